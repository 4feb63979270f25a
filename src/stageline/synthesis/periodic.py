"""Periodic programs: F, I and W in turns, and steady states that repeat.

**In turns**, every rank runs I some turns after F, and W some turns after I. Most one-way families have this form: 1f1b
has P−1−r turns between F and I, and zb-h1 has r turns between I and W. Here every rank has its own two delays, as large
as its memory allows; a local search then changes single delays.

**Steady states**: in the middle of a step, ranks settle into a pattern that repeats every microbatch or every few. If a
section of a program runs the same number of F, I and W of every stage, it can be repeated for later microbatches. The
rank holds the same memory at its end as at its start, so the peak does not change.

    for 6 microbatches    F0 F1 F2 │ I0 F3 W0 │ I1 F4 W1 │ I2 F5 …
    for 7                 F0 F1 F2 │ I0 F3 W0 │ I1 F4 W1 │ I2 F5 W2 │ I3 F6 …

A short step can be searched more thoroughly in the same time, up to its proven optimum, and the long step inherits
that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import TypeAlias

from stageline.schedules import action as kinds
from stageline.synthesis.fast_simulate import end_times, objective_value, peak_memory_of
from stageline.synthesis.list_scheduling import Board, Code, PriorityRule, ProgramPlan, Programs
from stageline.synthesis.problem import Problem

Delay: TypeAlias = tuple[int, int]
"""Number of turns between F and I, and between I and W."""


class TurnPrograms:
    """Builds programs from delays, and caches them."""

    def __init__(self, board: Board, group: int, whole: bool) -> None:
        self.board = board
        self.whole = whole
        self.lanes = board.lanes(PriorityRule(group=group, whole=whole, order=()))
        first = board.problem.stages_of[0][-1] * board.problem.microbatches
        self.lead = self.lanes[0][0].index(first)
        """Number of forwards a rank runs before the first one of its last chunk."""
        self.program = cache(self._program)

    def _program(self, rank: int, delay: Delay) -> list[Code] | None:
        """Return the program of a rank with these delays, or None if it exceeds the rank's memory."""
        forwards, backwards = self.lanes[rank]
        turns = [(turn, 0, code) for turn, code in enumerate(forwards)]
        turns += [(turn + delay[0], 1, code) for turn, code in enumerate(backwards)]
        if not self.whole:
            shift = (kinds.W - kinds.I) * self.board.size
            turns += [(turn + sum(delay), 2, code + shift) for turn, code in enumerate(backwards)]
        program = [code for *_, code in sorted(turns)]
        return program if peak_memory_of(self.board, program) <= self.board.caps[rank] else None

    def fit(self, rank: int, delay: Delay) -> Delay | None:
        """Reduce the delays until they fit the rank's memory: first that of W, then that of I."""
        input_delay, weight_delay = delay
        while self.program(rank, (input_delay, weight_delay)) is None:
            if weight_delay > 0:
                weight_delay -= 1
            elif input_delay > 0:
                input_delay -= 1
            else:
                return None
        return input_delay, weight_delay

    def plan(self, delays: list[Delay]) -> ProgramPlan | None:
        """Combine all ranks; None if one exceeds its memory or they deadlock."""
        programs: Programs = []
        for rank, delay in enumerate(delays):
            program = self.program(rank, delay)
            if program is None:
                return None
            programs.append(program)
        ends = end_times(self.board, programs)
        return ProgramPlan(programs, objective_value(self.board, programs, ends), "turns") if ends is not None else None


def best_turns_plan(
    board: Board, *, dice: random.Random, tries: int, whole: bool, group: int, is_over: Callable[[], bool]
) -> ProgramPlan | None:
    """Try delays of known forms, then change single ones; return the best plan, or None if none fits."""
    problem = board.problem
    builder = TurnPrograms(board, group, whole)
    best: ProgramPlan | None = None
    delays: list[Delay] = []
    forms = _forms(problem, builder.lead, whole)
    for form in forms[:tries]:
        feasible: list[Delay] = []
        for rank, delay in enumerate(form):
            if is_over():
                return best
            fitted = builder.fit(rank, delay)
            if fitted is None:
                break
            feasible.append(fitted)
        plan = builder.plan(feasible) if len(feasible) == problem.ranks else None
        if plan is not None and (best is None or plan.value < best.value):
            best, delays = plan, feasible
    for _ in range(tries - len(forms) if best is not None else 0):
        if is_over():
            break
        neighbour = _perturb(dice, delays, whole)
        plan = builder.plan(neighbour)
        if plan is not None and best is not None and plan.value <= best.value:
            best, delays = plan, neighbour
    return best


def _forms(problem: Problem, lead: int, whole: bool) -> list[list[Delay]]:
    """Return delays as in the families: one or two times the distance to the last rank; W delayed by the rank."""
    ranks, limit = problem.ranks, problem.microbatches * problem.chunks
    turns_per_rank = 1 if problem.chunks == 1 else 2
    forms = []
    for depth in (1.0, 2.0, 1.5):
        for weight_factor in (1.0, 0.0, 2.0, 0.5)[: 1 if whole else 4]:
            input_delay = [min(limit, int(depth * (ranks - 1 - rank)) * turns_per_rank + lead) for rank in range(ranks)]
            forms.append([(input_delay[rank], int(weight_factor * rank)) for rank in range(ranks)])
    return forms


def _perturb(dice: random.Random, delays: list[Delay], whole: bool) -> list[Delay]:
    """Change the delays of one to three ranks by a little."""
    neighbour = list(delays)
    for _ in range(dice.choice((1, 1, 2, 3))):
        rank = dice.randrange(len(delays))
        input_delay, weight_delay = neighbour[rank]
        if dice.random() < 0.5 or whole:
            input_delay += dice.choice((-1, 1))
        else:
            weight_delay += dice.choice((-2, -1, 1, 2))
        neighbour[rank] = max(0, input_delay), max(0, weight_delay)
    return neighbour


MOMENTS = (0.5, 0.4, 0.6, 0.3, 0.7)
"""Where the repeated section starts in the short step, as fractions of its length."""


def periodic_plans(
    short: Board, plan: ProgramPlan, long: Board, *, tries: int, is_over: Callable[[], bool]
) -> Iterator[ProgramPlan]:
    """Yield plans for the long step that repeat different sections of a plan for the short step."""
    if _is_mixed(short, plan.programs):
        return
    ends = end_times(short, plan.programs)
    num_missing = long.problem.microbatches - short.problem.microbatches
    if ends is None or num_missing <= 0:
        return
    length = max(ends)
    tries_left = tries
    for size in range(1, min(short.problem.microbatches // 2, num_missing) + 1):
        for moment in MOMENTS:
            if tries_left <= 0 or is_over():
                return
            programs = _repeat_sections(short, plan.programs, ends, long, size, moment * length)
            if programs is None:
                continue
            tries_left -= 1
            long_ends = end_times(long, programs)
            if long_ends is not None:
                yield ProgramPlan(programs, objective_value(long, programs, long_ends), "a repeated kernel")


def _is_mixed(board: Board, programs: Programs) -> bool:
    """Whether a stage has both whole and split backwards; then no section repeats the same actions."""
    kinds_and_stages = {
        divmod(code // board.problem.microbatches, board.problem.stages) for program in programs for code in program
    }
    return any(
        (kinds.B, stage) in kinds_and_stages and (kinds.I, stage) in kinds_and_stages
        for stage in range(board.problem.stages)
    )


def _repeat_sections(
    short: Board, programs: Programs, ends: list[float], long: Board, size: int, moment: float
) -> Programs | None:
    """Repeat a section of `size` microbatches near `moment` on every rank until there are enough."""
    long_programs: Programs = []
    for rank, program in enumerate(programs):
        section = _section(short, program, ends, size, moment)
        if section is None:
            return None
        long_program = _repeat(short, long, program, section, size)
        if peak_memory_of(long, long_program) > long.caps[rank]:
            return None
        long_programs.append(long_program)
    return long_programs


def _section(board: Board, program: list[Code], ends: list[float], size: int, moment: float) -> tuple[int, int] | None:
    """Return the bounds of a section that runs `size` of each action and starts as close to `moment` as possible."""
    count = board.problem.microbatches
    lanes = sorted({code // count for code in program})  # kinds and stages
    counts = [0] * len(lanes)
    position_of: dict[tuple[int, ...], int] = {(0,) * len(lanes): 0}
    states = [tuple(counts)]
    for position, code in enumerate(program):
        counts[lanes.index(code // count)] += 1
        states.append(tuple(counts))
        position_of[states[-1]] = position + 1
    best: tuple[float, int, int] | None = None
    for position, state in enumerate(states[:-1]):
        end = position_of.get(tuple(num_run + size for num_run in state))
        if end is not None:
            distance = abs(ends[program[position]] - moment)
            if best is None or distance < best[0]:
                best = distance, position, end
    return None if best is None else best[1:]


def _repeat(short: Board, long: Board, program: list[Code], section: tuple[int, int], size: int) -> list[Code]:
    """Repeat a section for later microbatches, and shift what follows it.

    If the number of missing microbatches is not a multiple of `size`, the last repetition leaves out the excess ones.
    """
    count, total = short.problem.microbatches, long.problem.microbatches
    missing = total - count

    def shifted(code: Code, offset: int) -> Code:
        return code // count * total + code % count + offset

    first, last = section
    long_program = [shifted(code, 0) for code in program[:last]]
    repetitions, rest = divmod(missing, size)
    for repetition in range(1, repetitions + 1):
        long_program += [shifted(code, repetition * size) for code in program[first:last]]
    if rest:
        # A partial repetition: the first `rest` microbatches of every stage and kind.
        counts: dict[int, int] = {}
        for code in program[first:last]:
            lane = code // count
            counts[lane] = counts.get(lane, 0) + 1
            if counts[lane] <= rest:
                long_program.append(shifted(code, (repetitions + 1) * size))
    return long_program + [shifted(code, missing) for code in program[last:]]
