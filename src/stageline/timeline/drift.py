"""Drift: stages whose measured times differ from the planned ones, and the effect on the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stageline.common.errors import CostError
from stageline.common.units import format_seconds
from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs, Floats
from stageline.timeline.simulate import simulate

TOLERANCE = 0.2
"""A stage drifts if it takes this share more or less than planned, relative to the other stages."""
NOISE = 3.0
"""Deviations of up to this many standard deviations of a stage's own noise are not drift."""
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
    medians: dict[str, Any] = {"transfer": float(np.median([_number(costs.transfer) for costs in several]))}
    for name in TIMES:
        rows = [getattr(costs, name) for costs in several]
        if all(row is not None for row in rows):
            medians[name] = np.median(np.array(rows, dtype=np.float64), axis=0).tolist()
    return Costs(**medians)


def _number(transfer: object) -> float:
    if not isinstance(transfer, int | float):
        raise CostError("measured costs have one time for all transfers")
    return float(transfer)


@dataclass(frozen=True)
class _Kinds:
    """The kinds of action that every stage of a schedule runs."""

    schedule: Schedule

    @cached_property
    def runs(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """By kind and stage."""
        runs = np.zeros((4, self.schedule.stages), dtype=bool)
        runs[self.schedule.action_kinds, self.schedule.stage_ids] = True
        return runs

    def work(self, times: Sequence[Floats]) -> Floats:
        """Return the time of a microbatch on every stage, as this schedule runs it."""
        whole = self.runs[kinds.B]
        return times[kinds.F] + np.where(whole, times[kinds.B], times[kinds.I] + times[kinds.W])


def deviations(schedule: Schedule, planned: Costs, measured: Costs) -> Floats:
    """Return the measured time of every stage divided by the planned one, relative to the other stages."""
    stage_kinds = _Kinds(schedule)
    before, now = stage_kinds.work(planned.times(schedule.stages)), stage_kinds.work(measured.times(schedule.stages))
    ratio = np.divide(now, before, out=np.ones_like(now), where=before > 0)
    return ratio / _common(ratio)


def _common(ratio: Floats) -> float:
    """Return the median ratio; of two in the middle the lower one, so that one slow stage of two counts as slow."""
    return float(np.sort(ratio)[(len(ratio) - 1) // 2]) or 1.0


def drift_of(
    schedule: Schedule,
    planned: Costs,
    measured: Costs,
    tolerance: float = TOLERANCE,
    steps: Sequence[Costs] = (),
    noise: Floats | float = 0.0,
) -> Drift:
    """Compare the measured times of stages with the planned ones.

    A stage drifts only if it is out of tolerance in every one of `steps`, of which `measured` is the median. `noise` is
    the standard deviation of the logarithm of the times of stages; what it explains is not drift.
    """
    stage_kinds = _Kinds(schedule)
    plan, real = planned.times(schedule.stages), measured.times(schedule.stages)
    before, now = stage_kinds.work(plan), stage_kinds.work(real)
    ratio = np.divide(now, before, out=np.ones_like(now), where=before > 0)
    common = _common(ratio)
    filled = [np.where(runs, took, was * ratio) for runs, took, was in zip(stage_kinds.runs, real, plan, strict=True)]
    names = dict(zip(TIMES, (filled[kind].tolist() for kind in range(4)), strict=True))
    # If a schedule has no B, its time is that of I and W together, as planned.
    costs = replace(planned, **names, overlap=measured.overlap, transfer=measured.transfer, bandwidth=None)
    scaled = replace(costs, **{name: (row * common).tolist() for name, row in zip(TIMES, plan, strict=True)})
    table = schedule.placement.table[0]
    limit = np.maximum(np.log1p(tolerance), NOISE * np.asarray(noise)) * np.ones(schedule.stages)
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
