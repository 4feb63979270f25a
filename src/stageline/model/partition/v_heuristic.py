"""A fast, good cut for a V placement: of everything that the ranks so far may leave, keep only the smallest.

    positions    a →            ← c          the layers left lie between a and c
    one rank     ···│▒▒▒▒│······│▒▒▒│···     takes from both ends, up to its limit
                 a       a'     c'  c

For every a, only the smallest c is kept: later ranks can almost always do with fewer layers what they can do with more.
This fails only if a stage would be left with a single heavy layer. So the result is a valid cut, but only `v_cuts`,
which keeps all pairs, can prove that no better one exists.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stageline.model.partition.cuts import CutProblem, Floats, Ints, next_above, work_limits


class Pairs(NamedTuple):
    """Positions (a, c), sorted by a, then by c."""

    a: Ints
    c: Ints


def cut_from_front(problem: CutProblem, slowest: float, *, capped: bool) -> tuple[Ints | None, float]:
    """Return a cut that takes at most `slowest` and its time; or None and the next time worth trying."""
    ranks, limits, refused = len(problem.speed), work_limits(slowest, problem.speed), np.inf
    pairs = [Pairs(np.zeros(1, dtype=np.int64), np.full(1, len(problem.time) - 1))]
    for rank in range(ranks - 1):
        after, rejected = _next_front(problem, rank, limits, pairs[-1], capped)
        refused = min(refused, rejected)
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


def last_rank_pairs(problem: CutProblem, pairs: Pairs, limit: float, capped: bool) -> tuple[Pairs, float]:
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


def trace_back(problem: CutProblem, pairs: list[Pairs], limits: Floats, capped: bool) -> Ints:
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
