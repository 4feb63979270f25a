"""The exact cut for stages that go down the ranks and up again: rank 0 holds both ends, the last rank the middle.

    layers   0 1 2 3 4 5 6 7 8 9 …                          n
    rank     0 0 0│1 1│2 2 2 … the last one … 2 2│1 1 1│0 0
                  a                              c

Ranks are peeled off from the outside. When some of them have their two stages, what is left are the layers from a up
to c, so the places (a, c) that can be reached without any rank doing more than its limit say all there is to know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stageline.model.cuts import Floats, Ints, Problem, least, limits_of, next_above, running
from stageline.model.fronts import Pairs, ask, back, last_of

BUDGET = 1.5e8
"""How much work is spent on where the second of two rounds starts; enough for every place of 200 layers on 16 ranks."""
ROUNDING = 1e-12
"""What is better by no more than this share is not better."""


@dataclass(frozen=True)
class Step:
    """One rank takes its two stages: the pairs before it, and what it may take."""

    problem: Problem
    rank: int
    limit: float
    before: Pairs

    def work(self, pairs: Pairs) -> Floats:
        """What is left to do between a and c."""
        return np.asarray(self.problem.time[pairs.c] - self.problem.time[pairs.a])

    def corner(self, after: Pairs) -> tuple[Ints, Ints, int, int]:
        """For places after the step, the last row and the first column from which they can come; and the origin."""
        top, left = int(self.before.a[0]), int(self.before.c.min())
        row = np.minimum(after.a - 1, self.before.a[-1]) - top
        column = np.maximum(after.c + 1, left) - left
        return row, column, top, left

    def by_time(self, after: Pairs) -> tuple[Floats, Floats]:
        """The least work with which each of these can be reached; and the same, as what was refused."""
        row, column, top, left = self.corner(after)
        rest = np.full((int(self.before.a[-1]) - top + 1, int(self.before.c.max()) - left + 1), np.inf)
        rest[self.before.a - top, self.before.c - left] = self.work(self.before)
        np.minimum.accumulate(rest, axis=0, out=rest)
        backwards = rest[:, ::-1]
        np.minimum.accumulate(backwards, axis=1, out=backwards)
        taken = rest[row, column] - self.work(after)
        return taken, taken

    def by_both(self, after: Pairs) -> tuple[Floats, Floats]:
        """The same where memory counts, too: 0 for what can be reached, infinite for the rest; and what was refused.

        From a row a, a column c' is best reached from the next c in that row: the least to do, and the least to
        hold. That says how far the rank can go on the left; the farthest of all rows up to a' counts.
        """
        row, _, top, _ = self.corner(after)
        time, held, far = self.problem.time, self.problem.held, len(self.problem.time)
        lowest = int(after.c.min())
        source = np.full((int(self.before.a[-1]) - top + 1, int(self.before.c.max()) - lowest + 1), far)
        use = self.before.c > lowest
        source[self.before.a[use] - top, self.before.c[use] - lowest] = self.before.c[use]
        backwards = source[:, ::-1]
        np.minimum.accumulate(backwards, axis=1, out=backwards)
        source[:, :-1] = source[:, 1:]
        source[:, -1] = far
        a, c_after = np.nonzero(source < far)
        c = source[a, c_after]
        right = time[c] - time[c_after + lowest]
        # Most of that is more than the rank can do on the right alone.
        near = right <= self.limit
        least = np.min((right + time[a + top + 1] - time[a + top])[~near], initial=np.inf)
        a, c, c_after, right = a[near], c[near], c_after[near], right[near]
        room = self.problem.caps[self.rank] - (held[c] - held[c_after + lowest])
        by_time = np.searchsorted(time, time[a + top] + (self.limit - right), side="right") - 1
        by_room = np.searchsorted(held, held[a + top] + room, side="right") - 1
        goes = np.zeros(source.shape, dtype=np.int64)
        goes[a, c_after] = np.minimum(by_time, by_room)
        np.maximum.accumulate(goes, axis=0, out=goes)
        reached = goes[row, after.c - lowest] >= after.a
        stopped = (by_time < by_room) & (by_time + 1 < far)
        start = np.maximum(by_time[stopped] + 1, a[stopped] + top + 1)
        refused = time[np.minimum(start, far - 1)] - time[a[stopped] + top] + right[stopped]
        return np.where(reached, 0.0, np.inf), np.append(refused, least)


def cut_vee(problem: Problem, low: float, below: float = np.inf) -> Ints | None:
    """The cut whose slowest rank is fastest, for two stages a rank in a V; None if there is none.

    `low` is a time that the slowest rank takes at least; what is not better than `below` is not looked for.
    """
    capped = bool(np.isfinite(problem.caps).any())
    # Without caps it is quicker; they cost nothing where they are kept anyway, and otherwise it is where to begin.
    begin = low
    for kept in (False, True)[: 1 + capped]:
        if kept and not _has_room(problem):
            return None
        quick = least(partial(ask, problem, capped=kept), begin)
        if not kept and capped and quick is not None and not problem.fits(quick):
            begin = float(problem.loads(quick).max())
            continue
        found = _proven(problem, low, below, quick, kept)
        if found is None or problem.fits(found):
            return found
        begin = low = float(problem.loads(found).max())
    return None


def _has_room(problem: Problem) -> bool:
    """Whether some cut keeps the caps, whatever time it takes."""
    room = problem.by_memory()
    return any(test(room, 1.0, capped=False)[0] is not None for test in (ask, every_pair))


def _proven(problem: Problem, low: float, below: float, quick: Ints | None, capped: bool) -> Ints | None:
    """The best cut, by asking for a better one than that which was found quickly; None if it is not below."""
    test = partial(every_pair, problem, capped=capped)
    slowest = np.inf if quick is None else float(problem.loads(quick).max())
    if min(slowest, below) < np.inf:
        found, value = test(min(slowest, below) * (1 - ROUNDING))
        if found is None:
            return quick if slowest < below * (1 - ROUNDING) else None
        return least(test, low, (found, value))
    return least(test, low)


def cut_rounds(problem: Problem, low: float, start: Ints | None) -> tuple[Ints | None, bool]:
    """The same for stages that go round the ranks twice, and whether it is proven that there is no better cut.

    Where the second round starts is tried place by place, nearest to that of `start` first. For each, the layers of
    the second round are turned around: rank 0 then holds both ends, and what is sought is a V.
    """
    ranks, layers = len(problem.speed), len(problem.time) - 1
    places = np.arange(problem.low[ranks], problem.high[ranks] + 1)
    centre = layers // 2 if start is None else int(start[ranks])
    places = places[np.argsort(np.abs(places - centre), kind="stable")]
    tried = places[: max(1, int(BUDGET / (layers * layers * ranks)))]
    best, slowest = start, np.inf if start is None else problem.rating(start)[0]
    for place in tried.tolist():
        found = cut_vee(_turned(problem, place), low, below=slowest)
        if found is not None:
            cut = np.concatenate((found[: ranks + 1], (place + layers - found[ranks:-1])[::-1]))
            if problem.rating(cut)[0] < slowest:
                best, slowest = cut, problem.rating(cut)[0]
        if slowest <= low:
            break
    return best, len(tried) == len(places)


def _turned(problem: Problem, place: int) -> Problem:
    """The layers from a place on in the opposite order, where the middle of the V must be."""
    ranks, end = len(problem.speed), len(problem.time) - 1

    def turn(sums: Floats) -> Floats:
        steps = np.diff(sums)
        return running(np.concatenate((steps[:place], steps[place:][::-1])))

    left, right = slice(0, ranks + 1), slice(2 * ranks - 1, ranks - 1, -1)
    low = np.concatenate((problem.low[left], place + end - problem.high[right]))
    high = np.concatenate((problem.high[left], place + end - problem.low[right]))
    # A stage for every rank to come on either side of the middle.
    steps = np.arange(ranks + 1)
    high[left] = np.minimum(high[left], place - steps[::-1])
    low[ranks:] = np.maximum(low[ranks:], place + steps)
    low[ranks] = high[ranks] = place
    low[-1] = high[-1] = end
    down = np.arange(ranks)
    rank_of = np.concatenate((down, down[::-1]))
    return replace(problem, time=turn(problem.time), held=turn(problem.held), rank_of=rank_of, low=low, high=high)


def every_pair(problem: Problem, slowest: float, *, capped: bool) -> tuple[Ints | None, float]:
    """A cut that takes at most this and what it takes; or None, and what every cut takes at least."""
    ranks, end = len(problem.speed), len(problem.time) - 1
    limits = limits_of(slowest, problem.speed)
    pairs = [Pairs(np.zeros(1, dtype=np.int64), np.full(1, end))]
    refused = np.inf
    for rank in range(ranks - 1):
        step = Step(problem, rank, limits[rank], pairs[-1])
        after, outside = _candidates(step, limits)
        refused = min(refused, outside)
        if len(after.a):
            work, beyond = step.by_both(after) if capped else step.by_time(after)
            above = beyond[(beyond > limits[rank]) & np.isfinite(beyond)]
            refused = min(refused, float(np.min(above, initial=np.inf)) / problem.speed[rank])
            after = Pairs(after.a[work <= limits[rank]], after.c[work <= limits[rank]])
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


def _candidates(step: Step, limits: Floats) -> tuple[Pairs, float]:
    """Places that a rank may leave behind, as far as sums of limits tell; and the least time refused by them."""
    problem, rank, before, limit = step.problem, step.rank, step.before, step.limit
    time, ranks, done = problem.time, len(problem.speed), rank + 1
    end, speed = len(time) - 1, problem.speed[rank]
    refused = np.inf
    # As far as this rank gets on one side alone.
    first, last = max(int(problem.low[done]), int(before.a[0]) + 1), int(problem.high[done])
    reach = int(np.searchsorted(time, time[before.a[-1]] + limit, side="right"))
    if reach <= last:
        refused, last = (time[reach] - time[before.a[-1]]) / speed, reach - 1
    nearest = int(before.c.min())
    left, right = int(problem.low[-1 - done]), min(int(problem.high[-1 - done]), int(before.c.max()) - 1)
    reach = int(np.searchsorted(time, time[nearest] - limit, side="left"))
    if reach > left:
        refused, left = min(refused, (time[nearest] - time[reach - 1]) / speed), reach
    a = np.arange(first, last + 1)
    low, high = np.maximum(left, a + 2 * (ranks - done)), np.full(len(a), right)
    # The ranks so far have done no more than their limits, and those to come can do no more than theirs.
    left_over, to_come = time[end] - limits[:done].sum(), limits[done:].sum()
    by_done = np.searchsorted(time, time[a] + left_over, side="left")
    by_rest = np.searchsorted(time, time[a] + to_come, side="right") - 1
    more = (by_done > low) & (low <= high)
    work = time[end] - (time[np.minimum(by_done, high + 1)[more] - 1] - time[a[more]])
    refused = min(refused, (np.min(work, initial=np.inf) - done) / problem.speed[:done].sum())
    more = (by_rest < high) & (low <= high)
    work = time[np.maximum(by_rest, low - 1)[more] + 1] - time[a[more]]
    refused = min(refused, (np.min(work, initial=np.inf) - ranks) / problem.speed[done:].sum())
    low, high = np.maximum(low, by_done), np.minimum(high, by_rest)
    counts = np.maximum(high - low + 1, 0)
    starts = np.cumsum(counts) - counts
    return Pairs(np.repeat(a, counts), np.arange(int(counts.sum())) - np.repeat(starts - low, counts)), float(refused)
