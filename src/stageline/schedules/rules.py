"""What makes a schedule right: a table of rules, one function each, in the order in which they are asked.

A rule raises `ScheduleError` with its own name, the place, and a sentence about what is wrong there. Each may rely
on the ones before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import ScheduleError
from stageline.schedules import action as kinds
from stageline.schedules.action import KINDS
from stageline.schedules.channels import check_channels
from stageline.schedules.dependencies import Ints
from stageline.schedules.schedule import Schedule

Rule: TypeAlias = Callable[[Schedule], None]


def check_placement(schedule: Schedule) -> None:
    """Every stage is held by a rank that exists, for every microbatch."""
    placement = schedule.placement
    if placement.stages == 0 or placement.microbatches == 0 or schedule.ranks == 0:
        raise ScheduleError(
            f"a schedule needs at least one rank, stage and microbatch; this one has {schedule.ranks}, "
            f"{placement.stages} and {placement.microbatches}",
            rule="placement",
        )
    strays = np.argwhere((placement.table < 0) | (placement.table >= schedule.ranks))
    if len(strays):
        direction, stage = strays[0].tolist()
        rank = int(placement.table[direction, stage])
        held = "no rank" if rank < 0 else f"rank {rank}"
        raise ScheduleError(
            f"stage {stage} is held by {held}; every stage needs one of the ranks 0 to {schedule.ranks - 1}",
            rule="placement",
        )
    if placement.direction.min() < 0 or placement.direction.max() >= placement.directions:
        microbatch = int(np.argmax((placement.direction < 0) | (placement.direction >= placement.directions)))
        raise ScheduleError(
            f"microbatch {microbatch} travels in direction {placement.direction[microbatch]}, "
            f"and the placement has {placement.directions}",
            rule="placement",
        )


def check_known(schedule: Schedule) -> None:
    """Every action names a stage and a microbatch that exist."""
    for column, count, what in (
        (schedule.stage_ids, schedule.stages, "stage"),
        (schedule.microbatch_ids, schedule.microbatches, "microbatch"),
    ):
        stray = np.flatnonzero((column < 0) | (column >= count))
        if len(stray):
            _fail(
                schedule,
                int(stray[0]),
                "known",
                f"names a {what} that does not exist; there are {count}, counted from 0",
            )


def check_owner(schedule: Schedule) -> None:
    """Every action runs on the rank that holds its stage."""
    rank = np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(schedule.bounds))
    owner = schedule.placement.ranks_of(schedule.stage_ids, schedule.microbatch_ids)
    stray = np.flatnonzero(rank != owner)
    if len(stray):
        index = int(stray[0])
        _fail(
            schedule, index, "owner", f"belongs on rank {owner[index]}, which holds stage {schedule.stage_ids[index]}"
        )


def check_overlap(schedule: Schedule) -> None:
    """An overlapped pair is one F and one B or I."""
    pairs = schedule.pairs
    if not len(pairs):
        return
    ends = schedule.bounds[1:]
    for index in pairs[np.isin(pairs + 1, ends)].tolist():
        _fail(schedule, index, "overlap", "is the forward of a pair that has no backward")
    first, second = schedule.action_kinds[pairs], schedule.action_kinds[pairs + 1]
    bad = np.flatnonzero((first != kinds.F) | ~np.isin(second, (kinds.B, kinds.I)) | schedule.pair_starts[pairs + 1])
    if len(bad):
        index = int(pairs[bad[0]])
        _fail(
            schedule, index, "overlap", f"is paired with {schedule.action(index + 1)}; a pair is one F and one B or I"
        )


def check_complete(schedule: Schedule) -> None:
    """Every stage runs F and its backward (B, or I and W) exactly once for each microbatch; F alone in inference."""
    size = schedule.stages * schedule.microbatches
    key = schedule.keys
    plain = schedule.action_kinds
    if size > schedule.num_actions:
        present = np.unique(key[plain == kinds.F])
        missing = int(np.argmax(np.append(present, -1) != np.arange(len(present) + 1)))
        _report_missing(schedule, missing, "F")
    none = np.zeros(size, dtype=np.int8)
    count: dict[str, Ints] = {}
    for code, kind in enumerate(KINDS):
        chosen = plain == code
        count[kind] = np.bincount(key[chosen], minlength=size) if chosen.any() else none

    for kind in KINDS:
        twice = count[kind] > 1
        if twice.any():
            _report_twice(schedule, key, plain, kind, twice, count[kind])
    if not schedule.training:
        for kind in KINDS[1:]:
            if count[kind].any():
                index = int(np.flatnonzero(plain == KINDS.index(kind))[0])
                _fail(schedule, index, "complete", "is a backward, and this schedule is forward-only")
    for half in ("I", "W"):
        both = (count["B"] > 0) & (count[half] > 0)
        if both.any():
            index = int(np.flatnonzero((plain == kinds.B) & both[key])[0])
            _fail(
                schedule,
                index,
                "complete",
                f"is a whole backward, and the same stage and microbatch also run {half}: either B, or I and W",
            )
    split = (count["I"] > 0) | (count["W"] > 0)
    lacking = {
        "F": count["F"] == 0,
        "B (or I and W)": ~split & (count["B"] == 0) & schedule.training,
        "I, although it runs W": split & (count["I"] == 0),
        "W, although it runs I": split & (count["W"] == 0),
    }
    for what, missing_here in lacking.items():
        if missing_here.any():
            _report_missing(schedule, int(np.argmax(missing_here)), what)


def check_progress(schedule: Schedule) -> None:
    """Dependencies together with each rank's order have no cycle: everyone gets to the end."""
    _check_local_order(schedule)
    if not schedule.graph.is_acyclic:
        _report_cycle(schedule)


RULES: dict[str, Rule] = {
    "placement": check_placement,
    "known": check_known,
    "owner": check_owner,
    "overlap": check_overlap,
    "complete": check_complete,
    "progress": check_progress,
    "channels": check_channels,
}
"""All rules by name, in the order in which they are asked; `docs/verify.md` has a paragraph on each."""


def _fail(schedule: Schedule, index: int, rule: str, sentence: str) -> NoReturn:
    rank, position = schedule.where(index)
    said = f"rank {rank}, position {position}: {schedule.action(index)} {sentence}"
    raise ScheduleError(said, rule=rule, rank=rank, position=position)


def _report_twice(
    schedule: Schedule,
    key: Ints,
    plain: NDArray[np.uint8],
    kind: str,
    twice: NDArray[np.bool_],
    count: Ints,
) -> NoReturn:
    """Name both places of an action that runs twice, and what its stage never runs instead."""
    found = np.flatnonzero((plain == KINDS.index(kind)) & twice[key])
    same = found[key[found] == key[found[0]]]
    (_, one), (rank, two) = schedule.where(int(same[0])), schedule.where(int(same[1]))
    stage, microbatch = divmod(int(key[same[0]]), schedule.microbatches)
    row = count[stage * schedule.microbatches : (stage + 1) * schedule.microbatches]
    never = np.flatnonzero(row == 0)
    instead = f", and that of microbatch {never[0]} never" if 0 < len(never) < len(row) else ""
    raise ScheduleError(
        f"rank {rank}, position {two}: stage {stage} runs {kind} of microbatch {microbatch} twice "
        f"(positions {one} and {two}){instead}; each must run exactly once",
        rule="complete",
        rank=rank,
        position=two,
    )


def _report_missing(schedule: Schedule, key: int, what: str) -> NoReturn:
    stage, microbatch = divmod(key, schedule.microbatches)
    rank = schedule.rank_of(stage, microbatch)
    raise ScheduleError(
        f"rank {rank}: stage {stage} never runs {what} for microbatch {microbatch}; each must run exactly once",
        rule="complete",
        rank=rank,
    )


def _check_local_order(schedule: Schedule) -> None:
    """F comes before the backward of the same stage and microbatch, and I before W, on the rank they share."""
    done_at = np.zeros(schedule.stages * schedule.microbatches, dtype=np.int32)
    for mine in schedule.slices():
        plain = schedule.action_kinds[mine]
        key = schedule.keys[mine]
        forward, weight = np.flatnonzero(plain == kinds.F), np.flatnonzero(plain == kinds.W)
        back = np.flatnonzero((plain == kinds.B) | (plain == kinds.I))
        for first, then in ((forward, back), (back, weight)):
            done_at[key[first]] = first
            needs = done_at[key[then]]
            wrong = needs > then
            # A pair starts both at once, so its backward cannot need its forward.
            wrong |= (needs == then - 1) & schedule.pair_starts[mine][needs]
            if wrong.any():
                late, need = int(then[np.argmax(wrong)]), int(needs[np.argmax(wrong)])
                _, position = schedule.where(mine.start + need)
                when = "in the same pair" if need == late - 1 else f"only at position {position}"
                _fail(
                    schedule,
                    mine.start + late,
                    "progress",
                    f"needs {schedule.action(mine.start + need)}, which the rank runs {when}",
                )


def _report_cycle(schedule: Schedule) -> NoReturn:
    """Follow what is stuck from one entry to the one it waits for, until the circle closes."""
    graph = schedule.graph
    stuck = np.ones(graph.places, dtype=bool)
    stuck[graph.fences] = False
    for wave in graph.waves:
        stuck[wave] = False
    path: list[int] = []
    seen: dict[int, int] = {}
    place = int(np.argmax(stuck))
    while place not in seen:
        seen[place] = len(path)
        path.append(place)
        waited = [int(source[place]) for source in graph.sources] + [place - 1]
        place = next(other for other in waited if stuck[other])
    circle = path[seen[place] :]
    ranks = (np.searchsorted(graph.fences, circle, side="right") - 1).tolist()
    names = [_named(schedule, rank, at) for rank, at in zip(ranks, circle, strict=True)]
    # Only the steps from one program to another are worth a word; those within one are its own order.
    words = []
    for here in range(len(circle)):
        there = (here + 1) % len(circle)
        if circle[there] != circle[here] - 1:
            words.append(f"rank {ranks[here]} at {names[here]} waits for {names[there]} of rank {ranks[there]}")
    shown = "; ".join(words[:4]) + ("; and so on round the circle" if len(words) > 4 else "")
    position = int(circle[0] - graph.fences[ranks[0]] - 1)
    raise ScheduleError(
        f"rank {ranks[0]}, position {position}: deadlock: {shown}",
        rule="progress",
        rank=ranks[0],
        position=position,
    )


def _named(schedule: Schedule, rank: int, place: int) -> str:
    position = int(place - schedule.graph.fences[rank] - 1)
    return f"{schedule.programs[rank][position]} (position {position})"
