"""Stages that do not take what they were planned to take: which, by how much, and what that costs the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stageline.common.errors import CostError
from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs, Floats
from stageline.timeline.simulate import simulate

TOLERANCE = 0.2
"""A stage drifts if it takes this share more or less than planned, beyond what all stages do alike."""
NOISE = 3.0
"""Standard deviations of a stage's own noise that are no drift."""
TIMES = ("forward", "backward", "backward_input", "backward_weight")


class Drifted(NamedTuple):
    """A stage, and what one microbatch takes on it, forward and backward."""

    stage: int
    rank: int
    planned: float
    """With what all stages have in common: a machine that is slower everywhere asks for no other order."""
    measured: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes."""
        return self.measured / self.planned if self.planned > 0 else float("inf")


@dataclass(frozen=True)
class Drift:
    """Measured costs against planned ones, for the order that runs.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=4, microbatches=8)
    >>> found = drift_of(s, sl.Costs(), sl.Costs(forward=[1, 1, 1.5, 1], backward=[2, 2, 3, 2]))
    >>> print(found)
    stage 2 on rank 2 takes 1.5 times what was planned (4.5 s instead of 3 s for a microbatch), and the step 1.32 times
    (43.5 s instead of 33 s)
    """

    schedule: Schedule
    costs: Costs
    """What was measured, and for what it does not say, what was planned."""
    stages: tuple[Drifted, ...]
    """Those that drift, the slowest first; empty where all take what was planned."""
    planned: float
    """What a step of this order takes as planned, with what all stages have in common."""
    measured: float
    """What it takes with the measured costs."""

    def __str__(self) -> str:
        """Say which stage, by how much, and what it costs."""
        if not self.stages:
            return "all stages take what was planned"
        first, *others = self.stages
        more = f" (and {len(others)} more stages drift)" if others else ""
        step = self.measured / self.planned if self.planned > 0 else float("inf")
        return (
            f"stage {first.stage} on rank {first.rank} takes {first.ratio:.3g} times what was planned "
            f"({_time(first.measured)} instead of {_time(first.planned)} for a microbatch){more}, and the step "
            f"{step:.3g} times ({_time(self.measured)} instead of {_time(self.planned)})"
        )

    def to_json(self) -> dict[str, Any]:
        """Turn it into plain data."""
        return {
            "stages": [{**each._asdict(), "ratio": each.ratio} for each in self.stages],
            "planned": self.planned,
            "measured": self.measured,
        }


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def typical_of(several: Sequence[Costs]) -> Costs:
    """The median of costs that were measured in several steps of one schedule.

    >>> typical_of([Costs(forward=[1, 2]), Costs(forward=[3, 2]), Costs(forward=[2, 9])]).forward
    [2.0, 2.0]
    """
    found: dict[str, Any] = {"transfer": float(np.median([_number(each.transfer) for each in several]))}
    for name in TIMES:
        rows = [getattr(each, name) for each in several]
        if all(row is not None for row in rows):
            found[name] = np.median(np.array(rows, dtype=np.float64), axis=0).tolist()
    return Costs(**found)


def _number(transfer: object) -> float:
    if not isinstance(transfer, int | float):
        raise CostError("measured costs have one time for all transfers")
    return float(transfer)


@dataclass(frozen=True)
class _Kinds:
    """Which kinds of action every stage of a schedule runs."""

    schedule: Schedule

    @cached_property
    def runs(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """By kind and stage."""
        found = np.zeros((4, self.schedule.stages), dtype=bool)
        found[self.schedule.action_kinds, self.schedule.stage_ids] = True
        return found

    def work(self, times: Sequence[Floats]) -> Floats:
        """What a microbatch takes on every stage, as this schedule runs it."""
        whole = self.runs[kinds.B]
        return times[kinds.F] + np.where(whole, times[kinds.B], times[kinds.I] + times[kinds.W])


def deviations(schedule: Schedule, planned: Costs, measured: Costs) -> Floats:
    """How many times what was planned every stage took, beyond what all stages do alike."""
    seen = _Kinds(schedule)
    before, now = seen.work(planned.times(schedule.stages)), seen.work(measured.times(schedule.stages))
    ratio = np.divide(now, before, out=np.ones_like(now), where=before > 0)
    return ratio / _common(ratio)


def _common(ratio: Floats) -> float:
    """The lower of two in the middle: one slow stage of two is what is slow."""
    return float(np.sort(ratio)[(len(ratio) - 1) // 2]) or 1.0


def drift_of(
    schedule: Schedule,
    planned: Costs,
    measured: Costs,
    tolerance: float = TOLERANCE,
    steps: Sequence[Costs] = (),
    noise: Floats | float = 0.0,
) -> Drift:
    """Compare what stages took with what they were planned to take.

    A stage drifts if it is out of tolerance in every one of `steps` too, which are what `measured` is the median of.
    `noise` is the standard deviation of the logarithm of what stages take: what it explains is no drift.
    """
    seen = _Kinds(schedule)
    plan, real = planned.times(schedule.stages), measured.times(schedule.stages)
    before, now = seen.work(plan), seen.work(real)
    ratio = np.divide(now, before, out=np.ones_like(now), where=before > 0)
    common = _common(ratio)
    filled = [np.where(runs, took, was * ratio) for runs, took, was in zip(seen.runs, real, plan, strict=True)]
    names = dict(zip(TIMES, (filled[kind].tolist() for kind in range(4)), strict=True))
    # F and W of a stage may run in a schedule that has no B, and then B is what they take together, as planned.
    costs = replace(planned, **names, overlap=measured.overlap, transfer=measured.transfer, bandwidth=None)
    alike = replace(costs, **{name: (row * common).tolist() for name, row in zip(TIMES, plan, strict=True)})
    table = schedule.placement.table[0]
    limit = np.maximum(np.log1p(tolerance), NOISE * np.asarray(noise)) * np.ones(schedule.stages)
    apart = np.log(
        np.maximum(np.stack([ratio / common, *(deviations(schedule, planned, step) for step in steps)]), 1e-9)
    )
    drifts = (apart.min(axis=0) > limit + 1e-12) | (apart.max(axis=0) < -limit - 1e-12)
    stages = [
        Drifted(stage, int(table[stage]), float(before[stage] * common), float(now[stage]))
        for stage in np.flatnonzero(drifts).tolist()
    ]
    stages.sort(key=lambda each: -each.ratio)
    return Drift(schedule, costs, tuple(stages), simulate(schedule, alike).makespan, simulate(schedule, costs).makespan)
