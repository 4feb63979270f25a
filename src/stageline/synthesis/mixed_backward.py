"""Schedules with both whole and split backwards, for costs where splitting a backward takes extra time.

Splitting pays where another rank waits for the gradient, mostly in the drain phase, where the last gradients go from
rank to rank and nothing else is left to run. So this module splits the last backwards of a schedule with whole ones,
and joins each I of a schedule with split ones with its W if W follows directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stageline.schedules import action as kinds
from stageline.synthesis.fast_simulate import evaluate
from stageline.synthesis.list_scheduling import Board, Code, ProgramPlan


def mixed_plans(board: Board, plan: ProgramPlan, *, tries: int, is_over: Callable[[], bool]) -> Iterator[ProgramPlan]:
    """Yield plans with some of the backwards in the other form."""
    count, ranks = board.problem.microbatches, board.problem.ranks
    split_counts: list[list[int]] = []
    for depth in range(1, min(count, 2 * ranks) + 1):
        split_counts.append([depth] * ranks)
        split_counts.append([min(count, depth * rank) for rank in range(ranks)])
    for counts in split_counts[:tries]:
        if is_over():
            return
        programs = [
            _split_last(board, program, num_split) for program, num_split in zip(plan.programs, counts, strict=True)
        ]
        candidate = evaluate(board, programs, "some backwards split")
        if candidate is not None:
            yield candidate
    programs = plan.programs
    best = plan
    for rank in range(ranks):
        if is_over():
            return
        joined = [*programs[:rank], _join_adjacent(board, programs[rank]), *programs[rank + 1 :]]
        candidate = evaluate(board, joined, "some backwards joined")
        if candidate is not None and candidate.value < best.value:
            best, programs = candidate, joined
            yield candidate


def _split_last(board: Board, program: list[Code], num_split: int) -> list[Code]:
    """Split the whole backwards of the last microbatches; run their W at the end."""
    size, count = board.size, board.problem.microbatches
    actions, weights = [], []
    for code in program:
        kind, key = divmod(code, size)
        if kind == kinds.B and key % count >= count - num_split:
            actions.append(kinds.I * size + key)
            weights.append(kinds.W * size + key)
        elif kind == kinds.W and key % count >= count - num_split:
            weights.append(code)
        else:
            actions.append(code)
    # The sort is stable, so the W of a stage stay in microbatch order.
    return actions + sorted(weights, key=lambda code: code % count)


def _join_adjacent(board: Board, program: list[Code]) -> list[Code]:
    """Join every I with its W if W follows directly."""
    size = board.size
    actions: list[Code] = []
    for code in program:
        if actions and code >= kinds.W * size and actions[-1] == code - (kinds.W - kinds.I) * size:
            actions[-1] = kinds.B * size + code % size
        else:
            actions.append(code)
    return actions
