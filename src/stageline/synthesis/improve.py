"""Local search: take the chain of actions that makes the step as long as it is, and move one of them.

Only an action that waits for its rank, and not for its input, can gain by another order, so moves are made on the
critical path alone: an action goes before some of those that its rank runs ahead of it, or after some that follow; and
where whole backwards may save time or memory, one is split or joined.
A move that does not make the step longer than it was some moves ago is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from stageline.schedules import action as kinds
from stageline.synthesis.exact import is_split_enough
from stageline.synthesis.greedy import Board, Code, Plan, Programs, is_snake
from stageline.synthesis.replay import peak_of, times_of, value_of

MEMORY_OF_SEARCH = 30
"""How many moves ago a step must have been longer for a move to be kept."""
FARTHEST = 8
"""Over how many actions one moves at most."""


class Move(NamedTuple):
    """A rank's program as it was, with one action at another place or in another form."""

    rank: int
    program: list[Code]


class Orders:
    """Which actions of a rank may change places."""

    def __init__(self, board: Board) -> None:
        """Lanes that all ranks share must stay as they are."""
        self.size = board.size
        self.count = board.problem.microbatches
        chunks = board.problem.chunks
        self.mixes = board.problem.split is None and not is_split_enough(board.problem)
        self.lanes_are_fixed = chunks > 2 or (chunks == 2 and not is_snake(board.problem.placement))

    def may_swap(self, first: Code, second: Code) -> bool:
        """Whether the second may run before the first, if nothing is between them."""
        one, two = first // self.size, second // self.size
        key_one, key_two = first % self.size, second % self.size
        if key_one == key_two:
            return False
        if one == two:
            return not self.lanes_are_fixed and key_one // self.count != key_two // self.count
        if key_one // self.count != key_two // self.count:
            both_back = one in (kinds.B, kinds.I) and two in (kinds.B, kinds.I)
            return not (both_back and self.lanes_are_fixed)
        # On one stage, gradients of the input keep their order, and so do those of the weights; B is both.
        return one == kinds.F or two == kinds.F or {one, two} == {kinds.I, kinds.W}


def _critical(board: Board, programs: Programs, ends: list[float]) -> list[tuple[int, int]]:
    """The (rank, position) of all actions on the critical path that waited for their rank."""
    taken, size, count = board.taken, board.size, board.problem.microbatches
    rank_of = board.problem.rank_of
    places: dict[Code, int] = {code: at for program in programs for at, code in enumerate(program)}
    if board.problem.objective == "makespan":
        code = max((program[-1] for program in programs), key=lambda last: ends[last])
        first = None
    else:
        worst = max(programs, key=lambda program: ends[program[-1]] - ends[program[0]] + taken[program[0]])
        code, first = worst[-1], worst[0]
    found = []
    while code != first:
        rank, at = rank_of[code % size // count], places[code]
        before = programs[rank][at - 1] if at else -1
        start = ends[code] - taken[code]
        if at and ends[before] >= start - 1e-9 * (1 + start):
            found.append((rank, at))
            code = before
            continue
        source = _source(board, code, ends)
        if source < 0:
            break
        code = source
    return found


def _source(board: Board, code: Code, ends: list[float]) -> Code:
    """The action of another stage whose output this one takes, or −1."""
    size, count = board.size, board.problem.microbatches
    kind, key = divmod(code, size)
    if kind == kinds.F:
        return key - count if key >= count else -1
    if kind == kinds.W or key >= size - count:
        return -1
    other = kinds.I * size + key + count
    return other if ends[other] >= 0 else kinds.B * size + key + count


def _propose(dice: random.Random, programs: Programs, critical: list[tuple[int, int]], orders: Orders) -> Move | None:
    """Some move of an action on the critical path, or of the one it waited for, as far as orders allow."""
    for _ in range(8):
        rank, at = critical[int(dice.random() * len(critical))]
        program = programs[rank]
        if orders.mixes and dice.random() < 0.3:
            changed = _in_other_form(program, at - int(dice.random() * 2), orders.size)
            if changed is not None:
                return Move(rank, changed)
        reach = 1 + int(dice.random() ** 2 * FARTHEST)
        if dice.random() < 0.5:
            source = target = at
            while target > 0 and at - target < reach and orders.may_swap(program[target - 1], program[at]):
                target -= 1
        else:
            source = target = at - 1
            last = len(program) - 1
            while target < last and target - source < reach and orders.may_swap(program[source], program[target + 1]):
                target += 1
        if target != source:
            changed = program[:]
            changed.insert(target, changed.pop(source))
            return Move(rank, changed)
    return None


def _in_other_form(program: list[Code], at: int, size: int) -> list[Code] | None:
    """A whole backward split, or a split one joined with the W right behind it; None for any other action."""
    kind, key = divmod(program[at], size)
    if kind == kinds.B:
        return [*program[:at], kinds.I * size + key, kinds.W * size + key, *program[at + 1 :]]
    if kind == kinds.I and at + 1 < len(program) and program[at + 1] == kinds.W * size + key:
        return [*program[:at], kinds.B * size + key, *program[at + 2 :]]
    return None


def improve(
    board: Board,
    plan: Plan,
    *,
    dice: random.Random,
    moves: int,
    least: float,
    is_over: Callable[[], bool],
    tell: Callable[[Plan], None] | None = None,
) -> Plan:
    """Try so many moves; stop at the lower bound, or when time is over."""
    orders = Orders(board)
    programs = [list(program) for program in plan.programs]
    ends = times_of(board, programs)
    if ends is None:
        return plan
    value = value_of(board, programs, ends)
    best = plan
    history = [value] * MEMORY_OF_SEARCH
    critical = _critical(board, programs, ends)
    for turn in range(moves):
        if best.value <= least or not critical or is_over():
            break
        move = _propose(dice, programs, critical, orders)
        if move is None:
            continue
        if peak_of(board, move.program) > board.caps[move.rank]:
            continue
        kept, programs[move.rank] = programs[move.rank], move.program
        ends = times_of(board, programs)
        now = value_of(board, programs, ends) if ends is not None else None
        slot = turn % MEMORY_OF_SEARCH
        if now is None or ends is None or (now > value and now > history[slot]):
            programs[move.rank] = kept
        else:
            value = now
            critical = _critical(board, programs, ends)
            if value < best.value * (1 - 1e-12):
                best = Plan([list(program) for program in programs], value, "local search")
                if tell is not None:
                    tell(best)
        history[slot] = value
    return best
