"""The rules that a valid schedule satisfies: one function each, in the order in which they are checked.

A rule raises `ScheduleError` with its name, the place and the problem. Each may rely on the ones before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeAlias

import numpy as np

from stageline.common.errors import ScheduleError
from stageline.schedules import action as kinds
from stageline.schedules.action import KINDS, Kind
from stageline.schedules.channels import check_channels
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import Sharding

ScheduleRule: TypeAlias = Callable[[Schedule], None]


def check_placement(schedule: Schedule) -> None:
    """Every stage is on an existing rank, for every microbatch."""
    placement = schedule.placement
    if placement.stages == 0 or placement.microbatches == 0 or schedule.ranks == 0:
        raise ScheduleError(
            f"a schedule needs at least one rank, stage and microbatch; this one has {schedule.ranks}, "
            f"{placement.stages} and {placement.microbatches}",
            rule="placement",
        )
    invalid = np.argwhere((placement.table < 0) | (placement.table >= schedule.ranks))
    if len(invalid):
        direction, stage = invalid[0].tolist()
        rank = int(placement.table[direction, stage])
        owner = "no rank" if rank < 0 else f"rank {rank}"
        raise ScheduleError(
            f"stage {stage} is on {owner}; every stage must be on one of the ranks 0 to {schedule.ranks - 1}",
            rule="placement",
        )
    if placement.direction.min() < 0 or placement.direction.max() >= placement.directions:
        microbatch = int(np.argmax((placement.direction < 0) | (placement.direction >= placement.directions)))
        raise ScheduleError(
            f"microbatch {microbatch} has direction {placement.direction[microbatch]}, but the placement has "
            f"{placement.directions}",
            rule="placement",
        )


def check_known(schedule: Schedule) -> None:
    """Every action has an existing stage and microbatch."""
    for column, count, what in (
        (schedule.stage_ids, schedule.stages, "stage"),
        (schedule.microbatch_ids, schedule.microbatches, "microbatch"),
    ):
        invalid = np.flatnonzero((column < 0) | (column >= count))
        if len(invalid):
            problem = f"refers to a {what} that does not exist; there are {count}, counted from 0"
            _fail(schedule, int(invalid[0]), "known", problem)


def check_owner(schedule: Schedule) -> None:
    """Every action runs on the rank of its stage."""
    rank = np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(schedule.bounds))
    owner = schedule.placement.ranks_of(schedule.stage_ids, schedule.microbatch_ids)
    invalid = np.flatnonzero(rank != owner)
    if len(invalid):
        index = int(invalid[0])
        problem = f"belongs on rank {owner[index]}, which holds stage {schedule.stage_ids[index]}"
        _fail(schedule, index, "owner", problem)


def check_overlap(schedule: Schedule) -> None:
    """An overlapped pair is one F and one B or I."""
    pairs = schedule.pairs
    if not len(pairs):
        return
    ends = schedule.bounds[1:]
    for index in pairs[np.isin(pairs + 1, ends)].tolist():
        _fail(schedule, index, "overlap", "is the forward of a pair without a backward")
    first, second = schedule.action_kinds[pairs], schedule.action_kinds[pairs + 1]
    invalid = np.flatnonzero(
        (first != kinds.F) | ~np.isin(second, (kinds.B, kinds.I)) | schedule.pair_starts[pairs + 1]
    )
    if len(invalid):
        index = int(pairs[invalid[0]])
        problem = f"is paired with {schedule.action(index + 1)}; a pair is one F and one B or I"
        _fail(schedule, index, "overlap", problem)


def check_complete(schedule: Schedule) -> None:
    """Every stage runs F and its backward (B, or I and W) exactly once per microbatch; in inference, only F."""
    size = schedule.stages * schedule.microbatches
    plain = schedule.action_kinds
    if size > schedule.num_actions:
        present = np.unique(schedule.keys()[plain == kinds.F])
        missing = int(np.argmax(np.append(present, -1) != np.arange(len(present) + 1)))
        _report_missing(schedule, missing, "F")
    runs = {kind: np.zeros(size, dtype=bool) for kind in KINDS}
    for part in schedule.windows():
        keys = schedule.keys(part)
        for code, kind in enumerate(KINDS):
            runs[kind][keys[plain[part] == code]] = True
    for code, kind in enumerate(KINDS):
        if np.count_nonzero(runs[kind]) < np.count_nonzero(plain == code):
            _report_twice(schedule, kind)
    if not schedule.training:
        for code, kind in enumerate(KINDS):
            if kind != "F" and runs[kind].any():
                index = int(np.argmax(plain == code))
                _fail(schedule, index, "complete", "is a backward in a forward-only schedule")
    for half in ("I", "W"):
        both = runs["B"] & runs[half]
        if both.any():
            index = int(np.argmax((plain == kinds.B) & both[schedule.keys()]))
            problem = (
                f"is a whole backward, but the same stage and microbatch also run {half}; use either B, or I and W"
            )
            _fail(schedule, index, "complete", problem)
    split = runs["I"] | runs["W"]
    lacking = {
        "F": ~runs["F"],
        "B (or I and W)": ~(split | runs["B"]) & schedule.training,
        "I, although it runs W": split & ~runs["I"],
        "W, although it runs I": split & ~runs["W"],
    }
    for what, missing_here in lacking.items():
        if missing_here.any():
            _report_missing(schedule, int(np.argmax(missing_here)), what)


def check_progress(schedule: Schedule) -> None:
    """The dependencies and the order of each rank have no cycle, so every rank reaches its end."""
    _check_local_order(schedule)
    if not schedule.graph.is_acyclic:
        _report_cycle(schedule)


def check_sharding(schedule: Schedule) -> None:
    """Every F, B and I of a sharded stage runs while its parameters are gathered; every gather is used and freed; its
    gradients are reduced once, after the last of its backwards. All processes of a stage run this one program. A stage
    that is never gathered nor freed is replicated: only its gradients are reduced."""
    if schedule.sharding is None:
        return
    for rank in range(schedule.ranks):
        _check_rank_sharding(schedule, schedule.sharding, rank)


def _check_rank_sharding(schedule: Schedule, sharding: Sharding, rank: int) -> None:
    part = slice(int(schedule.bounds[rank]), int(schedule.bounds[rank + 1]))
    kind, stage_of = schedule.action_kinds[part].tolist(), schedule.stage_ids[part].tolist()
    own = sharding.of_rank(rank)
    sharded = {int(sharding.stage_ids[index]) for index in own}
    sharded |= set(sharding.stages) & set(stage_of)
    is_gathered = set(sharding.stage_ids[sharding.kinds != kinds.REDUCE_GRAD].tolist())
    last = {stage: at for at, stage in enumerate(stage_of) if kind[at] != kinds.F}
    gathered: dict[int, bool] = {}
    """The stages that are gathered, and whether that was used."""
    reduced: set[int] = set()

    def fail(index: int, problem: str) -> NoReturn:
        at = int(sharding.places[index])
        where = f"before {schedule.action(at)}" if at < part.stop else "after the last action"
        message = f"rank {rank}, {where}: {sharding.action(index)} {problem}"
        raise ScheduleError(message, rule="sharding", rank=rank)

    def run_until(place: int, since: int) -> None:
        for at in range(since, place):
            stage = stage_of[at]
            if stage in is_gathered and kind[at] != kinds.W:
                if stage not in gathered:
                    _fail(schedule, part.start + at, "sharding", f"needs the parameters of stage {stage} gathered")
                gathered[stage] = True

    done = 0
    for index in own:
        place, stage = int(sharding.places[index]) - part.start, int(sharding.stage_ids[index])
        if not done <= place <= part.stop - part.start:
            fail(index, "is out of order")
        if 0 < place < len(kind) and schedule.pair_starts[part.start + place - 1]:
            fail(index, "is inside an overlapped pair")
        run_until(place, done)
        done = place
        match int(sharding.kinds[index]):
            case kinds.UNSHARD:
                if stage not in stage_of:
                    fail(index, f"gathers a stage that rank {rank} does not run")
                if stage in gathered:
                    fail(index, "gathers parameters that are already gathered")
                gathered[stage] = False
            case kinds.RESHARD:
                if stage not in gathered:
                    fail(index, "frees parameters that are not gathered")
                if not gathered.pop(stage):
                    fail(index, "frees parameters that no action has used since they were gathered")
            case _:
                if stage in reduced:
                    fail(index, "reduces the gradients a second time; each must be reduced exactly once")
                if stage not in last or place <= last[stage]:
                    then = f", {schedule.action(part.start + last[stage])}" if stage in last else ""
                    fail(index, f"reduces gradients before the last action that adds to them{then}")
                reduced.add(stage)
    run_until(len(kind), done)
    for stage in gathered:
        raise ScheduleError(f"rank {rank}: never frees the parameters of stage {stage}", rule="sharding", rank=rank)
    for stage in sorted(sharded & set(last) - reduced):
        raise ScheduleError(f"rank {rank}: never reduces the gradients of stage {stage}", rule="sharding", rank=rank)


RULES: dict[str, ScheduleRule] = {
    "placement": check_placement,
    "known": check_known,
    "owner": check_owner,
    "overlap": check_overlap,
    "complete": check_complete,
    "progress": check_progress,
    "sharding": check_sharding,
    "channels": check_channels,
}
"""All rules by name, in the order in which they are checked; `docs/verify.md` describes each."""


def _fail(schedule: Schedule, index: int, rule: str, problem: str) -> NoReturn:
    rank, position = schedule.where(index)
    message = f"rank {rank}, position {position}: {schedule.action(index)} {problem}"
    raise ScheduleError(message, rule=rule, rank=rank, position=position)


def _report_twice(schedule: Schedule, kind: Kind) -> NoReturn:
    """Report both places of an action that runs twice, and the microbatch that its stage never runs instead."""
    key, same_kind = schedule.keys(), schedule.action_kinds == KINDS.index(kind)
    count = np.bincount(key[same_kind], minlength=schedule.stages * schedule.microbatches)
    repeated = np.flatnonzero(same_kind & (count > 1)[key])
    same = repeated[key[repeated] == key[repeated[0]]]
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
    """On each rank, F comes before the backward of the same stage and microbatch, and I before W."""
    done_at = np.zeros(schedule.stages * schedule.microbatches, dtype=np.int32)
    for mine in schedule.slices():
        plain = schedule.action_kinds[mine]
        key = schedule.keys(mine)
        forward, weight = np.flatnonzero(plain == kinds.F), np.flatnonzero(plain == kinds.W)
        back = np.flatnonzero((plain == kinds.B) | (plain == kinds.I))
        for first, then in ((forward, back), (back, weight)):
            done_at[key[first]] = first
            needs = done_at[key[then]]
            wrong = needs > then
            # The two actions of a pair start together, so the backward cannot need the forward.
            wrong |= (needs == then - 1) & schedule.pair_starts[mine][needs]
            if wrong.any():
                late, need = int(then[np.argmax(wrong)]), int(needs[np.argmax(wrong)])
                _, position = schedule.where(mine.start + need)
                when = "in the same pair" if need == late - 1 else f"only at position {position}"
                problem = f"needs {schedule.action(mine.start + need)}, which the rank runs {when}"
                _fail(schedule, mine.start + late, "progress", problem)


def _report_cycle(schedule: Schedule) -> NoReturn:
    """Follow the waiting entries from one to the next until they form a cycle, and report it."""
    graph = schedule.graph
    stuck = np.ones(graph.entries + 1, dtype=bool)
    stuck[-1] = False
    for _, wave in graph.walk():
        stuck[wave] = False
    path: list[int] = []
    seen: dict[int, int] = {}
    entry = int(np.argmax(stuck))
    while entry not in seen:
        seen[entry] = len(path)
        path.append(entry)
        awaited = [int(source[entry]) for source in graph.sources] + [entry - 1]
        entry = next(other for other in awaited if stuck[other])
    cycle = path[seen[entry] :]
    ranks = (np.searchsorted(graph.first, cycle, side="right") - 1).tolist()
    positions = [entry - int(graph.first[rank]) for rank, entry in zip(ranks, cycle, strict=True)]
    names = [
        f"{schedule.programs[rank][position]} (position {position})"
        for rank, position in zip(ranks, positions, strict=True)
    ]
    # Report only the steps from one rank to another, not those within a program.
    steps = []
    for here in range(len(cycle)):
        there = (here + 1) % len(cycle)
        if cycle[there] != cycle[here] - 1:
            steps.append(f"rank {ranks[here]} at {names[here]} waits for {names[there]} of rank {ranks[there]}")
    shown = "; ".join(steps[:4]) + ("; and so on, in a cycle" if len(steps) > 4 else "")
    raise ScheduleError(
        f"rank {ranks[0]}, position {positions[0]}: deadlock: {shown}",
        rule="progress",
        rank=ranks[0],
        position=positions[0],
    )
