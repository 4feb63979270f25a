"""Exact search by constraint programming, for small instances: the best order, and the proof that there is none better.

Times become whole numbers. Where they are not whole multiples of one unit, they are rounded down: every schedule, its
times rounded down too, is then a solution of the rounded problem, so what is proven for it holds for the true costs.
The same goes for memory, with sizes rounded down and caps up. Orders that are found are judged at the true costs.

What takes no time holds memory all the same, and the solver does not see what has no length. So where there are such
actions the unit is cut into ticks, one for each of them and more than all of them together: they take one tick, which
no sum of theirs can turn into a unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from stageline.errors import StagelineError
from stageline.schedules import action as kinds
from stageline.synthesis.bounds import heads_of, tails_of
from stageline.synthesis.greedy import Board, Programs
from stageline.synthesis.problem import SLACK, Problem
from stageline.synthesis.relaxed import Relaxed

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

FINEST = 10**6
"""Into how many units the step is cut where times have no common one."""


class Unit(NamedTuple):
    """How many units one is, and whether all values are whole numbers of them."""

    per_one: float
    is_exact: bool

    def down(self, value: float) -> int:
        """Round down, but not by a rounding error."""
        return math.floor(value * self.per_one + 1e-6)

    def up(self, value: float) -> int:
        """Round up, but not by a rounding error."""
        return math.ceil(value * self.per_one - 1e-6)


def unit_of(values: Iterable[float], largest: float) -> Unit:
    """Find a unit that all values are whole multiples of, or else a fine one.

    >>> unit_of([0.5, 1.25, 3], 100).per_one
    4.0
    """
    distinct = sorted({value for value in values if value > 0})
    for per_one in (1.0, 2.0, 4.0, 5.0, 10.0, 20.0, 100.0, 1000.0, 1e4, 1e5):
        if largest * per_one <= 100 * FINEST and all(
            abs(value * per_one - round(value * per_one)) <= 1e-9 * max(1.0, value * per_one) for value in distinct
        ):
            return Unit(per_one, True)
    return Unit(FINEST / largest if largest > 0 else 1.0, False)


def is_available() -> bool:
    """Whether the solver is installed."""
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def solver() -> Any:
    """Import the solver, or say how to install it."""
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError:
        raise StagelineError("exact search needs ortools: pip install 'stageline[synthesis]'") from None
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
    """1 where the backward runs as a whole; else a constant."""


@dataclass
class Model:
    """The problem in the solver's words."""

    problem: Problem
    least: float
    most: float
    cp: Any = field(default_factory=solver)

    def __post_init__(self) -> None:
        """Make variables and constraints."""
        problem = self.problem
        tables = [*problem.times, problem.ahead, problem.back]
        self.unit = unit_of((time for table in tables for row in table for time in row), self.most)
        self.model: cp_model.CpModel = self.cp.CpModel()
        brief = sum(self.unit.down(time) == 0 for table in problem.times for row in table for time in row)
        self.brief = brief if self.unit.is_exact else 0
        """How many actions take no time."""
        self.ticks = 2 * self.brief + 1
        """How many ticks a unit has."""
        self.horizon = self.ticks * (self.unit.up(self.most) + 1) + self.brief
        self.slots: list[list[_Slot]] = []
        self._variables()
        self._orders()
        for rank in range(problem.ranks):
            self._memory(rank)
        self._channels()
        self._objective()

    def _ticks_down(self, value: float) -> int:
        return self.ticks * self.unit.down(value)

    def _length(self, time: float) -> int:
        """How many ticks an action takes."""
        return self._ticks_down(time) or min(self.brief, 1)

    def _first_start(self, stage: int) -> int:
        """When a rank begins whose first stage this is: as soon as the first microbatch can be there."""
        problem = self.problem
        if not self.brief:
            return self._ticks_down(heads_of(Relaxed(problem)).forward[stage][0])
        times = zip(problem.times[kinds.F][:stage], problem.ahead[:stage], strict=True)
        return sum(self._length(forward[0]) + self._ticks_down(hop[0]) for forward, hop in times)

    def _variables(self) -> None:
        problem, model, unit = self.problem, self.model, self.unit
        relaxed = Relaxed(problem)
        heads, tails = heads_of(relaxed), tails_of(relaxed)
        begins = [heads.forward[mine[0]][0] for mine in problem.stages_of]
        # A span may end later than the first rank's by as much as its rank begins later.
        last = self.horizon + (0 if problem.objective == "makespan" else self.ticks * unit.up(max(begins)) + self.brief)
        self.last = last
        mixes = problem.split is None and not is_split_enough(problem)
        busy: list[list[Any]] = [[] for _ in range(problem.ranks)]
        for stage, rank in enumerate(problem.rank_of):
            row = []
            for m in range(problem.microbatches):
                times = [self._length(problem.times[kind][stage][m]) for kind in range(4)]
                whole: Any = model.new_bool_var("") if mixes else int(problem.split is False)
                starts = []
                for kind in range(3):
                    low, tail = self._ticks_down(heads[kind][stage][m]), self._ticks_down(tails[kind][stage][m])
                    if kind == 0 and m == 0 and stage == problem.stages_of[rank][0]:
                        low = high = self._first_start(stage)
                    else:
                        high = max(low, last - tail)
                    starts.append(model.new_int_var(low, high, ""))
                row.append(self._slot(starts, times, whole, busy[rank]))
            self.slots.append(row)
        for intervals in busy:
            model.add_no_overlap(intervals)

    def _slot(self, starts: list[Any], times: list[int], whole: Any, busy: list[Any]) -> _Slot:
        """The actions of one stage and microbatch, added to those that keep the rank busy."""
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

    def _orders(self) -> None:
        """What each action waits for."""
        problem, model, down = self.problem, self.model, self._ticks_down
        for stage in range(problem.stages):
            for m in range(problem.microbatches):
                slot = self.slots[stage][m]
                forward_end = slot.forward + self._length(problem.times[kinds.F][stage][m])
                model.add(slot.weight >= slot.back_end)
                if stage < problem.stages - 1:
                    after = self.slots[stage + 1][m]
                    model.add(after.forward >= forward_end + down(problem.ahead[stage][m]))
                    model.add(slot.back >= after.back_end + down(problem.back[stage + 1][m]))
                else:
                    model.add(slot.back >= forward_end)
                if m + 1 < problem.microbatches:
                    after = self.slots[stage][m + 1]
                    model.add(after.forward >= forward_end)
                    model.add(after.back >= slot.back_end)
                    model.add(after.weight >= slot.weight_end)

    def _memory(self, rank: int) -> None:
        """What a rank holds at any moment is within its cap."""
        problem, model = self.problem, self.model
        cap = problem.caps[rank]
        mine = problem.stages_of[rank]
        tables = [problem.activation, problem.residue, *problem.transients]
        total = sum(max(table[stage]) for table in tables for stage in mine) * problem.microbatches
        if cap >= total:
            return
        unit = unit_of((size for table in tables for stage in mine for size in table[stage]), total)
        intervals, sizes = [], []

        def hold(start: Any, end: Any, size: Any) -> None:
            if isinstance(size, int) and size == 0:
                return
            length = model.new_int_var(0, 2 * self.last, "")
            intervals.append(model.new_interval_var(start, length, end, ""))
            sizes.append(size)

        for stage in mine:
            for m in range(problem.microbatches):
                slot = self.slots[stage][m]
                size, kept = (unit.down(table[stage][m]) for table in (problem.activation, problem.residue))
                transient = [unit.down(table[stage][m]) for table in problem.transients]
                if size == kept and problem.split is True:
                    hold(slot.forward, slot.weight_end, size)
                else:
                    hold(slot.forward, slot.back_end, size)
                    hold(slot.back_end, slot.weight_end, kept - slot.whole * kept)
                forward_end = slot.forward + self._length(problem.times[kinds.F][stage][m])
                hold(slot.forward, forward_end, transient[kinds.F])
                during = transient[kinds.I] + slot.whole * (transient[kinds.B] - transient[kinds.I])
                hold(slot.back, slot.back_end, during)
                hold(slot.weight, slot.weight_end, transient[kinds.W] - slot.whole * transient[kinds.W])
        model.add_cumulative(intervals, sizes, unit.up(cap * (1 + SLACK)))

    def _channels(self) -> None:
        """Where stages share a channel, messages are taken in the order in which they were sent."""
        problem, model = self.problem, self.model
        channels: dict[tuple[int, int, int], list[tuple[Any, Any]]] = {}
        rank = problem.rank_of
        for stage in range(problem.stages - 1):
            if rank[stage] == rank[stage + 1]:
                continue
            for m in range(problem.microbatches):
                low, high = self.slots[stage][m], self.slots[stage + 1][m]
                channels.setdefault((rank[stage], rank[stage + 1], stage), []).append((low.forward, high.forward))
                channels.setdefault((rank[stage + 1], rank[stage], ~stage), []).append((high.back, low.back))
        groups: dict[tuple[int, int, bool], list[list[tuple[Any, Any]]]] = {}
        for (source, target, stage), messages in channels.items():
            groups.setdefault((source, target, stage >= 0), []).append(messages)
        for members in groups.values():
            for at, some in enumerate(members):
                for others in members[at + 1 :]:
                    for sent, taken in some:
                        for sent_too, taken_too in others:
                            first = model.new_bool_var("")
                            model.add(sent <= sent_too).only_enforce_if(first)
                            model.add(taken <= taken_too).only_enforce_if(first)
                            model.add(sent >= sent_too).only_enforce_if(~first)
                            model.add(taken >= taken_too).only_enforce_if(~first)

    def _objective(self) -> None:
        problem, model, unit = self.problem, self.model, self.unit
        rounded = 0 if unit.is_exact or problem.objective == "makespan" else 1
        least = self.ticks * (unit.down(self.least) - rounded) - self.brief
        self.total = model.new_int_var(least, self.horizon, "")
        for mine in problem.stages_of:
            begin = 0 if problem.objective == "makespan" else self.slots[mine[0]][0].forward
            for stage in mine:
                model.add(self.total >= self.slots[stage][-1].weight_end - begin)
        model.minimize(self.total)
        self.slack = rounded

    def bound(self, ticks: float) -> float:
        """What holds for the true costs where no solution takes fewer ticks than this."""
        return (math.ceil((math.ceil(ticks - 1e-6) - self.brief) / self.ticks) - self.slack) / self.unit.per_one

    def hint(self, starts: dict[int, float]) -> None:
        """Begin from a schedule: the start of every action by its code."""
        problem = self.problem
        size = problem.stages * problem.microbatches
        for stage, row in enumerate(self.slots):
            for m, slot in enumerate(row):
                place = stage * problem.microbatches + m
                whole = kinds.B * size + place in starts
                back = starts[(kinds.B if whole else kinds.I) * size + place]
                self.model.add_hint(slot.forward, self._ticks_down(starts[place]))
                self.model.add_hint(slot.back, self._ticks_down(back))
                if not isinstance(slot.whole, int):
                    self.model.add_hint(slot.whole, whole)
                if not whole:
                    self.model.add_hint(slot.weight, self._ticks_down(starts[kinds.W * size + place]))

    def programs(self, value: Callable[[Any], int]) -> Programs:
        """Read the order of every rank from a solution."""
        problem = self.problem
        size = problem.stages * problem.microbatches
        found: list[list[tuple[int, ...]]] = [[] for _ in range(problem.ranks)]
        for stage, row in enumerate(self.slots):
            for m, slot in enumerate(row):
                place = stage * problem.microbatches + m
                mine = found[problem.rank_of[stage]]
                whole = bool(value(slot.whole)) if not isinstance(slot.whole, int) else bool(slot.whole)
                back = kinds.B if whole else kinds.I
                # Where times were rounded to nothing actions share a moment: they come first, in the model's order.
                end = value(slot.forward) + self._length(problem.times[kinds.F][stage][m])
                depth = 2 * problem.stages - stage
                mine.append((value(slot.forward), end, stage, m, place))
                mine.append((value(slot.back), value(slot.back_end), depth, m, back * size + place))
                if not whole:
                    weight = kinds.W * size + place
                    mine.append((value(slot.weight), value(slot.weight_end), 2 * depth, m, weight))
        return [[code for *_, code in sorted(mine)] for mine in found]


def is_split_enough(problem: Problem) -> bool:
    """Whether two halves do all that a whole backward does, in no more time and memory."""
    whole, first, second = (problem.times[kind] for kind in (kinds.B, kinds.I, kinds.W))
    during = [problem.transients[kind] for kind in (kinds.B, kinds.I, kinds.W)]
    for stage in range(problem.stages):
        for m in range(problem.microbatches):
            size, kept = problem.activation[stage][m], problem.residue[stage][m]
            of_whole, of_first, of_second = (table[stage][m] for table in during)
            if first[stage][m] + second[stage][m] > whole[stage][m] * (1 + SLACK):
                return False
            if max(of_first, kept - size, kept - size + of_second) > of_whole * (1 + SLACK):
                return False
    return True


class Answer(NamedTuple):
    """What exact search found: programs or None, a bound, and how it ended."""

    programs: Programs | None
    bound: float
    is_finished: bool
    was_cut: bool
    """Whether the clock or an interrupt ended it, and not its proof or the effort it was given."""


def search(
    board: Board,
    starts: dict[int, float],
    least: float,
    most: float,
    *,
    seconds: float,
    effort: float,
    seed: int,
    tell: Callable[[float], None],
) -> Answer:
    """Look for something shorter than `most`, and for a proof that nothing is shorter than what was found.

    `tell` is told the bound whenever something was found.
    """
    cp_model = solver()
    model = Model(board.problem, least, most)
    model.hint(starts)
    engine = cp_model.CpSolver()
    parameters = engine.parameters
    parameters.max_time_in_seconds = max(0.01, seconds)
    parameters.max_deterministic_time = effort
    parameters.random_seed = seed
    # It would take Ctrl-C over and give it back to nobody: a job that plans itself could not be stopped any more.
    parameters.catch_sigint_signal = False
    parameters.num_workers = 1  # one thread proves as fast as many on these, and always finds the same

    class Told(cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            tell(model.bound(self.best_objective_bound))

    status = _solve(engine, model.model, Told())
    if status == cp_model.INFEASIBLE:
        return Answer(None, most, True, False)
    bound = max(least, model.bound(engine.best_objective_bound))
    was_cut = status != cp_model.OPTIMAL and engine.response_proto.deterministic_time < effort
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, bound, False, was_cut)
    return Answer(model.programs(engine.value), bound, status == cp_model.OPTIMAL, was_cut)


def _solve(engine: Any, model: Any, callback: Any) -> Any:
    """Solve on another thread: in native code, this one would hear an interrupt only at the end."""
    with ThreadPoolExecutor(1, "stageline solver") as pool:
        answer = pool.submit(engine.solve, model, callback)
        try:
            return answer.result()
        except BaseException:
            engine.stop_search()
            raise
