"""Another order for the same stages on the same ranks, after their costs have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stageline.common.errors import StagelineError
from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.synthesis.synthesize import synthesize
from stageline.timeline.costs import Costs
from stageline.timeline.memory import peaks_of
from stageline.timeline.simulate import simulate

GAIN = 0.01
"""An order is replaced by one that is faster by at least this fraction. The change itself costs nothing."""


RE_PLANNED = ", re-planned"
"""Suffix of the name of a schedule with another order."""


@dataclass(frozen=True)
class Reordered:
    """A better order, and the simulated time of a step before and after."""

    schedule: Schedule
    before: float
    after: float


def reorder(
    schedule: Schedule,
    costs: Costs,
    *,
    memory: Sequence[float] | None = None,
    split: bool | None = None,
    time_limit: float = 1.0,
    gain: float = GAIN,
) -> Reordered | None:
    """Return a faster order for these costs; None if none is found that is worth the change.

    Every stage stays on its rank and runs its microbatches in their order, so gradients keep their bits. No rank holds
    more than `memory`, which defaults to what it holds now. `split` says whether backwards may be split.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=4, microbatches=8)
    >>> better = reorder(s, sl.Costs(forward=[1, 1, 1.5, 1], backward_weight=[1, 1, 1.5, 1]), memory=[8] * 4)
    >>> better.after < better.before, better.schedule.placement.table.tolist() == s.placement.table.tolist()
    (True, True)
    """
    placement = schedule.placement.pattern
    if placement is None or schedule.placement.directions > 1 or not schedule.training:
        return None
    before = simulate(schedule, costs).makespan
    caps = list(peaks_of(schedule, costs) if memory is None else memory)
    try:
        synthesized = synthesize(
            costs,
            schedule.ranks,
            schedule.microbatches,
            memory=caps,
            chunks=schedule.stages // schedule.ranks,
            placement=placement,
            split=split,
            time_limit=time_limit,
        )
    except StagelineError:
        return None  # the caps are below what any other order needs
    if synthesized.was_interrupted:
        raise KeyboardInterrupt  # meant for the training, not for this search
    if not synthesized.achieved < before * (1 - gain):
        return None
    name = f"{schedule.name.removesuffix(RE_PLANNED)}{RE_PLANNED}"
    return Reordered(replace(synthesized.schedule, name=name), before, synthesized.achieved)


def splits(schedule: Schedule) -> bool:
    """Whether any backward of a schedule is split, so that the costs of both halves are known."""
    return bool((schedule.action_kinds == kinds.W).any())
