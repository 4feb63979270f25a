"""Periodic schedules: take the steady state of a good schedule for few microbatches, and repeat it.

In the middle of a step, ranks settle into a pattern that repeats every microbatch or every few. If a section of a
program runs the same number of F, I and W of every stage, it can be repeated for later microbatches. The rank holds the
same memory at its end as at its start, so the peak does not change.

    for 6 microbatches    F0 F1 F2 │ I0 F3 W0 │ I1 F4 W1 │ I2 F5 …
    for 7                 F0 F1 F2 │ I0 F3 W0 │ I1 F4 W1 │ I2 F5 W2 │ I3 F6 …

A short step can be searched more thoroughly in the same time, up to its proven optimum, and the long step inherits
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stageline.schedules import action as kinds
from stageline.synthesis.fast_simulate import end_times, objective_value, peak_memory_of
from stageline.synthesis.list_scheduling import Board, Code, ProgramPlan, Programs

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
    count, cells = board.problem.microbatches, board.size
    lanes = sorted({code // cells * board.problem.stages + code % cells // count for code in program})
    lane_index = {lane: position for position, lane in enumerate(lanes)}
    counts = [0] * len(lanes)
    position_of: dict[tuple[int, ...], int] = {(0,) * len(lanes): 0}
    states = [tuple(counts)]
    for position, code in enumerate(program):
        counts[lane_index[code // cells * board.problem.stages + code % cells // count]] += 1
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
    count, cells, total = short.problem.microbatches, short.size, long.problem.microbatches
    missing = total - count

    def shifted(code: Code, offset: int) -> Code:
        kind, key = divmod(code, cells)
        stage, m = divmod(key, count)
        return kind * long.size + stage * total + m + offset

    first, last = section
    long_program = [shifted(code, 0) for code in program[:last]]
    repetitions, rest = divmod(missing, size)
    for repetition in range(1, repetitions + 1):
        long_program += [shifted(code, repetition * size) for code in program[first:last]]
    if rest:
        # A partial repetition: the first `rest` microbatches of every stage and kind.
        counts: dict[int, int] = {}
        for code in program[first:last]:
            lane = code // cells * short.problem.stages + code % cells // count
            counts[lane] = counts.get(lane, 0) + 1
            if counts[lane] <= rest:
                long_program.append(shifted(code, (repetitions + 1) * size))
    return long_program + [shifted(code, missing) for code in program[last:]]
