"""`synthesize`: build a schedule for given costs under a memory cap, with a proven gap; `reorder`: another order for
the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stageline.common.errors import StagelineError, shorten
from stageline.common.units import Size
from stageline.schedules import action as kinds
from stageline.schedules.channels import check_channels
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import verify
from stageline.synthesis.baselines import objective_of, starting_plan
from stageline.synthesis.fast_simulate import end_times, objective_value, peak_memory_of
from stageline.synthesis.list_scheduling import Board, ProgramPlan, Programs, schedule_of
from stageline.synthesis.local_search import join_adjacent
from stageline.synthesis.problem import SLACK, Objective, problem_of
from stageline.synthesis.search import Search, SearchProgress
from stageline.timeline.costs import Costs
from stageline.timeline.memory import peaks_of
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

MAX_TIME_LIMIT = 10**6
"""Largest time limit, in seconds."""


@dataclass(frozen=True, eq=False, repr=False)
class Synthesis:
    """A schedule built for given costs, and its proven distance from the optimum.

    >>> import stageline as sl
    >>> r = sl.synthesize(sl.Costs(), ranks=2, microbatches=4)
    >>> r
    <Synthesis: makespan 13, at least 13 is needed (gap 0.0%)>
    >>> r.schedule
    <Schedule synthesized: 2 ranks, 2 stages, 4 microbatches, 20 actions>
    """

    schedule: Schedule
    """Verified, with F, I and W of every stage in microbatch order."""
    timeline: Timeline
    objective: Objective
    lower_bound: float
    """No schedule in this placement under these caps is shorter."""
    named: Mapping[str, float]
    """The named families that fit, with their objective values, best first."""
    how: str
    """The method that found it: a family name, list scheduling, turns, local search, exact search."""
    was_cut: bool
    """Whether time was up before the gap was closed; another run with the same seed may then differ."""
    was_interrupted: bool
    """Whether an interrupt (Ctrl-C) ended the search."""
    seconds: float

    @property
    def achieved(self) -> float:
        """The makespan or the span, depending on the objective."""
        return self.timeline.makespan if self.objective == "makespan" else self.timeline.span

    @property
    def gap(self) -> float:
        """(achieved − lower bound) / lower bound; 0 if the schedule is proven optimal."""
        if self.achieved <= self.lower_bound * (1 + SLACK):
            return 0.0
        return (self.achieved - self.lower_bound) / self.lower_bound if self.lower_bound > 0 else float("inf")

    @property
    def best_named(self) -> str | None:
        """The best named family that fits, or None."""
        return min(self.named, key=lambda name: self.named[name]) if self.named else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without the schedule."""
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
    tolerance: float = 0.0,
    seed: int = 0,
    start: Schedule | None = None,
    progress: Callable[[SearchProgress], None] | None = None,
) -> Synthesis:
    """Build the shortest schedule that the search finds for these costs, and prove a lower bound.

    `costs` are per stage of the schedule, as in `simulate`. `memory` is one cap, or one per rank, in the unit of the
    costs, or a size like "24GiB" where that unit is bytes. Each rank holds `chunks` stages, placed round the ranks
    (`"loop"`) or down and up again (`"v"`). `split` forces (True) or forbids (False) split backwards. The result is
    never worse than a named family that fits.

    The search ends when the gap is at most `tolerance` (0.01 is 1%), or else after `time_limit` seconds.

    `start` is a schedule to start from, such as an earlier result: the new one is never longer.
    `progress` is called with a `SearchProgress` at every improvement. Raises `MemoryCapError` if no schedule fits the
    memory, and `StagelineError` for invalid arguments.

    >>> import stageline as sl
    >>> costs = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)
    >>> r = sl.synthesize(costs, ranks=4, microbatches=8, memory=4)
    >>> r.achieved, r.lower_bound, r.gap
    (278.0, 278.0, 0.0)
    >>> max(r.timeline.peak_memory)
    4.0
    """
    if isinstance(time_limit, bool) or not isinstance(time_limit, int | float) or not 0 < time_limit <= MAX_TIME_LIMIT:
        raise StagelineError(
            f"time_limit must be a number of seconds above 0 and up to {MAX_TIME_LIMIT}, got {shorten(time_limit)}"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise StagelineError(f"seed must be an integer from 0 to {2**31 - 1}, got {shorten(seed)}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise StagelineError(f"tolerance must be a number from 0 up to 1 (0.01 is 1%), got {shorten(tolerance)}")
    problem = problem_of(costs, ranks, microbatches, memory, chunks, placement, objective, split)
    search = Search(problem, float(time_limit), seed, progress, float(tolerance))
    search.start = None if start is None else starting_plan(problem, start)
    search.run()
    assert search.best is not None
    return _result(search, search.best)


def _result(search: Search, best: ProgramPlan) -> Synthesis:
    """Verify and simulate the best plan."""
    problem = search.problem
    schedule = best.schedule
    if schedule is None:
        programs = best.programs if problem.split is not None else _join_halves(search.board, best.programs)
        schedule = schedule_of(problem, programs)
    schedule = replace(schedule, name="synthesized", options={})
    verify(schedule)
    check_channels(schedule)
    timeline = simulate(schedule, problem.costs)
    achieved = objective_of(problem, timeline)
    return Synthesis(
        schedule=schedule,
        timeline=timeline,
        objective=problem.objective,
        lower_bound=min(search.lower_bound, achieved),
        named=dict(sorted(search.baselines.items(), key=lambda item: (item[1], item[0]))),
        how=best.how,
        was_cut=search.was_cut,
        was_interrupted=search.was_interrupted,
        seconds=search.elapsed,
    )


def _join_halves(board: Board, programs: Programs) -> Programs:
    """Replace an I and the W directly after it by one B where no rank waits for the I: splitting costs time."""
    ends = end_times(board, programs)
    if ends is None:
        return programs
    value = objective_value(board, programs, ends)
    joined = [join_adjacent(board, program, partial(_is_urgent, board, ends)) for program in programs]
    candidate = [
        after if peak_memory_of(board, after) <= cap else before
        for before, after, cap in zip(programs, joined, board.caps, strict=True)
    ]
    ends = end_times(board, candidate)
    return (
        candidate if ends is not None and objective_value(board, candidate, ends) <= value * (1 + 1e-12) else programs
    )


def _is_urgent(board: Board, ends: list[float], key: int) -> bool:
    """Whether the previous stage starts its backward before this one would end if it ran whole."""
    size, count, durations = board.size, board.problem.microbatches, board.durations
    if key < count:
        return False
    input_code, whole_code = kinds.I * size + key, kinds.B * size + key
    whole_end = ends[input_code] - durations[input_code] + durations[whole_code] + board.backward_hop[key]
    previous = input_code - count if ends[input_code - count] >= 0 else whole_code - count
    return ends[previous] - durations[previous] < whole_end


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
            tolerance=GAIN,
        )
    except StagelineError:
        return None  # the caps are below what any other order needs
    if synthesized.was_interrupted:
        raise KeyboardInterrupt  # meant for the training, not for this search
    if not synthesized.achieved < before * (1 - GAIN):
        return None
    name = f"{schedule.name.removesuffix(RE_PLANNED)}{RE_PLANNED}"
    return Reordered(replace(synthesized.schedule, name=name), before, synthesized.achieved)


def splits(schedule: Schedule) -> bool:
    """Whether any backward of a schedule is split, so that the costs of both halves are known."""
    return bool((schedule.action_kinds == kinds.W).any())
