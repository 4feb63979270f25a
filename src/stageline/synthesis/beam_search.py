"""Beam search for tight caps: many partial schedules are built in parallel, and the most promising ones are continued.

Where memory holds fewer microbatches than there are ranks, what counts is who waits when a forward on its way down and
a gradient on its way up need the same rank. Each partial schedule takes the rank whose next action could end first:

    rank r   free ──┬── F(n) ──▶          if both could start before that end, one partial schedule becomes two;
                    └─────── I(m) ──▶     otherwise the only choice is clear

All partial schedules have run the same number of F and I. A slot is one of the microbatches in memory and those that
take its place, one after the other; its outlook is when the last of them can leave the pipeline at the earliest. The
fewer delays, the better the outlooks: partial schedules are ranked by the mean and the latest of them. W follow a
fixed rule: they run where memory needs them, where they fit before the next F or I, and where their rank has no idle
time left.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from stageline.schedules import action as kinds
from stageline.synthesis.bounds import Relaxation, heads_of, tails_of
from stageline.synthesis.fast_simulate import evaluate
from stageline.synthesis.list_scheduling import Board, ProgramPlan, Programs
from stageline.synthesis.problem import SLACK

LAYERS_PER_CHECK = 10
"""How many layers pass before the clock is read."""


class BeamRule(NamedTuple):
    """How a beam chooses the partial schedules that go on."""

    width: int
    """Their number."""
    variety: int
    """How many of them may have run the same actions."""
    weight: float
    """The weight of the latest outlook; the rest is that of the mean."""
    target: float
    """The objective value to aim at: where it leaves a rank no idle time, W do not wait for a gap."""


def random_beam_rules(dice: random.Random, width: int, lower_bound: float) -> Iterator[BeamRule]:
    """Yield random rules of one width."""
    while True:
        yield BeamRule(
            width=width,
            variety=dice.choice((1, 2, 4, 8, 16)),
            weight=dice.choice((0.0, 0.05, 0.1, 0.2, 0.3)),
            target=lower_bound * dice.choice((1.02, 1.05, 1.1, 1.2, 2.0)),
        )


class _Next(NamedTuple):
    """The next F or I of a rank, if it ran now."""

    start: float
    weights: int
    """How many W the rank has run by then."""
    busy_until: float
    """The end of the last action before it."""


Path: TypeAlias = "tuple[Path | None, int, int, int]"
"""The actions of a partial schedule, the last one first: what came before, 2 × rank + (0 for F, 1 for I), and the
number of F or I and of W that the rank ran before it."""


class _Partial:
    """A partial schedule."""

    __slots__ = (
        *("forwards", "backwards", "weights", "free", "idle_left", "outputs", "gradients"),
        *("outlooks", "nexts", "ends", "path", "key"),
    )

    def __init__(self, source: _Partial | None = None) -> None:
        if source is None:
            return
        self.forwards, self.backwards, self.weights = source.forwards[:], source.backwards[:], source.weights[:]
        """How many F, I and W every rank has run."""
        self.free, self.idle_left = source.free[:], source.idle_left[:]
        self.outputs, self.gradients = source.outputs[:], source.gradients[:]
        """Per rank, when the inputs of its next F and I arrive, if known."""
        self.nexts, self.ends = source.nexts[:], source.ends[:]
        """Per rank, its next F and its next I, and when they end; infinite if they cannot run yet."""
        self.outlooks = source.outlooks
        self.path: Path | None = source.path
        self.key = source.key

    forwards: list[int]
    backwards: list[int]
    weights: list[int]
    free: list[float]
    idle_left: list[float]
    outputs: list[tuple[float, ...]]
    gradients: list[tuple[float, ...]]
    nexts: list[_Next | None]
    ends: list[float]
    outlooks: tuple[float, ...]
    path: Path | None
    key: int
    """Tells apart which actions have run."""


class _Child(NamedTuple):
    """A partial schedule with one more action, before it is built."""

    score: float
    number: int
    """Decides between equal scores."""
    parent: _Partial
    choice: int
    """2 × rank + (0 for F, 1 for I)."""
    outlooks: tuple[float, ...]


class Beam:
    """The beam searches of a problem with one stage per rank, whose backwards may be split."""

    def __init__(self, board: Board) -> None:
        self.board, problem = board, board.problem
        self.ranks, self.count = problem.ranks, problem.microbatches
        self.forward, self.back, self.weight = (problem.times[kind] for kind in (kinds.F, kinds.I, kinds.W))
        self.sizes, self.residues, self.weight_sums = (
            [[0.0, *accumulate(row)] for row in table] for table in (problem.activation, problem.residue, self.weight)
        )
        relaxation = Relaxation(problem)
        is_span = problem.objective == "span"
        tails = tails_of(relaxation, 0 if is_span else None)
        self.tails = (tails.forward, tails.back)
        self.late_starts = [row[0] for row in heads_of(relaxation).forward] if not is_span else [0.0] * self.ranks
        """Per rank, the idle time at the start that counts."""
        dice = random.Random(0)
        self.keys = [dice.randrange(2**60) for _ in range(2 * self.ranks)]
        """Numbers whose sum over all actions of a partial schedule tells apart which ones they are."""
        self.slots = max(1, min(map(self._fitting, range(self.ranks))))

    def _fitting(self, rank: int) -> int:
        """Return how many of the first microbatches fit in a rank's memory."""
        cap = self.board.caps[rank]
        return next((m for m in range(self.count) if self.sizes[rank][m + 1] > cap), self.count)

    def plan(self, rule: BeamRule, is_over: Callable[[], bool] = lambda: False) -> ProgramPlan | None:
        """Return the best plan of a beam; None if all partial schedules get stuck, or time is up."""
        layer = [self._empty(rule)]
        for number in range(2 * self.board.size):
            if number % LAYERS_PER_CHECK == 0 and is_over():
                return None
            layer = [self._built(child) for child in self._selected(layer, rule)]
            if not layer:
                return None
        plans = [evaluate(self.board, self._programs(partial), "beam search") for partial in layer]
        return min((plan for plan in plans if plan is not None), key=lambda plan: plan.value, default=None)

    def _empty(self, rule: BeamRule) -> _Partial:
        ranks, partial = self.ranks, _Partial()
        partial.forwards, partial.backwards, partial.weights = ([0] * ranks for _ in range(3))
        partial.free = [0.0] * ranks
        partial.idle_left = [
            rule.target - self.board.work(rank, whole=False) - self.late_starts[rank] for rank in range(ranks)
        ]
        partial.outputs = [(0.0,) * self.count, *[()] * (ranks - 1)]
        partial.gradients = [()] * ranks
        partial.outlooks = tuple(self.forward[0][m] + self.tails[0][0][m] for m in range(self.slots))
        partial.nexts = [None for _ in range(2 * ranks)]
        partial.ends = [math.inf] * 2 * ranks
        partial.path, partial.key = None, 0
        self._look_ahead(partial, 0)
        return partial

    def _look_ahead(self, partial: _Partial, rank: int) -> None:
        """Update the next F and I of a rank."""
        forwards, backwards = partial.forwards[rank], partial.backwards[rank]
        outputs, gradients = partial.outputs[rank], partial.gradients[rank]
        following = self._next_forward(partial, rank, outputs[0]) if outputs else None
        partial.nexts[2 * rank] = following
        partial.ends[2 * rank] = following.start + self.forward[rank][forwards] if following else math.inf
        following = self._next(partial, rank, gradients[0], partial.weights[rank]) if gradients else None
        partial.nexts[2 * rank + 1] = following
        partial.ends[2 * rank + 1] = following.start + self.back[rank][backwards] if following else math.inf

    def _next_forward(self, partial: _Partial, rank: int, arrival: float) -> _Next | None:
        """Return the next F of a rank after the W that make room for it; None if they are not enough."""
        board, residues = self.board, self.residues[rank]
        forwards, backwards, weights = partial.forwards[rank], partial.backwards[rank], partial.weights[rank]
        sizes = self.sizes[rank]
        excess = sizes[forwards + 1] - sizes[backwards] + residues[backwards] + board.spare[rank] - board.caps[rank]
        if forwards == backwards:
            excess -= board.spare[rank]
        while weights < backwards and excess > residues[weights]:
            weights += 1
        return None if excess > residues[weights] else self._next(partial, rank, arrival, weights)

    def _next(self, partial: _Partial, rank: int, arrival: float, weights: int) -> _Next:
        """Return the next F or I of a rank, after at least so many W and those that the rule adds."""
        sums, idle_left = self.weight_sums[rank], partial.idle_left[rank]
        now = partial.free[rank] + sums[weights] - sums[partial.weights[rank]]
        start = max(arrival, now)
        while weights < partial.backwards[rank]:
            end = now + self.weight[rank][weights]
            if end > start * (1 + SLACK) and start - now <= idle_left:
                break
            now, weights = end, weights + 1
            start = max(start, now)
        return _Next(start, weights, now)

    def _selected(self, layer: list[_Partial], rule: BeamRule) -> list[_Child]:
        """Return the partial schedules of the next layer."""
        children: list[_Child] = []
        for partial in layer:
            ends = partial.ends
            first = min(ends)
            if first == math.inf:
                continue
            choice = ends.index(first)
            other = partial.nexts[choice ^ 1]
            choices = (choice, choice ^ 1) if other is not None and other.start < first else (choice,)
            for option in choices:
                children.append(self._child(partial, option, rule.weight, len(children)))
        children.sort()
        selected = []
        similar: dict[int, int] = {}
        for child in children:
            key = child.parent.key + self.keys[child.choice]
            similar[key] = similar.get(key, 0) + 1
            if similar[key] <= rule.variety:
                selected.append(child)
                if len(selected) == rule.width:
                    break
        return selected

    def _child(self, partial: _Partial, choice: int, weight: float, number: int) -> _Child:
        rank, is_back = divmod(choice, 2)
        m = (partial.backwards if is_back else partial.forwards)[rank]
        slot = m % self.slots
        outlooks = partial.outlooks
        outlook = max(outlooks[slot], partial.ends[choice] + self.tails[is_back][rank][m])
        outlooks = (*outlooks[:slot], outlook, *outlooks[slot + 1 :])
        score = weight * max(outlooks) + (1 - weight) * sum(outlooks) / self.slots
        return _Child(score, number, partial, choice, outlooks)

    def _built(self, child: _Child) -> _Partial:
        """Return a partial schedule with one more action."""
        partial = _Partial(child.parent)
        rank, is_back = divmod(child.choice, 2)
        following, end = partial.nexts[child.choice], partial.ends[child.choice]
        assert following is not None
        counts = partial.backwards if is_back else partial.forwards
        m = counts[rank]
        partial.path = partial.path, child.choice, m, following.weights
        partial.key += self.keys[child.choice]
        if m or is_back:
            partial.idle_left[rank] -= following.start - following.busy_until
        counts[rank] += 1
        partial.weights[rank], partial.free[rank] = following.weights, end
        partial.outlooks = child.outlooks
        problem, other = self.board.problem, rank
        if is_back:
            partial.gradients[rank] = partial.gradients[rank][1:]
            if rank:
                other = rank - 1
                partial.gradients[other] += (end + problem.backward_hop[rank][m],)
        else:
            partial.outputs[rank] = partial.outputs[rank][1:]
            if rank < self.ranks - 1:
                other = rank + 1
                partial.outputs[other] += (end + problem.forward_hop[rank][m],)
            else:
                partial.gradients[rank] += (end,)
        self._look_ahead(partial, rank)
        if other != rank:
            self._look_ahead(partial, other)
        return partial

    def _programs(self, partial: _Partial) -> Programs:
        size, count = self.board.size, self.count
        actions = []
        path = partial.path
        while path is not None:
            path, *action = path
            actions.append(action)
        programs: Programs = [[] for _ in range(self.ranks)]
        weights = [0] * self.ranks

        def run_weights(rank: int, until: int) -> None:
            base = kinds.W * size + rank * count
            programs[rank].extend(range(base + weights[rank], base + until))
            weights[rank] = until

        for choice, m, until in reversed(actions):
            rank, is_back = divmod(choice, 2)
            run_weights(rank, until)
            programs[rank].append((kinds.I if is_back else kinds.F) * size + rank * count + m)
        for rank in range(self.ranks):
            run_weights(rank, count)
        return programs
