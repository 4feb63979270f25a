"""Large neighbourhood search: repeatedly find the best order of the actions in a time window.

    rank 0   prefix, fixed  │ window: any order │ suffix, its order is fixed
    rank 1   prefix, fixed  │ window: any order │ suffix, its order is fixed
    rank 2   prefix, fixed  │ same order        │ suffix, its order is fixed

Only the actions of the window are variables. The prefix sets when they may start, and the longest path through the
suffix sets how long the step takes after each of them. Some windows let only adjacent ranks change their order, and are
longer in time. Constraint programming finds the best order of a hundred actions in about a second; it needs ortools.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stageline.schedules import action as kinds
from stageline.synthesis import cp_sat
from stageline.synthesis.bounds import Relaxation
from stageline.synthesis.fast_simulate import end_times, evaluate
from stageline.synthesis.list_scheduling import Board, Code, ProgramPlan, Programs
from stageline.synthesis.local_search import Orders, source_of
from stageline.timeline.costs import Floats

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

SMALLEST, LARGEST = 30, 1000
"""Number of actions in a window whose order may change: the smallest, and the largest."""
FINER = 100
"""How much finer the grid of times is than that of exact search: a window is only a part of the step."""


@dataclass
class _Window:
    """The model of one window."""

    board: Board
    programs: Programs
    ends: list[float]
    free: set[Code]
    """The actions of the window."""
    fixed_ranks: set[int]
    """Ranks that keep their order."""
    value: float
    relaxation: Relaxation
    cp: Any = field(default_factory=cp_sat.solver)

    def __post_init__(self) -> None:
        board, problem = self.board, self.board.problem
        self.model: cp_model.CpModel = self.cp.CpModel()
        tables = (board.durations, board.forward_hop, board.backward_hop)
        self.unit = cp_sat.unit_of((time for table in tables for time in table), 2 * self.value / FINER)
        self.cuts = [self._cut(program) for program in self.programs]
        self.origin = min(self.ends[code] - board.durations[code] for code in self.free)
        """When the window begins."""
        self.horizon = self._ticks(max(self.ends) - self.origin + self.value)
        self.starts: dict[Code, Any] = {
            code: self.model.new_int_var(self._release(code), self.horizon, "") for code in self.free
        }
        self.orders = Orders(board)
        for rank in range(problem.ranks):
            self._order(rank)
            if problem.caps[rank] < np.inf and rank not in self.fixed_ranks:
                if problem.only_forwards_need_room(rank) and not self._is_mixed(rank):
                    self._wait_for_memory(rank)
                else:
                    self._memory(rank)
        self._objective()

    def _cut(self, program: list[Code]) -> tuple[int, int]:
        """Return the first position of the window in a program, and of the suffix."""
        inside = [position for position, code in enumerate(program) if code in self.free]
        if inside:
            return inside[0], inside[-1] + 1
        begin = min(self.ends[code] - self.board.durations[code] for code in self.free)
        position = sum(self.ends[code] - self.board.durations[code] < begin for code in program)
        return position, position

    def _ticks(self, time: float) -> int:
        """Round down: a schedule with its times rounded down obeys all constraints, so the known one is a solution."""
        return self.unit.down(time)

    def _length(self, code: Code) -> int:
        return self._ticks(self.board.durations[code])

    def _hop(self, source: Code) -> float:
        """Return the transfer time of an action's output."""
        size = self.board.size
        return self.board.forward_hop[source] if source < size else self.board.backward_hop[source % size]

    def _inputs(self, code: Code) -> Iterator[tuple[Code, float]]:
        """Yield the actions that must end before this one, with the transfer time: its input, and its own stage's."""
        size = self.board.size
        source = source_of(self.board, code, self.ends)
        if source >= 0:
            yield source, self._hop(source)
        kind, key = divmod(code, size)
        if kind == kinds.W:
            yield kinds.I * size + key, 0.0
        elif kind != kinds.F:
            yield key, 0.0

    def _release(self, code: Code) -> int:
        """Return when the prefix allows an action to start."""
        earliest = self.origin
        for source, hop in self._inputs(code):
            if source not in self.free:
                earliest = max(earliest, self.ends[source] + hop)
        program, (first, _) = self.programs[self._rank(code)], self.cuts[self._rank(code)]
        if first:
            earliest = max(earliest, self.ends[program[first - 1]])
        return self._ticks(earliest - self.origin)

    def _rank(self, code: Code) -> int:
        return self.board.problem.rank_of[code % self.board.size // self.board.problem.microbatches]

    def _order(self, rank: int) -> None:
        """Add what must precede what, and that a rank runs one action at a time."""
        first, last = self.cuts[rank]
        window, size = self.programs[rank][first:last], self.board.size
        previous: dict[tuple[int, ...], Code] = {}
        for code in window:
            for source, hop in self._inputs(code):
                if source in self.free:
                    self._precede(source, code, hop)
            kind, key = divmod(code, size)
            stage = key // self.board.problem.microbatches
            lane = -1 if self.orders.lanes_are_fixed and kind != kinds.W else stage
            halves = {kinds.F: (0,), kinds.B: (1, 2), kinds.I: (1,), kinds.W: (2,)}[kind]
            keys = [(3,)] if rank in self.fixed_ranks else [(half, stage if half == 2 else lane) for half in halves]
            for key_of_lane in keys:
                if key_of_lane in previous:
                    self._precede(previous[key_of_lane], code)
                previous[key_of_lane] = code
        if rank not in self.fixed_ranks:
            new = self.model.new_fixed_size_interval_var
            self.model.add_no_overlap([new(self.starts[code], self._length(code), "") for code in window])

    def _precede(self, first: Code, second: Code, hop: float = 0.0) -> None:
        self.model.add(self.starts[second] >= self.starts[first] + self._length(first) + self._ticks(hop))

    def _is_mixed(self, rank: int) -> bool:
        """Whether a rank has whole backwards although splits are allowed."""
        size, problem = self.board.size, self.board.problem
        return problem.split is not False and any(code // size == kinds.B for code in self.programs[rank])

    def _wait_for_memory(self, rank: int) -> None:
        """Let every F of a rank with one stage wait for the I and W that make room for it."""
        board, size = self.board, self.board.size
        first, last = self.cuts[rank]
        program, (stage,) = self.programs[rank], board.problem.stages_of[rank]
        base = stage * board.problem.microbatches
        back_base = (kinds.B if board.problem.split is False else kinds.I) * size + base
        before, inside = set(program[:first]), set(program[first:last])
        for code in program[first:last]:
            if code >= size:
                continue
            sets = []
            for backs, weights in self.relaxation.choices(stage, code - base):
                needs = [back_base + backs - 1] * (backs > 0) + [kinds.W * size + base + weights - 1] * (weights > 0)
                if all(other in before or other in inside for other in needs):
                    sets.append([other for other in needs if other in inside])
            ends = [[self.starts[other] + self._length(other) for other in needs] for needs in sets]
            start = self.ends[code] - board.durations[code]
            for needs, is_chosen in zip(sets, cp_sat.wait_for_one(self.model, self.starts[code], ends), strict=False):
                self.model.add_hint(is_chosen, all(self.ends[other] <= start for other in needs))

    def _memory(self, rank: int) -> None:
        """Keep the memory of a rank within its cap at all times."""
        board, model, size = self.board, self.model, self.board.size
        _, last = self.cuts[rank]
        program, cap = self.programs[rank], self.board.caps[rank]
        tables = (board.activation, board.residue, board.transient)
        keys = [code % size for code in program]
        sizes = [table[key] for table in tables[:2] for key in keys] + [board.transient[code] for code in program]
        unit = cp_sat.unit_of(sizes, 2 * sum(sizes))
        held: dict[tuple[int, int], Any] = {}
        """When each activation (0) and residue (1) began to be held; 0 before the window."""
        intervals, demands = [], []

        def hold(start: Any, end: Any, memory: float) -> None:
            if unit.down(memory):
                length = model.new_int_var(0, self.horizon, "")
                intervals.append(model.new_interval_var(start, length, end, ""))
                demands.append(unit.down(memory))

        for code in program[:last]:
            kind, key = divmod(code, size)
            start = self.starts.get(code, 0)
            end = start + self._length(code) if code in self.free else 0
            if code in self.free:
                hold(start, end, board.transient[code])
            if kind == kinds.F:
                held[0, key] = start
                continue
            half = 1 if kind == kinds.W else 0
            begin = held.pop((half, key))
            if code in self.free:
                hold(begin, end, tables[half][key])
            if kind == kinds.I:
                held[1, key] = end
        for (half, key), begin in held.items():
            hold(begin, self.horizon, tables[half][key])
        model.add_cumulative(intervals, demands, unit.down(cap))

    def _tails(self) -> dict[Code, Floats]:
        """Return, for every action of the suffix, the time from its start to the end of each rank's last action."""
        board, problem = self.board, self.board.problem
        suffix = [code for program, (_, last) in zip(self.programs, self.cuts, strict=True) for code in program[last:]]
        suffix.sort(key=lambda code: (self.ends[code] - board.durations[code], self.ends[code]), reverse=True)
        following = {
            code: after
            for program, (_, last) in zip(self.programs, self.cuts, strict=True)
            for code, after in zip(program[last:], program[last + 1 :], strict=False)
        }
        tails: dict[Code, Floats] = {}
        outputs: dict[Code, Floats] = {}
        """By action, the tail after its output is used in the suffix."""
        for code in suffix:
            tail = np.full(problem.ranks, -np.inf)
            if code in following:
                tail = tails[following[code]]
            else:
                tail[self._rank(code)] = 0.0
            if code in outputs:
                tail = np.maximum(tail, outputs[code])
            tails[code] = tail = tail + board.durations[code]
            source = source_of(board, code, self.ends)
            if source >= 0:
                outputs[source] = tail + self._hop(source)
        self.outputs = {code: tail for code, tail in outputs.items() if code not in tails}
        return tails

    def _objective(self) -> None:
        """Minimise the makespan, or the longest span."""
        board, problem, model = self.board, self.board.problem, self.model
        tails = self._tails()
        is_span = problem.objective == "span"
        begins = [self.ends[program[0]] - board.durations[program[0]] if is_span else 0.0 for program in self.programs]
        least = np.full(problem.ranks, -np.inf)
        paths: list[tuple[Any, Floats]] = []
        for rank, (program, (first, last)) in enumerate(zip(self.programs, self.cuts, strict=True)):
            tail = np.full(problem.ranks, -np.inf)
            if last < len(program):
                tail = tails[program[last]]
            else:
                tail[rank] = 0.0
            if first == last:
                least = np.maximum(least, (self.ends[program[last - 1]] if last else 0.0) + tail)
                continue
            end = model.new_int_var(0, self.horizon, "")
            for code in program[first:last]:
                model.add(end >= self.starts[code] + self._length(code))
            paths.append((end, tail))
        for code, tail in self.outputs.items():
            if code in self.free:
                paths.append((self.starts[code] + self._length(code), tail))
            else:
                least = np.maximum(least, self.ends[code] + tail)
        limit = self._ticks(self.value) + 1
        total = model.new_int_var(0, limit, "")
        known = (least - begins).max()
        if known > -np.inf:
            model.add(total >= min(limit, self._ticks(known)))
        for end, tail in paths:
            model.add(total >= end + self._ticks(self.origin + (tail - begins).max()))
        model.minimize(total)

    def solve(self, seconds: float, effort: float, seed: int) -> tuple[Programs | None, bool]:
        """Return the programs with the best order of the window, and whether no order is better."""
        for code, start in self.starts.items():
            self.model.add_hint(start, self._ticks(self.ends[code] - self.board.durations[code] - self.origin))
        engine = cp_sat.engine_of(seconds, effort, seed)
        engine.parameters.linearization_level = 0  # the linear relaxation proves little, and takes most of the time
        status = cp_sat.solve(engine, self.model)
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None, False
        programs = []
        for program, (first, last) in zip(self.programs, self.cuts, strict=True):
            position = {code: index for index, code in enumerate(program[first:last])}
            order = {code: (engine.value(self.starts[code]), self._length(code), position[code]) for code in position}
            programs.append([*program[:first], *sorted(position, key=order.__getitem__), *program[last:]])
        return programs, status == self.cp.OPTIMAL


def improve_in_windows(
    board: Board,
    plan: ProgramPlan,
    *,
    dice: random.Random,
    seconds_left: Callable[[], float],
    first: int = 200,
    effort: float = 0.1,
) -> Iterator[ProgramPlan]:
    """Solve one window after the other until time is up, and yield the best plan after each.

    `first` is the number of actions in the first window; `effort` limits the solver's deterministic time for each.
    """
    largest = min(LARGEST, max(SMALLEST, sum(map(len, plan.programs)) * 2 // 3))
    size = min(first, largest)
    relaxation = Relaxation(board.problem)
    while seconds_left() > 0:
        ends = end_times(board, plan.programs)
        if ends is None:
            return
        free, fixed_ranks = _choose(board, plan.programs, ends, size, dice)
        window = _Window(board, plan.programs, ends, free, fixed_ranks, plan.value, relaxation)
        programs, is_solved = window.solve(seconds_left(), effort, dice.randrange(2**31))
        size = min(largest, size * 9 // 8) if is_solved else max(SMALLEST, size * 3 // 4)
        candidate = evaluate(board, programs, "windows")
        if candidate is not None and candidate.value <= plan.value * (1 + 1e-12):
            plan = candidate
        yield plan


def _choose(
    board: Board, programs: Programs, ends: list[float], size: int, dice: random.Random
) -> tuple[set[Code], set[int]]:
    """Return about `size` actions of some adjacent ranks and, in the same time, all of the ranks that keep their order.

    The window takes all actions that start in an interval of time, so everything before it precedes it.
    """
    ranks = len(programs)
    num_ranks = min(ranks, dice.choice((3, 5, 8, ranks)))
    low = dice.randrange(ranks - num_ranks + 1)
    starts = sorted(
        ends[code] - board.durations[code] for program in programs[low : low + num_ranks] for code in program
    )
    # A window may begin before the step does, or end after it, so that its first and last actions are chosen as often.
    first = dice.randrange(-size // 2, max(1, len(starts) - size // 2))
    begin = starts[max(0, first)]
    end = starts[first + size] if first + size < len(starts) else np.inf
    free = {code for program in programs for code in program if begin <= ends[code] - board.durations[code] < end}
    fixed_ranks = set(range(ranks)) - set(range(low, low + num_ranks))
    if not free:
        free = {programs[low][0]}
    return free, fixed_ranks
