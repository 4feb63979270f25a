"""Cuts by cost: for ranks that hold stages in a loop or a V, or for a schedule, whose step is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from stageline.errors import ScheduleError, StagelineError, shorten
from stageline.model.partition import Partition, evaluate, partition
from stageline.model.request import Span
from stageline.schedules.placement import Placement
from stageline.schedules.registry import schedule as make_schedule
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs
from stageline.timeline.simulate import simulate

SLACKS = (0.0, 0.02, 0.05, 0.1, 0.2)
"""How much slower than the best the slowest rank may be, for stages that are more even."""


class Balance(NamedTuple):
    """What a cut by cost has to keep to."""

    ranks: int | None = None
    placement: Literal["loop", "v"] | None = None
    memory: float | Sequence[float] | None = None
    pinned: Mapping[str | int, int] | None = None
    speed: Sequence[float] | None = None
    schedule: str | Schedule | None = None


class Work(NamedTuple):
    """What every unit costs, by name: the times of F, I and W, apart and together, and the bytes of training it."""

    names: list[str]
    seconds: list[float]
    forward: list[float]
    backward_input: list[float]
    backward_weight: list[float]
    memory: list[float]


def cut_by_cost(work: Work, stages: int, ask: Balance, even: Sequence[Span]) -> Partition:
    """Cut so that the slowest rank is as fast as can be; or, of such cuts, the best for a schedule. `even` is another.

    >>> work = Work(["a", "b", "c", "d"], [3, 3, 3, 9], [1, 1, 1, 3], [1, 1, 1, 3], [1, 1, 1, 3], [1, 1, 1, 1])
    >>> cut_by_cost(work, 2, Balance(), [(0, 2), (2, 4)]).stages
    [(0, 3), (3, 4)]
    """
    if ask.schedule is not None:
        return _for_schedule(work, _schedule(ask.schedule, stages, ask), ask, even)
    ranks = stages if ask.ranks is None else ask.ranks
    if stages % ranks:
        near = [count for count in range(1, stages + 1) if stages % count == 0]
        raise StagelineError(
            f"{stages} stages cannot be spread evenly over {ranks} ranks; give ranks={' or '.join(map(str, near))}"
        )
    return partition(work.seconds, ranks, stages // ranks, ask.placement or "loop", **_kept(work, ask))


def _kept(work: Work, ask: Balance) -> dict[str, Any]:
    """What a cut has to keep to, as `partition` takes it."""
    memory = None if ask.memory is None else work.memory
    return {
        "memory": memory, "caps": ask.memory, "pinned": ask.pinned, "speed": ask.speed, "names": work.names,
    }  # fmt: skip


def _schedule(given: Any, stages: int, ask: Balance) -> Schedule:
    """The schedule that a cut is for; of a family, the one with so many stages."""
    if isinstance(given, str):
        made = _of_family(given, stages, ask.ranks)
    elif isinstance(given, Schedule):
        made = given
    else:
        raise StagelineError(f"schedule is a family or what sl.schedule(…) gives, got {shorten(given)}")
    if made.stages != stages:
        raise StagelineError(
            f"{made.name} on {made.ranks} ranks has {made.stages} stages, and {stages} are asked for: "
            f"give stages={made.stages}"
        )
    if ask.ranks is not None and ask.ranks != made.ranks:
        raise StagelineError(f"ranks={ask.ranks}, and the schedule has {made.ranks}; leave ranks= out")
    if ask.placement is not None:
        raise StagelineError(f"placement={ask.placement!r} and a schedule, which has its own; leave placement= out")
    return made


def _of_family(name: str, stages: int, ranks: int | None) -> Schedule:
    """With four microbatches a rank, enough for its steady state to show."""
    counts = [ranks] if ranks is not None else [count for count in range(stages, 0, -1) if stages % count == 0]
    refused: list[ScheduleError] = []
    for count in counts:
        try:
            made = make_schedule(name, count, 4 * count)
        except ScheduleError as error:
            refused.append(error)
            continue
        if made.stages == stages or ranks is not None:
            return made
    if refused:
        raise refused[0]
    raise StagelineError(f"{name} has {stages} stages on no number of ranks; give what sl.schedule(…) makes")


def _for_schedule(work: Work, made: Schedule, ask: Balance, even: Sequence[Span]) -> Partition:
    """Of cuts that are good for the slowest rank, and the even one, that whose step is shortest in simulation."""
    table, kept = made.placement.table, _kept(work, ask)
    two_way = len(table) == 2
    ranks, chunks, placement = _shape(made)
    if two_way:
        kept = _on_pairs(kept, made.ranks)
    found = [partition(work.seconds, ranks, chunks, placement, slack=slack, **kept) for slack in SLACKS]
    pins, asked = kept.pop("pinned") or {}, list(even)
    places = {name: index for index, name in reversed(list(enumerate(work.names)))}
    other = evaluate(asked, work.seconds, ranks, chunks, placement, **kept)
    fits = other.caps is None or other.memory is None or all(np.array(other.memory) <= np.array(other.caps))
    if fits and all(asked[stage][0] <= places.get(name, name) < asked[stage][1] for name, stage in pins.items()):
        found.append(replace(other, bound=min(other.bound, found[0].bound) if not found[0].optimal else found[0].bound))
    best = min(found, key=lambda each: _makespan(each.stages, work, made, ask.speed))
    return _mirrored(best, made) if two_way else best


def _shape(made: Schedule) -> tuple[int, int, str]:
    """The ranks, chunks and placement whose slowest rank counts."""
    table, ranks = made.placement.table, made.ranks
    if len(table) == 2 and ranks % 2 == 0 and np.array_equal(table, Placement.two_way(ranks, []).table):
        # A rank does half of what its stage and the opposite one cost, and so does the opposite rank: pairs in a V.
        return ranks // 2, 2, "v"
    chunks = made.stages // ranks
    for placement, places in (("loop", Placement.loop), ("v", Placement.snake)):
        if made.stages == ranks * chunks and np.array_equal(table, places(ranks, chunks).table):
            return ranks, chunks, placement
    raise StagelineError(
        f"{made.name} places its stages on ranks as {shorten(table.tolist())}; cuts by cost are for stages that go "
        "round the ranks, down and up them, or both ways on an even number: cut by='layers', or name the first unit of "
        "each stage"
    )


def _on_pairs(kept: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What is given for every rank, for pairs of ranks that hold the same two stages."""
    speed, caps = kept["speed"], kept["caps"]
    if speed is not None and len(set(speed)) > 1:
        raise StagelineError(
            f"speed is {shorten(speed)}, and every stage is on two ranks of the schedule; leave speed= out, or use a "
            "schedule of one direction"
        )
    if caps is not None and np.ndim(caps):
        if len(caps) != ranks:
            raise StagelineError(f"memory has {len(caps)} entries, and the schedule has {ranks} ranks")
        caps = [min(caps[rank], caps[ranks - 1 - rank]) for rank in range(ranks // 2)]
    return {**kept, "caps": caps, "speed": None}


def _mirrored(found: Partition, made: Schedule) -> Partition:
    """The figures of all ranks, from those of pairs."""
    pair = [min(rank, made.ranks - 1 - rank) for rank in range(made.ranks)]
    return replace(
        found,
        rank_of=tuple(made.placement.table[0].tolist()),
        also_on=tuple(made.placement.table[1].tolist()),
        loads=tuple(found.loads[each] / 2 for each in pair),
        bound=found.bound / 2,
        memory=None if found.memory is None else tuple(found.memory[each] for each in pair),
        caps=None if found.caps is None else tuple(found.caps[each] for each in pair),
    )


def _makespan(stages: Sequence[Span], work: Work, made: Schedule, speed: Sequence[float] | None) -> float:
    fast = [1.0 if speed is None else float(speed[rank]) for rank in made.placement.table[0].tolist()]

    def times(values: Sequence[float]) -> list[float]:
        return [sum(values[start:stop]) / each for (start, stop), each in zip(stages, fast, strict=True)]

    costs = Costs(times(work.forward), times(work.backward_input), times(work.backward_weight))
    return float(simulate(made, costs).makespan)
