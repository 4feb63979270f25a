"""Cut a chain of layers into stages: exact for one stage per rank, a search for all other shapes.

A cut of n layers into S stages is S + 1 positions, from 0 to n: stage s holds the layers from position s up to position
s + 1. All values are integers (see `to_integers`), so their sums are exact in any order.
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
Oracle: TypeAlias = Callable[[float], tuple[Ints | None, float]]

BITS = 48
"""The sum of all costs has this many bits: far finer than any measurement, and sums are exact."""
MAX_DENSE_COLUMNS = 40
"""Up to this many entries per row, all are evaluated at once."""
MAX_ROUNDS = 20
"""Maximum number of passes over all windows; three are usually enough."""


@dataclass(frozen=True)
class CutProblem:
    """Layers to cut into stages, and the ranks that hold them; times and bytes are prefix sums over layers."""

    time: Floats
    memory: Floats
    rank_of: Ints
    """The rank of every stage."""
    speed: Floats
    caps: Floats
    """The memory cap of every rank; infinite where there is none."""
    low: Ints
    high: Ints
    """The allowed range of every position, such that no stage is empty and pinned layers are in their stages."""

    def loads(self, cut: Ints) -> Floats:
        """Return the time of every rank."""
        return np.asarray(self._sums(self.time, cut) / self.speed)

    def fits(self, cut: Ints) -> bool:
        """Whether every rank is within its memory cap."""
        return bool((self._sums(self.memory, cut) <= self.caps).all())

    def _sums(self, prefix: Floats, cut: Ints) -> Floats:
        return sums(self.rank_of, np.diff(prefix[cut]), len(self.speed))

    def rating(self, cut: Ints) -> tuple[float, float]:
        """Return the value to minimise: the slowest rank, then the sum of squares over ranks and stages."""
        loads, stage_times = self.loads(cut), np.diff(self.time[cut]) / self.speed[self.rank_of]
        chunks = len(stage_times) / len(loads)
        return float(loads.max()), float((loads**2).sum() + chunks * (stage_times**2).sum())

    def by_memory(self, scale: Floats | None = None) -> CutProblem:
        """Return the problem of balancing memory, relative to `scale` or to the caps, in place of time."""
        if scale is None:
            scale = np.clip(self.caps, 0.5, max(self.memory[-1], 1.0))
        return replace(self, time=self.memory, speed=scale, caps=np.full(len(self.caps), np.inf))


@dataclass(frozen=True)
class Chain:
    """A window of stages on distinct ranks; a rank may have other stages outside the window."""

    time: Floats
    memory: Floats
    speed: Floats
    base: Floats
    """The work of the rank's other stages."""
    room: Floats
    """The memory that the rank has left for this stage."""
    low: Ints
    high: Ints

    @property
    def bound(self) -> float:
        """A lower bound on the time of the slowest rank."""
        total = self.base.sum() + self.time[-1] - self.time[0]
        return max(float(total / self.speed.sum()), float((self.base / self.speed).max()))


def to_integers(values: Floats, bits: int = BITS) -> tuple[Floats, int]:
    """Scale values by a power of two and round them; the sum has about `bits` bits. Return them and the exponent."""
    total = float(values.sum())
    power = bits - int(np.frexp(total)[1]) if total else 0
    return np.rint(np.ldexp(values, power)), power


def prefix_sums(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, 2, … values."""
    return np.concatenate(([0.0], np.cumsum(values)))


def sums(rank_of: Ints, values: Floats, ranks: int) -> Floats:
    """Return the sum of the values of every rank."""
    return np.asarray(np.bincount(rank_of, values, minlength=ranks), dtype=np.float64)


def work_limits(slowest: float, speed: Floats) -> Floats:
    """Return the work each rank completes in this time; rounding recovers the work that a time was computed from."""
    return np.rint(slowest * speed)


def next_above(limits: Floats, speed: Floats) -> float:
    """Return the smallest time in which some rank completes more than its limit."""
    return float(((limits + 1) / speed).min())


def time_bound(problem: CutProblem) -> float:
    """Return a lower bound on the time of the slowest rank: the maximum of several simple bounds."""
    costs = np.sort(np.diff(problem.time))
    ranks, layers = len(problem.speed), len(costs)
    chunks = len(problem.rank_of) // ranks
    # All work at full speed; the largest layer plus the smallest others its rank must hold, on the fastest rank.
    values = [costs.sum() / problem.speed.sum(), (costs[-1] + costs[: chunks - 1].sum()) / problem.speed.max()]
    # Layers whose stage is fixed: the first, the last, pinned ones, and those between two pins of one stage.
    first, last = problem.high[:-1], np.maximum(problem.low[1:], problem.high[:-1])
    certain = sums(problem.rank_of, problem.time[last] - problem.time[first], ranks)
    values.append((certain / problem.speed).max())
    if (problem.speed == problem.speed[0]).all():
        # Of the m largest layers, some rank holds at least m / ranks, rounded up.
        largest = prefix_sums(costs[::-1])
        count = np.arange(1, layers + 1)
        values.append((largest[count] - largest[count - -(-count // ranks)]).max() / problem.speed[0])
    return float(max(values))


def minimise(oracle: Oracle, low: float, known: tuple[Ints, float] | None = None) -> Ints | None:
    """Find the cut with the fastest slowest rank by bisection; return None if there is no cut at all.

    `oracle(limit)` returns a cut that takes at most `limit` and the time it takes, or None and a lower bound above
    `limit`. `low` is a lower bound too. `known` is a cut and the time it takes.
    """
    best, high = (None, np.inf) if known is None else known
    limit, step = low, low / 4096
    while True:
        if low >= high:
            return best
        cut, value = oracle(limit)
        if cut is not None:
            best, high = cut, min(value, limit)
        else:
            low = value
        if low == np.inf:
            return best
        if high == np.inf:
            step = max(4 * step, low / 4096)
            limit = low + step
        else:
            limit = (low + high) / 2 if (low + high) / 2 < high else low


def reachable(chain: Chain, limits: Floats) -> tuple[list[Ints], float]:
    """Return, for every cut, the positions within the limits of the ranks, and the smallest time that was refused.

    The best predecessor of a position is the last reachable one before it: it leaves the least work and memory to this
    stage. The work behind a position must not exceed the limits of the later stages.
    """
    time, memory, stages = chain.time, chain.memory, len(limits)
    share = limits - chain.base
    later = prefix_sums(share[::-1])[::-1]
    earliest = np.searchsorted(time, time[-1] - later, side="left")
    excess = chain.base.sum() + time[-1] - stages
    current, sets, refused = np.zeros(1, dtype=np.int64), [np.zeros(1, dtype=np.int64)], np.inf
    for stage in range(stages):
        first = max(int(chain.low[stage + 1]), int(current[0]) + 1)
        last = min(int(chain.high[stage + 1]), len(time) - 1)
        if earliest[stage + 1] > first:
            first = int(earliest[stage + 1])
            completed = chain.base[: stage + 1].sum() + time[first - 1]
            refused = min(refused, (excess - completed) / chain.speed[stage + 1 :].sum())
        farthest = int(np.searchsorted(time, time[current[-1]] + share[stage], side="right"))
        if farthest <= last:
            refused = min(refused, (chain.base[stage] + time[farthest] - time[current[-1]]) / chain.speed[stage])
            last = farthest - 1
        positions = np.arange(first, last + 1)
        previous = current[np.searchsorted(current, positions, side="left") - 1]
        work, room = time[positions] - time[previous], memory[positions] - memory[previous] <= chain.room[stage]
        allowed = room & (work <= share[stage])
        rejected = np.min(work[room & ~allowed], initial=np.inf)
        refused = min(refused, (chain.base[stage] + rejected) / chain.speed[stage])
        current = positions[allowed]
        sets.append(current)
        if not len(current):
            break
    return sets, float(refused)


def cut_chain(chain: Chain, known: Ints | None = None) -> Ints | None:
    """Return the best cut of a window (least time of the slowest rank, then sum of squares); None if none fits.

    `known` is a cut that satisfies all constraints.
    """

    def oracle(slowest: float) -> tuple[Ints | None, float]:
        limits = work_limits(slowest, chain.speed)
        sets, refused = reachable(chain, limits)
        if not len(sets[-1]):
            return None, max(refused, next_above(limits, chain.speed))
        cut = _trace_back(sets)
        return cut, _slowest(chain, cut)

    best = minimise(oracle, chain.bound, None if known is None else (known, _slowest(chain, known)))
    if best is None:
        return None
    limits = work_limits(_slowest(chain, best), chain.speed)
    return _evenest(chain, reachable(chain, limits)[0], limits)


def _slowest(chain: Chain, cut: Ints) -> float:
    return float(((chain.base + np.diff(chain.time[cut])) / chain.speed).max())


def _trace_back(sets: list[Ints]) -> Ints:
    """Return one cut through the reachable positions."""
    cut = [int(sets[-1][-1])]
    for positions in sets[-2::-1]:
        cut.append(int(positions[np.searchsorted(positions, cut[-1], side="left") - 1]))
    return np.array(cut[::-1])


def _evenest(chain: Chain, positions: list[Ints], limits: Floats) -> Ints:
    """Return the cut within the limits that has the smallest sum of squares."""
    value = np.zeros(1)
    best = []
    for stage, (starts, stops) in enumerate(pairwise(positions)):
        # The starts from which a stage may reach a stop are consecutive.
        first = np.maximum(
            np.searchsorted(chain.time[starts], chain.time[stops] - (limits[stage] - chain.base[stage]), side="left"),
            np.searchsorted(chain.memory[starts], chain.memory[stops] - chain.room[stage], side="left"),
        )
        last = np.searchsorted(starts, stops, side="left") - 1
        value, columns = _row_minima(first, last, partial(_squares, chain, stage, stops, starts, value))
        best.append(columns)
    index, cut = 0, [int(positions[-1][0])]
    for columns, starts_of_stage in zip(best[::-1], positions[-2::-1], strict=True):
        index = int(columns[index])
        cut.append(int(starts_of_stage[index]))
    return np.array(cut[::-1])


def _squares(chain: Chain, stage: int, stops: Ints, starts: Ints, before: Floats, row: Ints, column: Ints) -> Floats:
    """Return the sum of squares up to a stage between two positions."""
    work = chain.base[stage] + (chain.time[stops[row]] - chain.time[starts[column]])
    return np.asarray(before[column] + (work / chain.speed[stage]) ** 2)


def _row_minima(first: Ints, last: Ints, entry: Callable[[Ints, Ints], Floats]) -> tuple[Floats, Ints]:
    """Return the minimum of every row between two columns, and its column (the first of several).

    The columns of the minima increase with the rows, because entries are squares of the work between two positions. So
    if there are many entries, every second row, every fourth, … is searched only between the minima of its neighbours.
    """
    rows = len(first)
    value, best = np.full(rows, np.inf), np.zeros(rows, dtype=np.int64)
    is_dense = int((last - first).sum()) <= MAX_DENSE_COLUMNS * rows
    step = 0 if is_dense else 1 << (rows.bit_length() - 1)
    while True:
        row = np.arange(rows) if is_dense else np.arange(step - 1, rows, 2 * step)
        left, right = first[row], last[row]
        if not is_dense:
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


def window(problem: CutProblem, cut: Ints, start: int, stop: int) -> Chain:
    """Return the stages from `start` to `stop` of a cut, on distinct ranks, as a chain to cut again."""
    ranks, count = problem.rank_of[start:stop], len(problem.speed)
    first, last = int(cut[start]), int(cut[stop])
    work, memory = np.diff(problem.time[cut]), np.diff(problem.memory[cut])
    base = sums(problem.rank_of, work, count)[ranks] - work[start:stop]
    room = problem.caps[ranks] - (sums(problem.rank_of, memory, count)[ranks] - memory[start:stop])
    low, high = problem.low[start : stop + 1] - first, problem.high[start : stop + 1] - first
    low[-1] = high[-1] = last - first
    part = slice(first, last + 1)
    return Chain(problem.time[part], problem.memory[part], problem.speed[ranks], base, room, low, high)


def improve(problem: CutProblem, cut: Ints) -> Ints:
    """Recut windows of stages optimally until none improves.

    A window is a maximal run of stages on distinct ranks; windows overlap by half.
    """
    ranks, stages = len(problem.speed), len(problem.rank_of)
    rating = problem.rating(cut)
    for _ in range(MAX_ROUNDS):
        previous_rating = rating
        for start in range(0, stages - 1, max(1, ranks // 2)):
            stop = start + 1
            while stop < stages and problem.rank_of[stop] not in problem.rank_of[start:stop]:
                stop += 1
            part = cut_chain(window(problem, cut, start, stop), cut[start : stop + 1] - cut[start])
            if part is None:
                continue
            candidate = np.concatenate((cut[:start], part + cut[start], cut[stop + 1 :]))
            if problem.rating(candidate) < rating:
                cut, rating = candidate, problem.rating(candidate)
        if rating >= previous_rating:
            break
    return cut
