"""The exact cut for a V placement: rank 0 holds both ends of the chain, the last rank the middle.

    layers   0 1 2 3 4 5 6 7 8 9 …                          n
    rank     0 0 0│1 1│2 2 2 … the last one … 2 2│1 1 1│0 0
                  a                              c

Ranks are assigned from the outside in. Once some ranks have their two stages, the layers from a up to c are left. So
the pairs (a, c) that can be reached within the ranks' limits describe the state completely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from stageline.model.partition.cuts import CutProblem, Floats, Ints, minimise, next_above, prefix_sums, work_limits

BUDGET = 1.5e8
"""Limit on the work spent on the start of the second round; enough for every position of 200 layers on 16 ranks."""
ROUNDING = 1e-12
"""Relative improvements up to this do not count."""


class Pairs(NamedTuple):
    """Positions (a, c), sorted by a, then by c."""

    a: Ints
    c: Ints


Advance = Callable[[CutProblem, int, Floats, Pairs, bool], tuple[Pairs, float]]
"""Returns the pairs after a rank, given its number, all limits, the pairs before it and whether caps count."""


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
    return _cut(problem, slowest, capped, _next_pairs)


def _cut(problem: CutProblem, slowest: float, capped: bool, advance: Advance) -> tuple[Ints | None, float]:
    """Let every rank take its two stages by `advance`, and return a cut that the pairs lead to."""
    limits, refused = work_limits(slowest, problem.speed), np.inf
    pairs = [Pairs(np.zeros(1, dtype=np.int64), np.full(1, len(problem.time) - 1))]
    for rank in range(len(problem.speed) - 1):
        after, rejected = advance(problem, rank, limits, pairs[-1], capped)
        refused = min(refused, rejected)
        if not len(after.a):
            return None, max(refused, next_above(limits, problem.speed))
        pairs.append(after)
    pairs[-1], rejected = _last_rank_pairs(problem, pairs[-1], limits[-1], capped)
    if not len(pairs[-1].a):
        return None, max(min(refused, rejected), next_above(limits, problem.speed))
    cut = _trace_back(problem, pairs, limits, capped)
    return cut, float(problem.loads(cut).max())


def _next_pairs(problem: CutProblem, rank: int, limits: Floats, before: Pairs, capped: bool) -> tuple[Pairs, float]:
    """Return the pairs that a rank may leave, and the smallest time that was refused."""
    step = Step(problem, rank, limits[rank], before)
    after, refused = _candidates(step, limits)
    if len(after.a):
        work, needed = step.by_both(after) if capped else step.by_time(after)
        above = needed[(needed > limits[rank]) & np.isfinite(needed)]
        refused = min(refused, float(np.min(above, initial=np.inf)) / problem.speed[rank])
        after = Pairs(after.a[work <= limits[rank]], after.c[work <= limits[rank]])
    return after, refused


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


# A fast first pass: for every a, keep only the smallest c. Later ranks can almost always do with fewer layers what they
# can do with more; this fails only if a stage would be left with a single heavy layer. So the result is a valid cut,
# but only the second pass, over all pairs, can prove that no better one exists.
#
#     positions    a →            ← c          the layers left lie between a and c
#     one rank     ···│▒▒▒▒│······│▒▒▒│···     takes from both ends, up to its limit
#                  a       a'     c'  c


def cut_from_front(problem: CutProblem, slowest: float, *, capped: bool) -> tuple[Ints | None, float]:
    """Return a cut that takes at most `slowest` and its time; or None and the next time worth trying."""
    return _cut(problem, slowest, capped, _next_front)


def _last_rank_pairs(problem: CutProblem, pairs: Pairs, limit: float, capped: bool) -> tuple[Pairs, float]:
    """Return the pairs that the last rank can complete, and the smallest time that was refused."""
    (a, c), ranks = pairs, len(problem.speed)
    ends = problem.time[c] - problem.time[a]
    fits = np.maximum(a + 1, problem.low[ranks]) <= np.minimum(c - 1, problem.high[ranks])
    if capped:
        fits &= problem.memory[c] - problem.memory[a] <= problem.caps[-1]
    allowed = fits & (ends <= limit)
    refused = float(np.min(ends[fits & ~allowed], initial=np.inf)) / float(problem.speed[-1])
    return Pairs(a[allowed], c[allowed]), refused


def _next_front(problem: CutProblem, rank: int, limits: Floats, before: Pairs, capped: bool) -> tuple[Pairs, float]:
    """Return, for every a' that a rank may leave, the smallest c', and the smallest time that was refused."""
    time, memory, limit, depth = problem.time, problem.memory, limits[rank], rank + 1
    last, refused = int(problem.high[depth]), np.inf
    farthest = int(np.searchsorted(time, time[before.a[-1]] + limit, side="right"))
    if farthest <= last:
        refused, last = time[farthest] - time[before.a[-1]], farthest - 1
    a = np.arange(max(int(problem.low[depth]), int(before.a[0]) + 1), last + 1)
    # The pairs it can come from: this rank reaches a' on the left, and every later stage has a layer.
    first = np.searchsorted(time[before.a], time[a] - limit, side="left")
    refused = min(refused, np.min((time[a] - time[before.a[first - 1]])[first > 0], initial=np.inf))
    gap = 2 * (len(limits) - depth)
    first = np.maximum(first, np.searchsorted(before.c, a + gap + 1, side="left"))
    if capped:
        first = np.maximum(first, np.searchsorted(memory[before.a], memory[a] - problem.caps[rank], side="left"))
    final = np.searchsorted(before.a, a - 1, side="right") - 1
    has_source = first <= final
    a, first, counts = a[has_source], first[has_source], (final - first + 1)[has_source]
    if not len(a):
        return Pairs(a, a), float(refused / problem.speed[rank])
    room = problem.caps[rank] if capped else None
    c, rejected = _smallest_c(problem, limit, room, int(problem.low[-1 - depth]), before, a, first, counts)
    c = np.maximum(np.maximum(c, problem.low[-1 - depth]), a + gap)
    remaining = time[np.minimum(c, len(time) - 1)] - time[a]
    allowed = c <= problem.high[-1 - depth]
    within_limits = remaining <= limits[depth:].sum()
    later_time = np.min(remaining[allowed & ~within_limits], initial=np.inf) - len(limits)
    later_time /= problem.speed[depth:].sum()
    allowed &= within_limits
    if capped:
        allowed &= memory[np.minimum(c, len(time) - 1)] - memory[a] <= problem.caps[depth:].sum()
    a, c = a[allowed], c[allowed]
    # A later a' with a c' that is no larger leaves fewer layers.
    later = np.minimum.accumulate(c[::-1])[::-1]
    is_minimal = c < np.concatenate((later[1:], [len(time)]))
    return Pairs(a[is_minimal], c[is_minimal]), float(min(min(refused, rejected) / problem.speed[rank], later_time))


def _smallest_c(
    problem: CutProblem,
    limit: float,
    room: float | None,
    lowest: int,
    before: Pairs,
    a: Ints,
    first: Ints,
    counts: Ints,
) -> tuple[Ints, float]:
    """Return, for every a, the smallest c reachable from its pairs, and the smallest work that was refused."""
    time, memory, end = problem.time, problem.memory, len(problem.time)
    starts = np.cumsum(counts) - counts
    source = np.arange(int(counts.sum())) - np.repeat(starts - first, counts)
    work, stop = (time[before.c] - time[before.a])[source], before.c[source]
    # Leave at least one layer for the right side.
    work += np.repeat(time[a], counts)
    if room is None:
        least_work = np.minimum.reduceat(np.where(work - limit <= time[stop - 1], work, np.inf), starts)
        c = np.searchsorted(time, least_work - limit, side="left")
        is_limited = (c > lowest) & (c < end)
        return c, float(np.min((least_work - time[c - 1])[is_limited], initial=np.inf))
    by_time = np.searchsorted(time, work - limit, side="left")
    needed = (memory[before.c] - memory[before.a])[source] + np.repeat(memory[a], counts)
    c = np.maximum(by_time, np.searchsorted(memory, needed - room, side="left"))
    is_limited = (by_time == c) & (c > lowest)
    refused = float(np.min((work - time[c - 1])[is_limited], initial=np.inf))
    return np.minimum.reduceat(np.where(c < stop, c, end), starts), refused


def _trace_back(problem: CutProblem, pairs: list[Pairs], limits: Floats, capped: bool) -> Ints:
    """Return a cut through reachable pairs whose stages are close to half of their rank's share."""
    time, memory, ranks = problem.time, problem.memory, len(problem.speed)
    share = problem.speed * (time[-1] / problem.speed.sum())
    index = int(np.argmin(np.abs(time[pairs[-1].c] - time[pairs[-1].a] - share[-1])))
    a, c = int(pairs[-1].a[index]), int(pairs[-1].c[index])
    between = np.arange(max(a + 1, problem.low[ranks]), min(c - 1, problem.high[ranks]) + 1)
    middle = int(between[np.argmin(np.abs(2 * time[between] - time[a] - time[c]))])
    left, right = [a, middle], [c]
    for rank in range(ranks - 2, -1, -1):
        start, stop = pairs[rank]
        first, second = time[a] - time[start], time[stop] - time[c]
        allowed = (start < a) & (stop > c) & (first + second <= limits[rank])
        if capped:
            allowed &= memory[a] - memory[start] + memory[stop] - memory[c] <= problem.caps[rank]
        uneven = (2 * first - share[rank]) ** 2 + (2 * second - share[rank]) ** 2
        index = int(np.argmin(np.where(allowed, uneven, np.inf)))
        a, c = int(start[index]), int(stop[index])
        left.insert(0, a)
        right.append(c)
    return np.array(left + right)
