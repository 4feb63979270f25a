"""Lower bounds from crossings: under a tight cap, forwards that go down meet gradients that come up.

Let m < n be two microbatches. If F(n) ends before I(m) starts on a rank, it does on every rank above, too: F(n) was
there earlier, and I(m) comes there later. So there is one rank, r, down to which F(n) is before I(m); below it, I(m) is
before F(n). They cross between r and r+1:

    rank q     F(m) ·· F(n) ················ I(m) F(n+)      F(n+) waits for the memory of I(m)
    rank r          F(m)  F(n) ········ I(m)                 above the crossing, I(m) waits for F(n)
    rank r+1            F(m) ···· I(m) F(n)                  below the crossing, F(n) waits for I(m)
    rank P−1               F(m) I(m)     F(n) I(n)

Let S be the later of the end of F(n) on r and the end of I(m) on r+1. Both F(n) on r+1 and I(m) on r start at S or
later: one of them after an action of its own rank, the other after a transfer. If rank q has memory for F(n+) only
after I(m), then F(n+) crosses I(n) between some r' and r'+1, and the two ends whose later one is S' follow from S:

    below   F(n) goes from r+1 to the last rank, and I(n) comes up to r'+1
    above   I(m) goes from r up to q, where it makes room, and F(n+) goes down to r'

So S' − S is at least the longer of the two, whatever r and r' are. The shorter the one, the longer the other: together
they take a round trip, and a crossing lies between two ranks, never within one. The shortest path over all r, for the
chain of crossings of m and n, n and m's successor, m's and n's successors, …, bounds when each F of rank q can start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from stageline.timeline.costs import Floats

if TYPE_CHECKING:
    from stageline.synthesis.bounds import Relaxation, Times

Floors: TypeAlias = "dict[tuple[int, int], float]"
"""By stage and microbatch, a time before which its F cannot start."""
MAX_RANKS_EXAMINED, MAX_CHAINS = 3, 120
"""Ranks whose memory is examined: those that limit the number of microbatches per time the most; and chains of each."""


@dataclass(frozen=True, eq=False)
class Crossings:
    """The crossings of a problem with one stage per rank, above which rank q limits the memory."""

    relaxation: Relaxation
    heads: Times
    rank: int
    """The rank q."""

    @cached_property
    def _times(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Durations of F and I, and of their transfers, of the ranks from q on: one row per rank."""
        problem, (forward, back, _) = self.relaxation.problem, self.relaxation.halves
        rows = (forward, back, problem.forward_hop, problem.backward_hop)
        first, second, third, fourth = (np.asarray(row[self.rank :], dtype=np.float64) for row in rows)
        return first, second, third, fourth

    @cached_property
    def _paths(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Per crossing (a row) and microbatch: F and I below it, then F and I above it.

        Row x is the crossing between ranks q+x−1 and q+x: row 0 lies above rank q, the last one below the last rank.
        """
        forward, back, forward_hop, backward_hop = self._times
        nothing = np.zeros((1, forward.shape[1]))

        def below(times: Floats, hops: Floats) -> Floats:
            total = np.concatenate([np.cumsum(times[::-1], axis=0)[::-1], nothing])
            between = np.concatenate([np.cumsum(hops[::-1], axis=0)[::-1], nothing])
            sums: Floats = total + between
            return sums

        def above(times: Floats, hops: Floats) -> Floats:
            sums: Floats = np.concatenate([nothing, np.cumsum(times, axis=0)])
            sums[2:] += np.cumsum(hops, axis=0)
            return sums

        # The output of rank s costs hop s on the way down; its gradient costs hop s+1 on the way up.
        down, up = forward_hop[:-1], backward_hop[1:]
        return (
            below(forward, np.concatenate([down, nothing])),
            below(back, np.concatenate([up, nothing])),
            above(forward, down),
            above(back, up),
        )

    @cached_property
    def successor(self) -> list[int]:
        """For every I, the first F of the same rank that must wait for it; the number of microbatches if none does."""
        count = self.relaxation.problem.microbatches
        successor = [count] * count
        for m, edges in enumerate(self.relaxation.edges[self.rank]):
            for back in reversed(range(edges[0].backwards if edges else 0)):
                if successor[back] < count:
                    break
                successor[back] = m
        return successor

    def room(self, m: int, n: int) -> float:
        """Return the least time from the end of I(m) to the start of F(n): rank q runs the other I and W it needs."""
        _, back, weight = (table[self.rank] for table in self.relaxation.halves)
        least = np.inf
        for backs, weights in self.relaxation.choices(self.rank, n):
            others = sum(back[m + 1 : backs])
            if others >= least:
                break
            least = min(least, others + sum(weight[m:weights]))
        return float(least) if least < np.inf else 0.0

    def _ends(self, m: int, n: int) -> Floats:
        """Return, per crossing of I(m) and F(n), the earliest time at which both ends before it have passed."""
        forward, back, *_ = self._times
        ends = np.full(len(forward) + 1, -np.inf)
        ends[:-1] = [row[m] for row in self.heads.back[self.rank :]] + back[:, m]
        ends[1:] = np.maximum(ends[1:], [row[n] for row in self.heads.forward[self.rank :]] + forward[:, n])
        return ends

    def floors(self, m: int, n: int) -> Iterator[tuple[int, float]]:
        """Yield microbatches, each with a time before which rank q cannot start its F, from the chain of m and n."""
        forward, back, *_ = self._times
        forward_below, back_below, forward_above, back_above = self._paths
        count = len(self.successor)
        ends = self._ends(m, n)
        while m < n < (following := self.successor[m]) < count:
            to_room = back_above[:, m] + self.room(m, following)
            to_gradient = forward_below[:, n].copy()
            # If they cross above rank q, it runs F(n) between I(m) and F(n+); if they cross below the last rank, it is
            # the last rank that runs I(m) between F(n) and I(n).
            to_room[0] += forward[0, n]
            to_gradient[-1] += back[-1, m]
            yield following, float((ends + to_room).min())
            below = to_gradient[:, None] + back_below[None, :, n]
            above = to_room[:, None] + forward_above[None, :, following]
            # Above rank q there is no F to wait for, and below the last rank there is no I.
            below[:, -1] = -np.inf
            above[:, 0] = -np.inf
            ends = np.maximum((ends[:, None] + np.maximum(below, above)).min(axis=0), self._ends(n, following))
            m, n = n, following


def floors_of(relaxation: Relaxation, heads: Times) -> Floors:
    """Return times before which F cannot start, from the crossings of one-stage ranks whose memory is tight."""
    problem = relaxation.problem
    if problem.chunks > 1 or problem.costs.overlap is not None or problem.microbatches < 3:
        return {}
    floors: Floors = {}
    for rank in tight_ranks(relaxation):
        crossings = Crossings(relaxation, heads, rank)
        for first, second in islice(combinations(range(crossings.successor[0]), 2), MAX_CHAINS):
            for m, time in crossings.floors(first, second):
                floors[rank, m] = max(time, floors.get((rank, m), 0.0))
    return floors


def tight_ranks(relaxation: Relaxation) -> list[int]:
    """Return the ranks whose round trip is the longest for the number of microbatches that fit."""
    problem, (forward, back, _) = relaxation.problem, relaxation.halves
    lengths = []
    trip = 0.0
    for rank in reversed(range(problem.ranks)):
        trip += forward[rank][0] + back[rank][0] + problem.forward_hop[rank][0] + problem.backward_hop[rank][0]
        fitting = next((m for m, edges in enumerate(relaxation.edges[rank]) if edges and edges[0].backwards), 0)
        if fitting > 1:
            lengths.append((trip / fitting, rank))
    return [rank for _, rank in sorted(lengths, reverse=True)[:MAX_RANKS_EXAMINED]]
