"""A quick and good cut for a V: of all that the ranks so far may leave behind, only the least is looked at.

    places       a →            ← c          what is left lies between a and c
    one rank     ···│▒▒▒▒│······│▒▒▒│···     takes from both ends of it, up to its limit
                 a       a'     c'  c

For every a only the least c is kept: of fewer layers, later ranks can mostly make what they can make of more. It fails
only where a stage would be left with nothing but one heavy layer, so what is found is a cut, but whether a better one
exists has to be asked once more, with all pairs (see `vee`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stageline.model.cuts import Floats, Ints, Problem, limits_of, next_above


class Pairs(NamedTuple):
    """Places (a, c), sorted by a, then by c."""

    a: Ints
    c: Ints


def ask(problem: Problem, slowest: float, *, capped: bool) -> tuple[Ints | None, float]:
    """A cut that takes at most this and what it takes; or None, and the least time for which the answer may differ."""
    ranks, limits, refused = len(problem.speed), limits_of(slowest, problem.speed), np.inf
    pairs = [Pairs(np.zeros(1, dtype=np.int64), np.full(1, len(problem.time) - 1))]
    for rank in range(ranks - 1):
        after, others = _next(problem, rank, limits, pairs[-1], capped)
        refused = min(refused, others)
        if not len(after.a):
            break
        pairs.append(after)
    if len(pairs) == ranks:
        good, others = last_of(problem, pairs[-1], limits[-1], capped)
        refused = min(refused, others)
        if len(good.a):
            cut = back(problem, [*pairs[:-1], good], limits, capped)
            return cut, float(problem.loads(cut).max())
    return None, max(refused, next_above(limits, problem.speed))


def last_of(problem: Problem, pairs: Pairs, limit: float, capped: bool) -> tuple[Pairs, float]:
    """Of what is left to the last rank, that which it can do; and the least time that was refused."""
    (a, c), ranks = pairs, len(problem.speed)
    ends = problem.time[c] - problem.time[a]
    fits = np.maximum(a + 1, problem.low[ranks]) <= np.minimum(c - 1, problem.high[ranks])
    if capped:
        fits &= problem.held[c] - problem.held[a] <= problem.caps[-1]
    good = fits & (ends <= limit)
    return Pairs(a[good], c[good]), float(np.min(ends[fits & ~good], initial=np.inf)) / float(problem.speed[-1])


def _next(problem: Problem, rank: int, limits: Floats, before: Pairs, capped: bool) -> tuple[Pairs, float]:
    """For every place a' that a rank may leave behind, the least c'; and the least time that was refused."""
    time, held, limit, done = problem.time, problem.held, limits[rank], rank + 1
    last, refused = int(problem.high[done]), np.inf
    reach = int(np.searchsorted(time, time[before.a[-1]] + limit, side="right"))
    if reach <= last:
        refused, last = time[reach] - time[before.a[-1]], reach - 1
    a = np.arange(max(int(problem.low[done]), int(before.a[0]) + 1), last + 1)
    # From which pairs it can come: this rank gets that far on the left, and every stage to come has a layer.
    first = np.searchsorted(time[before.a], time[a] - limit, side="left")
    refused = min(refused, np.min((time[a] - time[before.a[first - 1]])[first > 0], initial=np.inf))
    gap = 2 * (len(limits) - done)
    first = np.maximum(first, np.searchsorted(before.c, a + gap + 1, side="left"))
    if capped:
        first = np.maximum(first, np.searchsorted(held[before.a], held[a] - problem.caps[rank], side="left"))
    final = np.searchsorted(before.a, a - 1, side="right") - 1
    some = first <= final
    a, first, counts = a[some], first[some], (final - first + 1)[some]
    if not len(a):
        return Pairs(a, a), float(refused / problem.speed[rank])
    room = problem.caps[rank] if capped else None
    c, others = _least(problem, limit, room, int(problem.low[-1 - done]), before, a, first, counts)
    c = np.maximum(np.maximum(c, problem.low[-1 - done]), a + gap)
    rest = time[np.minimum(c, len(time) - 1)] - time[a]
    allowed = c <= problem.high[-1 - done]
    enough = rest <= limits[done:].sum()
    more = (np.min(rest[allowed & ~enough], initial=np.inf) - len(limits)) / problem.speed[done:].sum()
    allowed &= enough
    if capped:
        allowed &= held[np.minimum(c, len(time) - 1)] - held[a] <= problem.caps[done:].sum()
    a, c = a[allowed], c[allowed]
    # What a later place leaves behind with no more on the right is less.
    later = np.minimum.accumulate(c[::-1])[::-1]
    kept = c < np.concatenate((later[1:], [len(time)]))
    return Pairs(a[kept], c[kept]), float(min(min(refused, others) / problem.speed[rank], more))


def _least(
    problem: Problem, limit: float, room: float | None, lowest: int, before: Pairs, a: Ints, first: Ints, counts: Ints
) -> tuple[Ints, float]:
    """For every a the least c that can be reached from so many pairs; and the least work that was refused."""
    time, held, far = problem.time, problem.held, len(problem.time)
    starts = np.cumsum(counts) - counts
    source = np.arange(int(counts.sum())) - np.repeat(starts - first, counts)
    work, stop = (time[before.c] - time[before.a])[source], before.c[source]
    # A layer must be left for the right, too.
    work += np.repeat(time[a], counts)
    if room is None:
        least = np.minimum.reduceat(np.where(work - limit <= time[stop - 1], work, np.inf), starts)
        c = np.searchsorted(time, least - limit, side="left")
        less = (c > lowest) & (c < far)
        return c, float(np.min((least - time[c - 1])[less], initial=np.inf))
    by_time = np.searchsorted(time, work - limit, side="left")
    holds = (held[before.c] - held[before.a])[source] + np.repeat(held[a], counts)
    c = np.maximum(by_time, np.searchsorted(held, holds - room, side="left"))
    less = (by_time == c) & (c > lowest)
    refused = float(np.min((work - time[c - 1])[less], initial=np.inf))
    return np.minimum.reduceat(np.where(c < stop, c, far), starts), refused


def back(problem: Problem, pairs: list[Pairs], limits: Floats, capped: bool) -> Ints:
    """A cut through pairs that can be reached; the stages of each rank are as near to half of its share as can be."""
    time, held, ranks = problem.time, problem.held, len(problem.speed)
    share = problem.speed * (time[-1] / problem.speed.sum())
    at = int(np.argmin(np.abs(time[pairs[-1].c] - time[pairs[-1].a] - share[-1])))
    a, c = int(pairs[-1].a[at]), int(pairs[-1].c[at])
    between = np.arange(max(a + 1, problem.low[ranks]), min(c - 1, problem.high[ranks]) + 1)
    middle = int(between[np.argmin(np.abs(2 * time[between] - time[a] - time[c]))])
    left, right = [a, middle], [c]
    for rank in range(ranks - 2, -1, -1):
        start, stop = pairs[rank]
        first, second = time[a] - time[start], time[stop] - time[c]
        allowed = (start < a) & (stop > c) & (first + second <= limits[rank])
        if capped:
            allowed &= held[a] - held[start] + held[stop] - held[c] <= problem.caps[rank]
        uneven = (2 * first - share[rank]) ** 2 + (2 * second - share[rank]) ** 2
        at = int(np.argmin(np.where(allowed, uneven, np.inf)))
        a, c = int(start[at]), int(stop[at])
        left.insert(0, a)
        right.append(c)
    return np.array(left + right)
