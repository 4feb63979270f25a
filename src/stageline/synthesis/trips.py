"""Lower bounds from trips: how a few microbatches in flight delay each other on their way down the ranks and back.

Under a tight cap, an F of rank q waits until the I of an earlier microbatch has made room. So a rank has slots, and one
microbatch after the other takes a slot for a trip of 2R steps: F on the R ranks from q down, then I back up.

    slot 0   F F F F I I I I │ F F F F I I I I │ …       a step starts after the one before it, and after the
    slot 1     F F F F I I I I │ F F F F I I I I │ …     same step of the slot before it; a rank runs one at a time

All but a few slots are left out, and so are W, which can only make a step shorter. To prove that no schedule reaches a
target, all orders of the steps are tried, in the order of their starts. The state is how many steps every slot has
run; each way to come to it is the end of the last step of every slot, and the start of the latest one. No step starts
before its head, and none so late that its tail exceeds the target. A state keeps a limited number of ways. The two most
similar become one that is at least as early as both: later steps can only start earlier, so no order is lost. If none
reaches the end, no schedule reaches the target.

A step may only start once its rank is free. As starts are in order, only the last step of a slot can still be running:
when a slot has gone on to another rank, its later step has started, so its earlier one has ended.

The earliest start of a step over all states is a head for schedules that reach the target. The same search backwards in
time, from the last step to the first, then gives tails; it excludes more, as it begins with these heads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from stageline.synthesis.bounds import Relaxation, Times, heads_of, tails_of
from stageline.synthesis.crossings import Crossings, tight_ranks
from stageline.synthesis.problem import SLACK, Problem, Table

State: TypeAlias = tuple[int, ...]
"""The number of steps that every slot has run."""
Way: TypeAlias = tuple[tuple[float, ...], float]
"""When the last step of every slot ended, and when the latest one started."""
FIRST_SHARE, SMALLEST_SHARE, LARGEST_SHARE = 0.25, 0.02, 0.9
"""The share of the gap that the first attempt tries to close, and the limits of those after it."""
MAX_SLOTS, MAX_WAYS, MIN_WAYS = 4, 64, 2
"""The largest number of slots that are examined together, and the largest and smallest number of ways of a state."""


@dataclass(frozen=True)
class Trips:
    """The trips of some slots. In every table, a row is a step and a column is a microbatch, slot after slot."""

    slots: int
    ranks: list[int]
    """The rank of every step."""
    times: Table
    waits: Table
    """The least time from the end of the step before it to the start of a step."""
    heads: Table
    """The earliest starts."""
    latest: Table
    """The latest starts with which the target can be reached."""

    def reversed(self) -> Trips:
        """Return the same trips backwards in time: a step starts when it ended, with the sign changed."""
        steps, count = len(self.ranks), len(self.times[0])
        waits = [[0.0] * count for _ in range(steps)]
        for step in range(1, steps):
            waits[step] = self.waits[steps - step][::-1]
        for column in range(count - self.slots):
            waits[0][count - 1 - column] = self.waits[0][column + self.slots]
        heads, latest = (
            [
                [-start - time for start, time in zip(*rows, strict=True)][::-1]
                for rows in zip(table, self.times, strict=True)
            ][::-1]
            for table in (self.latest, self.heads)
        )
        return Trips(self.slots, self.ranks[::-1], [row[::-1] for row in self.times[::-1]], waits, heads, latest)

    def _by_slot(self, table: Table) -> Table:
        """Return one row per slot, with all steps of its trips."""
        return [
            [row[column] for column in range(slot, len(table[0]), self.slots) for row in table]
            for slot in range(self.slots)
        ]

    def search(self, max_ways: int, max_work: float, is_over: Callable[[], bool]) -> tuple[Table | None, int]:
        """Return the heads for schedules that reach the target, None if there are none; and the number of ways tried.

        If it is over before the end, or takes too much work, the heads are those from before.
        """
        steps, slots = len(self.ranks), self.slots
        times, waits, heads, latest = map(self._by_slot, (self.times, self.waits, self.heads, self.latest))
        earliest = [[math.inf] * len(row) for row in times]
        last = tuple(map(len, times))
        layer: dict[State, list[Way]] = {(0,) * slots: [((-math.inf,) * slots, -math.inf)]}
        work = 0
        while layer and last not in layer:
            if work > max_work or is_over():
                return self.heads, work
            following: dict[State, list[Way]] = {}
            for state, ways in layer.items():
                for slot, step in enumerate(state):
                    before = state[slot - 1] if slot else state[-1] + steps
                    if step == last[slot] or before <= step:
                        continue
                    work += len(ways)
                    rank = self.ranks[step % steps]
                    same_rank = [
                        other
                        for other, done in enumerate(state)
                        if other != slot and done and self.ranks[(done - 1) % steps] == rank
                    ]
                    bounds = (waits[slot][step], heads[slot][step], latest[slot][step], times[slot][step])
                    start, reached = _reached(ways, slot, same_rank, bounds)
                    earliest[slot][step] = min(earliest[slot][step], start)
                    if reached:
                        known = following.setdefault((*state[:slot], step + 1, *state[slot + 1 :]), [])
                        for way in reached:
                            _keep(known, way, max_ways)
            layer = following
        if not layer:
            return None, work
        return [
            [max(head, earliest[column % slots][column // slots * steps + step]) for column, head in enumerate(row)]
            for step, row in enumerate(self.heads)
        ], work


def _reached(
    ways: list[Way], slot: int, same_rank: list[int], bounds: tuple[float, float, float, float]
) -> tuple[float, list[Way]]:
    """Return the earliest start of the next step of a slot, and the ways after it that can reach the target."""
    wait, head, latest, time = bounds
    earliest, reached = math.inf, []
    for ends, now in ways:
        start = max(ends[slot] + wait, now, head)
        for other in same_rank:
            if ends[other] > start:
                start = ends[other]
        if start <= latest:
            if start < earliest:
                earliest = start
            reached.append(((*ends[:slot], start + time, *ends[slot + 1 :]), start))
    return earliest, reached


def _keep(ways: list[Way], way: Way, most: int) -> None:
    """Keep a way unless another is at least as early; if there are too many, merge it with the most similar one."""
    ends, now = way
    nearest, least = 0, math.inf
    for index, (other_ends, other_now) in enumerate(ways):
        distance = abs(other_now - now)
        is_later, is_earlier = other_now <= now, other_now >= now
        for other_end, end in zip(other_ends, ends, strict=True):
            if other_end < end:
                is_earlier = False
                if other_end > -math.inf:
                    distance += end - other_end
            elif other_end > end:
                is_later = False
                if end > -math.inf:
                    distance += other_end - end
        if is_later:
            return
        if is_earlier:
            ways[index] = way
            return
        if distance < least:
            nearest, least = index, distance
    if len(ways) < most:
        ways.append(way)
        return
    other_ends, other_now = ways[nearest]
    ways[nearest] = tuple(map(min, ends, other_ends)), min(now, other_now)


@dataclass
class TripBounds:
    """Proofs that no schedule reaches a target; for a problem with one stage per rank."""

    problem: Problem
    dice: random.Random
    share: float = FIRST_SHARE
    """How much of the gap the next attempt tries to close."""
    favourites: tuple[int, ...] = ()
    """The slots of the last attempt that was a success."""
    was_success: bool = False
    """Whether the last attempt was one."""
    work: float = field(default=0.0, init=False)
    """The work of the last attempt, in ways."""

    @cached_property
    def _relaxation(self) -> Relaxation:
        return Relaxation(self.problem)

    @cached_property
    def rank(self) -> int:
        """The rank q; -1 if memory is tight on none."""
        return next(iter(tight_ranks(self._relaxation)), -1)

    @cached_property
    def _heads(self) -> Times:
        return heads_of(self._relaxation)

    @cached_property
    def _tails(self) -> Times:
        return tails_of(self._relaxation, self.rank if self.problem.objective == "span" else None)

    @cached_property
    def _crossings(self) -> Crossings:
        return Crossings(self._relaxation, self._heads, self.rank)

    @property
    def num_slots(self) -> int:
        """How many F the rank runs before one must wait for an I; 0 if memory is tight on none."""
        return 0 if self.rank < 0 else self._crossings.successor[0]

    def trips(self, chosen: tuple[int, ...], target: float) -> Trips:
        """Return the trips of the chosen slots."""
        problem, relaxation, crossings = self.problem, self._relaxation, self._crossings
        columns, rooms = list(chosen), [0.0] * len(chosen)
        while True:
            # The successor of the earliest microbatch in flight; if two I make room together, the trips end there.
            m = columns[-len(chosen)]
            following = crossings.successor[m]
            if following >= problem.microbatches or following <= columns[-1]:
                break
            rooms.append(crossings.room(m, following))
            columns.append(following)
        down = range(self.rank, problem.ranks)
        begin = self._heads.forward[self.rank][0] if problem.objective == "span" else 0.0
        limit = (target + begin) * (1 + SLACK)
        ranks, times, waits, heads, latest = [*down, *reversed(down)], [], [], [], []
        for step, rank in enumerate(ranks):
            kind = int(step >= len(down))
            length = [relaxation.halves[kind][rank][m] for m in columns]
            tails = [self._tails[kind][rank][m] for m in columns]
            times.append(length)
            heads.append([self._heads[kind][rank][m] for m in columns])
            latest.append([limit - time - tail for time, tail in zip(length, tails, strict=True)])
            if step == 0:
                waits.append(rooms)
            elif step == len(down):
                waits.append([0.0] * len(columns))
            else:
                hops = problem.backward_hop[rank + 1] if kind else problem.forward_hop[rank - 1]
                waits.append([hops[m] for m in columns])
        return Trips(len(chosen), ranks, times, waits, heads, latest)

    def excludes(
        self, chosen: tuple[int, ...], target: float, max_ways: int, max_work: float, is_over: Callable[[], bool]
    ) -> bool:
        """Whether the chosen slots prove that every schedule takes longer than the target."""
        trips = self.trips(chosen, target)
        self.work = 0.0
        for _ in range(2):
            if is_over():
                return False
            heads, work = trips.search(max_ways, max_work, is_over)
            self.work += work
            if heads is None:
                return True
            trips = replace(trips, heads=heads).reversed()
        return False

    def attempt(self, low: float, high: float, work: float, is_over: Callable[[], bool]) -> float:
        """Return a lower bound, at least `low`, after about so much work; `high` is the best known value."""
        chosen = self._chosen_slots(work)
        if not chosen:
            self.work = work
            return low
        max_ways = min(MAX_WAYS, max(1, int(work / self._states(len(chosen)))))
        target = low + self.share * (high - low)
        self.was_success = self.excludes(chosen, target, max_ways, 2 * work, is_over)
        if self.was_success:
            self.share, self.favourites = min(LARGEST_SHARE, 1.6 * self.share), chosen
            return target
        self.share = max(SMALLEST_SHARE, 0.7 * self.share)
        return low

    def _states(self, num_chosen: int) -> float:
        """Estimate the number of ways tried if every state keeps one."""
        steps = 2.0 * (self.problem.ranks - self.rank)
        rounds = self.problem.microbatches / self.num_slots
        return num_chosen * rounds * steps**num_chosen / math.factorial(num_chosen - 1)

    def _chosen_slots(self, work: float) -> tuple[int, ...]:
        """Choose slots, few enough for so much work: those of an earlier success, or others at random.

        The slot of the last microbatch is always one of them.
        """
        if self.was_success or (self.favourites and self.dice.random() < 0.5):
            return self.favourites
        total = self.num_slots
        numbers = [num for num in range(2, min(MAX_SLOTS, total) + 1) if self._states(num) * MIN_WAYS < work]
        if not numbers:
            return ()
        last = (self.problem.microbatches - 1) % total
        others = [slot for slot in range(total) if slot != last]
        return tuple(sorted([last, *self.dice.sample(others, self.dice.choice(numbers) - 1)]))
