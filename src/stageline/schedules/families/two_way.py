"""Families with two directions: chimera, dualpipe and dualpipe-v, which is dualpipe folded onto a V placement.

Half of the microbatches go down the ranks, the others up, and each direction fills the bubble of the other. Every stage
is on two ranks, so the weights are held twice. Each copy of a stage runs the backwards of its own direction in order;
there is no common order of both copies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.placement import Placement
from stageline.schedules.registry import family, require, require_even
from stageline.schedules.runs import PAIRED, ActionRun, backward, by_slot, forward
from stageline.schedules.schedule import Schedule


@family(
    "chimera",
    "two directions at once, weights twice: half the bubble of 1f1b at M = P",
    constraints="an even number of ranks",
)
def chimera(ranks: int, microbatches: int) -> Schedule:
    """Units of P microbatches, the first half of each going down, the second up; the last may be incomplete.

    rank 0  01.2c3da.b      P=4, M=4: 0 and 1 go down, 2 and 3 go up
    rank 1  .0213cadb.
    rank 2  .2031acbd.      F of stage s, j-th of its direction, at slot s + 2j, B at 2P−1−s + 2j
    rank 3  23.0a1bc.d      (up: the same on mirrored ranks), so that no two share a slot
    """
    require_even("chimera", ranks)
    every = np.arange(microbatches)
    size = np.minimum(ranks, microbatches - every // ranks * ranks)
    half = (size + 1) // 2
    inside = every % ranks
    up = inside >= half
    turn = np.where(up, inside - half, inside)
    unit = every // ranks * 2 * ranks
    placement = Placement.two_way(ranks, up)
    runs = []
    for rank in range(ranks):
        timed = []
        for going_up, stage in ((False, rank), (True, ranks - 1 - rank)):
            mine = every[up == going_up]
            slots = (unit + 2 * turn)[mine]
            timed.append((forward(stage, mine), slots + stage))
            timed.append((backward(stage, mine), slots + 2 * ranks - 1 - stage))
        runs.append(by_slot(timed))
    return Schedule.from_runs(runs, placement)


@dataclass
class _Writer:
    """Writes one rank's program phase by phase, counting the microbatches of both directions."""

    stages: tuple[int, int]
    microbatches: tuple[range, range]
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    deferred: deque[tuple[int, int]] = field(default_factory=deque)
    forwards: list[int] = field(default_factory=lambda: [0, 0])
    backwards: list[int] = field(default_factory=lambda: [0, 0])

    def forward(self, way: int, flag: int = 0) -> None:
        microbatch = self.microbatches[way][self.forwards[way]]
        self.rows.append((kinds.F + flag, self.stages[way], microbatch))
        self.forwards[way] += 1

    def backward(self, way: int, split: bool = False) -> None:
        microbatch = self.microbatches[way][self.backwards[way]]
        self.rows.append((kinds.I if split else kinds.B, self.stages[way], microbatch))
        self.backwards[way] += 1
        if split:
            self.deferred.append((self.stages[way], microbatch))

    def weight(self) -> None:
        self.rows.append((kinds.W, *self.deferred.popleft()))

    def pair(self, forward_way: int, backward_way: int) -> None:
        self.forward(forward_way, PAIRED)
        self.backward(backward_way)


def _program(writer: _Writer, place: int, half: int, steady: int) -> ActionRun:
    """Write the eight phases; `place` is h, `half` the number of places, `steady` the number of turns in phase 4.

    On every rank, 0 is the direction that reaches it first, and h counts ranks from the end where that direction
    starts. F&B is an overlapped pair; I is a backward whose W is deferred.

        1  fill             F0 …
        2  meet             F0 F1 …
        3  first backwards  I1 W F1 …            a deferred W fills the wait
        4  steady           F0&B1 F1&B0 …
        5  no F0 left       B1 F1&B0 …
        6  no F1 left       B1 B0 …              in the second half, I instead of B
        7  drain            W I0 …
        8  close            W …
    """
    gap = half - place - 1
    for _ in range(2 * gap):  # 1
        writer.forward(0)
    for _ in range(place + 1):  # 2
        writer.forward(0)
        writer.forward(1)
    for _ in range(gap):  # 3
        writer.backward(1, split=True)
        writer.weight()
        writer.forward(1)
    for turn in range(steady):  # 4
        if turn == 0 and gap == 0:
            # Where the directions meet, the first backward needs the forward before it, so they cannot overlap.
            writer.forward(0)
            writer.backward(1)
        else:
            writer.pair(0, 1)
        writer.pair(1, 0)
    for _ in range(gap):  # 5
        writer.backward(1)
        writer.pair(1, 0)
    turns = place + 1
    for turn in range(turns):  # 6
        writer.backward(1, split=turn > turns // 2 or (turn == turns // 2 and place % 2 == 1))
        writer.backward(0, split=turn >= turns // 2)
    for _ in range(gap):  # 7
        writer.weight()
        writer.backward(0, split=True)
    while writer.deferred:  # 8
        writer.weight()
    return np.array(writer.rows, dtype=np.int32)


@family(
    "dualpipe",
    "two directions at once, weights twice, forwards and backwards overlapped",
    constraints="P even, M even, M ≥ 2P",
)
def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Rank r holds stage r for the first half of the microbatches, which goes down, and P−1−r for the others.

    The ranks of one half mirror those of the other. Forwards and backwards of opposite directions run together.

        rank 0 F0F1F2f4i4w4f5F3&B5*f6&b0*b6....f7&b1*b7I2W2I3W3      P=4, M=8
        rank 1 ..F0f4F1f5F2b4f6&b0*F3&B5*f7&b1*b6B2....i7I3w7W3
        rank 2 ..F4f0F5f1F6b0f2&b4*F7&B1*f3&b5*b2B6....i3I7w3W7
        rank 3 F4F5F6f0i0w0f1F7&B1*f2&b4*b2....f3&b5*b3I6W6I7W7
    """
    require_even("dualpipe", ranks, most=max(2, microbatches // 2))
    least = max(2 * ranks, microbatches + microbatches % 2)
    require(
        microbatches % 2 == 0 and microbatches >= 2 * ranks,
        f"dualpipe needs an even number of microbatches, at least 2P = {2 * ranks}, got {microbatches}; "
        f"nearest: {least}",
    )
    half, per_direction = ranks // 2, microbatches // 2
    down, up = range(per_direction), range(per_direction, microbatches)
    runs = []
    for rank in range(ranks):
        mirrored = rank >= half
        place = min(rank, ranks - 1 - rank)
        stages = (ranks - 1 - rank, rank) if mirrored else (rank, ranks - 1 - rank)
        writer = _Writer(stages, (up, down) if mirrored else (down, up))
        runs.append(_program(writer, place, half, per_direction - ranks + place + 1))
    return Schedule.from_runs(runs, Placement.two_way(ranks, np.arange(microbatches) >= per_direction))


@family(
    "dualpipe-v",
    "dualpipe folded onto a V: weights once, half the ranks",
    constraints="M ≥ 2P",
    aliases=["DualPipeV"],
)
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """The order of dualpipe, with the way down as direction 0 and the way up as direction 1.

    Rank r holds stages r and 2P−1−r, so the weights are held once, and the backwards of every stage are in order.
    """
    fewer = f", or {microbatches // 2} ranks" if microbatches >= 2 else ""
    require(
        microbatches >= 2 * ranks,
        f"dualpipe-v needs at least 2P = {2 * ranks} microbatches for {ranks} ranks, got {microbatches}; "
        f"nearest: {2 * ranks} microbatches{fewer}",
    )
    every = range(microbatches)
    runs = []
    for rank in range(ranks):
        writer = _Writer((rank, 2 * ranks - 1 - rank), (every, every))
        runs.append(_program(writer, rank, ranks, microbatches - 2 * ranks + rank + 1))
    return Schedule.from_runs(runs, Placement.v(ranks, microbatches=microbatches))
