"""The search as a whole: what is tried, in which order, and how much of it.

Work is counted in actions looked at, not in seconds, so that the same seed gives the same schedule on any machine that
is fast enough; the clock only cuts off what takes too long, and the answer says whether it did.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any, NamedTuple

from stageline.schedules import action as kinds
from stageline.synthesis import exact
from stageline.synthesis.bounds import lower_bound
from stageline.synthesis.greedy import Board, Plan, Rule, is_snake, run_greedy
from stageline.synthesis.improve import improve
from stageline.synthesis.mixed import mixed_plans
from stageline.synthesis.named import named_ones, one_by_one
from stageline.synthesis.problem import SLACK, Problem, with_microbatches
from stageline.synthesis.replay import judged, times_of
from stageline.synthesis.unroll import unrolled
from stageline.synthesis.woven import weave_plans

SPEED = 300_000
"""Actions that one second of the time limit is worth; most machines look at more."""
MOST_EXACT = 500
"""Actions up to which exact search is tried."""


ORDERS = ((3, 2, 1, 0), (1, 3, 2, 0), (2, 3, 1, 0), (2, 1, 3, 0), (1, 2, 3, 0), (3, 2, 0, 1))
"""Which action goes first on a V; see `Rule.order`."""
HABITS = (
    *((0.0, 0.01, math.inf), (0.0, 1.0, math.inf), (0.0, 0.5, -1), (0.0, 0.01, 1), (0.0, 0.5, 2), (0.0, 1.0, 0)),
    *((0.5, 0.01, math.inf), (0.0, 0.01, -1), (0.0, 0.01, 2), (0.0, 1.0, -1), (1.0, 1.0, math.inf), (0.5, 0.5, 2)),
)
"""Patience, gap and most owed of a rule; −1 owed is one for every rank."""


class Progress(NamedTuple):
    """Where a search stands."""

    seconds: float
    achieved: float
    lower_bound: float
    step: str


@dataclass
class Search:
    """What is known so far about a problem: the best plan, the bound, and the time that is left."""

    problem: Problem
    seconds: float
    seed: int
    progress: Callable[[Progress], None] | None = None
    named: dict[str, float] = field(default_factory=dict)
    """The families that fit, with what each takes."""
    by_form: dict[bool, Plan] = field(default_factory=dict)
    """The best plan with all backwards whole, and the best with all of them split."""
    best: Plan | None = None
    least: float = 0.0
    is_part: bool = False
    """Whether it serves another search, which goes on when this one's time is up."""
    was_cut: bool = False
    """Whether the clock, or the user, ended it before its work was done."""
    was_interrupted: bool = False

    def __post_init__(self) -> None:
        """Start the clock."""
        self.begun = time.monotonic()
        self.board = Board(self.problem)
        self.dice = random.Random(self.seed)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def is_over(self) -> bool:
        """Whether time is up; the first call that says so is remembered."""
        if self.elapsed < self.seconds:
            return False
        self.was_cut = True
        return True

    @property
    def is_proven(self) -> bool:
        """Whether the best plan is known to be the best there is."""
        return self.best is not None and self.best.value <= self.least * (1 + SLACK)

    def offer(self, plan: Plan | None) -> None:
        """Keep a plan if it is the best so far."""
        if plan is None:
            return
        if plan.rule is not None or plan.how == "turns":
            whole = plan.programs[0][-1] // self.board.size == kinds.B
            known = self.by_form.get(whole)
            if known is None or plan.value < known.value:
                self.by_form[whole] = plan
        if self.best is None or plan.value < self.best.value * (1 - 1e-12):
            self.best = plan
            self.tell(plan.how)

    def tell(self, step: str) -> None:
        """Let whoever waits know where it stands."""
        if self.progress is not None and self.best is not None:
            self.progress(Progress(self.elapsed, self.best.value, min(self.least, self.best.value), step))

    def run(self) -> None:
        """Go through all steps, until the bound is reached or time is up; an interrupt keeps what was found."""
        try:
            self._begin()
            for step in (self._rules, self._turns, self._refine, self._mixed, self._moves, self._kernel, self._exact):
                if self.is_proven or self.is_over():
                    break
                step()
        except KeyboardInterrupt:
            self.was_cut = self.was_interrupted = True
            if self.best is None or self.is_part:
                raise

    def _begin(self) -> None:
        """What there is without a search."""
        for found in named_ones(self.problem):
            self.named[found.name] = min(found.value, self.named.get(found.name, found.value))
            if self.best is None or found.value < self.best.value:
                self.offer(found.plan())
        for rule in islice(rules_for(self.problem), 1 + len(tight_groups(self.problem))):
            self.offer(run_greedy(self.board, rule))
            if self.best is not None:
                break
        else:
            self.offer(one_by_one(self.problem))
        self.least = lower_bound(self.problem)
        self.tell("lower bound")

    def _tries(self, share: float) -> int:
        """How many passes over all actions this share of the time is worth; less where exact search follows."""
        seconds = min(self.seconds, 1.0, self.problem.num_actions / 200) if self._is_small else self.seconds
        return max(1, int(share * seconds * SPEED / self.problem.num_actions))

    @property
    def _is_small(self) -> bool:
        """Whether exact search can tell."""
        plain = self.problem.costs.overlap is None
        return plain and self.problem.num_actions <= MOST_EXACT and exact.is_available()

    def _rules(self) -> None:
        """List scheduling by many rules."""
        for _, rule in zip(range(self._tries(0.25)), rules_for(self.problem), strict=False):
            if self.is_proven or self.is_over():
                return
            self.offer(run_greedy(self.board, rule))

    def _turns(self) -> None:
        """Programs in turns."""
        wholes = [whole for whole in (False, True) if may_be(self.problem, whole)]
        groups = [0] if self.problem.chunks == 1 else [*tight_groups(self.problem), 0, -1, -2, 1]
        for whole in wholes:
            for group in groups:
                if self.is_proven or self.is_over():
                    return
                tries = self._tries(0.25 / len(wholes) / len(groups))
                self.offer(
                    weave_plans(self.board, dice=self.dice, tries=tries, whole=whole, group=group, is_over=self.is_over)
                )

    def _refine(self) -> None:
        """Change the best rule in single ranks."""
        rule = self.best.rule if self.best is not None else None
        if rule is None:
            return
        problem = self.problem
        most = problem.microbatches * problem.chunks
        value = self.best.value if self.best is not None else 0.0
        for _ in range(self._tries(0.1)):
            if self.is_proven or self.is_over():
                return
            ahead = list(rule.ahead or (most,) * problem.ranks)
            for _ in range(self.dice.choice((1, 1, 2))):
                rank = self.dice.randrange(problem.ranks)
                ahead[rank] = min(most, max(1, ahead[rank] + self.dice.choice((-1, 1))))
            plan = run_greedy(self.board, replace(rule, ahead=tuple(ahead)))
            if plan is not None and plan.value <= value:
                value, rule = plan.value, plan.rule or rule
                self.offer(plan)

    def _mixed(self) -> None:
        """Some backwards in the other form, where that may save time or memory."""
        if self.best is None or self.problem.split is not None or exact.is_split_enough(self.problem):
            return
        for whole in (True, False):
            plan = self.by_form.get(whole)
            if plan is not None:
                for found in mixed_plans(self.board, plan, tries=self._tries(0.05), is_over=self.is_over):
                    self.offer(found)

    def _moves(self, share: float = 0.25) -> None:
        """Local search on the critical path."""
        if self.best is not None and self.best.schedule is None:
            self.offer(
                improve(
                    self.board,
                    self.best,
                    dice=self.dice,
                    moves=3 * self._tries(share),  # a move costs a third of a pass
                    least=self.least * (1 + SLACK),
                    is_over=self.is_over,
                    tell=self.offer,
                )
            )

    def _kernel(self) -> None:
        """Search a shorter step with more care, and repeat its middle."""
        problem = self.problem
        fewer = 2 * problem.ranks if problem.chunks == 1 else problem.ranks + 1
        if not problem.is_uniform or problem.microbatches < fewer + 2 or self._is_small:
            return
        short = Search(with_microbatches(problem, fewer), 0.2 * self.seconds, self.seed, is_part=True)
        short.run()
        self.was_cut |= short.was_cut
        if short.best is None:
            return
        before = self.best
        for plan in unrolled(short.board, short.best, self.board, tries=self._tries(0.1), is_over=self.is_over):
            self.offer(plan)
        if self.best is not before:
            self._moves(0.1)

    def _raise(self, bound: float) -> None:
        """Take a bound that may be better."""
        self.least = max(self.least, bound)
        self.tell("exact search")

    def _exact(self) -> None:
        """Exact search, and a bound that may be tighter."""
        best = self.best
        if best is None or best.schedule is not None or not self._is_small:
            return
        ends = times_of(self.board, best.programs)
        if ends is None:
            return
        taken = self.board.taken
        starts = {code: ends[code] - taken[code] for program in best.programs for code in program}
        found = exact.search(
            self.board,
            starts,
            self.least,
            best.value,
            seconds=self.seconds - self.elapsed,
            effort=2 * self.seconds,
            seed=self.seed,
            tell=self._raise,
        )
        self.was_cut |= found.was_cut
        self.least = max(self.least, found.bound)
        self.offer(judged(self.board, found.programs, "exact search"))


def may_be(problem: Problem, whole: bool) -> bool:
    """Whether programs with all backwards whole, or all split, are asked for, and not known to be worse."""
    if problem.split is not None:
        return problem.split is not whole
    return not whole or not exact.is_split_enough(problem)


def tight_groups(problem: Problem) -> list[int]:
    """Groups that can be finished where memory holds few microbatches at a time: so many, or along steep diagonals.

    On a diagonal the first microbatch comes to its last chunk after P(V−1) turns: what begins meanwhile must fit, too.
    """
    ranks, chunks = problem.ranks, problem.chunks
    if chunks == 1 or not problem.is_capped:
        return []
    alone = [
        max(sum(problem.activation[stage][m] for stage in mine) for m in range(problem.microbatches))
        for mine in problem.stages_of
    ]
    held = min(cap / most if most > 0 else math.inf for cap, most in zip(problem.caps, alone, strict=True))
    if held >= ranks:
        return []
    whole = max(1, int(held))
    turns = [math.ceil(ranks * (chunks - 1) / max(most - 1, 0.5)) for most in (whole, held, whole + 1)]
    diagonals = [-min(some, ranks * chunks) for some in (*turns, ranks * chunks)]
    return list(dict.fromkeys([whole, *diagonals, max(1, whole - 1)]))


def rules_for(problem: Problem) -> Iterator[Rule]:
    """Rules for list scheduling, the most promising ones first."""
    ranks, chunks = problem.ranks, problem.chunks
    wholes = [whole for whole in (False, True) if may_be(problem, whole)]
    snake = is_snake(problem.placement)
    groups = [0] if chunks == 1 or (snake and chunks == 2) else [0, -1, -2, 1, 2 * ranks, problem.microbatches]
    tight = tight_groups(problem)
    depths: list[tuple[float, ...] | None] = [None]
    for depth in (2.0, 1.0, 1.5, 1.25):
        held = [round(depth * (ranks - rank)) + (chunks - 1) * ranks - (depth == 2) for rank in range(ranks)]
        depths.append(tuple(max(1.0, float(most)) for most in held))
    firsts: list[dict[str, Any]] = [{"forward_first": False}, {"forward_first": True}]
    if snake:
        firsts = [{"order": order} for order in ORDERS] + [{"order": ()}] * (chunks > 2)
    narrow: list[dict[str, Any]] = [{"order": order} for order in ORDERS[: chunks > 2]] + [{"order": ()}]
    ways = list(product(tight, narrow if snake else firsts)) + list(product(groups, firsts))
    for patience, gap, owed in HABITS:
        most_owed = ranks if owed < 0 else owed
        for ahead, (group, first), whole in product(depths, ways, wholes):
            yield Rule(ahead=ahead, owed=most_owed, patience=patience, gap=gap, whole=whole, group=group, **first)
