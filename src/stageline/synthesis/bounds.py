"""Lower bounds on makespan and span: no schedule of any kind can be shorter.

Three facts are put together, for F, I and W of every stage and microbatch:

    what must come before it   its input, and the microbatches before it on its stage, each after what it waits for
    what memory asks for       an F that does not fit beside those before it waits for an earlier I, or even a W
    what its rank must do      all that must run before it on its rank runs there one by one, and so it takes its sum

They give every action a head (it cannot start before) and a tail (so much follows its end). A rank runs its actions one
by one, so the step is at least as long as the best order of one rank's actions with these heads and tails, where
actions may even be interrupted: that is found exactly, by always running the one with the longest tail.

A span begins with the first action of one rank, whose start no order changes, and ends with the last one of that rank,
so for it tails are counted to that one alone.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from stageline.synthesis.problem import Problem, Table
from stageline.synthesis.relaxed import Edge, Relaxed

NEVER = -math.inf

MOST_ACTIONS = 100_000
"""So many actions are looked at for the spans of ranks; beyond that only the ranks that promise most are."""


LARGEST = 150_000
"""Actions beyond which looking at each of them would take longer than searching is worth."""


class _Best:
    """Running maxima: the largest of the first n values, for every n."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = [NEVER]

    def add(self, value: float) -> None:
        self.values.append(max(value, self.values[-1]))


class _Loads:
    """What one rank with a single stage must have run before an action, counted from any earlier action of its own.

    `forwards[n]` is the largest, over the first n F, of its head less all that is before it; adding all that is before
    another action gives what lies between them.
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
        self.forwards, self.forwards_with_weights = _Best(), _Best()
        self.backwards, self.backwards_with_weights = _Best(), _Best()

    def before_forward(self, m: int, backs: int, weights: int) -> float:
        f, i, w = self.sums
        base = f[m] + i[backs]
        return base + max(
            self.forwards.values[backs],
            self.backwards.values[backs],
            w[weights] + self.forwards_with_weights.values[weights],
            w[weights] + self.backwards_with_weights.values[weights],
        )

    def add_forward(self, m: int, head: float) -> None:
        f, i, w = self.sums
        self.forwards.add(head - f[m] - i[m])
        self.forwards_with_weights.add(head - f[m] - i[m] - w[m])

    def before_backward(self, m: int) -> float:
        f, i, w = self.sums
        backs, weights = self.needs[m]
        base = f[m + 1] + i[m]
        return base + max(
            self.forwards.values[m + 1],
            self.backwards.values[min(backs, m)],
            w[weights] + self.forwards_with_weights.values[weights],
            w[weights] + self.backwards_with_weights.values[weights],
        )

    def add_backward(self, m: int, head: float) -> None:
        f, i, w = self.sums
        value = head - i[m] - f[self.first_after[m]]
        self.backwards.add(value)
        self.backwards_with_weights.add(value - w[m])

    def before_weight(self, m: int) -> float:
        f, i, w = self.sums
        return f[m + 1] + i[m + 1] + w[m] + self.forwards_with_weights.values[m + 1]


class Times(NamedTuple):
    """Heads or tails of F, I and W, for every stage and microbatch."""

    forward: Table
    back: Table
    weight: Table


def heads_of(relaxed: Relaxed) -> Times:
    """The earliest start of every action."""
    problem = relaxed.problem
    stages, count = problem.stages, problem.microbatches
    forward, back, weight = relaxed.halves
    edges, single = relaxed.edges, problem.chunks == 1
    ahead, behind = problem.ahead, problem.back
    hf, hi, hw = ([[NEVER] * count for _ in range(stages)] for _ in range(3))
    loads = [_Loads(forward[s], back[s], weight[s], edges[s]) for s in range(stages)] if single else None
    for m in range(count):
        for s in range(stages):
            head = hf[s - 1][m] + forward[s - 1][m] + ahead[s - 1][m] if s else 0.0
            if m:
                head = max(head, hf[s][m - 1] + forward[s][m - 1])
                for stage, backs, weights in edges[s][m]:
                    if backs:
                        head = max(head, hi[stage][backs - 1] + back[stage][backs - 1])
                    if weights:
                        head = max(head, hw[stage][weights - 1] + weight[stage][weights - 1])
            if loads is not None:
                earliest = math.inf
                for backs, weights in relaxed.choices(s, m):
                    after = hi[s][backs - 1] + back[s][backs - 1] if backs else NEVER
                    if after >= earliest:
                        break
                    if weights:
                        after = max(after, hw[s][weights - 1] + weight[s][weights - 1])
                    earliest = min(earliest, max(after, loads[s].before_forward(m, backs, weights)))
                head = max(head, earliest if earliest < math.inf else NEVER)
                loads[s].add_forward(m, head)
            hf[s][m] = head
        for s in reversed(range(stages)):
            head = hf[s][m] + forward[s][m]
            if s < stages - 1:
                head = max(head, hi[s + 1][m] + back[s + 1][m] + behind[s + 1][m])
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


def tails_of(relaxed: Relaxed, sink: int | None = None) -> Times:
    """What follows the end of every action at least; with a sink, until the last action of that rank."""
    problem = relaxed.problem
    stages, count = problem.stages, problem.microbatches
    forward, back, weight = relaxed.halves
    ahead, behind = problem.ahead, problem.back
    waits = _waits(relaxed)
    tf, ti, tw = ([[NEVER] * count for _ in range(stages)] for _ in range(3))
    ends = [0.0 if sink is None or rank == sink else NEVER for rank in problem.rank_of]
    for m in reversed(range(count)):
        more = m + 1 < count
        for s in range(stages):
            tail = ends[s]
            if more:
                tail = max(tail, tw[s][m + 1] + weight[s][m + 1])
            for stage, other in waits[1][s][m]:
                tail = max(tail, forward[stage][other] + tf[stage][other])
            tw[s][m] = tail
            tail += weight[s][m]
            if s:
                tail = max(tail, behind[s][m] + back[s - 1][m] + ti[s - 1][m])
            if more:
                tail = max(tail, back[s][m + 1] + ti[s][m + 1])
            for stage, other in waits[0][s][m]:
                tail = max(tail, forward[stage][other] + tf[stage][other])
            ti[s][m] = tail
        for s in reversed(range(stages)):
            tail = back[s][m] + ti[s][m]
            if s < stages - 1:
                tail = max(tail, ahead[s][m] + forward[s + 1][m] + tf[s + 1][m])
            if more:
                tail = max(tail, forward[s][m + 1] + tf[s][m + 1])
            tf[s][m] = tail
    return Times(tf, ti, tw)


def _waits(relaxed: Relaxed) -> list[list[list[list[tuple[int, int]]]]]:
    """The edges of memory the other way round: for every I, and for every W, the first F that wait for it."""
    problem = relaxed.problem
    shape = range(problem.stages), range(problem.microbatches)
    found: list[list[list[list[tuple[int, int]]]]] = [[[[] for _ in shape[1]] for _ in shape[0]] for _ in range(2)]
    for stage in shape[0]:
        known: dict[tuple[int, int], int] = {}
        for m in shape[1]:
            for edge in relaxed.edges[stage][m]:
                for half, done in ((0, edge.backwards), (1, edge.weights)):
                    if done > known.get((half, edge.stage), 0):
                        known[half, edge.stage] = done
                        found[half][edge.stage][done - 1].append((stage, m))
    return found


def one_rank(jobs: list[tuple[float, float, float]]) -> float:
    """The shortest step in which one rank runs these (head, time, tail), if it may interrupt them.

    >>> one_rank([(0, 4, 1), (1, 2, 6)])
    9
    """
    jobs = sorted(job for job in jobs if job[0] > NEVER)
    waiting: list[tuple[float, float]] = []
    now = best = 0.0
    at = 0
    while at < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[at][0])
        while at < len(jobs) and jobs[at][0] <= now:
            heappush(waiting, (-jobs[at][2], jobs[at][1]))
            at += 1
        tail, left = heappop(waiting)
        until = now + left
        if at < len(jobs) and jobs[at][0] < until:
            heappush(waiting, (tail, until - jobs[at][0]))
            now = jobs[at][0]
            continue
        now = until
        best = max(best, now - tail)
    return best


def _of_rank(relaxed: Relaxed, rank: int, heads: Times, tails: Times) -> float:
    problem = relaxed.problem
    jobs = []
    most = 0.0
    for stage in problem.stages_of[rank]:
        for kind, times in enumerate(relaxed.halves):
            for job in zip(heads[kind][stage], times[stage], tails[kind][stage], strict=True):
                jobs.append(job)
                most = max(most, sum(job))
    return max(most, one_rank(jobs))


def lower_bound(problem: Problem) -> float:
    """The most that any of these arguments gives, for the objective of the problem.

    >>> import stageline as sl
    >>> from stageline.synthesis.problem import problem_of
    >>> costs = sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1)
    >>> lower_bound(problem_of(costs, 4, 8, None, 1, "loop", "makespan", None))
    257.0
    """
    relaxed = Relaxed(problem)
    if problem.num_actions > LARGEST:
        return quick_bound(relaxed)
    heads = heads_of(relaxed)
    if problem.objective == "makespan":
        tails = tails_of(relaxed)
        return max(_of_rank(relaxed, rank, heads, tails) for rank in range(problem.ranks))
    spans = []
    for rank in _promising(relaxed):
        begin = heads.forward[problem.stages_of[rank][0]][0]
        spans.append(_of_rank(relaxed, rank, heads, tails_of(relaxed, rank)) - begin)
    return max(spans)


def quick_bound(relaxed: Relaxed) -> float:
    """The work of every rank, what it waits for before it, and what it idles until its first gradient comes back.

    Until then a rank runs forwards alone, and no more of them than fit its memory.
    """
    problem, (forward, back, _) = relaxed.problem, relaxed.halves
    best = begin = 0.0
    round_trip = sum(row[0] for row in (*forward, *problem.ahead[:-1]))
    round_trip += sum(row[0] for row in (*back, *problem.back[1:]))
    passed = 0.0
    for stage, rank in enumerate(problem.rank_of[: problem.ranks]):
        mine = problem.stages_of[rank]
        work = sum(sum(times[own]) for times in relaxed.halves for own in mine)
        # From the start of this stage's first F to the end of its first I.
        way = round_trip - passed
        if problem.chunks == 1:
            edges = relaxed.edges[stage]
            fit = next((m for m, needed in enumerate(edges) if needed and needed[0].backwards), problem.microbatches)
            work += max(0.0, way - back[stage][0] - sum(forward[stage][:fit]))
        length = max(work, way)
        best = max(best, length + (begin if problem.objective == "makespan" else 0.0))
        begin += forward[stage][0] + problem.ahead[stage][0]
        behind = problem.back[stage + 1][0] if stage + 1 < problem.stages else 0.0
        passed += forward[stage][0] + problem.ahead[stage][0] + back[stage][0] + behind
    return best


def _promising(relaxed: Relaxed) -> list[int]:
    """The ranks whose spans are worth looking at: all, or the first one and those that have most to do."""
    problem = relaxed.problem
    work = [sum(sum(times[stage]) for times in relaxed.halves for stage in mine) for mine in problem.stages_of]
    order = sorted(range(problem.ranks), key=lambda rank: (rank > 0, -work[rank]))
    return order[: max(2, MOST_ACTIONS // problem.num_actions)]
