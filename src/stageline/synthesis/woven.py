"""Programs in turns: every rank runs F, I and W in turns, its I some turns behind its F and its W behind its I.

Most one-way families are of this form: 1f1b has P−1−r turns between F and I, and zb-h1 puts r turns between I and W.
Here every rank has two delays of its own, as large as its memory allows; single ones are changed while that helps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from stageline.schedules import action as kinds
from stageline.synthesis.greedy import Board, Code, Plan, Programs, Rule
from stageline.synthesis.problem import Problem
from stageline.synthesis.replay import peak_of, times_of, value_of

Delay: TypeAlias = tuple[int, int]
"""Turns between F and I, and between I and W."""


class Weaver:
    """Makes programs from delays, and keeps those that it made."""

    def __init__(self, board: Board, group: int, whole: bool) -> None:
        """Take the lanes that all ranks share."""
        self.board = board
        self.whole = whole
        self.lanes = board.lanes(Rule(group=group, whole=whole, order=()))
        first = board.problem.stages_of[0][-1] * board.problem.microbatches
        self.way = self.lanes[0][0].index(first)
        """Forwards of a rank before the first one of its last chunk."""
        self._made: dict[tuple[int, Delay], list[Code] | None] = {}

    def program(self, rank: int, delay: Delay) -> list[Code] | None:
        """The program of a rank with these delays; None where it does not fit its memory."""
        key = rank, delay
        if key not in self._made:
            forwards, backwards = self.lanes[rank]
            turns = [(turn, 0, code) for turn, code in enumerate(forwards)]
            turns += [(turn + delay[0], 1, code) for turn, code in enumerate(backwards)]
            if not self.whole:
                shift = (kinds.W - kinds.I) * self.board.size
                turns += [(turn + sum(delay), 2, code + shift) for turn, code in enumerate(backwards)]
            program = [code for *_, code in sorted(turns)]
            fits = peak_of(self.board, program) <= self.board.caps[rank]
            self._made[key] = program if fits else None
        return self._made[key]

    def fit(self, rank: int, delay: Delay) -> Delay | None:
        """The delays that fit the memory of a rank: first W earlier, then I."""
        behind, owed = delay
        while self.program(rank, (behind, owed)) is None:
            if owed > 0:
                owed -= 1
            elif behind > 0:
                behind -= 1
            else:
                return None
        return behind, owed

    def plan(self, delays: list[Delay]) -> Plan | None:
        """All ranks together; None where one does not fit, or they wait for each other."""
        programs: Programs = []
        for rank, delay in enumerate(delays):
            program = self.program(rank, delay)
            if program is None:
                return None
            programs.append(program)
        ends = times_of(self.board, programs)
        return Plan(programs, value_of(self.board, programs, ends), "turns") if ends is not None else None


def weave_plans(
    board: Board, *, dice: random.Random, tries: int, whole: bool, group: int, is_over: Callable[[], bool]
) -> Plan | None:
    """Try delays of the known forms, then change single ones; the best of all that fit."""
    problem = board.problem
    weaver = Weaver(board, group, whole)
    best: Plan | None = None
    delays: list[Delay] = []
    forms = _forms(problem, weaver.way, whole)
    for wanted in forms[:tries]:
        if is_over():
            return best
        fitted = [weaver.fit(rank, delay) for rank, delay in enumerate(wanted)]
        fine = [delay for delay in fitted if delay is not None]
        plan = weaver.plan(fine) if len(fine) == problem.ranks else None
        if plan is not None and (best is None or plan.value < best.value):
            best, delays = plan, fine
    for _ in range(tries - len(forms) if best is not None else 0):
        if is_over():
            break
        changed = _changed(dice, delays, whole)
        plan = weaver.plan(changed)
        if plan is not None and best is not None and plan.value <= best.value:
            best, delays = plan, changed
    return best


def _forms(problem: Problem, way: int, whole: bool) -> list[list[Delay]]:
    """Delays like those of the families: once or twice the way to the last rank, W as far behind as the rank is."""
    ranks, most = problem.ranks, problem.microbatches * problem.chunks
    steps = 1 if problem.chunks == 1 else 2
    found = []
    for depth in (1.0, 2.0, 1.5):
        for put_off in (1.0, 0.0, 2.0, 0.5)[: 1 if whole else 4]:
            behind = [min(most, int(depth * (ranks - 1 - rank)) * steps + way) for rank in range(ranks)]
            found.append([(behind[rank], int(put_off * rank)) for rank in range(ranks)])
    return found


def _changed(dice: random.Random, delays: list[Delay], whole: bool) -> list[Delay]:
    """The delays of one to three ranks changed a little."""
    changed = list(delays)
    for _ in range(dice.choice((1, 1, 2, 3))):
        rank = dice.randrange(len(delays))
        behind, owed = changed[rank]
        if dice.random() < 0.5 or whole:
            behind += dice.choice((-1, 1))
        else:
            owed += dice.choice((-2, -1, 1, 2))
        changed[rank] = max(0, behind), max(0, owed)
    return changed
