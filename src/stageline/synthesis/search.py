"""The search: which steps run, in which order, and how much work each may do.

The work of each step is counted in actions, not in seconds, so a search that proves its optimum gives the same schedule
for the same seed on any machine. As long as a gap is open, the search goes on until its time is up, and the result says
so.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

from stageline.schedules import action as kinds
from stageline.synthesis import cp_sat
from stageline.synthesis.baselines import baselines, sequential_plan
from stageline.synthesis.beam_search import Beam, random_beam_rules
from stageline.synthesis.bounds import lower_bound
from stageline.synthesis.fast_simulate import end_times, evaluate
from stageline.synthesis.list_scheduling import Board, ProgramPlan, list_schedule, per_rank, schedule_of
from stageline.synthesis.local_search import improve, mixed_plans
from stageline.synthesis.periodic import best_turns_plan, periodic_plans
from stageline.synthesis.priority_rules import is_tight, random_rules, rules_for, tight_groups
from stageline.synthesis.problem import SLACK, Problem, with_microbatches
from stageline.synthesis.trips import FIRST_SHARE, TripBounds
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
LOAD_SECONDS = 0.5
"""Time to load the solver."""
MAX_EXACT_ACTIONS = 500
"""Largest number of actions for the exact search."""
MAX_WINDOW_ACTIONS = 15_000
"""Largest number of actions for the search in windows."""
MAX_IDLE_WINDOWS, WINDOWS_PER_SECOND = 10, 5
"""Other steps follow after so many windows without a gain, or so many per second; under tight caps, twice as many."""
TIGHT_WINDOWS: dict[str, Any] = {"first": 300, "effort": 0.2}
"""Under tight caps, microbatches depend on each other for longer."""
DECIDED_ACTIONS_PER_SECOND = 800
"""Constraint programming raises the lower bound for at most this many actions per second of the time limit."""
SMALLEST_SHARE, SMALL_GAP = 0.05, 0.01
"""Of the gap, the smallest share by which it tries to; below the small gap, it tries to close it first."""
NUM_FIRST_RULES, SHARE_OF_LIMITS = 5, 0.4
"""Under tight caps: rules tried before random ones, and the share of variations that change a limit, not a habit."""
TURNS_SHARE_IF_TIGHT, TIGHT_EFFORT = 0.02, 0.2
"""Under tight caps: the share of the time for programs in turns, and the solver's deterministic time to begin with."""
WAYS_PER_SECOND, PROOF_SHARE, PROOF_ATTEMPTS = 500_000, 0.25, 20
"""Ways that the proofs from trips try per second, their share of the time, and that of the first attempt in it."""
MAX_FAILED_PROOFS = 4
"""Trips that have proven nothing after so many attempts get no more time."""
BEAM_SHARE, PARTIALS_PER_SECOND = 0.25, 100_000
"""The share of the time for beam searches, and the partial schedules they grow per second."""
SMALLEST_BEAM, GOOD_BEAM, LARGEST_BEAM = 20, 60, 300
"""The width of the smallest useful beam, of a good one, and of the largest."""


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
        self.trips = TripBounds(self.problem, random.Random(self.seed))

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
            rules: tuple[Callable[[], None], ...]
            rules = (self._zero_bubble, self._rules, self._turns, self._refine, self._mixed)
            if is_tight(self.problem):
                rules = (self._rules, self._refine, self._beams, self._zero_bubble, self._turns, self._mixed)
            solvers = (self._exact, self._windows) if self._is_small else (self._windows, self._exact)
            for step in (*rules, self._moves, self._periodic, self._prove, *solvers):
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
            self.reserve = min(RESULT_COST * self._simulation_seconds(self.best), 0.5 * self.seconds)
        self.lower_bound = lower_bound(self.problem, quick=self._is_large)
        self.report("lower bound")

    def _simulation_seconds(self, plan: ProgramPlan) -> float:
        """Return the time that a simulation takes; of three, if that is little: another process may interrupt one."""
        fastest = math.inf
        for _ in range(3):
            begun = self.elapsed
            simulate(schedule_of(self.problem, plan.programs), self.problem.costs)
            fastest = min(fastest, self.elapsed - begun)
            if fastest > 0.005 * self.seconds:
                break
        return fastest

    def _tries(self, share: float) -> int:
        """Return how many passes over all actions this share of the time allows; fewer if exact search follows."""
        seconds = min(self.seconds, 1.0, self.problem.num_actions / 200) if self._is_small else self.seconds
        return max(1, int(share * seconds * ACTIONS_PER_SECOND / self.problem.num_actions))

    @property
    def _is_large(self) -> bool:
        """Whether there is no time to compute heads and tails."""
        return self.problem.num_actions > CAREFUL_ACTIONS_PER_SECOND * self.seconds

    @property
    def _is_small(self) -> bool:
        """Whether exact search applies."""
        plain = self.problem.costs.overlap is None
        return plain and self.problem.num_actions <= MAX_EXACT_ACTIONS and cp_sat.is_available()

    def _zero_bubble(self) -> None:
        """Run the variants of the zero-bubble heuristic."""
        if self.problem.chunks > 1 or self.problem.split is False:
            return
        share = 0.05 if is_tight(self.problem) else 0.1
        for plan in islice(zero_bubble_plans(self.board, self.lower_bound, self.is_over), self._tries(share)):
            self.offer(plan)
            if self.is_proven or self.is_over():
                return

    def _rules(self) -> None:
        """Run list scheduling with many rules."""
        rules = rules_for(self.problem, self.lower_bound)
        if is_tight(self.problem):
            rules = chain(islice(rules, NUM_FIRST_RULES), random_rules(self.problem, self.lower_bound, self.dice))
        for _, rule in zip(range(self._tries(0.25)), rules, strict=False):
            if self.is_proven or self.is_over():
                return
            self.offer(list_schedule(self.board, rule, self.is_over))

    def _beams(self, round_: int = 0) -> None:
        """Run beam searches under tight caps, in later rounds wider ones."""
        if not is_tight(self.problem) or not self.problem.allows_form(False) or self._is_large:
            return
        width_left = int(BEAM_SHARE * self.seconds * PARTIALS_PER_SECOND / (2 * self.board.size))
        width = min(LARGEST_BEAM * 2**round_, max(GOOD_BEAM, width_left // 4), width_left)
        beam = Beam(self.board)
        for rule in random_beam_rules(self.dice, width, self.lower_bound):
            if width_left < max(width, SMALLEST_BEAM) or self.is_proven or self.is_over():
                return
            self.offer(beam.plan(rule, self.is_over))
            width_left -= width

    def _prove(self) -> None:
        """Raise the lower bound under tight caps; after every failure, try harder to close less of the gap."""
        is_plain = self.problem.costs.overlap is None and not self.is_nested
        if not is_tight(self.problem) or not is_plain or self._is_large:
            return
        work_left = PROOF_SHARE * self.seconds * WAYS_PER_SECOND
        work = work_left / PROOF_ATTEMPTS
        self.trips.share = FIRST_SHARE
        num_failures = 0
        while work_left > 0 and not self.is_proven and not self.is_over():
            if num_failures == MAX_FAILED_PROOFS and not self.trips.favourites:
                return  # other things than trips make the step long
            assert self.best is not None
            work = min(work, work_left)
            self._raise_bound(self.trips.attempt(self.lower_bound, self.best.value, work, self.is_over), "trips")
            work_left -= max(self.trips.work, 0.05 * work)
            if not self.trips.was_success:
                num_failures += 1
                work *= 1.5

    def _turns(self) -> None:
        """Search programs in turns."""
        wholes = [whole for whole in (False, True) if self.problem.allows_form(whole)]
        groups = [0] if self.problem.chunks == 1 else [*tight_groups(self.problem), 0, -1, -2, 1]
        for whole in wholes:
            for group in groups:
                if self.is_proven or self.is_over():
                    return
                share = TURNS_SHARE_IF_TIGHT if is_tight(self.problem) else 0.25
                tries = self._tries(share / len(wholes) / len(groups))
                self.offer(
                    best_turns_plan(
                        self.board, dice=self.dice, tries=tries, whole=whole, group=group, is_over=self.is_over
                    )
                )

    def _refine(self) -> None:
        """Vary the best rule on single ranks."""
        if self.best is not None and self.best.rule is not None:
            self._vary(self.best, self._tries(0.3 if is_tight(self.problem) else 0.1))

    def _vary(self, plan: ProgramPlan, tries: int, num_ranks: tuple[int, ...] = (1, 1, 2)) -> None:
        """Vary the rule of a plan: the limits and habits of some ranks, and where it aims at a value, that value."""
        problem, dice = self.problem, self.dice
        ranks, limit = problem.ranks, problem.microbatches * problem.chunks
        value, rule = plan.value, plan.rule
        for _ in range(tries):
            if rule is None or self.is_proven or self.is_over():
                return
            ahead = list(rule.ahead or (limit,) * ranks)
            patience, gap = (list(per_rank(share, ranks)) for share in (rule.patience, rule.gap))
            for _ in range(dice.choice(num_ranks)):
                rank = dice.randrange(ranks)
                change = dice.random() if is_tight(problem) else 0.0
                if change < SHARE_OF_LIMITS:
                    ahead[rank] = min(limit, max(1, ahead[rank] + dice.choice((-1, 1))))
                else:
                    (patience if change < (1 + SHARE_OF_LIMITS) / 2 else gap)[rank] = dice.random()
            neighbour = replace(
                rule,
                ahead=tuple(ahead),
                patience=tuple(patience),
                gap=tuple(gap),
                target=rule.target if rule.target == math.inf else dice.uniform(self.lower_bound, value),
            )
            plan_of_neighbour = list_schedule(self.board, neighbour, self.is_over)
            if plan_of_neighbour is not None and plan_of_neighbour.value <= value:
                value, rule = plan_of_neighbour.value, plan_of_neighbour.rule
                self.offer(plan_of_neighbour)

    def _explore(self) -> None:
        """Use the time that is left: vary the best rules by more, and search around the best plan again."""
        round_ = 0
        while not self.is_proven and not self.is_over():
            for plan in list(self.by_form.values()):
                self._vary(plan, max(1, self._tries(0.02)), num_ranks=(1, 2, 4, 8))
            self._beams(round_)
            self._prove()
            self._moves(0.05)
            self._windows(0.2 if is_tight(self.problem) else 1.0)
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

    def _windows(self, share: float = 1.0) -> None:
        """Put the actions of windows into their best order until that no longer helps."""
        best, problem = self.best, self.problem
        if best is None or not self._is_solvable or problem.num_actions > MAX_WINDOW_ACTIONS:
            return
        tight = is_tight(problem)
        plans = improve_in_windows(
            self.board,
            best,
            dice=self.dice,
            seconds_left=lambda: self.seconds - self.reserve - self.elapsed,
            **(TIGHT_WINDOWS if tight else {}),
        )
        num_idle = 0
        for plan in islice(plans, max(1, int((1 + tight) * share * WINDOWS_PER_SECOND * self.seconds))):
            num_idle = 0 if self.best is not None and plan.value < self.best.value else num_idle + 1
            self.offer(plan)
            if self.is_proven or self.is_over() or num_idle == (1 + tight) * MAX_IDLE_WINDOWS:
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

    def _raise_bound(self, bound: float, step: str = "exact search") -> None:
        """Raise the lower bound if this one is higher."""
        if bound > self.lower_bound:
            self.lower_bound = bound
            self.report(step)

    @property
    def _is_solvable(self) -> bool:
        """Whether constraint programming applies to the problem and to the best plan."""
        plain = self.problem.costs.overlap is None and self.best is not None and self.best.schedule is None
        has_time = self._is_small or self.seconds >= MIN_SOLVER_SECONDS
        left = self.seconds - self.reserve - self.elapsed
        is_ready = cp_sat.is_loaded() or left > LOAD_SECONDS
        return plain and has_time and is_ready and cp_sat.is_available()

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
        effort = (TIGHT_EFFORT if is_tight(self.problem) else 0.05) * 2**round_
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
