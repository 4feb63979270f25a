"""V-Half and V-Min: a V placement with little memory, in a pattern that repeats every six slots.

    rank 0 F0F1F2F3......f0i0f1i1w0w1..f2I0i2W0w2f3i3I1w3I2W1W2..I3W3      V-Half, P=4, M=4: F0 goes down two slots a
    rank 1 ..F0F1F2F3..f0..f1i0w0i1w1f2I0W0..i2f3w2I1i3I2W1w3W2I3W3..      rank, F1 comes up one, I1 goes down two,
    rank 2 ....F0F1F2f0F3f1....i0w0f2I0i1W0w1f3i2I1w2I2i3W1W2I3w3W3..      I0 comes up one; a rank holds (P+2)//2
    rank 3 ......F0f0F1f1F2f2....i0I0w0W0F3f3i1I1i2I2w1W1i3I3w2W2w3W3      microbatches

    rank 0 F0F1..........f0i0F2w0....f1i1I0w1F3W0f2i2I1w2W1..f3i3I2w3W2......I3W3      V-Min: all four move one slot
    rank 1 ..F0........f0F1..i0w0..f1F2I0i1W0w1f2F3I1i2W1w2f3..I2i3W2w3....I3W3..      a rank; a rank holds (P+4)//3
    rank 2 ....F0....f0....F1..i0f1w0I0F2W0i1f2w1I1F3W1i2f3w2I2W2..i3w3..I3W3....
    rank 3 ......F0f0........F1f1i0I0w0W0F2f2i1I1w1W1F3f3i2I2w2W2....i3I3w3W3....

The pattern repeats without collisions, so the middle of the step has no bubble if F = I = W. In V-Half, a rank whose
next action is not ready takes a later one that is, within its memory; that shortens the warm-up and the drain. In V-Min
that would cost more than it gains, so a rank keeps its order and only W fills the gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.schedule import Schedule
from stageline.schedules.v_scheduling import B0, B1, F0, F1, list_v

PERIOD = 6


@dataclass(frozen=True)
class _Pattern:
    """The slot of each point on each rank for microbatch 0, and the number of activations that a rank may hold."""

    slots: dict[int, list[int]]
    cap: int
    overtake: bool

    def make(self, ranks: int, microbatches: int) -> Schedule:
        # The periods from F0 to the end of its W: this many activations are held on the way down.
        down = [-(-(self.slots[B0][rank] - self.slots[F0][rank] + 2) // PERIOD) for rank in range(ranks)]

        def priority(point: int, rank: int, microbatch: int) -> float:
            return self.slots[point][rank] + PERIOD * microbatch

        def may_start(point: int, rank: int, held_down: int, held_up: int) -> bool:
            room = held_down + held_up < self.cap
            return room and (point == F1 or not self.overtake or held_down < down[rank])

        runs = list_v(ranks, microbatches, priority, may_start, split=True, overtake=self.overtake)
        return Schedule.from_runs(runs, Placement.v(ranks, microbatches=microbatches))


@family("v-half", "a V with about half the memory of 1f1b and about half its bubble")
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Two slots per rank down, one up."""
    shift = 3 if ranks % 2 == 0 else 0
    every = range(ranks)
    slots = {
        F0: [2 * rank for rank in every],
        F1: [3 * ranks - rank - 2 for rank in every],
        B1: [3 * ranks + shift + 2 * rank - 1 for rank in every],
        B0: [6 * ranks + shift - rank - 2 for rank in every],
    }
    return _Pattern(slots, 2 * ((ranks + 2) // 2), overtake=True).make(ranks, microbatches)


@family("v-min", "a V with about a third of the memory of 1f1b and about two thirds of its bubble")
def v_min(ranks: int, microbatches: int) -> Schedule:
    """One slot per rank, down and up."""
    shift = 2 if ranks % 3 == 0 else 0
    every = range(ranks)
    slots = {
        F0: list(every),
        F1: [2 * ranks - rank - 1 for rank in every],
        B1: [2 * ranks + shift + rank for rank in every],
        B0: [4 * ranks + shift - rank - 1 for rank in every],
    }
    return _Pattern(slots, 2 * ((ranks + 4) // 3), overtake=False).make(ranks, microbatches)
