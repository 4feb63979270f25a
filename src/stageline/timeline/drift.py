"""Drift and stragglers: stages whose times differ from the plan, and stages that became permanently slower.

Drift compares the measured times of a few steps with the planned ones, and tells the effect on the step.

The test for stragglers uses the fastest microbatch of a stage in every step. Other load on a machine hits some actions
and not others, so the fastest of several hardly changes, while a stage that became slower is slower in all of them. A
stage is reported if its fastest times of several consecutive steps exceed what its own past explains, relative to the
other stages. The noise of a stage is the median deviation of its past steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stageline.common.units import format_seconds
from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs, Floats
from stageline.timeline.simulate import simulate

TOLERANCE = 0.2
"""A stage drifts if it takes this share more or less than planned, relative to the other stages."""
NOISE = 3.0
"""Deviations of up to this many standard deviations of a stage's own noise do not count."""
TIMES = ("forward", "backward", "backward_input", "backward_weight")


class Drifted(NamedTuple):
    """A stage, and the time of one microbatch on it, forward and backward."""

    stage: int
    rank: int
    planned: float
    """Scaled by what all stages have in common: a machine that is uniformly slower needs no other order."""
    measured: float

    @property
    def ratio(self) -> float:
        """The measured time divided by the planned one."""
        return self.measured / self.planned if self.planned > 0 else float("inf")


@dataclass(frozen=True)
class Drift:
    """Measured costs compared with planned ones, for the schedule that runs.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=4, microbatches=8)
    >>> drift = drift_of(s, sl.Costs(), sl.Costs(forward=[1, 1, 1.5, 1], backward=[2, 2, 3, 2]))
    >>> print(drift)
    stage 2 on rank 2 takes 1.5 times the planned time (4.5 s instead of 3 s for a microbatch), and the step 1.32 times
    (43.5 s instead of 33 s)
    """

    schedule: Schedule
    costs: Costs
    """The measured costs; the planned ones where nothing was measured."""
    stages: tuple[Drifted, ...]
    """The stages that drift, slowest first."""
    planned: float
    """The time of a step with the planned costs, scaled by what all stages have in common."""
    measured: float
    """The time of a step with the measured costs."""

    def __str__(self) -> str:
        if not self.stages:
            return "all stages take the planned time"
        first, *others = self.stages
        more = f" (and {len(others)} more stages drift)" if others else ""
        step = self.measured / self.planned if self.planned > 0 else float("inf")
        return (
            f"stage {first.stage} on rank {first.rank} takes {first.ratio:.3g} times the planned time "
            f"({format_seconds(first.measured)} instead of {format_seconds(first.planned)} for a microbatch){more}, "
            f"and the step {step:.3g} times ({format_seconds(self.measured)} instead of {format_seconds(self.planned)})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "stages": [{**stage._asdict(), "ratio": stage.ratio} for stage in self.stages],
            "planned": self.planned,
            "measured": self.measured,
        }


def typical_of(several: Sequence[Costs]) -> Costs:
    """Return the median of costs that were measured in several steps of one schedule.

    >>> typical_of([Costs(forward=[1, 2]), Costs(forward=[3, 2]), Costs(forward=[2, 9])]).forward
    [2.0, 2.0]
    """
    medians: dict[str, Any] = {"transfer": float(np.median([np.asarray(costs.transfer) for costs in several]))}
    for name in TIMES:
        rows = [getattr(costs, name) for costs in several]
        if all(row is not None for row in rows):
            medians[name] = np.median(np.array(rows, dtype=np.float64), axis=0).tolist()
    return Costs(**medians)


def _work(schedule: Schedule, costs: Costs) -> Floats:
    """Return the time of a microbatch on every stage, as this schedule runs it."""
    forward, backward, inputs, weights = costs.times(schedule.stages)
    return forward + np.where(_kinds_run(schedule)[kinds.B], backward, inputs + weights)


def _kinds_run(schedule: Schedule) -> NDArray[np.bool_]:
    """Return which kinds of action every stage runs, by kind and stage."""
    runs = np.zeros((4, schedule.stages), dtype=bool)
    runs[schedule.action_kinds, schedule.stage_ids] = True
    return runs


def _ratios(schedule: Schedule, planned: Costs, measured: Costs) -> tuple[Floats, float]:
    """Return the measured time of every stage divided by the planned one, and what all stages have in common."""
    before, now = _work(schedule, planned), _work(schedule, measured)
    ratio = np.divide(now, before, out=np.ones_like(now), where=before > 0)
    return ratio, float(_lower_median(ratio)) or 1.0


def deviations(schedule: Schedule, planned: Costs, measured: Costs) -> Floats:
    """Return the measured time of every stage divided by the planned one, relative to the other stages."""
    ratio, common = _ratios(schedule, planned, measured)
    return ratio / common


def _lower_median(values: Floats) -> Floats:
    """Return the median over the stages; of two in the middle the lower one, so that one slow stage of two is slow."""
    return np.asarray(np.sort(values)[..., (values.shape[-1] - 1) // 2])


def drift_of(
    schedule: Schedule,
    planned: Costs,
    measured: Costs,
    steps: Sequence[Costs] = (),
    noise: Floats | float = 0.0,
) -> Drift:
    """Compare the measured times of stages with the planned ones.

    A stage drifts only if it is out of tolerance in every one of `steps`, of which `measured` is the median. `noise` is
    the standard deviation of the logarithm of the times of stages; what it explains is not drift.
    """
    plan, real = planned.times(schedule.stages), measured.times(schedule.stages)
    before, now = _work(schedule, planned), _work(schedule, measured)
    ratio, common = _ratios(schedule, planned, measured)
    # If a schedule has no B, its time is that of I and W together, as planned.
    filled = np.where(_kinds_run(schedule), real, np.array(plan) * ratio).tolist()
    times = dict(zip(TIMES, filled, strict=True))
    costs = replace(planned, **times, overlap=measured.overlap, transfer=measured.transfer, bandwidth=None)
    scaled = replace(costs, **{name: (row * common).tolist() for name, row in zip(TIMES, plan, strict=True)})
    table = schedule.placement.table[0]
    limit = np.maximum(np.log1p(TOLERANCE), NOISE * np.asarray(noise)) * np.ones(schedule.stages)
    deviation = np.log(
        np.maximum(np.stack([ratio / common, *(deviations(schedule, planned, step) for step in steps)]), 1e-9)
    )
    drifts = (deviation.min(axis=0) > limit + 1e-12) | (deviation.max(axis=0) < -limit - 1e-12)
    stages = [
        Drifted(stage, int(table[stage]), float(before[stage] * common), float(now[stage]))
        for stage in np.flatnonzero(drifts).tolist()
    ]
    stages.sort(key=lambda drifted: -drifted.ratio)
    return Drift(
        schedule, costs, tuple(stages), simulate(schedule, scaled).makespan, simulate(schedule, costs).makespan
    )


WARM_UP = 2
"""Steps that are ignored at the beginning, while memory is allocated and kernels are chosen."""
WINDOW = 7
"""The number of consecutive steps that must be slow."""
LEAST_PAST = 4
"""The minimum number of earlier steps to compare with."""
PAST = 60
"""The maximum number of earlier steps to compare with."""
SLOWER = (math.log(1.6), math.log(1.8))
"""The minimum slowdown, of forward and backward together, or of forward alone; as logarithms."""
GLANCE = math.log(1.25)
"""The minimum deviation, as a logarithm, for a full test."""
RARE = 0.9
"""The share of its past steps that it must exceed as well, as some stages are slow now and then."""
QUIET = 100
"""The number of steps before a stage is reported again."""


class Straggler(NamedTuple):
    """A stage that became slower."""

    stage: int
    rank: int
    before: float
    """The earlier time of its fastest microbatch of a step, forward and backward, in seconds."""
    now: float

    @property
    def ratio(self) -> float:
        """The time now divided by the time before."""
        return self.now / self.before

    def __str__(self) -> str:
        return (
            f"stage {self.stage} on rank {self.rank} became slower than the other stages and stayed slower: a "
            f"microbatch takes {self.ratio:.3g} times as long ({format_seconds(self.now)} instead of "
            f"{format_seconds(self.before)})"
        )


class Stragglers:
    """Observes every step, and reports the stages that became slower.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=2, microbatches=2)
    >>> watch = Stragglers(s)
    >>> steps = [watch.add([[3.0, 3.0], [1.0, 1.0]]) for _ in range(20)]
    >>> steps += [watch.add([[3.0, 6.0], [1.0, 2.0]]) for _ in range(20)]
    >>> [(step, stragglers[0].stage) for step, stragglers in enumerate(steps) if stragglers]
    [(26, 1)]
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._ranks = schedule.placement.table[0].tolist()
        key = schedule.action_kinds.astype(np.int64) * schedule.stages + schedule.stage_ids
        self._order = np.argsort(key, kind="stable")
        """The actions, grouped by kind and stage."""
        self._keys, self._starts = np.unique(key[self._order], return_index=True)
        self._steps = 0
        self._rows: deque[Floats] = deque(maxlen=PAST + WINDOW)
        """One row per step: logarithms of the times of stages, in total and of forwards."""
        self._reported = [-QUIET] * schedule.stages
        self._normal: Floats | None = None
        """The normal times, as of a few steps ago."""
        self._deviates_for = np.zeros(schedule.stages, dtype=np.int64)
        """For each stage, the number of consecutive steps in which it deviated from that."""

    def after(self, seconds: Floats) -> list[Straggler]:
        """Add a step, given the times of all actions; see `add`."""
        shortest = np.zeros((4, self.schedule.stages))
        shortest.flat[self._keys] = np.minimum.reduceat(seconds[self._order], self._starts)
        return self.add(np.stack([shortest.sum(axis=0), shortest[kinds.F]]))

    def add(self, fastest: Floats | Sequence[Sequence[float]]) -> list[Straggler]:
        """Add a step, given the times of the fastest microbatch on every stage, in total and of the forward.

        Returns the stages that have just become stragglers, the worst first; usually none.
        """
        self._steps += 1
        if self._steps <= WARM_UP:
            return []
        row: Floats = np.log(np.maximum(np.asarray(fastest, dtype=np.float64), 1e-9))
        self._rows.append(row)
        return self._test() if self._stands_out(row) else []

    def _stands_out(self, row: Floats) -> bool:
        """Whether a stage has deviated from the others for long enough to run the full test; cheap."""
        count = len(self._rows)
        if self._normal is None or count < 4 * WINDOW or not self._steps % (4 * WINDOW):
            if count <= LEAST_PAST:
                return False
            self._normal = np.median(np.stack(self._rows)[: max(LEAST_PAST, count - WINDOW)], axis=0)
        above = np.abs(_deviation((row - self._normal)[None])[0]).max(axis=0)
        self._deviates_for = np.where(above > GLANCE, self._deviates_for + 1, 0)
        return bool(count >= LEAST_PAST + WINDOW and self._deviates_for.max() >= WINDOW)

    def _test(self) -> list[Straggler]:
        rows = np.stack(self._rows)
        past, last = rows[:-WINDOW], rows[-WINDOW:]
        normal = np.median(past, axis=0)
        above = _deviation(last - normal)
        before = _deviation(past - normal)
        noise = np.maximum(NOISE * 1.4826 * np.median(np.abs(before), axis=0), np.quantile(before, RARE, axis=0))
        limit = np.maximum(np.array(SLOWER)[:, None], noise)
        slower = (above.min(axis=0) > limit).any(axis=0)
        faster = above[:, 0].max(axis=0) < -limit[0]
        if not (slower | faster).any():
            return []
        return self._take_for_normal(np.flatnonzero(slower | faster), slower, normal[0], np.median(above, axis=0))

    def _take_for_normal(
        self, changed: np.ndarray[Any, np.dtype[np.int64]], slower: Any, normal: Floats, shift: Floats
    ) -> list[Straggler]:
        """Take the current times of these stages as normal from now on; return those that became slower."""
        for row in list(self._rows)[:-WINDOW]:
            row[:, changed] += shift[:, changed]
        self._normal = None
        self._deviates_for[:] = 0
        reported = [
            stage for stage in changed.tolist() if slower[stage] and self._steps - self._reported[stage] >= QUIET
        ]
        for stage in reported:
            self._reported[stage] = self._steps
        stragglers = [
            Straggler(stage, self._ranks[stage], math.exp(normal[stage]), math.exp(normal[stage] + shift[0, stage]))
            for stage in reported
        ]
        return sorted(stragglers, key=lambda straggler: -straggler.ratio)


def _deviation(rows: Floats) -> Floats:
    """Return deviations by step, row and stage, without what all stages of a step have in common."""
    return rows - _lower_median(rows[:, :1])[..., None]
