"""Backwards whole here and split there, for costs where splitting one takes longer than running it whole.

Splitting pays where another rank waits for the gradient: in the drain above all, where the last gradients go from rank
to rank and nothing else is left to run. So the last backwards of a schedule with whole ones are split, and those of a
schedule with split ones are joined wherever their W follows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stageline.schedules import action as kinds
from stageline.synthesis.greedy import Board, Code, Plan
from stageline.synthesis.replay import judged


def mixed_plans(board: Board, plan: Plan, *, tries: int, is_over: Callable[[], bool]) -> Iterator[Plan]:
    """Plans with some of the backwards in the other form than they have."""
    count, ranks = board.problem.microbatches, board.problem.ranks
    shapes: list[list[int]] = []
    for most in range(1, min(count, 2 * ranks) + 1):
        shapes.append([most] * ranks)
        shapes.append([min(count, most * rank) for rank in range(ranks)])
    for counts in shapes[:tries]:
        if is_over():
            return
        programs = [_split_last(board, mine, last) for mine, last in zip(plan.programs, counts, strict=True)]
        found = judged(board, programs, "some backwards split")
        if found is not None:
            yield found
    programs = plan.programs
    best = plan
    for rank in range(ranks):
        if is_over():
            return
        tried = [*programs[:rank], _joined_all(board, programs[rank]), *programs[rank + 1 :]]
        found = judged(board, tried, "some backwards joined")
        if found is not None and found.value < best.value:
            best, programs = found, tried
            yield found


def _split_last(board: Board, program: list[Code], last: int) -> list[Code]:
    """Split the whole backwards of the last microbatches; their W wait until all the rest is done."""
    size, count = board.size, board.problem.microbatches
    made, owed = [], []
    for code in program:
        kind, key = divmod(code, size)
        if kind == kinds.B and key % count >= count - last:
            made.append(kinds.I * size + key)
            owed.append(kinds.W * size + key)
        elif kind == kinds.W and key % count >= count - last:
            owed.append(code)
        else:
            made.append(code)
    # On a stage W stay in order: they were put off in the order of their backwards.
    return made + sorted(owed, key=lambda code: code % count)


def _joined_all(board: Board, program: list[Code]) -> list[Code]:
    """Join every I with the W that follows it at once."""
    size = board.size
    made: list[Code] = []
    for code in program:
        if made and code >= kinds.W * size and made[-1] == code - (kinds.W - kinds.I) * size:
            made[-1] = kinds.B * size + code % size
        else:
            made.append(code)
    return made
