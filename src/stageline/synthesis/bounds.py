"""Lower bounds on makespan and span, valid for every schedule.

They combine four facts about F, I and W of every stage and microbatch:

    precedence   an action starts after its input, and after the earlier microbatches of its stage
    memory       an F that does not fit beside earlier ones waits for an earlier I, or for an earlier W
    rank load    everything that must run earlier on the same rank runs there sequentially, so its durations add up
    crossings    an F on its way down and an I on its way up meet between two ranks, and one waits for the other

They give every action a head (its earliest start) and a tail (the minimum time after its end). A rank runs one action
at a time, so the step takes at least as long as the best preemptive order of one rank's actions with these heads and
tails. That order is computed exactly: always run the action with the longest tail.

The span of a rank starts with its first action, whose start does not depend on the order, and ends with its last. So
for spans, tails count only up to the last action of that rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from stageline.schedules import action as kinds
from stageline.synthesis.crossings import Floors, floors_of
from stageline.synthesis.problem import SLACK, Problem, Table
from stageline.timeline.costs import per_stage


class Edge(NamedTuple):
    """A memory precedence of an F: this many I and W of a stage on the same rank must finish first."""

    stage: int
    backwards: int
    weights: int


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A problem in which every backward takes the shorter and earlier of its two forms."""

    problem: Problem

    @cached_property
    def halves(self) -> list[Table]:
        """Minimum durations of F, I and W over all schedules, with or without split backwards and pairs."""
        problem = self.problem
        forward, whole, first, second = (np.asarray(table) for table in problem.times)
        if problem.split is True:
            head, total = first, first + second
        elif problem.split is False:
            head, total = whole, whole
        else:
            head, total = np.minimum(first, whole), np.minimum(first + second, whole)
        if problem.costs.overlap is not None:
            scale = problem.costs.scales(problem.microbatches)
            pair = per_stage("overlap", problem.costs.overlap, problem.stages)[:, None] * (scale + scale.min()) / 2
            for stages in problem.stages_of:
                least, most = pair[stages].min(), max(whole[stages].max(), first[stages].max())
                forward[stages] = np.minimum(forward[stages], np.maximum(0.0, pair[stages] - most))
                rest = np.minimum(second[stages], np.maximum(0.0, total[stages] - head[stages]))
                head[stages] = np.minimum(head[stages], least)
                total[stages] = head[stages] + rest if problem.split is True else head[stages]
        return [forward.tolist(), head.tolist(), (total - head).tolist()]

    @cached_property
    def residue(self) -> Table:
        """Minimum memory that remains of an activation until its W."""
        problem = self.problem
        residue: Table = np.minimum(problem.activation, 0.0 if problem.split is False else problem.residue).tolist()
        return residue

    @cached_property
    def edges(self) -> list[list[list[Edge]]]:
        """For every stage and microbatch, the memory precedences of its F."""
        problem = self.problem
        edges: list[list[list[Edge]]] = [[[] for _ in range(problem.microbatches)] for _ in range(problem.stages)]
        for rank, stages in enumerate(problem.stages_of):
            if problem.caps[rank] == math.inf:
                continue
            for chunk, stage in enumerate(stages):
                for lower in range(chunk + 1):
                    for m, edge in enumerate(self._edges(rank, stages, chunk, lower)):
                        if edge.backwards or edge.weights:
                            edges[stage][m].append(edge)
        return edges

    @cached_property
    def _sums(self) -> list[tuple[list[float], list[float]]]:
        """For every stage, the prefix sums of its activations and of their minimum residues."""
        tables = zip(self.problem.activation, self.residue, strict=True)
        return [([0.0, *accumulate(sizes)], [0.0, *accumulate(residue)]) for sizes, residue in tables]

    def choices(self, stage: int, m: int) -> Iterator[tuple[int, int]]:
        """Yield the minimal (I, W) counts that make room for an F, fewest I first; for one stage per rank.

        The more I have run, the fewer W are needed. F starts after at least one of these choices.
        """
        activations, residues = self._sums[stage]
        transient = self.problem.transients[kinds.F][stage][m]
        room = self.problem.caps[self.problem.rank_of[stage]] * (1 + 2 * SLACK) - transient - activations[m + 1]
        if room >= 0:
            yield 0, 0
            return
        fewest = m + 1
        for backs in range(self.edges[stage][m][0].backwards, m + 1):
            weights = bisect_left(residues, residues[backs] - activations[backs] - room, 0, backs + 1)
            if weights <= backs and weights < fewest:
                fewest = weights
                yield backs, weights
                if not weights:
                    return

    def _edges(self, rank: int, stages: list[int], chunk: int, lower: int) -> list[Edge]:
        """Return, per microbatch, what the F of a chunk needs from a lower chunk (or from its own)."""
        problem = self.problem
        size, residue = problem.activation, self.residue
        transients = problem.transients[kinds.F][stages[chunk]]
        below = [0.0, *accumulate(sum(size[stage][m] for stage in stages[: lower + 1]) for m in range(len(transients)))]
        residues = [0.0, *accumulate(residue[stages[lower]])]
        cap = problem.caps[rank] * (1 + 2 * SLACK)
        backwards = weights = 0
        edges = []
        for m, transient in enumerate(transients):
            between = sum(size[stage][m] for stage in stages[lower + 1 : chunk + 1])
            while backwards < m and below[m + 1] - below[backwards] + between + transient > cap:
                backwards += 1
            current = below[m + 1] - below[m] + between
            while weights < m and residues[m] - residues[weights] + current + transient > cap:
                weights += 1
            backwards = max(backwards, weights)
            edges.append(Edge(stages[lower], backwards, weights))
        return edges


NEVER = -math.inf

MAX_SPAN_ACTIONS = 100_000
"""Total number of actions examined for spans; above it, only the most promising ranks are examined."""
MAX_ACTIONS = 150_000
"""Above this many actions, only the quick bound is computed."""


class _Loads:
    """The work of a rank with a single stage that must precede an action, counted from any earlier action.

    `forwards[n]` is the maximum, over the first n F, of the head minus all work before it; adding all work before
    another action gives that action's head.
    """

    def __init__(self, forward: list[float], back: list[float], weight: list[float], edges: list[list[Edge]]) -> None:
        self.sums = [[0.0, *accumulate(times)] for times in (forward, back, weight)]
        self.needs = [(edge[0].backwards, edge[0].weights) if edge else (0, 0) for edge in edges]
        count = len(forward)
        self.first_after = [count] * count
        """For each I, the first F that must come after it."""
        for m in reversed(range(count)):
            done = self.needs[m][0]
            if done:
                self.first_after[done - 1] = m
        for m in reversed(range(count - 1)):
            self.first_after[m] = min(self.first_after[m], self.first_after[m + 1])
        self.forwards, self.forwards_with_weights, self.backwards, self.backwards_with_weights = (
            [NEVER] for _ in range(4)
        )

    def before_forward(self, m: int, backs: int, weights: int) -> float:
        f, i, _ = self.sums
        return f[m] + i[backs] + max(self.forwards[backs], self.backwards[backs], self._with_weights(weights))

    def _with_weights(self, weights: int) -> float:
        return self.sums[2][weights] + max(self.forwards_with_weights[weights], self.backwards_with_weights[weights])

    def add_forward(self, m: int, head: float) -> None:
        f, i, w = self.sums
        _add(self.forwards, head - f[m] - i[m])
        _add(self.forwards_with_weights, head - f[m] - i[m] - w[m])

    def before_backward(self, m: int) -> float:
        f, i, _ = self.sums
        backs, weights = self.needs[m]
        earliest = max(self.forwards[m + 1], self.backwards[min(backs, m)], self._with_weights(weights))
        return f[m + 1] + i[m] + earliest

    def add_backward(self, m: int, head: float) -> None:
        f, i, w = self.sums
        value = head - i[m] - f[self.first_after[m]]
        _add(self.backwards, value)
        _add(self.backwards_with_weights, value - w[m])

    def before_weight(self, m: int) -> float:
        f, i, w = self.sums
        return f[m + 1] + i[m + 1] + w[m] + self.forwards_with_weights[m + 1]


def _add(maxima: list[float], value: float) -> None:
    """Add a value to running maxima: the n-th is the maximum of the first n values."""
    maxima.append(max(value, maxima[-1]))


class Times(NamedTuple):
    """Heads or tails of F, I and W per stage and microbatch."""

    forward: Table
    back: Table
    weight: Table


def heads_of(relaxation: Relaxation) -> Times:
    """Return the earliest start of every action."""
    heads = _heads(relaxation, {})
    floors = floors_of(relaxation, heads)
    is_raised = any(time > heads.forward[stage][m] * (1 + SLACK) for (stage, m), time in floors.items())
    return _heads(relaxation, floors) if is_raised else heads


def _heads(relaxation: Relaxation, floors: Floors) -> Times:
    """Return the earliest start of every action, if some F cannot start before their floors."""
    problem = relaxation.problem
    stages, count = problem.stages, problem.microbatches
    forward, back, weight = relaxation.halves
    edges, has_one_chunk = relaxation.edges, problem.chunks == 1
    forward_hop, backward_hop = problem.forward_hop, problem.backward_hop
    hf, hi, hw = ([[NEVER] * count for _ in range(stages)] for _ in range(3))
    loads = [_Loads(forward[s], back[s], weight[s], edges[s]) for s in range(stages)] if has_one_chunk else None
    for m in range(count):
        for s in range(stages):
            head = hf[s - 1][m] + forward[s - 1][m] + forward_hop[s - 1][m] if s else 0.0
            if m:
                head = max(head, hf[s][m - 1] + forward[s][m - 1])
                for stage, backs, weights in edges[s][m]:
                    if backs:
                        head = max(head, hi[stage][backs - 1] + back[stage][backs - 1])
                    if weights:
                        head = max(head, hw[stage][weights - 1] + weight[stage][weights - 1])
            if loads is not None:
                earliest = math.inf
                for backs, weights in relaxation.choices(s, m):
                    ready = hi[s][backs - 1] + back[s][backs - 1] if backs else NEVER
                    if ready >= earliest:
                        break
                    if weights:
                        ready = max(ready, hw[s][weights - 1] + weight[s][weights - 1])
                    earliest = min(earliest, max(ready, loads[s].before_forward(m, backs, weights)))
                head = max(head, earliest if earliest < math.inf else NEVER, floors.get((s, m), NEVER))
                loads[s].add_forward(m, head)
            hf[s][m] = head
        for s in reversed(range(stages)):
            head = hf[s][m] + forward[s][m]
            if s < stages - 1:
                head = max(head, hi[s + 1][m] + back[s + 1][m] + backward_hop[s + 1][m])
            if m:
                head = max(head, hi[s][m - 1] + back[s][m - 1])
            if loads is not None:
                head = max(head, loads[s].before_backward(m))
                loads[s].add_backward(m, head)
            hi[s][m] = head
            head += back[s][m]
            if m:
                head = max(head, hw[s][m - 1] + weight[s][m - 1])
            if loads is not None:
                head = max(head, loads[s].before_weight(m))
            hw[s][m] = head
    return Times(hf, hi, hw)


def tails_of(relaxation: Relaxation, sink: int | None = None) -> Times:
    """Return the minimum time after the end of every action; with a sink, until the last action of that rank."""
    problem = relaxation.problem
    stages, count = problem.stages, problem.microbatches
    forward, back, weight = relaxation.halves
    forward_hop, backward_hop = problem.forward_hop, problem.backward_hop
    waiters = _waiters(relaxation)
    tf, ti, tw = ([[NEVER] * count for _ in range(stages)] for _ in range(3))
    ends = [0.0 if sink is None or rank == sink else NEVER for rank in problem.rank_of]
    for m in reversed(range(count)):
        has_next = m + 1 < count
        for s in range(stages):
            tail = ends[s]
            if has_next:
                tail = max(tail, tw[s][m + 1] + weight[s][m + 1])
            for stage, later in waiters.get((1, s, m), ()):
                tail = max(tail, forward[stage][later] + tf[stage][later])
            tw[s][m] = tail
            tail += weight[s][m]
            if s:
                tail = max(tail, backward_hop[s][m] + back[s - 1][m] + ti[s - 1][m])
            if has_next:
                tail = max(tail, back[s][m + 1] + ti[s][m + 1])
            for stage, later in waiters.get((0, s, m), ()):
                tail = max(tail, forward[stage][later] + tf[stage][later])
            ti[s][m] = tail
        for s in reversed(range(stages)):
            tail = back[s][m] + ti[s][m]
            if s < stages - 1:
                tail = max(tail, forward_hop[s][m] + forward[s + 1][m] + tf[s + 1][m])
            if has_next:
                tail = max(tail, forward[s][m + 1] + tf[s][m + 1])
            tf[s][m] = tail
    return Times(tf, ti, tw)


def _waiters(relaxation: Relaxation) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """Invert the memory edges: the first F that wait for an I (0) or W (1) of a stage and microbatch."""
    waiters: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for stage, row in enumerate(relaxation.edges):
        counts: dict[tuple[int, int], int] = {}
        for m, edges in enumerate(row):
            for edge in edges:
                for half, count in ((0, edge.backwards), (1, edge.weights)):
                    if count > counts.get((half, edge.stage), 0):
                        counts[half, edge.stage] = count
                        waiters.setdefault((half, edge.stage, count - 1), []).append((stage, m))
    return waiters


def one_rank(jobs: list[tuple[float, float, float]]) -> float:
    """Return the minimum makespan of one rank for (head, time, tail) jobs, if it may interrupt them.

    >>> one_rank([(0, 4, 1), (1, 2, 6)])
    9
    """
    jobs = sorted(job for job in jobs if job[0] > NEVER)
    waiting: list[tuple[float, float]] = []
    now = best = 0.0
    position = 0
    while position < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[position][0])
        while position < len(jobs) and jobs[position][0] <= now:
            heappush(waiting, (-jobs[position][2], jobs[position][1]))
            position += 1
        tail, remaining = heappop(waiting)
        end = now + remaining
        if position < len(jobs) and jobs[position][0] < end:
            heappush(waiting, (tail, end - jobs[position][0]))
            now = jobs[position][0]
            continue
        now = end
        best = max(best, now - tail)
    return best


def _rank_bound(relaxation: Relaxation, rank: int, heads: Times, tails: Times) -> float:
    problem = relaxation.problem
    jobs = []
    longest = 0.0
    for stage in problem.stages_of[rank]:
        for kind, times in enumerate(relaxation.halves):
            for job in zip(heads[kind][stage], times[stage], tails[kind][stage], strict=True):
                jobs.append(job)
                longest = max(longest, sum(job))
    return max(longest, one_rank(jobs))


def lower_bound(problem: Problem, quick: bool = False) -> float:
    """Return the best lower bound for the objective of the problem, or one that takes little time.

    >>> import stageline as sl
    >>> from stageline.synthesis.problem import problem_of
    >>> costs = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)
    >>> lower_bound(problem_of(costs, 4, 8, None, 1, "loop", "makespan", None))
    257.0
    """
    relaxation = Relaxation(problem)
    if quick or problem.num_actions > MAX_ACTIONS:
        return quick_bound(relaxation)
    heads = heads_of(relaxation)
    if problem.objective == "makespan":
        tails = tails_of(relaxation)
        return max(_rank_bound(relaxation, rank, heads, tails) for rank in range(problem.ranks))
    spans = []
    for rank in _promising_ranks(relaxation):
        start = heads.forward[problem.stages_of[rank][0]][0]
        spans.append(_rank_bound(relaxation, rank, heads, tails_of(relaxation, rank)) - start)
    return max(spans)


def quick_bound(relaxation: Relaxation) -> float:
    """Return a cheaper bound: each rank's work, the wait before it, and its idle time until its first gradient.

    Until then a rank runs only forwards, and no more of them than fit in its memory.
    """
    problem, (forward, back, _) = relaxation.problem, relaxation.halves
    best = start = 0.0
    round_trip = sum(row[0] for row in (*forward, *problem.forward_hop[:-1]))
    round_trip += sum(row[0] for row in (*back, *problem.backward_hop[1:]))
    elapsed = 0.0
    for stage, rank in enumerate(problem.rank_of[: problem.ranks]):
        rank_stages = problem.stages_of[rank]
        work = sum(sum(times[rank_stage]) for times in relaxation.halves for rank_stage in rank_stages)
        # From the start of this stage's first F to the end of its first I.
        turnaround = round_trip - elapsed
        if problem.chunks == 1:
            edges = relaxation.edges[stage]
            num_fitting = next(
                (m for m, needs in enumerate(edges) if needs and needs[0].backwards), problem.microbatches
            )
            work += max(0.0, turnaround - back[stage][0] - sum(forward[stage][:num_fitting]))
        length = max(work, turnaround)
        best = max(best, length + (start if problem.objective == "makespan" else 0.0))
        start += forward[stage][0] + problem.forward_hop[stage][0]
        hop = problem.backward_hop[stage + 1][0] if stage + 1 < problem.stages else 0.0
        elapsed += forward[stage][0] + problem.forward_hop[stage][0] + back[stage][0] + hop
    return best


def _promising_ranks(relaxation: Relaxation) -> list[int]:
    """Return the ranks whose spans to examine: all, or the first one and the busiest."""
    problem = relaxation.problem
    work = [sum(sum(times[stage]) for times in relaxation.halves for stage in stages) for stages in problem.stages_of]
    order = sorted(range(problem.ranks), key=lambda rank: (rank > 0, -work[rank]))
    return order[: max(2, MAX_SPAN_ACTIONS // problem.num_actions)]
