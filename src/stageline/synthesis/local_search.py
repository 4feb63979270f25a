"""Local changes to a schedule: moves along its critical path, and backwards that are split or joined.

Only an action that waits for its rank, and not for its input, can gain from another order, so `improve` moves actions
on the critical path ahead of earlier ones of their rank, or behind later ones. A move is kept if the step is not longer
than it was some moves ago (late acceptance).

Where splitting a backward takes extra time or memory, it pays only if another rank waits for the gradient, mostly in
the drain phase, where the last gradients go from rank to rank and nothing else is left to run. So `mixed_plans` splits
the last backwards of a plan with whole ones, and joins each I of a plan with split ones with its W if W follows
directly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from stageline.schedules import action as kinds
from stageline.synthesis.fast_simulate import end_times, evaluate, objective_value, peak_memory_of
from stageline.synthesis.list_scheduling import Board, Code, ProgramPlan, Programs

HISTORY_LENGTH = 30
"""A move is kept if the step is not longer than it was this many moves ago."""
MAX_DISTANCE = 8
"""Maximum number of actions that one moves past."""


class Orders:
    """Which actions of a rank may swap."""

    def __init__(self, board: Board) -> None:
        self.size = board.size
        self.count = board.problem.microbatches
        chunks = board.problem.chunks
        self.mixes = board.problem.mixes
        # Lanes that all ranks share must not change.
        self.lanes_are_fixed = chunks > 2 or (chunks == 2 and board.problem.pattern == "loop")

    def may_swap(self, first: Code, second: Code) -> bool:
        """Whether two adjacent actions may swap."""
        one, two = first // self.size, second // self.size
        key_one, key_two = first % self.size, second % self.size
        if key_one == key_two:
            return False
        if one == two:
            return not self.lanes_are_fixed and key_one // self.count != key_two // self.count
        if key_one // self.count != key_two // self.count:
            both_back = one in (kinds.B, kinds.I) and two in (kinds.B, kinds.I)
            return not (both_back and self.lanes_are_fixed)
        # On one stage, input gradients keep their order, and so do weight gradients; B is both.
        return one == kinds.F or two == kinds.F or {one, two} == {kinds.I, kinds.W}


def _critical_actions(board: Board, programs: Programs, ends: list[float]) -> list[tuple[int, int]]:
    """Return the (rank, position) of all actions on the critical path that waited for their rank."""
    durations, size, count = board.durations, board.size, board.problem.microbatches
    rank_of = board.problem.rank_of
    positions: dict[Code, int] = {code: position for program in programs for position, code in enumerate(program)}
    if board.problem.objective == "makespan":
        code = max((program[-1] for program in programs), key=lambda last: ends[last])
        first = None
    else:
        worst = max(programs, key=lambda program: ends[program[-1]] - ends[program[0]] + durations[program[0]])
        code, first = worst[-1], worst[0]
    waited = []
    while code != first:
        rank, position = rank_of[code % size // count], positions[code]
        previous = programs[rank][position - 1] if position else -1
        start = ends[code] - durations[code]
        if position and ends[previous] >= start - 1e-9 * (1 + start):
            waited.append((rank, position))
            code = previous
            continue
        source = source_of(board, code, ends)
        if source < 0:
            break
        code = source
    return waited


def source_of(board: Board, code: Code, ends: list[float]) -> Code:
    """Return the action of another stage whose output this one takes, or −1."""
    size, count = board.size, board.problem.microbatches
    kind, key = divmod(code, size)
    if kind == kinds.F:
        return key - count if key >= count else -1
    if kind == kinds.W or key >= size - count:
        return -1
    other = kinds.I * size + key + count
    return other if ends[other] >= 0 else kinds.B * size + key + count


def _propose(
    dice: random.Random, programs: Programs, critical: list[tuple[int, int]], orders: Orders
) -> tuple[int, list[Code]] | None:
    """Return a rank and its program after a random move on the critical path; None if none is allowed."""
    for _ in range(8):
        rank, position = critical[int(dice.random() * len(critical))]
        program = programs[rank]
        if orders.mixes and dice.random() < 0.3:
            changed = _switch_form(program, position - int(dice.random() * 2), orders.size)
            if changed is not None:
                return rank, changed
        distance = 1 + int(dice.random() ** 2 * MAX_DISTANCE)
        step = -1 if dice.random() < 0.5 else 1
        source = target = position if step < 0 else position - 1
        while (
            0 <= target + step < len(program)
            and abs(target - source) < distance
            and orders.may_swap(program[source], program[target + step])
        ):
            target += step
        if target != source:
            changed = program[:]
            changed.insert(target, changed.pop(source))
            return rank, changed
    return None


def _switch_form(program: list[Code], position: int, size: int) -> list[Code] | None:
    """Split a whole backward, or join a split one with the W directly after it; None for other actions."""
    kind, key = divmod(program[position], size)
    if kind == kinds.B:
        return [*program[:position], kinds.I * size + key, kinds.W * size + key, *program[position + 1 :]]
    if kind == kinds.I and position + 1 < len(program) and program[position + 1] == kinds.W * size + key:
        return [*program[:position], kinds.B * size + key, *program[position + 2 :]]
    return None


def improve(
    board: Board,
    plan: ProgramPlan,
    *,
    dice: random.Random,
    moves: int,
    lower_bound: float,
    is_over: Callable[[], bool],
) -> Iterator[ProgramPlan]:
    """Try `moves` moves, and yield every plan that is the best so far; stop at the lower bound."""
    orders = Orders(board)
    programs = [list(program) for program in plan.programs]
    ends = end_times(board, programs)
    if ends is None:
        return
    value = objective_value(board, programs, ends)
    best_value = plan.value
    history = [value] * HISTORY_LENGTH
    critical = _critical_actions(board, programs, ends)
    for turn in range(moves):
        if best_value <= lower_bound or not critical or is_over():
            return
        move = _propose(dice, programs, critical, orders)
        if move is None:
            continue
        rank, program = move
        if peak_memory_of(board, program) > board.caps[rank]:
            continue
        previous, programs[rank] = programs[rank], program
        ends = end_times(board, programs)
        new_value = objective_value(board, programs, ends) if ends is not None else None
        slot = turn % HISTORY_LENGTH
        if new_value is None or ends is None or (new_value > value and new_value > history[slot]):
            programs[rank] = previous
        else:
            value = new_value
            critical = _critical_actions(board, programs, ends)
            if value < best_value * (1 - 1e-12):
                best_value = value
                yield ProgramPlan([list(program) for program in programs], value, "local search")
        history[slot] = value


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
        joined = [*programs[:rank], join_adjacent(board, programs[rank]), *programs[rank + 1 :]]
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


def join_adjacent(
    board: Board, program: list[Code], is_urgent: Callable[[int], bool] = lambda key: False
) -> list[Code]:
    """Join every I with its W if W follows directly and the I is not urgent, given its stage and microbatch."""
    size = board.size
    actions: list[Code] = []
    for code in program:
        kind, key = divmod(code, size)
        if kind == kinds.W and actions and actions[-1] == kinds.I * size + key and not is_urgent(key):
            actions[-1] = kinds.B * size + key
        else:
            actions.append(code)
    return actions
