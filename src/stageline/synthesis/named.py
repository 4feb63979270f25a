"""The schedules that are there without any search: the named families that fit, and one microbatch after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stageline.errors import StagelineError
from stageline.schedules import action as kinds
from stageline.schedules.build import PAIRED
from stageline.schedules.certificate import ensure_progress
from stageline.schedules.channels import check_channels
from stageline.schedules.placement import Placement
from stageline.schedules.registry import Family, families, schedule
from stageline.schedules.schedule import Schedule
from stageline.synthesis.greedy import Plan, Programs, schedule_of
from stageline.synthesis.problem import SLACK, Problem
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

MOST_IN_GROUPS = 20_000
"""Actions that are simulated at most to try groups of other sizes, beyond the first of them."""


class Named(NamedTuple):
    """A schedule of a family, and what it takes."""

    name: str
    schedule: Schedule
    value: float

    def plan(self) -> Plan:
        """Make it a plan to search on from."""
        paired = self.schedule if self.schedule.has_overlaps else None
        return Plan(programs_of(self.schedule), self.value, self.name, schedule=paired)


def named_ones(problem: Problem) -> Iterator[Named]:
    """Every training family in this placement that is in order and fits the caps."""
    for name, family in families().items():
        for options in _options(problem, family):
            made = _made(problem, family, options)
            if made is None:
                continue
            for variant in _variants(made):
                timeline = simulate(variant, problem.costs)
                if problem.fits(timeline.peak_memory):
                    yield Named(name, variant, objective_of(problem, timeline))


def objective_of(problem: Problem, timeline: Timeline) -> float:
    """The figure that is to be made small."""
    return timeline.makespan if problem.objective == "makespan" else timeline.span


def programs_of(made: Schedule) -> Programs:
    """The actions of every rank as codes."""
    size = made.stages * made.microbatches
    codes = (made.kinds % PAIRED).astype(np.int64) * size + made.keys
    return [codes[mine].tolist() for mine in made.slices()]


def _made(problem: Problem, family: Family, options: dict[str, Any]) -> Schedule | None:
    """The family at these sizes, if it has this placement and keeps to what was asked."""
    if not family.training:
        return None
    # Whether the placement is the right one shows on two ranks as well as on many, and faster.
    small = min(2, problem.ranks)
    for ranks, microbatches in ((small, 1), (small, 2 * small), (problem.ranks, problem.microbatches)):
        try:
            made = schedule(family.name, ranks, microbatches, **options)
        except StagelineError:
            continue
        placed = problem.placement if ranks == problem.ranks else _placed(problem, ranks)
        if made.placement.table.tolist() != placed.table.tolist() or not made.training:
            return None
        if (ranks, microbatches) == (problem.ranks, problem.microbatches):
            return made if _keeps(problem, made) else None
    return None


def _placed(problem: Problem, ranks: int) -> Placement:
    """The same placement on fewer ranks."""
    row = problem.placement.table[0]
    is_loop = problem.chunks == 1 or bool(row[problem.ranks] == 0)
    return Placement.loop(ranks, problem.chunks) if is_loop else Placement.snake(ranks, problem.chunks)


def _options(problem: Problem, family: Family) -> list[dict[str, Any]]:
    """The option that says how many stages a rank holds, with all sizes of its groups that there is time for."""
    if "waves" in family.options and problem.chunks % 2 == 0:
        return [{"waves": problem.chunks // 2}]
    if "chunks" not in family.options:
        return [{}]
    found: list[dict[str, Any]] = [{"chunks": problem.chunks}]
    if "group" in family.options and problem.chunks > 1:
        most = max(1, MOST_IN_GROUPS // problem.num_actions)
        found += [{"chunks": problem.chunks, "group": group} for group in _groups(problem)[:most]]
    return found


def _groups(problem: Problem) -> list[int]:
    """Sizes of groups beside one microbatch per rank: first the even ones, for the largest group takes the memory."""
    least, count = problem.ranks + 1, problem.microbatches
    if count < least:
        return []
    even = [-(-count // parts) for parts in range(count // least, 0, -1)]
    return list(dict.fromkeys([*even, *range(least, count // 2 + 1)]))


def _keeps(problem: Problem, made: Schedule) -> bool:
    """Whether backwards are split as asked, and every stage runs F, I and weight gradients in order."""
    plain = made.kinds % PAIRED
    if problem.split is not None and bool((plain == (kinds.B if problem.split else kinds.I)).any()):
        return False
    for chosen in (plain == kinds.F, (plain == kinds.B) | (plain == kinds.I), (plain == kinds.B) | (plain == kinds.W)):
        stage, microbatch = made.stage_ids[chosen], made.microbatch_ids[chosen]
        order = np.argsort(stage, kind="stable")
        if (np.diff(microbatch[order])[np.diff(stage[order]) == 0] < 0).any():
            return False
    return _is_valid(made)


def _is_valid(made: Schedule) -> bool:
    """Whether it gets to its end with all messages in order; `verify` asks for more, which takes longer."""
    try:
        ensure_progress(made)
        check_channels(made)
    except StagelineError:
        return False
    return True


def _variants(made: Schedule) -> list[Schedule]:
    """A schedule with overlapped pairs is also one without: F first, then its partner."""
    if not made.has_overlaps:
        return [made]
    apart = Schedule(
        made.kinds % PAIRED, made.stage_ids, made.microbatch_ids, made.bounds, made.placement, made.training, made.name
    )
    return [apart, made] if _is_valid(apart) else [made]


def one_by_one(problem: Problem) -> Plan:
    """One microbatch after the other, each in as little memory as there is: it exists wherever any schedule does."""
    size, count = problem.stages * problem.microbatches, problem.microbatches
    programs: Programs = []
    for rank, mine in enumerate(problem.stages_of):
        program = []
        for m in range(count):
            program += [stage * count + m for stage in mine]
            held = sum(problem.activation[stage][m] for stage in mine)
            done, _ = problem.drain(rank, m, held, problem.caps[rank] * (1 + SLACK))
            program += [kind * size + stage * count + m for kind, stage in done]
        programs.append(program)
    timeline = simulate(schedule_of(problem, programs), problem.costs)
    return Plan(programs, objective_of(problem, timeline), "one by one")
