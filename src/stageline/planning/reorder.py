"""Another order for the same stages on the same ranks, where costs are not what they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stageline.common.errors import StagelineError
from stageline.schedules import action as kinds
from stageline.schedules.placement import Placement
from stageline.schedules.runs import PAIRED
from stageline.schedules.schedule import Schedule
from stageline.synthesis.synthesize import synthesize
from stageline.timeline.costs import Costs
from stageline.timeline.memory import peaks_of
from stageline.timeline.simulate import simulate

GAIN = 0.01
"""An order is changed for one that takes at least this share less: changing it costs nothing but the search."""


@dataclass(frozen=True)
class Reordered:
    """A better order, and what a step takes before and after, in simulation."""

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
    """A faster order of the same actions' work for these costs; None where none is found that is worth the change.

    Every stage stays on its rank and runs its microbatches in their order, so gradients keep their bits. No rank holds
    more than `memory`, or than it holds now unless that is given. `split` says whether backwards may be split.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=4, microbatches=8)
    >>> found = reorder(s, sl.Costs(forward=[1, 1, 1.5, 1], backward_weight=[1, 1, 1.5, 1]), memory=[8] * 4)
    >>> found.after < found.before, found.schedule.placement.table.tolist() == s.placement.table.tolist()
    (True, True)
    """
    where = placement_of(schedule)
    if where is None or not schedule.training:
        return None
    before = simulate(schedule, costs).makespan
    caps = list(peaks_of(schedule, costs) if memory is None else memory)
    try:
        found = synthesize(
            costs,
            schedule.ranks,
            schedule.microbatches,
            memory=caps,
            chunks=schedule.stages // schedule.ranks,
            placement=where,
            split=split,
            time_limit=time_limit,
        )
    except StagelineError:
        return None  # the caps are below what any other order needs
    if found.was_interrupted:
        raise KeyboardInterrupt  # what is to end is the training, not this search
    if not found.achieved < before * (1 - gain):
        return None
    return Reordered(replace(found.schedule, name=f"{_base(schedule.name)}, re-planned"), before, found.achieved)


def _base(name: str) -> str:
    return name.removesuffix(", re-planned")


def placement_of(schedule: Schedule) -> str | None:
    """Where its stages lie, as `synthesize` calls it: loop or vee; None where they lie otherwise.

    >>> import stageline as sl
    >>> [placement_of(sl.schedule(name, 4, 8)) for name in ("1f1b", "zb-v", "chimera")]
    ['loop', 'vee', None]
    """
    chunks, rest = divmod(schedule.stages, schedule.ranks)
    if rest or schedule.placement.directions > 1:
        return None
    table = schedule.placement.table.tolist()
    if table == Placement.loop(schedule.ranks, chunks).table.tolist():
        return "loop"
    return "vee" if table == Placement.snake(schedule.ranks, chunks).table.tolist() else None


def splits(schedule: Schedule) -> bool:
    """Whether any backward of it runs in two halves, so that what these take is known."""
    return bool((schedule.kinds % PAIRED == kinds.W).any())
