"""The search: which steps run, in which order, and how much work each may do.

The work of each step is counted in actions, not in seconds, so a search that proves its optimum gives the same schedule
for the same seed on any machine. As long as a gap is open, the search goes on until its time is up, and the result says
so.
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
from stageline.synthesis import cp_sat
from stageline.synthesis.baselines import baselines, sequential_plan
from stageline.synthesis.bounds import lower_bound
from stageline.synthesis.fast_simulate import end_times, evaluate
from stageline.synthesis.list_scheduling import Board, PriorityRule, ProgramPlan, list_schedule, schedule_of
from stageline.synthesis.local_search import improve, mixed_plans
from stageline.synthesis.periodic import best_turns_plan, periodic_plans
from stageline.synthesis.problem import SLACK, Problem, with_microbatches
from stageline.synthesis.windows import improve_in_windows
from stageline.synthesis.zero_bubble import zero_bubble_plans
from stageline.timeline.simulate import simulate

ACTIONS_PER_SECOND = 300_000
"""Work per second of the time limit; most machines are faster."""
CAREFUL_ACTIONS_PER_SECOND = 10_000
"""The careful lower bound is computed for at most this many actions per second of the time limit."""
RESULT_COST = 8.0
"""Time to build, verify and simulate the result, over the time to simulate it."""
MIN_SOLVER_SECONDS = 1.0
"""Below this time limit, only small problems wait for the solver to load."""
MAX_EXACT_ACTIONS = 500
"""Largest number of actions for the exact search."""
MAX_WINDOW_ACTIONS = 15_000
"""Largest number of actions for the search in windows."""
MAX_IDLE_WINDOWS, WINDOWS_PER_SECOND = 10, 5
"""Other steps follow after so many windows without a gain, or so many per second of the time limit."""
DECIDED_ACTIONS_PER_SECOND = 800
"""Constraint programming raises the lower bound for at most this many actions per second of the time limit."""
SMALLEST_SHARE, SMALL_GAP = 0.05, 0.01
"""Of the gap, the smallest share by which it tries to; below the small gap, it tries to close it first."""
ORDERS = ((3, 2, 1, 0), (1, 3, 2, 0), (2, 3, 1, 0), (2, 1, 3, 0), (1, 2, 3, 0), (3, 2, 0, 1))
"""Priorities on a V placement; see `PriorityRule.order`."""
HABITS = (
    *((0.0, 0.01, math.inf), (0.0, 1.0, math.inf), (0.0, 0.5, -1), (0.0, 0.01, 1), (0.0, 0.5, 2), (0.0, 1.0, 0)),
    *((0.5, 0.01, math.inf), (0.0, 0.01, -1), (0.0, 0.01, 2), (0.0, 1.0, -1), (1.0, 1.0, math.inf), (0.5, 0.5, 2)),
)
"""(patience, gap, max_deferred) of a rule; −1 means one per rank."""


class SearchProgress(NamedTuple):
    """The state of a running search."""

    seconds: float
    achieved: float
    lower_bound: float
    step: str


@dataclass
class Search:
    """What is known about a problem so far: the best plan, the lower bound, and the time left."""

    problem: Problem
    seconds: float
    seed: int
    progress: Callable[[SearchProgress], None] | None = None
    tolerance: float = 0.0
    """The gap at which the search ends."""
    baselines: dict[str, float] = field(default_factory=dict)
    """The named families that fit, with their objective values."""
    by_form: dict[bool, ProgramPlan] = field(default_factory=dict)
    """The best plan with all backwards whole (True) and with all split (False)."""
    best: ProgramPlan | None = None
    lower_bound: float = 0.0
    is_nested: bool = False
    """Whether it serves another search, which continues when this one ends."""
    was_cut: bool = False
    """Whether the clock or the user ended it before its work was done."""
    was_interrupted: bool = False
    start: ProgramPlan | None = None
    """A plan to start from."""

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.reserve = 0.0
        """Seconds at the end that are left for the result."""
        self.board = Board(self.problem)
        self.dice = random.Random(self.seed)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def is_over(self) -> bool:
        """Whether time is up; sets `was_cut` if so."""
        if self.elapsed < self.seconds - self.reserve:
            return False
        self.was_cut = True
        return True

    @property
    def is_proven(self) -> bool:
        """Whether the best plan is proven optimal, up to the tolerance."""
        return self.best is not None and self.best.value <= self.lower_bound * (1 + self.tolerance + SLACK)

    def offer(self, plan: ProgramPlan | None) -> None:
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
            self.report(plan.how)

    def report(self, step: str) -> None:
        """Call `progress` with the current state."""
        if self.progress is not None and self.best is not None:
            self.progress(SearchProgress(self.elapsed, self.best.value, min(self.lower_bound, self.best.value), step))

    def run(self) -> None:
        """Run all steps until the bound is reached or time is up; an interrupt keeps the best plan so far."""
        try:
            self._start()
            rules = (self._zero_bubble, self._rules, self._turns, self._refine, self._mixed)
            solvers = (self._exact, self._windows) if self._is_small else (self._windows, self._exact)
            for step in (*rules, self._moves, self._periodic, *solvers):
                if self.is_proven or self.is_over():
                    break
                step()
            if not self.is_nested:
                self._explore()
        except KeyboardInterrupt:
            self.was_cut = self.was_interrupted = True
            if self.best is None or self.is_nested:
                raise

    def _start(self) -> None:
        """Collect the baselines and compute the lower bound."""
        self.offer(self.start)
        for plan in baselines(self.problem):
            self.baselines[plan.how] = min(plan.value, self.baselines.get(plan.how, plan.value))
            if self.best is None or plan.value < self.best.value:
                self.offer(plan)
        for rule in islice(rules_for(self.problem), 1 + len(tight_groups(self.problem))):
            self.offer(list_schedule(self.board, rule))
            if self.best is not None:
                break
        else:
            self.offer(sequential_plan(self.problem))
        if self.best is not None and not self.is_nested:
            begun = self.elapsed
            simulate(schedule_of(self.problem, self.best.programs), self.problem.costs)
            self.reserve = min(RESULT_COST * (self.elapsed - begun), 0.5 * self.seconds)
        is_large = self.problem.num_actions > CAREFUL_ACTIONS_PER_SECOND * self.seconds
        self.lower_bound = lower_bound(self.problem, quick=is_large)
        self.report("lower bound")

    def _tries(self, share: float) -> int:
        """Return how many passes over all actions this share of the time allows; fewer if exact search follows."""
        seconds = min(self.seconds, 1.0, self.problem.num_actions / 200) if self._is_small else self.seconds
        return max(1, int(share * seconds * ACTIONS_PER_SECOND / self.problem.num_actions))

    @property
    def _is_small(self) -> bool:
        """Whether exact search applies."""
        plain = self.problem.costs.overlap is None
        return plain and self.problem.num_actions <= MAX_EXACT_ACTIONS and cp_sat.is_available()

    def _zero_bubble(self) -> None:
        """Run the variants of the zero-bubble heuristic."""
        if self.problem.chunks > 1 or self.problem.split is False:
            return
        for plan in islice(zero_bubble_plans(self.board, self.lower_bound, self.is_over), self._tries(0.1)):
            self.offer(plan)
            if self.is_proven or self.is_over():
                return

    def _rules(self) -> None:
        """Run list scheduling with many rules."""
        for _, rule in zip(range(self._tries(0.25)), rules_for(self.problem, self.lower_bound), strict=False):
            if self.is_proven or self.is_over():
                return
            self.offer(list_schedule(self.board, rule, self.is_over))

    def _turns(self) -> None:
        """Search programs in turns."""
        wholes = [whole for whole in (False, True) if self.problem.allows_form(whole)]
        groups = [0] if self.problem.chunks == 1 else [*tight_groups(self.problem), 0, -1, -2, 1]
        for whole in wholes:
            for group in groups:
                if self.is_proven or self.is_over():
                    return
                tries = self._tries(0.25 / len(wholes) / len(groups))
                self.offer(
                    best_turns_plan(
                        self.board, dice=self.dice, tries=tries, whole=whole, group=group, is_over=self.is_over
                    )
                )

    def _refine(self) -> None:
        """Vary the best rule on single ranks."""
        if self.best is not None and self.best.rule is not None:
            self._vary(self.best, self._tries(0.1))

    def _vary(self, plan: ProgramPlan, tries: int, num_ranks: tuple[int, ...] = (1, 1, 2)) -> None:
        """Vary the rule of a plan: the limits of some ranks, and where it aims at a value, that value."""
        problem, dice = self.problem, self.dice
        limit = problem.microbatches * problem.chunks
        value, rule = plan.value, plan.rule
        for _ in range(tries):
            if rule is None or self.is_proven or self.is_over():
                return
            ahead = list(rule.ahead or (limit,) * problem.ranks)
            for _ in range(dice.choice(num_ranks)):
                rank = dice.randrange(problem.ranks)
                ahead[rank] = min(limit, max(1, ahead[rank] + dice.choice((-1, 1))))
            target = rule.target if rule.target == math.inf else dice.uniform(self.lower_bound, value)
            neighbour = list_schedule(self.board, replace(rule, ahead=tuple(ahead), target=target), self.is_over)
            if neighbour is not None and neighbour.value <= value:
                value, rule = neighbour.value, neighbour.rule
                self.offer(neighbour)

    def _explore(self) -> None:
        """Use the time that is left: vary the best rules by more, and search around the best plan again."""
        round_ = 0
        while not self.is_proven and not self.is_over():
            for plan in list(self.by_form.values()):
                self._vary(plan, max(1, self._tries(0.02)), num_ranks=(1, 2, 4, 8))
            self._moves(0.05)
            self._windows()
            round_ += 1
            self._exact(round_)

    def _mixed(self) -> None:
        """Switch the form of some backwards, if that may save time or memory."""
        if self.best is None or not self.problem.mixes:
            return
        for whole in (True, False):
            plan = self.by_form.get(whole)
            if plan is not None:
                for candidate in mixed_plans(self.board, plan, tries=self._tries(0.05), is_over=self.is_over):
                    self.offer(candidate)

    def _moves(self, share: float = 0.25) -> None:
        """Run local search on the critical path."""
        if self.best is not None and self.best.schedule is None:
            moves = 3 * self._tries(share)  # a move costs a third of a pass
            limit = self.lower_bound * (1 + self.tolerance + SLACK)
            for plan in improve(
                self.board, self.best, dice=self.dice, moves=moves, lower_bound=limit, is_over=self.is_over
            ):
                self.offer(plan)

    def _windows(self) -> None:
        """Put the actions of windows into their best order until that no longer helps."""
        best, problem = self.best, self.problem
        if best is None or not self._is_solvable or problem.num_actions > MAX_WINDOW_ACTIONS:
            return
        plans = improve_in_windows(
            self.board, best, dice=self.dice, seconds_left=lambda: self.seconds - self.reserve - self.elapsed
        )
        num_idle = 0
        for plan in islice(plans, max(1, int(WINDOWS_PER_SECOND * self.seconds))):
            num_idle = 0 if self.best is not None and plan.value < self.best.value else num_idle + 1
            self.offer(plan)
            if self.is_proven or self.is_over() or num_idle == MAX_IDLE_WINDOWS:
                return

    def _periodic(self) -> None:
        """Search a shorter step more thoroughly, and repeat its steady state."""
        problem = self.problem
        fewer = 2 * problem.ranks if problem.chunks == 1 else problem.ranks + 1
        if not problem.is_uniform or problem.microbatches < fewer + 2 or self._is_small:
            return
        seconds = min(0.2 * self.seconds, 0.5 * (self.seconds - self.reserve - self.elapsed))
        short = Search(with_microbatches(problem, fewer), seconds, self.seed, is_nested=True)
        short.run()
        self.was_cut |= short.was_cut
        if short.best is None:
            return
        before = self.best
        for plan in periodic_plans(short.board, short.best, self.board, tries=self._tries(0.1), is_over=self.is_over):
            self.offer(plan)
        if self.best is not before:
            self._moves(0.1)

    def _raise_bound(self, bound: float) -> None:
        """Raise the lower bound if this one is higher."""
        if bound > self.lower_bound:
            self.lower_bound = bound
            self.report("exact search")

    @property
    def _is_solvable(self) -> bool:
        """Whether constraint programming applies to the problem and to the best plan."""
        plain = self.problem.costs.overlap is None and self.best is not None and self.best.schedule is None
        has_time = self._is_small or self.seconds >= MIN_SOLVER_SECONDS
        return plain and has_time and cp_sat.is_available()

    def _decide(self, effort: float) -> None:
        """Move the lower bound up, or the best plan down, by shares of the gap, as long as each takes little effort."""
        is_large = self.problem.num_actions > DECIDED_ACTIONS_PER_SECOND * self.seconds
        if not self._is_solvable or self.is_nested or is_large:
            return
        share = 0.5
        while share > SMALLEST_SHARE and not self.is_proven and not self.is_over():
            assert self.best is not None
            gap = self.best.value - self.lower_bound
            if share == 0.5 and gap < SMALL_GAP * self.lower_bound:
                share = 1 - 1e-6
            outcome = cp_sat.decide(
                self.board,
                self.lower_bound,
                self.lower_bound + share * gap,
                seconds=self.seconds - self.reserve - self.elapsed,
                effort=effort,
                seed=self.seed,
            )
            self.was_cut |= outcome.was_cut
            self._raise_bound(outcome.bound)
            self.offer(evaluate(self.board, outcome.programs, "exact search"))
            if self.best.value - self.lower_bound > (1 - 0.5 * share) * gap:
                share /= 2.1

    def _exact(self, round_: int = 0) -> None:
        """Run exact search, which may also raise the bound; later rounds take twice the effort of the one before."""
        effort = 0.05 * 2**round_
        self._decide(effort)
        best = self.best
        if best is None or not self._is_small or not self._is_solvable or self.is_proven or self.is_over():
            return
        ends = end_times(self.board, best.programs)
        if ends is None:
            return
        durations = self.board.durations
        starts = {code: ends[code] - durations[code] for program in best.programs for code in program}
        outcome = cp_sat.search(
            self.board,
            starts,
            self.lower_bound,
            best.value,
            seconds=self.seconds - self.reserve - self.elapsed,
            effort=4 * effort,
            seed=self.seed + round_,
            on_bound=self._raise_bound,
        )
        self.was_cut |= outcome.was_cut
        self._raise_bound(outcome.bound)
        self.offer(evaluate(self.board, outcome.programs, "exact search"))


def tight_groups(problem: Problem) -> list[int]:
    """Return group sizes (negative: diagonals) that can finish where memory holds few microbatches at a time.

    On a diagonal the first microbatch reaches its last chunk after P(V−1) turns; the microbatches started meanwhile
    must fit too.
    """
    ranks, chunks = problem.ranks, problem.chunks
    if chunks == 1:
        return []
    microbatch_memory = [
        max(sum(problem.activation[stage][m] for stage in stages) for m in range(problem.microbatches))
        for stages in problem.stages_of
    ]
    capacity = min(
        cap / memory if memory > 0 else math.inf for cap, memory in zip(problem.caps, microbatch_memory, strict=True)
    )
    if capacity >= ranks:
        return []
    num_whole = max(1, int(capacity))
    turns = [math.ceil(ranks * (chunks - 1) / max(count - 1, 0.5)) for count in (num_whole, capacity, num_whole + 1)]
    diagonals = [-min(turn, ranks * chunks) for turn in (*turns, ranks * chunks)]
    return list(dict.fromkeys([num_whole, *diagonals, max(1, num_whole - 1)]))


TARGETS = (1.0, 1.01, 1.03, 1.06)
"""Objective values to aim at, over the lower bound."""


def rules_for(problem: Problem, lower_bound: float = 0.0) -> Iterator[PriorityRule]:
    """Yield rules for list scheduling, the most promising first; with a lower bound, also rules that aim at it."""
    ranks, chunks = problem.ranks, problem.chunks
    wholes = [whole for whole in (False, True) if problem.allows_form(whole)]
    on_v = problem.pattern == "v"
    groups = [0] if chunks == 1 or (on_v and chunks == 2) else [0, -1, -2, 1, 2 * ranks, problem.microbatches]
    tight = tight_groups(problem)
    depths: list[tuple[float, ...] | None] = [None]
    for depth in (2.0, 1.0, 1.5, 1.25):
        limits = [round(depth * (ranks - rank)) + (chunks - 1) * ranks - (depth == 2) for rank in range(ranks)]
        depths.append(tuple(max(1.0, float(limit)) for limit in limits))
    priorities: list[dict[str, Any]] = [{"forward_first": False}, {"forward_first": True}, {"alternate": True}]
    if on_v:
        priorities = [{"order": order} for order in ORDERS] + [{"order": ()}] * (chunks > 2)
    narrow_priorities: list[dict[str, Any]] = [{"order": order} for order in ORDERS[: chunks > 2]] + [{"order": ()}]
    variants = list(product(tight, narrow_priorities if on_v else priorities)) + list(product(groups, priorities))
    if lower_bound > 0 and False in wholes:
        for factor, gap, ahead, (group, priority) in product(TARGETS, (1.0, 0.5), depths, variants):
            yield PriorityRule(ahead=ahead, gap=gap, target=factor * lower_bound, group=group, **priority)
    for patience, gap, deferred in HABITS:
        max_deferred = ranks if deferred < 0 else deferred
        for ahead, (group, priority), whole in product(depths, variants, wholes):
            yield PriorityRule(
                ahead=ahead, max_deferred=max_deferred, patience=patience, gap=gap, whole=whole, group=group, **priority
            )
