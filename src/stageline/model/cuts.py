"""Where to cut a chain of layers: exact for one stage a rank, and the search for all other shapes.

A cut of n layers into S stages is S + 1 places, from 0 to n: stage s holds the layers from place s up to place s + 1.
All sums are of whole numbers (see `whole`), so that they are exact in whatever order they are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Test: TypeAlias = Callable[[float], tuple[Ints | None, float]]

BITS = 48
"""The sum of all costs has this many bits: far finer than any measurement, and sums are exact."""
FEW = 40
"""So many entries a row are looked at all at once."""
ROUNDS = 20
"""How often the search goes over all windows, at most; it mostly ends by itself after three."""


@dataclass(frozen=True)
class Problem:
    """Layers to be cut into stages, and the ranks that hold them; times and bytes are running sums over layers."""

    time: Floats
    held: Floats
    rank_of: Ints
    """The rank of every stage."""
    speed: Floats
    caps: Floats
    """What every rank may hold; infinite where nothing was said."""
    low: Ints
    high: Ints
    """Between which places every cut must lie, so that no stage is empty and pinned layers are where they must be."""

    def loads(self, cut: Ints) -> Floats:
        """The time of every rank."""
        return np.asarray(self._sums(self.time, cut) / self.speed)

    def fits(self, cut: Ints) -> bool:
        """Whether every rank may hold what this cut gives it."""
        return bool((self._sums(self.held, cut) <= self.caps).all())

    def _sums(self, running: Floats, cut: Ints) -> Floats:
        return sums(self.rank_of, np.diff(running[cut]), len(self.speed))

    def rating(self, cut: Ints) -> tuple[float, float]:
        """What is made small: the slowest rank, and among equals the sum of squares over ranks and over stages."""
        loads, works = self.loads(cut), np.diff(self.time[cut]) / self.speed[self.rank_of]
        chunks = len(works) / len(loads)
        return float(loads.max()), float((loads**2).sum() + chunks * (works**2).sum())

    def by_memory(self, scale: Floats | None = None) -> Problem:
        """The same layers, where a rank's memory over `scale`, or over its cap, takes the place of its time."""
        if scale is None:
            scale = np.clip(self.caps, 0.5, max(self.held[-1], 1.0))
        return replace(self, time=self.held, speed=scale, caps=np.full(len(self.caps), np.inf))


@dataclass(frozen=True)
class Chain:
    """A window of stages on ranks that are all different; each rank may have more to do outside of the window."""

    time: Floats
    held: Floats
    speed: Floats
    base: Floats
    """The time of other stages of the rank."""
    room: Floats
    """The bytes that the rank may still hold."""
    low: Ints
    high: Ints

    @property
    def bound(self) -> float:
        """No cut makes the slowest rank faster than this."""
        total = self.base.sum() + self.time[-1] - self.time[0]
        return max(float(total / self.speed.sum()), float((self.base / self.speed).max()))


def whole(values: Floats, bits: int = BITS) -> tuple[Floats, int]:
    """Values as whole numbers, times a power of two, whose sum has about so many bits; and that power.

    >>> whole(np.array([0.5, 0.25]), bits=4)
    (array([8., 4.]), 4)
    """
    total = float(values.sum())
    power = bits - int(np.frexp(total)[1]) if total else 0
    return np.rint(np.ldexp(values, power)), power


def running(values: Floats) -> Floats:
    """Sums of the first 0, 1, 2, … values."""
    return np.concatenate(([0.0], np.cumsum(values)))


def sums(rank_of: Ints, values: Floats, ranks: int) -> Floats:
    """The sum of the values of every rank."""
    return np.asarray(np.bincount(rank_of, values, minlength=ranks), dtype=np.float64)


def limits_of(slowest: float, speed: Floats) -> Floats:
    """The work that ranks get done in this time; rounding gives back the work that a time was made from."""
    return np.rint(slowest * speed)


def next_above(limits: Floats, speed: Floats) -> float:
    """The least time in which some rank gets more done; it is above that of the limits, whatever was rounded."""
    return float(((limits + 1) / speed).min())


def bound_of(problem: Problem) -> float:
    """A time that the slowest rank needs in any cut: the largest of several that are easily known."""
    costs = np.sort(np.diff(problem.time))
    ranks, layers = len(problem.speed), len(costs)
    chunks = len(problem.rank_of) // ranks
    # All work at full speed; the largest layer, and the least that its rank must hold beside it, on the fastest rank.
    values = [costs.sum() / problem.speed.sum(), (costs[-1] + costs[: chunks - 1].sum()) / problem.speed.max()]
    # What must be where it is: the first and the last layer, those that are pinned, and what lies between them.
    first, last = problem.high[:-1], np.maximum(problem.low[1:], problem.high[:-1])
    certain = sums(problem.rank_of, problem.time[last] - problem.time[first], ranks)
    values.append((certain / problem.speed).max())
    if (problem.speed == problem.speed[0]).all():
        # Of the m largest layers, some rank holds at least m / ranks, rounded up.
        largest = running(costs[::-1])
        count = np.arange(1, layers + 1)
        values.append((largest[count] - largest[count - -(-count // ranks)]).max() / problem.speed[0])
    return float(max(values))


def least(test: Test, low: float, known: tuple[Ints, float] | None = None) -> Ints | None:
    """The cut whose slowest rank is fastest, by bisection; None if there is no cut at all.

    `test(slowest)` gives a cut that takes at most this, and what it takes; or None, and a time that any cut takes at
    least, which is above `slowest`. `low` is such a time, too; `known` is a cut and what it takes.
    """
    best, high = (None, np.inf) if known is None else known
    limit, step = low, low / 4096
    while True:
        if low >= high:
            return best
        found, value = test(limit)
        if found is not None:
            best, high = found, min(value, limit)
        else:
            low = value
        if low == np.inf:
            return best
        if high == np.inf:
            step = max(4 * step, low / 4096)
            limit = low + step
        else:
            limit = (low + high) / 2 if (low + high) / 2 < high else low


def reach(chain: Chain, limits: Floats) -> tuple[list[Ints], float]:
    """For every cut the places it can have if no rank does more than its limit; and the least time that was refused.

    A place is reached best from the last one before it: that is the least to do, and the least to hold. Behind it must
    be no more than the stages to come can do.
    """
    time, held, stages = chain.time, chain.held, len(limits)
    share = limits - chain.base
    to_come = running(share[::-1])[::-1]
    behind = np.searchsorted(time, time[-1] - to_come, side="left")
    over = chain.base.sum() + time[-1] - stages
    now, sets, refused = np.zeros(1, dtype=np.int64), [np.zeros(1, dtype=np.int64)], np.inf
    for stage in range(stages):
        first, last = max(int(chain.low[stage + 1]), int(now[0]) + 1), min(int(chain.high[stage + 1]), len(time) - 1)
        if behind[stage + 1] > first:
            first = int(behind[stage + 1])
            done = chain.base[: stage + 1].sum() + time[first - 1]
            refused = min(refused, (over - done) / chain.speed[stage + 1 :].sum())
        ahead = int(np.searchsorted(time, time[now[-1]] + share[stage], side="right"))
        if ahead <= last:
            refused = min(refused, (chain.base[stage] + time[ahead] - time[now[-1]]) / chain.speed[stage])
            last = ahead - 1
        places = np.arange(first, last + 1)
        before = now[np.searchsorted(now, places, side="left") - 1]
        work, room = time[places] - time[before], held[places] - held[before] <= chain.room[stage]
        good = room & (work <= share[stage])
        others = np.min(work[room & ~good], initial=np.inf)
        refused = min(refused, (chain.base[stage] + others) / chain.speed[stage])
        now = places[good]
        sets.append(now)
        if not len(now):
            break
    return sets, float(refused)


def cut_chain(chain: Chain, known: Ints | None = None) -> Ints | None:
    """The best cut of a window: the slowest of its ranks as fast as can be, then the smallest sum of squares.

    `known` is a cut that keeps all there is to keep.
    """

    def test(slowest: float) -> tuple[Ints | None, float]:
        limits = limits_of(slowest, chain.speed)
        sets, refused = reach(chain, limits)
        if not len(sets[-1]):
            return None, max(refused, next_above(limits, chain.speed))
        cut = _back(sets)
        return cut, _slowest(chain, cut)

    found = least(test, chain.bound, None if known is None else (known, _slowest(chain, known)))
    if found is None:
        return None
    limits = limits_of(_slowest(chain, found), chain.speed)
    return _most_even(chain, reach(chain, limits)[0], limits)


def _slowest(chain: Chain, cut: Ints) -> float:
    return float(((chain.base + np.diff(chain.time[cut])) / chain.speed).max())


def _back(sets: list[Ints]) -> Ints:
    """Some cut through the places that can be reached."""
    cut = [int(sets[-1][-1])]
    for now in sets[-2::-1]:
        cut.append(int(now[np.searchsorted(now, cut[-1], side="left") - 1]))
    return np.array(cut[::-1])


def _most_even(chain: Chain, places: list[Ints], limits: Floats) -> Ints:
    """Of all cuts within the limits, the one with the smallest sum of squares."""
    value = np.zeros(1)
    best = []
    for stage, (starts, stops) in enumerate(pairwise(places)):
        # Every stop has starts from which the stage may go there, all in a row.
        first = np.maximum(
            np.searchsorted(chain.time[starts], chain.time[stops] - (limits[stage] - chain.base[stage]), side="left"),
            np.searchsorted(chain.held[starts], chain.held[stops] - chain.room[stage], side="left"),
        )
        last = np.searchsorted(starts, stops, side="left") - 1
        value, chosen = _row_minima(first, last, partial(_squares, chain, stage, stops, starts, value))
        best.append(chosen)
    at, cut = 0, [int(places[-1][0])]
    for chosen, columns in zip(best[::-1], places[-2::-1], strict=True):
        at = int(chosen[at])
        cut.append(int(columns[at]))
    return np.array(cut[::-1])


def _squares(chain: Chain, stage: int, stops: Ints, starts: Ints, before: Floats, row: Ints, column: Ints) -> Floats:
    """The sum of squares up to a stage that goes from one place to another."""
    work = chain.base[stage] + (chain.time[stops[row]] - chain.time[starts[column]])
    return np.asarray(before[column] + (work / chain.speed[stage]) ** 2)


def _row_minima(first: Ints, last: Ints, entry: Callable[[Ints, Ints], Floats]) -> tuple[Floats, Ints]:
    """The smallest entry of every row between two columns, and its column, the first if there are several.

    The squares of what lies between two places, and limits on it, make the columns of the minima go up with the rows.
    So where there are many entries, every second row, every fourth, … is searched only between the minima of its
    neighbours.
    """
    rows = len(first)
    value, best = np.full(rows, np.inf), np.zeros(rows, dtype=np.int64)
    few = int((last - first).sum()) <= FEW * rows
    step = 0 if few else 1 << (rows.bit_length() - 1)
    while True:
        row = np.arange(rows) if few else np.arange(step - 1, rows, 2 * step)
        left, right = first[row], last[row]
        if not few:
            left = np.where(row >= step, np.maximum(left, best[row - step]), left)
            right = np.where(row + step < rows, np.minimum(right, best[np.minimum(row + step, rows - 1)]), right)
        counts = right - left + 1
        starts = np.cumsum(counts) - counts
        column = np.arange(int(counts.sum())) - np.repeat(starts - left, counts)
        entries = entry(np.repeat(row, counts), column)
        value[row] = np.minimum.reduceat(entries, starts)
        hits = np.flatnonzero(entries == np.repeat(value[row], counts))
        best[row] = column[hits[np.searchsorted(hits, starts)]]
        step //= 2
        if not step:
            return value, best


def window(problem: Problem, cut: Ints, start: int, stop: int) -> Chain:
    """The stages from `start` to `stop` of a cut, on ranks that are all different, to be cut again."""
    ranks, count = problem.rank_of[start:stop], len(problem.speed)
    first, last = int(cut[start]), int(cut[stop])
    work, held = np.diff(problem.time[cut]), np.diff(problem.held[cut])
    base = sums(problem.rank_of, work, count)[ranks] - work[start:stop]
    room = problem.caps[ranks] - (sums(problem.rank_of, held, count)[ranks] - held[start:stop])
    low, high = problem.low[start : stop + 1] - first, problem.high[start : stop + 1] - first
    low[-1] = high[-1] = last - first
    part = slice(first, last + 1)
    return Chain(problem.time[part], problem.held[part], problem.speed[ranks], base, room, low, high)


def improve(problem: Problem, cut: Ints) -> Ints:
    """Cut windows of the stages again, each as well as can be, until none gets better.

    A window is as many stages in a row as are on different ranks; windows overlap by half.
    """
    ranks, stages = len(problem.speed), len(problem.rank_of)
    rating = problem.rating(cut)
    for _ in range(ROUNDS):
        before = rating
        for start in range(0, stages - 1, max(1, ranks // 2)):
            stop = start + 1
            while stop < stages and problem.rank_of[stop] not in problem.rank_of[start:stop]:
                stop += 1
            found = cut_chain(window(problem, cut, start, stop), cut[start : stop + 1] - cut[start])
            if found is None:
                continue
            tried = np.concatenate((cut[:start], found + cut[start], cut[stop + 1 :]))
            if problem.rating(tried) < rating:
                cut, rating = tried, problem.rating(tried)
        if rating >= before:
            break
    return cut
