"""A short step made long: the middle of a good schedule for few microbatches, repeated as often as is asked for.

In the middle of a step ranks settle into something that repeats, once every microbatch or once every few. Where between
two places of a program as many F, I and W of every stage are run, what lies between them can be run again and again,
for later microbatches each time; the rank holds the same at its end as at its start, so memory stays as it was.

    for 6 microbatches    F0 F1 F2 │ I0 F3 W0 │ I1 F4 W1 │ I2 F5 …
    for 7                 F0 F1 F2 │ I0 F3 W0 │ I1 F4 W1 │ I2 F5 W2 │ I3 F6 …

A short step is searched with more care in the same time, up to its proven optimum, and a long one inherits that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stageline.schedules import action as kinds
from stageline.synthesis.greedy import Board, Code, Plan, Programs
from stageline.synthesis.replay import peak_of, times_of, value_of

MOMENTS = (0.5, 0.4, 0.6, 0.3, 0.7)
"""Where in the short step the part that is repeated begins, as shares of its length."""


def unrolled(short: Board, plan: Plan, long: Board, *, tries: int, is_over: Callable[[], bool]) -> Iterator[Plan]:
    """Plans for the long step from one for the short one, by repeating different parts of it."""
    if _is_mixed(short, plan.programs):
        return
    ends = times_of(short, plan.programs)
    more = long.problem.microbatches - short.problem.microbatches
    if ends is None or more <= 0:
        return
    length = max(ends)
    left = tries
    for size in range(1, min(short.problem.microbatches // 2, more) + 1):
        for moment in MOMENTS:
            if left <= 0 or is_over():
                return
            programs = _spliced(short, plan.programs, ends, long, size, moment * length)
            if programs is None:
                continue
            left -= 1
            found = times_of(long, programs)
            if found is not None:
                yield Plan(programs, value_of(long, programs, found), "a repeated kernel")


def _is_mixed(board: Board, programs: Programs) -> bool:
    """Whether a stage has whole backwards and split ones: what repeats would then not be the same actions."""
    found = {divmod(code // board.problem.microbatches, board.problem.stages) for mine in programs for code in mine}
    return any((kinds.B, stage) in found and (kinds.I, stage) in found for stage in range(board.problem.stages))


def _spliced(
    short: Board, programs: Programs, ends: list[float], long: Board, size: int, moment: float
) -> Programs | None:
    """Repeat a part of `size` microbatches that begins about here on every rank, until there are enough."""
    found: Programs = []
    for rank, program in enumerate(programs):
        part = _part(short, program, ends, size, moment)
        if part is None:
            return None
        made = _repeated(short, long, program, part, size)
        if peak_of(long, made) > long.caps[rank]:
            return None
        found.append(made)
    return found


def _part(board: Board, program: list[Code], ends: list[float], size: int, moment: float) -> tuple[int, int] | None:
    """Two places in a program, the first as near to this moment as can be, with so many of all actions between them."""
    count, cells = board.problem.microbatches, board.size
    kinds_of = sorted({code // cells * board.problem.stages + code % cells // count for code in program})
    number = {lane: at for at, lane in enumerate(kinds_of)}
    seen = [0] * len(kinds_of)
    places: dict[tuple[int, ...], int] = {(0,) * len(kinds_of): 0}
    states = [tuple(seen)]
    for at, code in enumerate(program):
        seen[number[code // cells * board.problem.stages + code % cells // count]] += 1
        states.append(tuple(seen))
        places[states[-1]] = at + 1
    best: tuple[float, int, int] | None = None
    for at, state in enumerate(states[:-1]):
        other = places.get(tuple(done + size for done in state))
        if other is not None:
            distance = abs(ends[program[at]] - moment)
            if best is None or distance < best[0]:
                best = distance, at, other
    return None if best is None else best[1:]


def _repeated(short: Board, long: Board, program: list[Code], part: tuple[int, int], size: int) -> list[Code]:
    """The program with its part run again for later microbatches, and what follows moved behind it.

    Where the microbatches that are missing are no multiple of the part, the last time leaves out those beyond.
    """
    count, cells, total = short.problem.microbatches, short.size, long.problem.microbatches
    missing = total - count

    def moved(code: Code, by: int) -> Code:
        kind, place = divmod(code, cells)
        stage, m = divmod(place, count)
        return kind * long.size + stage * total + m + by

    first, last = part
    made = [moved(code, 0) for code in program[:last]]
    times, rest = divmod(missing, size)
    for turn in range(1, times + 1):
        made += [moved(code, turn * size) for code in program[first:last]]
    if rest:
        # A turn of fewer microbatches: the first so many of every stage and kind.
        taken: dict[int, int] = {}
        for code in program[first:last]:
            lane = code // cells * short.problem.stages + code % cells // count
            taken[lane] = taken.get(lane, 0) + 1
            if taken[lane] <= rest:
                made.append(moved(code, (times + 1) * size))
    return made + [moved(code, missing) for code in program[last:]]
