"""Exact search by constraint programming, for small instances: an optimal schedule with its proof.

Times become integers. If they are not multiples of a common unit, they are rounded down: every schedule with its times
rounded down is a solution of the rounded problem, so a bound proven for it holds for the true costs. The same applies
to memory, with sizes rounded down and caps rounded up (down, if the unit divides all sizes). Orders found this way are
evaluated with the true costs.

The solver ignores intervals of length zero, but an action of zero duration still holds memory. So if there are such
actions, the unit is divided into more ticks than there are of them, and each takes one tick: together they never add up
to a unit.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from stageline.common.errors import StagelineError
from stageline.schedules import action as kinds
from stageline.synthesis.bounds import Relaxation, heads_of, tails_of
from stageline.synthesis.list_scheduling import Board, Programs
from stageline.synthesis.problem import SLACK, Problem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

FINEST_GRID = 10**6
"""Number of units per step if times have no common unit."""


class Unit(NamedTuple):
    """The number of units per 1.0, and whether all values are multiples of the unit."""

    per_one: float
    is_exact: bool

    def down(self, value: float) -> int:
        """Round down, ignoring floating-point error."""
        return math.floor(value * self.per_one + 1e-6)

    def up(self, value: float) -> int:
        """Round up, ignoring floating-point error."""
        return math.ceil(value * self.per_one - 1e-6)


def unit_of(values: Iterable[float], largest: float) -> Unit:
    """Return a unit that divides all values, or else a fine one.

    >>> unit_of([0.5, 1.25, 3], 100).per_one
    4.0
    """
    distinct = sorted({value for value in values if value > 0})
    for per_one in (1.0, 2.0, 4.0, 5.0, 10.0, 20.0, 100.0, 1000.0, 1e4, 1e5):
        if largest * per_one <= 100 * FINEST_GRID and all(
            abs(value * per_one - round(value * per_one)) <= 1e-9 * max(1.0, value * per_one) for value in distinct
        ):
            return Unit(per_one, True)
    return Unit(FINEST_GRID / largest if largest > 0 else 1.0, False)


def is_available() -> bool:
    """Whether ortools is installed."""
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def is_loaded() -> bool:
    """Whether the solver has been imported."""
    return "ortools.sat.python.cp_model" in sys.modules


def solver() -> Any:
    """Import the solver; raise `StagelineError` with the install command if it is missing."""
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError:
        raise StagelineError("exact search needs ortools; run pip install 'stageline[synthesis]'") from None
    return cp_model


@dataclass
class _Slot:
    """The variables of one stage and microbatch."""

    forward: Any
    back: Any
    back_end: Any
    weight: Any
    weight_end: Any
    whole: Any
    """1 if the backward runs whole: a variable or a constant."""


@dataclass
class Model:
    """The problem as a CP-SAT model."""

    problem: Problem
    lower_bound: float
    upper_bound: float
    cp: Any = field(default_factory=solver)

    def __post_init__(self) -> None:
        problem = self.problem
        tables = [*problem.times, problem.forward_hop, problem.backward_hop]
        self.unit = unit_of((time for table in tables for row in table for time in row), self.upper_bound)
        self.model: cp_model.CpModel = self.cp.CpModel()
        num_instant = sum(self.unit.down(time) == 0 for table in problem.times for row in table for time in row)
        self.num_instant = num_instant if self.unit.is_exact else 0
        """Number of actions of zero duration."""
        self.ticks = 2 * self.num_instant + 1
        """Number of ticks per unit."""
        exact = self.unit.is_exact
        self.longest = self.unit.down(self.upper_bound) if exact else self.unit.up(self.upper_bound) + 1
        """The longest step to consider, in units."""
        self.horizon = self.ticks * self.longest + self.num_instant
        self.slots: list[list[_Slot]] = []
        self._variables()
        self._precedences()
        for rank in range(problem.ranks):
            self._memory(rank)
        self._channels()
        self._objective()

    def _ticks_down(self, value: float) -> int:
        return self.ticks * self.unit.down(value)

    def _length(self, time: float) -> int:
        """Return the number of ticks an action takes."""
        return self._ticks_down(time) or min(self.num_instant, 1)

    def _first_start(self, stage: int) -> int:
        """Return when a rank starts, given its first stage: when the first microbatch can arrive."""
        problem = self.problem
        if not self.num_instant:
            return self._ticks_down(self.heads.forward[stage][0])
        times = zip(problem.times[kinds.F][:stage], problem.forward_hop[:stage], strict=True)
        return sum(self._length(forward[0]) + self._ticks_down(hop[0]) for forward, hop in times)

    def _variables(self) -> None:
        problem, model, unit = self.problem, self.model, self.unit
        self.relaxation = relaxation = Relaxation(problem)
        heads, tails = heads_of(relaxation), tails_of(relaxation)
        self.heads = heads
        first_starts = [heads.forward[stages[0]][0] for stages in problem.stages_of]
        # A rank that starts later may also end later, by the same time.
        last = self.horizon + (
            0 if problem.objective == "makespan" else self.ticks * unit.up(max(first_starts)) + self.num_instant
        )
        self.last = last
        busy: list[list[Any]] = [[] for _ in range(problem.ranks)]
        for stage, rank in enumerate(problem.rank_of):
            row = []
            for m in range(problem.microbatches):
                times = [self._length(problem.times[kind][stage][m]) for kind in range(4)]
                whole: Any = model.new_bool_var("") if problem.mixes else int(problem.split is False)
                starts = []
                for kind in range(3):
                    earliest, tail = self._ticks_down(heads[kind][stage][m]), self._ticks_down(tails[kind][stage][m])
                    if kind == 0 and m == 0 and stage == problem.stages_of[rank][0]:
                        earliest = latest = self._first_start(stage)
                    else:
                        latest = max(earliest, last - tail)
                    starts.append(model.new_int_var(earliest, latest, ""))
                row.append(self._slot(starts, times, whole, busy[rank]))
            self.slots.append(row)
        for intervals in busy:
            model.add_no_overlap(intervals)

    def _slot(self, starts: list[Any], times: list[int], whole: Any, busy: list[Any]) -> _Slot:
        """Create the actions of one stage and microbatch, and add them to the rank's intervals."""
        model, new = self.model, self.model.new_interval_var
        back_time = times[kinds.I] + whole * (times[kinds.B] - times[kinds.I])
        weight_time = times[kinds.W] - whole * times[kinds.W]
        back_end, weight_end = starts[1] + back_time, starts[2] + weight_time
        if not isinstance(whole, int):
            ends = []
            for end in (back_end, weight_end):
                ends.append(model.new_int_var(0, 2 * self.last, ""))
                model.add(ends[-1] == end)
            back_end, weight_end = ends
            busy.append(model.new_optional_interval_var(starts[2], times[kinds.W], weight_end, ~whole, ""))
            model.add(starts[2] == back_end).only_enforce_if(whole)
        elif whole:
            model.add(starts[2] == back_end)
        else:
            busy.append(new(starts[2], weight_time, weight_end, ""))
        busy.append(new(starts[0], times[kinds.F], starts[0] + times[kinds.F], ""))
        busy.append(new(starts[1], back_time, back_end, ""))
        return _Slot(starts[0], starts[1], back_end, starts[2], weight_end, whole)

    def _precedences(self) -> None:
        """Add the precedence constraints of every action."""
        problem, model, down = self.problem, self.model, self._ticks_down
        for stage in range(problem.stages):
            for m in range(problem.microbatches):
                slot = self.slots[stage][m]
                forward_end = slot.forward + self._length(problem.times[kinds.F][stage][m])
                model.add(slot.weight >= slot.back_end)
                if stage < problem.stages - 1:
                    following = self.slots[stage + 1][m]
                    model.add(following.forward >= forward_end + down(problem.forward_hop[stage][m]))
                    model.add(slot.back >= following.back_end + down(problem.backward_hop[stage + 1][m]))
                else:
                    model.add(slot.back >= forward_end)
                if m + 1 < problem.microbatches:
                    following = self.slots[stage][m + 1]
                    model.add(following.forward >= forward_end)
                    model.add(following.back >= slot.back_end)
                    model.add(following.weight >= slot.weight_end)

    def _memory(self, rank: int) -> None:
        """Keep the memory of a rank within its cap at all times."""
        problem, model = self.problem, self.model
        cap = problem.caps[rank]
        stages = problem.stages_of[rank]
        tables = [problem.activation, problem.residue, *problem.transients]
        total = sum(max(table[stage]) for table in tables for stage in stages) * problem.microbatches
        if cap >= total:
            return
        if not problem.mixes and problem.only_forwards_need_room(rank):
            self._wait_for_memory(rank)
            return
        unit = unit_of((size for table in tables for stage in stages for size in table[stage]), total)
        intervals, sizes = [], []

        def hold(start: Any, end: Any, size: Any) -> None:
            if isinstance(size, int) and size == 0:
                return
            length = model.new_int_var(0, 2 * self.last, "")
            intervals.append(model.new_interval_var(start, length, end, ""))
            sizes.append(size)

        for stage in stages:
            for m in range(problem.microbatches):
                slot = self.slots[stage][m]
                size, residue = (unit.down(table[stage][m]) for table in (problem.activation, problem.residue))
                transient = [unit.down(table[stage][m]) for table in problem.transients]
                if size == residue and problem.split is True:
                    hold(slot.forward, slot.weight_end, size)
                else:
                    hold(slot.forward, slot.back_end, size)
                    hold(slot.back_end, slot.weight_end, residue - slot.whole * residue)
                forward_end = slot.forward + self._length(problem.times[kinds.F][stage][m])
                hold(slot.forward, forward_end, transient[kinds.F])
                during = transient[kinds.I] + slot.whole * (transient[kinds.B] - transient[kinds.I])
                hold(slot.back, slot.back_end, during)
                hold(slot.weight, slot.weight_end, transient[kinds.W] - slot.whole * transient[kinds.W])
        round_cap = unit.down if unit.is_exact else unit.up
        model.add_cumulative(intervals, sizes, round_cap(cap * (1 + SLACK)))

    def _wait_for_memory(self, rank: int) -> None:
        """Let every F of a rank with one stage wait for the I and W that make room for it."""
        (stage,) = self.problem.stages_of[rank]
        slots = self.slots[stage]
        for m, slot in enumerate(slots):
            ends = []
            for backs, weights in self.relaxation.choices(stage, m):
                ends.append([slots[backs - 1].back_end] * (backs > 0))
                ends[-1] += [slots[weights - 1].weight_end] * (weights > 0)
            wait_for_one(self.model, slot.forward, ends)

    def _channels(self) -> None:
        """Where stages share a channel, receive messages in the order in which they are sent."""
        model, rank = self.model, self.problem.rank_of
        channels: dict[tuple[int, int, bool], list[list[tuple[Any, Any]]]] = {}
        for stage, (low, high) in enumerate(pairwise(self.slots)):
            source, target = rank[stage], rank[stage + 1]
            if source != target:
                slots = list(zip(low, high, strict=True))
                forwards = [(sender.forward, receiver.forward) for sender, receiver in slots]
                backwards = [(sender.back, receiver.back) for receiver, sender in slots]
                channels.setdefault((source, target, True), []).append(forwards)
                channels.setdefault((target, source, False), []).append(backwards)
        for stages in channels.values():
            for one, other in combinations(stages, 2):
                for (sent, received), (other_sent, other_received) in product(one, other):
                    first = model.new_bool_var("")
                    model.add(sent <= other_sent).only_enforce_if(first)
                    model.add(received <= other_received).only_enforce_if(first)
                    model.add(sent >= other_sent).only_enforce_if(~first)
                    model.add(received >= other_received).only_enforce_if(~first)

    def _objective(self) -> None:
        problem, model, unit = self.problem, self.model, self.unit
        rounded = 0 if unit.is_exact or problem.objective == "makespan" else 1
        lower_bound = self.ticks * (unit.down(self.lower_bound) - rounded) - self.num_instant
        self.total = model.new_int_var(lower_bound, self.horizon, "")
        for stages in problem.stages_of:
            start = 0 if problem.objective == "makespan" else self.slots[stages[0]][0].forward
            for stage in stages:
                model.add(self.total >= self.slots[stage][-1].weight_end - start)
        model.minimize(self.total)
        self.slack = rounded

    def bound(self, ticks: float) -> float:
        """Convert a bound in ticks to one that holds for the true costs."""
        return (math.ceil((math.ceil(ticks - 1e-6) - self.num_instant) / self.ticks) - self.slack) / self.unit.per_one

    def hint(self, starts: dict[int, float]) -> None:
        """Warm-start the solver with the start of every action by code."""
        problem = self.problem
        size = problem.stages * problem.microbatches
        for stage, row in enumerate(self.slots):
            for m, slot in enumerate(row):
                key = stage * problem.microbatches + m
                whole = kinds.B * size + key in starts
                back = starts[(kinds.B if whole else kinds.I) * size + key]
                self.model.add_hint(slot.forward, self._ticks_down(starts[key]))
                self.model.add_hint(slot.back, self._ticks_down(back))
                if not isinstance(slot.whole, int):
                    self.model.add_hint(slot.whole, whole)
                if not whole:
                    self.model.add_hint(slot.weight, self._ticks_down(starts[kinds.W * size + key]))

    def programs(self, value: Callable[[Any], int]) -> Programs:
        """Read the order of every rank from a solution."""
        problem = self.problem
        size = problem.stages * problem.microbatches
        actions: list[list[tuple[int, ...]]] = [[] for _ in range(problem.ranks)]
        for stage, row in enumerate(self.slots):
            for m, slot in enumerate(row):
                key = stage * problem.microbatches + m
                rank_actions = actions[problem.rank_of[stage]]
                whole = bool(value(slot.whole)) if not isinstance(slot.whole, int) else bool(slot.whole)
                back = kinds.B if whole else kinds.I
                # Actions whose duration was rounded to zero share a start: they come first, in model order.
                end = value(slot.forward) + self._length(problem.times[kinds.F][stage][m])
                depth = 2 * problem.stages - stage
                rank_actions.append((value(slot.forward), end, stage, m, key))
                rank_actions.append((value(slot.back), value(slot.back_end), depth, m, back * size + key))
                if not whole:
                    weight = kinds.W * size + key
                    rank_actions.append((value(slot.weight), value(slot.weight_end), 2 * depth, m, weight))
        return [[code for *_, code in sorted(rank_actions)] for rank_actions in actions]


def wait_for_one(model: cp_model.CpModel, start: Any, sets: list[list[Any]]) -> list[Any]:
    """Let an action start after all ends of one of the sets; return a variable per set, none if there is no choice."""
    if [] in sets:
        return []
    if len(sets) == 1:
        for end in sets[0]:
            model.add(start >= end)
        return []
    chosen = [model.new_bool_var("") for _ in sets]
    model.add_bool_or(chosen)
    for ends, is_chosen in zip(sets, chosen, strict=True):
        for end in ends:
            model.add(start >= end).only_enforce_if(is_chosen)
    return chosen


class Outcome(NamedTuple):
    """The outcome of the exact search."""

    programs: Programs | None
    bound: float
    is_finished: bool
    was_cut: bool
    """Whether the clock or an interrupt ended it, rather than a proof or the effort limit."""


def search(
    board: Board,
    starts: dict[int, float],
    lower_bound: float,
    upper_bound: float,
    *,
    seconds: float,
    effort: float,
    seed: int,
    on_bound: Callable[[float], None],
) -> Outcome:
    """Search for a plan shorter than `upper_bound`, and raise the lower bound.

    `starts` holds the start of every action of a known plan. `seconds` and `effort` limit the search by the clock and
    by the solver's deterministic time. `on_bound` is called with the current bound at every solution.
    """
    cp_model, begun = solver(), time.monotonic()
    model = Model(board.problem, lower_bound, upper_bound)
    model.hint(starts)
    engine = engine_of(seconds - (time.monotonic() - begun), effort, seed)

    class BoundReporter(cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            on_bound(model.bound(self.best_objective_bound))

    status = solve(engine, model.model, BoundReporter())
    if status == cp_model.INFEASIBLE:
        return Outcome(None, upper_bound, True, False)
    bound = max(lower_bound, model.bound(engine.best_objective_bound))
    was_cut = status != cp_model.OPTIMAL and engine.response_proto.deterministic_time < effort
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome(None, bound, False, was_cut)
    return Outcome(model.programs(engine.value), bound, status == cp_model.OPTIMAL, was_cut)


def decide(board: Board, lower_bound: float, target: float, *, seconds: float, effort: float, seed: int) -> Outcome:
    """Find a plan that is not longer than `target`, or prove that there is none: `target` is then a lower bound.

    This proves more than a search for the shortest plan does, because a target limits the start of every action.
    """
    cp_model, begun = solver(), time.monotonic()
    model = Model(board.problem, lower_bound, target)
    model.model.clear_objective()  # type: ignore[no-untyped-call]
    engine = engine_of(seconds - (time.monotonic() - begun), effort, seed)
    parameters = engine.parameters
    parameters.use_strong_propagation_in_disjunctive = True
    parameters.use_dynamic_precedence_in_disjunctive = True
    parameters.use_dynamic_precedence_in_cumulative = True
    parameters.use_overload_checker_in_cumulative = True
    parameters.use_timetable_edge_finding_in_cumulative = True
    status = solve(engine, model.model)
    if status == cp_model.INFEASIBLE:
        bound = (model.longest + 1) / model.unit.per_one if model.unit.is_exact else target
        return Outcome(None, bound, True, False)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome(model.programs(engine.value), lower_bound, True, False)
    return Outcome(None, lower_bound, False, engine.response_proto.deterministic_time < effort)


def engine_of(seconds: float, effort: float, seed: int) -> cp_model.CpSolver:
    """Return a solver that is limited by the clock and by its deterministic time."""
    engine: cp_model.CpSolver = solver().CpSolver()
    parameters = engine.parameters
    parameters.max_time_in_seconds = max(0.01, seconds)
    parameters.max_deterministic_time = effort
    parameters.random_seed = seed
    # The solver would replace the Ctrl-C handler and not restore it; a training job could then no longer be stopped.
    parameters.catch_sigint_signal = False
    parameters.num_workers = 1  # as fast as many workers on small instances, and deterministic
    return engine


def solve(engine: Any, model: Any, callback: Any = None) -> Any:
    """Solve on another thread: native code would delay an interrupt of this thread until the end."""
    with ThreadPoolExecutor(1, "stageline solver") as pool:
        solution = pool.submit(engine.solve, model, callback)
        try:
            return solution.result()
        except BaseException:
            engine.stop_search()
            raise
