"""Cut a model by cost: for a loop or V placement, or for a schedule, whose step is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from stageline.common.errors import ScheduleError, StagelineError, shorten
from stageline.model.partition.partition import Partition, evaluate, partition
from stageline.model.partition.request import Span
from stageline.schedules.placement import Placement
from stageline.schedules.registry import schedule as make_schedule
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs
from stageline.timeline.simulate import simulate

SLACKS = (0.0, 0.02, 0.05, 0.1, 0.2)
"""Allowed slowdown of the slowest rank in exchange for more even stages."""


class CutConstraints(NamedTuple):
    """The constraints of a cut by cost."""

    ranks: int | None = None
    placement: Literal["loop", "v"] | None = None
    memory: float | Sequence[float] | None = None
    pinned: Mapping[str | int, int] | None = None
    speed: Sequence[float] | None = None
    schedule: str | Schedule | None = None


class UnitCosts(NamedTuple):
    """The costs of every unit, by name: the times of F, I and W, their sum, and the bytes of training it."""

    names: list[str]
    seconds: list[float]
    forward: list[float]
    backward_input: list[float]
    backward_weight: list[float]
    memory: list[float]


def cut_by_cost(costs: UnitCosts, stages: int, constraints: CutConstraints, even: Sequence[Span]) -> Partition:
    """Cut such that the slowest rank is as fast as possible; with a schedule, such that its simulated step is shortest.

    `even` is an additional candidate for a schedule.
    """
    if constraints.schedule is not None:
        return _for_schedule(costs, _resolve_schedule(constraints.schedule, stages, constraints), constraints, even)
    ranks = stages if constraints.ranks is None else constraints.ranks
    if stages % ranks:
        divisors = [count for count in range(1, stages + 1) if stages % count == 0]
        raise StagelineError(
            f"{stages} stages do not fit evenly on {ranks} ranks; pass ranks={' or '.join(map(str, divisors))}"
        )
    return partition(
        costs.seconds, ranks, stages // ranks, constraints.placement or "loop", **_partition_options(costs, constraints)
    )


def _partition_options(costs: UnitCosts, constraints: CutConstraints) -> dict[str, Any]:
    """Return the constraints as keyword arguments of `partition`."""
    return {
        "memory": None if constraints.memory is None else costs.memory,
        "caps": constraints.memory,
        "pinned": constraints.pinned,
        "speed": constraints.speed,
        "names": costs.names,
    }


def _resolve_schedule(family_or_schedule: Any, stages: int, constraints: CutConstraints) -> Schedule:
    """Return the schedule that the cut is for; for a family name, the one with this number of stages."""
    if isinstance(family_or_schedule, str):
        schedule = _family_schedule(family_or_schedule, stages, constraints.ranks)
    elif isinstance(family_or_schedule, Schedule):
        schedule = family_or_schedule
    else:
        raise StagelineError(
            f"schedule must be a family name or a Schedule from sl.schedule(…), got {shorten(family_or_schedule)}"
        )
    if schedule.stages != stages:
        raise StagelineError(
            f"{schedule.name} on {schedule.ranks} ranks has {schedule.stages} stages, but stages is {stages}; "
            f"pass stages={schedule.stages}"
        )
    if constraints.ranks is not None and constraints.ranks != schedule.ranks:
        raise StagelineError(
            f"ranks is {constraints.ranks}, but the schedule has {schedule.ranks} ranks; leave ranks= out"
        )
    if constraints.placement is not None:
        raise StagelineError(
            f"placement is {constraints.placement!r}, but a schedule has its own placement; leave placement= out"
        )
    return schedule


def _family_schedule(name: str, stages: int, ranks: int | None) -> Schedule:
    """Build a family with four microbatches per rank, enough to reach its steady state."""
    counts = [ranks] if ranks is not None else [count for count in range(stages, 0, -1) if stages % count == 0]
    errors: list[ScheduleError] = []
    for count in counts:
        try:
            schedule = make_schedule(name, count, 4 * count)
        except ScheduleError as error:
            errors.append(error)
            continue
        if schedule.stages == stages or ranks is not None:
            return schedule
    if errors:
        raise errors[0]
    raise StagelineError(f"{name} has {stages} stages for no number of ranks; pass a Schedule from sl.schedule(…)")


def _for_schedule(costs: UnitCosts, schedule: Schedule, constraints: CutConstraints, even: Sequence[Span]) -> Partition:
    """Return the cut with the shortest simulated step, among good cuts for the slowest rank and the even one."""
    table, options = schedule.placement.table, _partition_options(costs, constraints)
    is_bidirectional = len(table) == 2
    ranks, chunks, placement = _shape(schedule)
    if is_bidirectional:
        options = _options_for_pairs(options, schedule.ranks)
    candidates = [partition(costs.seconds, ranks, chunks, placement, slack=slack, **options) for slack in SLACKS]
    pins = options.pop("pinned") or {}
    index_of = {name: index for index, name in reversed(list(enumerate(costs.names)))}
    even_cut = evaluate(even, costs.seconds, ranks, chunks, placement, **options)
    fits = even_cut.caps is None or even_cut.memory is None or all(np.array(even_cut.memory) <= np.array(even_cut.caps))
    if fits and all(even[stage][0] <= index_of.get(name, name) < even[stage][1] for name, stage in pins.items()):
        bound = candidates[0].bound if candidates[0].optimal else min(even_cut.bound, candidates[0].bound)
        candidates.append(replace(even_cut, bound=bound))
    best = min(candidates, key=lambda candidate: _makespan(candidate.stages, costs, schedule, constraints.speed))
    return _expand_pairs(best, schedule) if is_bidirectional else best


def _shape(schedule: Schedule) -> tuple[int, int, str]:
    """Return the ranks, chunks and placement whose slowest rank counts."""
    table, ranks = schedule.placement.table, schedule.ranks
    if len(table) == 2 and ranks % 2 == 0 and np.array_equal(table, Placement.two_way(ranks, []).table):
        # A rank and the opposite one run half of the microbatches each of the same two stages: pairs in a V.
        return ranks // 2, 2, "v"
    pattern = schedule.placement.pattern
    if pattern is not None and len(table) == 1:
        return ranks, schedule.stages // ranks, pattern
    raise StagelineError(
        f"{schedule.name} places its stages on ranks as {shorten(table.tolist())}; cuts by cost support only stages "
        "placed around the ranks, down and up, or in both directions on an even number of ranks; use by='layers', "
        "or pass the first unit of each stage"
    )


def _options_for_pairs(options: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Convert per-rank options to options for pairs of ranks that hold the same two stages."""
    speed, caps = options["speed"], options["caps"]
    if speed is not None and len(set(speed)) > 1:
        raise StagelineError(
            f"speed is {shorten(speed)}, but every stage is on two ranks of the schedule; leave speed= out, or use a "
            "unidirectional schedule"
        )
    if caps is not None and np.ndim(caps):
        if len(caps) != ranks:
            raise StagelineError(f"memory has {len(caps)} entries, but the schedule has {ranks} ranks")
        caps = [min(caps[rank], caps[ranks - 1 - rank]) for rank in range(ranks // 2)]
    return {**options, "caps": caps, "speed": None}


def _expand_pairs(cut: Partition, schedule: Schedule) -> Partition:
    """Expand the figures of pairs to all ranks."""
    pair = [min(rank, schedule.ranks - 1 - rank) for rank in range(schedule.ranks)]
    return replace(
        cut,
        rank_of=tuple(schedule.placement.table[0].tolist()),
        also_on=tuple(schedule.placement.table[1].tolist()),
        loads=tuple(cut.loads[index] / 2 for index in pair),
        bound=cut.bound / 2,
        memory=None if cut.memory is None else tuple(cut.memory[index] for index in pair),
        caps=None if cut.caps is None else tuple(cut.caps[index] for index in pair),
    )


def _makespan(stages: Sequence[Span], costs: UnitCosts, schedule: Schedule, speed: Sequence[float] | None) -> float:
    speeds = [1.0 if speed is None else float(speed[rank]) for rank in schedule.placement.table[0].tolist()]
    forward, backward_input, backward_weight = (
        [sum(values[start:stop]) / stage_speed for (start, stop), stage_speed in zip(stages, speeds, strict=True)]
        for values in (costs.forward, costs.backward_input, costs.backward_weight)
    )
    return float(simulate(schedule, Costs(forward, backward_input, backward_weight)).makespan)
