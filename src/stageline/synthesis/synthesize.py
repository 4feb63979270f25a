"""`synthesize`: a schedule made for given costs under a cap on memory, with a proven gap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.errors import StagelineError, shorten
from stageline.schedules import action as kinds
from stageline.schedules.certificate import verify
from stageline.schedules.channels import check_channels
from stageline.schedules.schedule import Schedule
from stageline.sizes import Size
from stageline.synthesis.greedy import Board, Plan, Programs, schedule_of
from stageline.synthesis.named import objective_of
from stageline.synthesis.problem import SLACK, Objective, problem_of
from stageline.synthesis.replay import peak_of, times_of, value_of
from stageline.synthesis.search import Progress, Search
from stageline.timeline.costs import Costs
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

LONGEST = 10**6
"""Seconds that a search may take."""


@dataclass(frozen=True, eq=False, repr=False)
class Synthesis:
    """A schedule that was made for its costs, and how far from the best possible it can be at most.

    >>> import stageline as sl
    >>> r = sl.synthesize(sl.Costs(), ranks=2, microbatches=4)
    >>> r
    <Synthesis: makespan 13, at least 13 is needed (gap 0.0%)>
    >>> r.schedule
    <Schedule synthesized: 2 ranks, 2 stages, 4 microbatches, 20 actions>
    """

    schedule: Schedule
    """Verified, and in order: F, I and W of every stage by microbatch."""
    timeline: Timeline
    objective: Objective
    lower_bound: float
    """No schedule in this placement and under these caps takes less."""
    named: Mapping[str, float]
    """The named families that fit, with what each takes."""
    how: str
    """What found it: a family, list scheduling, turns, local search, exact search."""
    was_cut: bool
    """Whether the time limit ended the search: another run with the same seed may then find something else."""
    was_interrupted: bool
    """Whether an interrupt (Ctrl-C) ended it."""
    seconds: float

    @property
    def achieved(self) -> float:
        """The makespan or the span, whichever was asked for."""
        return self.timeline.makespan if self.objective == "makespan" else self.timeline.span

    @property
    def gap(self) -> float:
        """(achieved − lower bound) / lower bound: 0 where it is proven to be the best."""
        if self.achieved <= self.lower_bound * (1 + SLACK):
            return 0.0
        return (self.achieved - self.lower_bound) / self.lower_bound if self.lower_bound > 0 else float("inf")

    @property
    def best_named(self) -> str | None:
        """The best of the named families that fit."""
        return min(self.named, key=lambda name: self.named[name]) if self.named else None

    def to_json(self) -> dict[str, Any]:
        """Turn it into plain data, without the schedule."""
        return {
            "objective": self.objective,
            "achieved": self.achieved,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "found_by": self.how,
            "seconds": self.seconds,
            "was_cut": self.was_cut,
            "named": dict(self.named),
            **self.timeline.figures(),
        }

    def __repr__(self) -> str:
        """Show the figures."""
        return (
            f"<Synthesis: {self.objective} {self.achieved:.6g}, at least {self.lower_bound:.6g} is needed "
            f"(gap {self.gap:.1%})>"
        )


def synthesize(
    costs: Costs,
    ranks: int,
    microbatches: int,
    *,
    memory: Size | Sequence[Size] | None = None,
    chunks: int = 1,
    placement: str = "loop",
    objective: str = "makespan",
    split: bool | None = None,
    time_limit: float = 2.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Synthesis:
    """Make a schedule for these costs, as short as can be found, and say how much shorter another one could be.

    `costs` are those of the stages of the schedule, as for `simulate`; `memory` is one cap or one per rank, in their
    unit, or sizes like "24GiB" where that is bytes. A rank holds `chunks` stages, placed round the ranks (`"loop"`) or
    down and up again (`"vee"`). `split` forces (True) or forbids (False) the backward in two halves. It is never worse
    than a named family that fits.

    >>> import stageline as sl
    >>> costs = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)
    >>> r = sl.synthesize(costs, ranks=4, microbatches=8, memory=4)
    >>> r.achieved, r.lower_bound, r.gap
    (278.0, 278.0, 0.0)
    >>> max(r.timeline.peak_memory)
    4.0
    """
    if isinstance(time_limit, bool) or not isinstance(time_limit, int | float) or not 0 < time_limit <= LONGEST:
        raise StagelineError(f"time_limit is a number of seconds above 0, {LONGEST} at most, got {shorten(time_limit)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise StagelineError(f"seed is a whole number from 0 to {2**31 - 1}, got {shorten(seed)}")
    problem = problem_of(costs, ranks, microbatches, memory, chunks, placement, objective, split)
    search = Search(problem, float(time_limit), seed, progress)
    search.run()
    assert search.best is not None
    return _finished(search, search.best)


def _finished(search: Search, best: Plan) -> Synthesis:
    """Verify and simulate the best plan."""
    problem = search.problem
    made = best.schedule
    if made is None:
        programs = best.programs if problem.split is not None else _joined(search.board, best.programs)
        made = schedule_of(problem, programs)
    made = Schedule(made.kinds, made.stage_ids, made.microbatch_ids, made.bounds, made.placement, name="synthesized")
    verify(made)
    check_channels(made)
    timeline = simulate(made, problem.costs)
    achieved = objective_of(problem, timeline)
    return Synthesis(
        schedule=made,
        timeline=timeline,
        objective=problem.objective,
        lower_bound=min(search.least, achieved),
        named=dict(sorted(search.named.items(), key=lambda item: (item[1], item[0]))),
        how=best.how,
        was_cut=search.was_cut,
        was_interrupted=search.was_interrupted,
        seconds=search.elapsed,
    )


def _joined(board: Board, programs: Programs) -> Programs:
    """Run I and the W right behind it as one B, wherever nobody waits for the I: splitting a backward has its price."""
    ends = times_of(board, programs)
    if ends is None:
        return programs
    value = value_of(board, programs, ends)
    size = board.size
    found = []
    for rank, program in enumerate(programs):
        joined: list[int] = []
        for code in program:
            key = code % size
            behind = joined and joined[-1] == kinds.I * size + key
            if behind and code >= kinds.W * size and not _is_awaited(board, ends, key):
                joined[-1] = kinds.B * size + key
            else:
                joined.append(code)
        found.append(joined if peak_of(board, joined) <= board.caps[rank] else program)
    ends = times_of(board, found)
    return found if ends is not None and value_of(board, found, ends) <= value * (1 + 1e-12) else programs


def _is_awaited(board: Board, ends: list[float], key: int) -> bool:
    """Whether the stage before begins its backward before this one would be done as a whole."""
    size, count, taken = board.size, board.problem.microbatches, board.taken
    if key < count:
        return False
    first, whole = kinds.I * size + key, kinds.B * size + key
    done = ends[first] - taken[first] + taken[whole] + board.back[key]
    below = first - count if ends[first - count] >= 0 else whole - count
    return ends[below] - taken[below] < done
