"""The exact cut for a V placement: rank 0 holds both ends of the chain, the last rank the middle.

    layers   0 1 2 3 4 5 6 7 8 9 …                          n
    rank     0 0 0│1 1│2 2 2 … the last one … 2 2│1 1 1│0 0
                  a                              c

Ranks are assigned from the outside in. Once some ranks have their two stages, the layers from a up to c are left. So
the pairs (a, c) that can be reached within the ranks' limits describe the state completely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stageline.model.partition.cuts import CutProblem, Floats, Ints, minimise, next_above, prefix_sums, work_limits
from stageline.model.partition.v_heuristic import Pairs, cut_from_front, last_rank_pairs, trace_back

BUDGET = 1.5e8
"""Limit on the work spent on the start of the second round; enough for every position of 200 layers on 16 ranks."""
ROUNDING = 1e-12
"""Relative improvements up to this do not count."""


@dataclass(frozen=True)
class Step:
    """One rank takes its two stages: the pairs before it, and its limit."""

    problem: CutProblem
    rank: int
    limit: float
    before: Pairs

    def work(self, pairs: Pairs) -> Floats:
        """Return the work between a and c."""
        return np.asarray(self.problem.time[pairs.c] - self.problem.time[pairs.a])

    def corner(self, after: Pairs) -> tuple[Ints, Ints, int, int]:
        """Return the last row and first column from which each pair can be reached, and the origin of the table."""
        top, left = int(self.before.a[0]), int(self.before.c.min())
        row = np.minimum(after.a - 1, self.before.a[-1]) - top
        column = np.maximum(after.c + 1, left) - left
        return row, column, top, left

    def by_time(self, after: Pairs) -> tuple[Floats, Floats]:
        """Return the minimum work with which each pair can be reached; and the same values as refused ones."""
        row, column, top, left = self.corner(after)
        rest = np.full((int(self.before.a[-1]) - top + 1, int(self.before.c.max()) - left + 1), np.inf)
        rest[self.before.a - top, self.before.c - left] = self.work(self.before)
        np.minimum.accumulate(rest, axis=0, out=rest)
        backwards = rest[:, ::-1]
        np.minimum.accumulate(backwards, axis=1, out=backwards)
        work = rest[row, column] - self.work(after)
        return work, work

    def by_both(self, after: Pairs) -> tuple[Floats, Floats]:
        """Return, with memory caps, 0 for reachable pairs and infinity for others; and the refused work.

        From a row a, a column c' is best reached from the next c in that row, which leaves the least work and memory.
        That determines how far the rank can go on the left; the maximum over all rows up to a' counts.
        """
        row, _, top, _ = self.corner(after)
        time, memory, end = self.problem.time, self.problem.memory, len(self.problem.time)
        lowest = int(after.c.min())
        source = np.full((int(self.before.a[-1]) - top + 1, int(self.before.c.max()) - lowest + 1), end)
        usable = self.before.c > lowest
        source[self.before.a[usable] - top, self.before.c[usable] - lowest] = self.before.c[usable]
        backwards = source[:, ::-1]
        np.minimum.accumulate(backwards, axis=1, out=backwards)
        source[:, :-1] = source[:, 1:]
        source[:, -1] = end
        a, c_after = np.nonzero(source < end)
        c = source[a, c_after]
        right = time[c] - time[c_after + lowest]
        # In most of these, the right side alone exceeds the limit.
        feasible = right <= self.limit
        smallest_refused = np.min((right + time[a + top + 1] - time[a + top])[~feasible], initial=np.inf)
        a, c, c_after, right = a[feasible], c[feasible], c_after[feasible], right[feasible]
        room = self.problem.caps[self.rank] - (memory[c] - memory[c_after + lowest])
        by_time = np.searchsorted(time, time[a + top] + (self.limit - right), side="right") - 1
        by_room = np.searchsorted(memory, memory[a + top] + room, side="right") - 1
        farthest = np.zeros(source.shape, dtype=np.int64)
        farthest[a, c_after] = np.minimum(by_time, by_room)
        np.maximum.accumulate(farthest, axis=0, out=farthest)
        reached = farthest[row, after.c - lowest] >= after.a
        time_limited = (by_time < by_room) & (by_time + 1 < end)
        start = np.maximum(by_time[time_limited] + 1, a[time_limited] + top + 1)
        refused = time[np.minimum(start, end - 1)] - time[a[time_limited] + top] + right[time_limited]
        return np.where(reached, 0.0, np.inf), np.append(refused, smallest_refused)


def cut_v(problem: CutProblem, low: float, below: float = np.inf) -> Ints | None:
    """Return the cut with the fastest slowest rank for two stages per rank in a V; None if there is none.

    `low` is a lower bound on the time. Cuts that are not better than `below` are not searched for.
    """
    has_caps = bool(np.isfinite(problem.caps).any())
    # Try without caps first, which is faster. If that cut exceeds the caps, it is still a starting point.
    start = low
    for with_caps in (False, True)[: 1 + has_caps]:
        if with_caps and not _has_room(problem):
            return None
        front_cut = minimise(partial(cut_from_front, problem, capped=with_caps), start)
        if not with_caps and has_caps and front_cut is not None and not problem.fits(front_cut):
            start = float(problem.loads(front_cut).max())
            continue
        best = _prove_or_improve(problem, low, below, front_cut, with_caps)
        if best is None or problem.fits(best):
            return best
        start = low = float(problem.loads(best).max())
    return None


def _has_room(problem: CutProblem) -> bool:
    """Whether some cut satisfies the caps, regardless of time."""
    memory_problem = problem.by_memory()
    return any(
        cut_from(memory_problem, 1.0, capped=False)[0] is not None for cut_from in (cut_from_front, cut_from_all_pairs)
    )


def _prove_or_improve(
    problem: CutProblem, low: float, below: float, front_cut: Ints | None, capped: bool
) -> Ints | None:
    """Return the best cut, by searching for one better than `front_cut`; None if it is not below `below`."""
    oracle = partial(cut_from_all_pairs, problem, capped=capped)
    slowest = np.inf if front_cut is None else float(problem.loads(front_cut).max())
    if min(slowest, below) < np.inf:
        better, value = oracle(min(slowest, below) * (1 - ROUNDING))
        if better is None:
            return front_cut if slowest < below * (1 - ROUNDING) else None
        return minimise(oracle, low, (better, value))
    return minimise(oracle, low)


def cut_loop(problem: CutProblem, low: float, start: Ints | None) -> tuple[Ints | None, bool]:
    """Return the best cut for two rounds of a loop, and whether it is proven optimal.

    Every start of the second round is tried, the closest to that of `start` first. For each, the layers of the second
    round are reversed: rank 0 then holds both ends, which makes it a V.
    """
    ranks, layers = len(problem.speed), len(problem.time) - 1
    positions = np.arange(problem.low[ranks], problem.high[ranks] + 1)
    centre = layers // 2 if start is None else int(start[ranks])
    positions = positions[np.argsort(np.abs(positions - centre), kind="stable")]
    candidates = positions[: max(1, int(BUDGET / (layers * layers * ranks)))]
    best, slowest = start, np.inf if start is None else problem.rating(start)[0]
    for position in candidates.tolist():
        v_cut = cut_v(_reverse_second_round(problem, position), low, below=slowest)
        if v_cut is not None:
            cut = np.concatenate((v_cut[: ranks + 1], (position + layers - v_cut[ranks:-1])[::-1]))
            if problem.rating(cut)[0] < slowest:
                best, slowest = cut, problem.rating(cut)[0]
        if slowest <= low:
            break
    return best, len(candidates) == len(positions)


def _reverse_second_round(problem: CutProblem, position: int) -> CutProblem:
    """Reverse the layers from a position on, where the middle of the V must be."""
    ranks, end = len(problem.speed), len(problem.time) - 1

    def reverse(sums: Floats) -> Floats:
        steps = np.diff(sums)
        return prefix_sums(np.concatenate((steps[:position], steps[position:][::-1])))

    left, right = slice(0, ranks + 1), slice(2 * ranks - 1, ranks - 1, -1)
    low = np.concatenate((problem.low[left], position + end - problem.high[right]))
    high = np.concatenate((problem.high[left], position + end - problem.low[right]))
    # Every remaining rank needs a stage on either side of the middle.
    steps = np.arange(ranks + 1)
    high[left] = np.minimum(high[left], position - steps[::-1])
    low[ranks:] = np.maximum(low[ranks:], position + steps)
    low[ranks] = high[ranks] = position
    low[-1] = high[-1] = end
    down = np.arange(ranks)
    rank_of = np.concatenate((down, down[::-1]))
    return replace(
        problem, time=reverse(problem.time), memory=reverse(problem.memory), rank_of=rank_of, low=low, high=high
    )


def cut_from_all_pairs(problem: CutProblem, slowest: float, *, capped: bool) -> tuple[Ints | None, float]:
    """Return a cut that takes at most `slowest` and its time; or None and a lower bound for every cut."""
    ranks, end = len(problem.speed), len(problem.time) - 1
    limits = work_limits(slowest, problem.speed)
    pairs = [Pairs(np.zeros(1, dtype=np.int64), np.full(1, end))]
    refused = np.inf
    for rank in range(ranks - 1):
        step = Step(problem, rank, limits[rank], pairs[-1])
        after, outside = _candidates(step, limits)
        refused = min(refused, outside)
        if len(after.a):
            work, needed = step.by_both(after) if capped else step.by_time(after)
            above = needed[(needed > limits[rank]) & np.isfinite(needed)]
            refused = min(refused, float(np.min(above, initial=np.inf)) / problem.speed[rank])
            after = Pairs(after.a[work <= limits[rank]], after.c[work <= limits[rank]])
        if not len(after.a):
            break
        pairs.append(after)
    if len(pairs) == ranks:
        allowed, rejected = last_rank_pairs(problem, pairs[-1], limits[-1], capped)
        refused = min(refused, rejected)
        if len(allowed.a):
            cut = trace_back(problem, [*pairs[:-1], allowed], limits, capped)
            return cut, float(problem.loads(cut).max())
    return None, max(refused, next_above(limits, problem.speed))


def _candidates(step: Step, limits: Floats) -> tuple[Pairs, float]:
    """Return the pairs that a rank may leave, judged by sums of limits, and the smallest time they refuse."""
    problem, rank, before, limit = step.problem, step.rank, step.before, step.limit
    time, ranks, depth = problem.time, len(problem.speed), rank + 1
    end, speed = len(time) - 1, problem.speed[rank]
    refused = np.inf
    # How far this rank gets on one side alone.
    first, last = max(int(problem.low[depth]), int(before.a[0]) + 1), int(problem.high[depth])
    farthest = int(np.searchsorted(time, time[before.a[-1]] + limit, side="right"))
    if farthest <= last:
        refused, last = (time[farthest] - time[before.a[-1]]) / speed, farthest - 1
    nearest = int(before.c.min())
    left, right = int(problem.low[-1 - depth]), min(int(problem.high[-1 - depth]), int(before.c.max()) - 1)
    farthest = int(np.searchsorted(time, time[nearest] - limit, side="left"))
    if farthest > left:
        refused, left = min(refused, (time[nearest] - time[farthest - 1]) / speed), farthest
    a = np.arange(first, last + 1)
    low, high = np.maximum(left, a + 2 * (ranks - depth)), np.full(len(a), right)
    # Neither the ranks so far nor the later ranks exceed their limits.
    work_after, later = time[end] - limits[:depth].sum(), limits[depth:].sum()
    lower = np.searchsorted(time, time[a] + work_after, side="left")
    upper = np.searchsorted(time, time[a] + later, side="right") - 1
    is_limited = (lower > low) & (low <= high)
    work = time[end] - (time[np.minimum(lower, high + 1)[is_limited] - 1] - time[a[is_limited]])
    refused = min(refused, (np.min(work, initial=np.inf) - depth) / problem.speed[:depth].sum())
    is_limited = (upper < high) & (low <= high)
    work = time[np.maximum(upper, low - 1)[is_limited] + 1] - time[a[is_limited]]
    refused = min(refused, (np.min(work, initial=np.inf) - ranks) / problem.speed[depth:].sum())
    low, high = np.maximum(low, lower), np.minimum(high, upper)
    counts = np.maximum(high - low + 1, 0)
    starts = np.cumsum(counts) - counts
    return Pairs(np.repeat(a, counts), np.arange(int(counts.sum())) - np.repeat(starts - low, counts)), float(refused)
