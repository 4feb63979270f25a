"""Programs in turns: every rank runs F, I and W in turns, I some turns after F, and W some turns after I.

Most one-way families have this form: 1f1b has P−1−r turns between F and I, and zb-h1 has r turns between I and W.
Here every rank has its own two delays, as large as its memory allows; a local search then changes single delays.
"""

from __future__ import annotations

import random
from collections.abc import Callable
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
        self._programs: dict[tuple[int, Delay], list[Code] | None] = {}

    def program(self, rank: int, delay: Delay) -> list[Code] | None:
        """Return the program of a rank with these delays, or None if it exceeds the rank's memory."""
        key = rank, delay
        if key not in self._programs:
            forwards, backwards = self.lanes[rank]
            turns = [(turn, 0, code) for turn, code in enumerate(forwards)]
            turns += [(turn + delay[0], 1, code) for turn, code in enumerate(backwards)]
            if not self.whole:
                shift = (kinds.W - kinds.I) * self.board.size
                turns += [(turn + sum(delay), 2, code + shift) for turn, code in enumerate(backwards)]
            program = [code for *_, code in sorted(turns)]
            fits = peak_memory_of(self.board, program) <= self.board.caps[rank]
            self._programs[key] = program if fits else None
        return self._programs[key]

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
        if is_over():
            return best
        fitted = [builder.fit(rank, delay) for rank, delay in enumerate(form)]
        feasible = [delay for delay in fitted if delay is not None]
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
