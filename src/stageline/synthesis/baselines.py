"""Schedules that need no search: the named families that fit, and one microbatch after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from stageline.common.errors import StagelineError, shorten
from stageline.schedules import action as kinds
from stageline.schedules.channels import check_channels
from stageline.schedules.placement import Placement
from stageline.schedules.registry import Family, families
from stageline.schedules.registry import schedule as build_schedule
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import ensure_progress, runs_in_order
from stageline.synthesis.list_scheduling import ProgramPlan, Programs, schedule_of
from stageline.synthesis.problem import SLACK, Problem
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

MAX_GROUP_ACTIONS = 20_000
"""Total number of actions to simulate, at most, to try other group sizes."""


def baselines(problem: Problem) -> Iterator[ProgramPlan]:
    """Yield every training family in this placement that is in order and fits the caps."""
    for name, family in families().items():
        for options in _options(problem, family):
            schedule = _build(problem, family, options)
            for variant in [] if schedule is None else _variants(schedule):
                timeline = simulate(variant, problem.costs)
                if problem.fits(timeline.peak_memory):
                    paired = variant if variant.has_overlaps else None
                    yield ProgramPlan(programs_of(variant), objective_of(problem, timeline), name, schedule=paired)


def starting_plan(problem: Problem, schedule: Schedule) -> ProgramPlan:
    """Return a user's schedule as a plan; raise `StagelineError` if it does not solve the problem."""
    if not isinstance(schedule, Schedule):
        raise StagelineError(f"start must be a schedule, got {shorten(schedule)}")
    sizes = (schedule.placement.table.tolist(), schedule.microbatches)
    if sizes != (problem.placement.table.tolist(), problem.microbatches) or not schedule.training:
        raise StagelineError(
            f"start has {schedule.ranks} ranks, {schedule.stages} stages and {schedule.microbatches} microbatches in "
            f"a different placement or size than the {problem.ranks} ranks, {problem.stages} stages and "
            f"{problem.microbatches} microbatches to synthesize; build it for the same ones"
        )
    if not _conforms(problem, schedule):
        raise StagelineError(
            "start must be free of deadlocks, run the microbatches of every stage in order, and split its backwards "
            f"as required by split={problem.split}"
        )
    timeline = simulate(schedule, problem.costs)
    if not problem.fits(timeline.peak_memory):
        peaks = zip(timeline.peak_memory, problem.caps, strict=True)
        rank, (peak, cap) = max(enumerate(peaks), key=lambda item: item[1][0] - item[1][1])
        raise StagelineError(f"start needs {peak:.12g} memory on rank {rank}; the cap is {cap:.12g}")
    paired = schedule if schedule.has_overlaps else None
    return ProgramPlan(programs_of(schedule), objective_of(problem, timeline), "the start", schedule=paired)


def objective_of(problem: Problem, timeline: Timeline) -> float:
    """Return the value to minimise: makespan or span."""
    return timeline.makespan if problem.objective == "makespan" else timeline.span


def programs_of(schedule: Schedule) -> Programs:
    """Return the actions of every rank as codes."""
    size = schedule.stages * schedule.microbatches
    codes = schedule.action_kinds.astype(np.int64) * size + schedule.keys()
    return [codes[part].tolist() for part in schedule.slices()]


def _build(problem: Problem, family: Family, options: dict[str, Any]) -> Schedule | None:
    """Build the family at the sizes of the problem; None if its placement or its backwards differ."""
    if not family.training:
        return None
    # Compare the placement on two ranks first, which is faster.
    few = min(2, problem.ranks)
    for ranks, microbatches in ((few, 1), (few, 2 * few), (problem.ranks, problem.microbatches)):
        try:
            schedule = build_schedule(family.name, ranks, microbatches, **options)
        except StagelineError:
            continue
        placement = Placement.of_pattern(problem.pattern, ranks, problem.chunks)
        if schedule.placement.table.tolist() != placement.table.tolist() or not schedule.training:
            return None
        if (ranks, microbatches) == (problem.ranks, problem.microbatches):
            return schedule if _conforms(problem, schedule) else None
    return None


def _options(problem: Problem, family: Family) -> list[dict[str, Any]]:
    """Return the options that set the number of chunks, with as many group sizes as there is time for."""
    if "waves" in family.options and problem.chunks % 2 == 0:
        return [{"waves": problem.chunks // 2}]
    if "chunks" not in family.options:
        return [{}]
    options: list[dict[str, Any]] = [{"chunks": problem.chunks}]
    if "group" in family.options and problem.chunks > 1:
        limit = max(1, MAX_GROUP_ACTIONS // problem.num_actions)
        options += [{"chunks": problem.chunks, "group": group} for group in _groups(problem)[:limit]]
    return options


def _groups(problem: Problem) -> list[int]:
    """Return group sizes above one microbatch per rank; even splits first, as the largest group sets the memory."""
    least, count = problem.ranks + 1, problem.microbatches
    if count < least:
        return []
    even = [-(-count // parts) for parts in range(count // least, 0, -1)]
    return list(dict.fromkeys([*even, *range(least, count // 2 + 1)]))


def _conforms(problem: Problem, schedule: Schedule) -> bool:
    """Whether backwards are split as required and every stage runs F, I and W in microbatch order."""
    kind = schedule.action_kinds
    if problem.split is not None and bool((kind == (kinds.B if problem.split else kinds.I)).any()):
        return False
    backwards = [(kind == kinds.B) | (kind == half) for half in (kinds.I, kinds.W)]
    return _is_valid(schedule) and all(runs_in_order(schedule, group) for group in (kind == kinds.F, *backwards))


def _is_valid(schedule: Schedule) -> bool:
    """Whether the schedule is free of deadlocks and its messages are in order; faster than `verify`."""
    try:
        ensure_progress(schedule)
        check_channels(schedule)
    except StagelineError:
        return False
    return True


def _variants(schedule: Schedule) -> list[Schedule]:
    """Return the schedule and, if it has overlapped pairs, the same one with F and its partner in sequence."""
    if not schedule.has_overlaps:
        return [schedule]
    sequential = replace(schedule, kinds=schedule.action_kinds)
    return [sequential, schedule] if _is_valid(sequential) else [schedule]


def sequential_plan(problem: Problem) -> ProgramPlan:
    """Run the microbatches one after the other in as little memory as possible: exists if any schedule does."""
    size, count = problem.stages * problem.microbatches, problem.microbatches
    programs: Programs = []
    for rank, stages in enumerate(problem.stages_of):
        program = []
        for m in range(count):
            program += [stage * count + m for stage in stages]
            level = sum(problem.activation[stage][m] for stage in stages)
            backwards, _ = problem.drain(rank, m, level, problem.caps[rank] * (1 + SLACK))
            program += [kind * size + stage * count + m for kind, stage in backwards]
        programs.append(program)
    timeline = simulate(schedule_of(problem, programs), problem.costs)
    return ProgramPlan(programs, objective_of(problem, timeline), "one by one")
