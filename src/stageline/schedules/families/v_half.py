"""V-Half and V-Min: a V that repeats every six slots, made for little memory.

    P=4, slots of one period on each rank (F0 and I0 on the way down, F1 and I1 on the way up; W in the holes):

    V-Half  F0 goes down two slots a rank and F1 comes up one a rank; I1 goes down two, I0 comes up one.
            A rank holds (P+2)//2 microbatches, about half of what 1f1b holds.
    V-Min   all four move one slot a rank. A rank holds (P+4)//3, about a third.

The slots repeat without a clash, so the middle of the step has no bubble when F = I = W. In V-Half a rank whose
next slot is not ready yet takes a later one that is, as long as its memory allows; that shortens the ends. In
V-Min that would cost more than it gains, so there a rank keeps its order and only W fill the holes.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.schedule import Schedule
from stageline.schedules.vee import B0, B1, F0, F1, list_vee

PERIOD = 6


@dataclass(frozen=True)
class _Pattern:
    """The slot of each point on each rank for microbatch 0, and the activations a rank may hold."""

    slots: dict[int, list[int]]
    cap: int
    overtake: bool

    def make(self, ranks: int, microbatches: int) -> Schedule:
        # From F0 to the end of its W, and so many periods' worth of activations on the way down.
        down = [-(-(self.slots[B0][rank] - self.slots[F0][rank] + 2) // PERIOD) for rank in range(ranks)]

        def priority(point: int, rank: int, microbatch: int) -> float:
            return self.slots[point][rank] + PERIOD * microbatch

        def may_start(point: int, rank: int, held_down: int, held_up: int) -> bool:
            room = held_down + held_up < self.cap
            return room and (point == F1 or not self.overtake or held_down < down[rank])

        runs = list_vee(ranks, microbatches, priority, may_start, split=True, overtake=self.overtake)
        return Schedule.from_runs(runs, Placement.vee(ranks, microbatches))


@family("v-half", "a V in about half the memory of 1f1b, with about half its bubble")
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Two slots a rank down, one up."""
    shift = 3 if ranks % 2 == 0 else 0
    every = range(ranks)
    slots = {
        F0: [2 * rank for rank in every],
        F1: [3 * ranks - rank - 2 for rank in every],
        B1: [3 * ranks + shift + 2 * rank - 1 for rank in every],
        B0: [6 * ranks + shift - rank - 2 for rank in every],
    }
    return _Pattern(slots, 2 * ((ranks + 2) // 2), overtake=True).make(ranks, microbatches)


@family("v-min", "a V in about a third of the memory of 1f1b, with about two thirds of its bubble")
def v_min(ranks: int, microbatches: int) -> Schedule:
    """One slot a rank, down and up."""
    shift = 2 if ranks % 3 == 0 else 0
    every = range(ranks)
    slots = {
        F0: list(every),
        F1: [2 * ranks - rank - 1 for rank in every],
        B1: [2 * ranks + shift + rank for rank in every],
        B0: [4 * ranks + shift - rank - 1 for rank in every],
    }
    return _Pattern(slots, 2 * ((ranks + 4) // 3), overtake=False).make(ranks, microbatches)
