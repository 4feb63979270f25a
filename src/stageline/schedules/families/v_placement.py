"""Families on a V placement: zb-v, v-half, v-min and hanayo.

Rank r holds stages r and 2P−1−r, so that a microbatch goes down the ranks and up again: 0 is the stage of a rank on the
way down, 1 the one on the way up. The first rank holds the first and the last stage, so the loss is computed where the
batch enters, and the first backward starts at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.runs import (
    ActionRun,
    backward,
    backward_input,
    backward_weight,
    by_slot,
    forward,
    join,
    take_turns,
)
from stageline.schedules.schedule import Schedule


@family("zb-v", "zero bubble on a V: two stages per rank, down and up again", aliases=["ZBVZeroBubble", "ZBV"])
def zb_v(ranks: int, microbatches: int) -> Schedule:
    """The bubble of zb-h2 (none in the span if F = I = W) in the memory of 1f1b.

        rank 0 F0F1F2F3F4f0i0w0f1i1w1f2i2w2I0W0f3i3w3I1W1f4i4w4I2W2I3W3I4W4....      P=3, M=5
        rank 1 ..F0F1F2f0F3f1i0w0f2i1w1F4I0W0f3i2w2I1W1f4i3w3I2i4I3W2I4W3w4W4..
        rank 2 ....F0f0F1f1F2f2i0w0F3I0W0f3i1w1F4I1W1f4i2w2I2i3I3i4I4W2w3w4W3W4

    It is built for at least 2P−1 microbatches; those beyond the requested number are dropped.
    """
    full = max(microbatches, 2 * ranks - 1)
    programs = [_zb_v_program(rank, ranks, full) for rank in range(ranks)]
    runs = [program[program[:, 2] < microbatches] for program in programs]
    return Schedule.from_runs(runs, Placement.v(ranks, microbatches=microbatches))


def _zb_v_program(rank: int, ranks: int, microbatches: int) -> ActionRun:
    down, up = rank, 2 * ranks - 1 - rank
    every = range(microbatches)
    f0, i0, w0 = forward(down, every), backward_input(down, every), backward_weight(down, every)
    f1, i1, w1 = forward(up, every), backward_input(up, every), backward_weight(up, every)
    last = microbatches
    # 1. fill: as many F0 as fit before the first microbatch returns
    fill = 2 * (ranks - rank) - 1
    # 2. the first microbatches return
    meet = take_turns(f1[:rank], f0[fill : fill + rank])
    # 3. the first backwards
    first = ranks - rank
    turn = take_turns(f1[rank:ranks], i1[:first], w1[:first])
    # 4. steady state, and its end, when no F0 is left
    steady = last - 2 * ranks + rank + 1
    f0_from = fill + rank
    full = take_turns(
        f0[f0_from:],
        i0[:steady],
        w0[:steady],
        f1[ranks : ranks + steady],
        i1[first : first + steady],
        w1[first : first + steady],
    )
    ebb = take_turns(
        i0[steady : last - ranks],
        w0[steady : last - ranks],
        f1[ranks + steady :],
        i1[first + steady : last - rank],
        w1[first + steady : last - rank],
    )
    # 5. drain: first the gradients that other ranks wait for, then all deferred weight gradients
    drain = take_turns(i0[last - ranks : last - ranks + rank], i1[last - rank :])
    close = take_turns(i0[last - ranks + rank :], w0[last - ranks : last - rank])
    return join(f0[:fill], meet, turn, full, ebb, drain, close, w1[last - rank :], w0[last - rank :])


F0, F1, B1, B0 = range(4)
"""The points of a rank that each microbatch passes, in this order. Every point has one predecessor:

    F0  forward on the way down      after F0 of the previous rank
    F1  forward on the way up        after F1 of the next rank (on the last rank: after its own F0)
    B1  backward of the way up       after B1 of the previous rank (on the first rank: after its own F1)
    B0  backward of the way down     after B0 of the next rank (on the last rank: after its own B1)

With a split backward, B1 and B0 are input gradients, and weight gradients fill the slots in which nothing else can run.
"""

Priority = Callable[[int, int, int], float]
"""Maps (point, rank, microbatch) to a number; the smallest goes first."""

Limit = Callable[[int, int, int, int], bool]
"""Whether a forward may start, given (point, rank, activations held on the way down, on the way up)."""


class ListScheduler:
    """In every time slot, each rank takes the ready action with the smallest priority.

    Without `overtake`, a rank waits for the action with the smallest priority even if another one is ready, and only
    weight gradients run meanwhile.
    """

    def __init__(
        self, ranks: int, microbatches: int, priority: Priority, may_start: Limit, *, split: bool, overtake: bool
    ) -> None:
        self.ranks, self.microbatches, self.split, self.overtake = ranks, microbatches, split, overtake
        self.priority, self.may_start = priority, may_start
        self.done = [[0] * ranks for _ in range(4)]  # the number of microbatches that have passed each point
        self.freed = [[0, 0] for _ in range(ranks)]  # the number of activations freed, by way
        self.deferred: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]  # weight gradients still to run
        self.programs: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]

    def run(self) -> list[ActionRun]:
        """Return the program of every rank."""
        length = self.microbatches * (6 if self.split else 4)
        while any(len(program) < length for program in self.programs):
            chosen = [self._choose(rank) for rank in range(self.ranks)]
            for rank, point in enumerate(chosen):
                self._advance(rank, point)
        return [np.array(program, dtype=np.int32).reshape(-1, 3) for program in self.programs]

    def _choose(self, rank: int) -> int | None:
        passed = [done[rank] for done in self.done]
        left = [point for point in (F0, F1, B1, B0) if passed[point] < self.microbatches]
        held = (passed[F0] - self.freed[rank][0], passed[F1] - self.freed[rank][1])
        for point in sorted(left, key=lambda point: (self.priority(point, rank, passed[point]), point)):
            is_allowed = point in (B1, B0) or self.may_start(point, rank, *held)
            if is_allowed and self._is_ready(point, rank, passed[point]):
                return point
            if not self.overtake:
                return None
        return None

    def _is_ready(self, point: int, rank: int, microbatch: int) -> bool:
        done = self.done
        if point == F0:
            return rank == 0 or done[F0][rank - 1] > microbatch
        if point == B1:
            return done[B1][rank - 1] > microbatch if rank else done[F1][0] > microbatch
        if rank < self.ranks - 1:
            return done[point][rank + 1] > microbatch
        return done[F0 if point == F1 else B1][rank] > microbatch

    def _advance(self, rank: int, point: int | None) -> None:
        """Run the chosen action, or else a deferred weight gradient."""
        if point is not None:
            kind, microbatch = kinds.F, self.done[point][rank]
            if point in (B1, B0):
                kind = kinds.I if self.split else kinds.B
            self.done[point][rank] += 1
        elif self.deferred[rank]:
            kind, (point, microbatch) = kinds.W, self.deferred[rank].popleft()
        else:
            return
        self.programs[rank].append((kind, rank if point in (F0, B0) else 2 * self.ranks - 1 - rank, microbatch))
        if kind == kinds.I:
            self.deferred[rank].append((point, microbatch))
        elif kind != kinds.F:
            self.freed[rank][point == B1] += 1


PERIOD = 6
"""The number of slots after which the pattern of v-half and v-min repeats, without collisions: the middle of the step
has no bubble if F = I = W."""


@family("v-half", "a V with about half the memory of 1f1b and about half its bubble")
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Two slots per rank down, one up; a rank holds (P+2)//2 microbatches.

        rank 0 F0F1F2F3......f0i0f1i1w0w1..f2I0i2W0w2f3i3I1w3I2W1W2..I3W3      P=4, M=4: F0 goes down two slots a
        rank 1 ..F0F1F2F3..f0..f1i0w0i1w1f2I0W0..i2f3w2I1i3I2W1w3W2I3W3..      rank, F1 comes up one, I1 goes down
        rank 2 ....F0F1F2f0F3f1....i0w0f2I0i1W0w1f3i2I1w2I2i3W1W2I3w3W3..      two, I0 comes up one
        rank 3 ......F0f0F1f1F2f2....i0I0w0W0F3f3i1I1i2I2w1W1i3I3w2W2w3W3

    A rank whose next action is not ready takes a later one that is, within its memory; that shortens the warm-up and
    the drain.
    """
    shift = 3 if ranks % 2 == 0 else 0
    every = range(ranks)
    slots = {
        F0: [2 * rank for rank in every],
        F1: [3 * ranks - rank - 2 for rank in every],
        B1: [3 * ranks + shift + 2 * rank - 1 for rank in every],
        B0: [6 * ranks + shift - rank - 2 for rank in every],
    }
    return _repeat(slots, ranks, microbatches, 2 * ((ranks + 2) // 2), overtake=True)


@family("v-min", "a V with about a third of the memory of 1f1b and about two thirds of its bubble")
def v_min(ranks: int, microbatches: int) -> Schedule:
    """One slot per rank, down and up; a rank holds (P+4)//3 microbatches.

        rank 0 F0F1..........f0i0F2w0....f1i1I0w1F3W0f2i2I1w2W1..f3i3I2w3W2......I3W3      P=4, M=4
        rank 1 ..F0........f0F1..i0w0..f1F2I0i1W0w1f2F3I1i2W1w2f3..I2i3W2w3....I3W3..
        rank 2 ....F0....f0....F1..i0f1w0I0F2W0i1f2w1I1F3W1i2f3w2I2W2..i3w3..I3W3....
        rank 3 ......F0f0........F1f1i0I0w0W0F2f2i1I1w1W1F3f3i2I2w2W2....i3I3w3W3....

    A rank keeps its order, and only W fills the gaps; taking later actions would cost more than it gains.
    """
    shift = 2 if ranks % 3 == 0 else 0
    every = range(ranks)
    slots = {
        F0: list(every),
        F1: [2 * ranks - rank - 1 for rank in every],
        B1: [2 * ranks + shift + rank for rank in every],
        B0: [4 * ranks + shift - rank - 1 for rank in every],
    }
    return _repeat(slots, ranks, microbatches, 2 * ((ranks + 4) // 3), overtake=False)


def _repeat(slots: Mapping[int, list[int]], ranks: int, microbatches: int, cap: int, overtake: bool) -> Schedule:
    """Repeat the slots of microbatch 0, by point and rank; a rank holds at most `cap` activations."""
    # The periods from F0 to the end of its W: this many activations are held on the way down.
    down = [-(-(last - first + 2) // PERIOD) for first, last in zip(slots[F0], slots[B0], strict=True)]

    def priority(point: int, rank: int, microbatch: int) -> float:
        return slots[point][rank] + PERIOD * microbatch

    def may_start(point: int, rank: int, held_down: int, held_up: int) -> bool:
        return held_down + held_up < cap and (point == F1 or not overtake or held_down < down[rank])

    runs = ListScheduler(ranks, microbatches, priority, may_start, split=True, overtake=overtake).run()
    return Schedule.from_runs(runs, Placement.v(ranks, microbatches=microbatches))


@family("hanayo", "waves: stages go down and up the ranks `waves` times", constraints="any waves ≥ 1")
def hanayo(ranks: int, microbatches: int, *, waves: int = 1) -> Schedule:
    """The stages go down and up the ranks W times, with the weights held once.

        rank 0  ╲    ╱╲    ╱      W=2 waves over P=4 ranks: 16 stages, four a rank
        rank 1   ╲  ╱  ╲  ╱
        rank 2    ╲╱    ╲╱        at the turns the next stage is on the same rank: no transfer
        rank 3

        rank 0 F0F1F2F3......f0b0f1b1f2b2f3b3B0..B1..B2..B3      W=1, P=4, M=4
        rank 1 ..F0F1F2F3..f0..f1b0f2b1f3b2B0b3B1..B2..B3..
        rank 2 ....F0F1F2f0F3f1..f2b0f3b1B0b2B1b3B2..B3....
        rank 3 ......F0f0F1f1F2f2F3f3b0B0b1B1b2B2b3B3......

    Every action has a time slot. A microbatch runs F of stage k in slot k and B in slot 2S−1−k; the next one follows
    two slots later, in the gaps that the first leaves on every rank. After P microbatches the gaps are full, and the
    next P follow 2S slots later, in the gaps of the drain. No two actions of a rank share a slot, and the bubble is
    that of 1f1b divided by 2W (for B = F).

    With one wave, forwards run as early as possible within the memory of 1f1b instead, which also helps where B takes
    longer than F. With more waves, early forwards of one sweep would overtake those of another on the channel they
    share, so the slots are kept.
    """
    placement = Placement.v(ranks, 2 * waves, microbatches)
    return Schedule.from_runs(_one_wave(placement) if waves == 1 else _many_waves(placement), placement)


def _one_wave(placement: Placement) -> list[ActionRun]:
    ranks, order = placement.ranks, (F1, F0, B1, B0)

    def priority(point: int, rank: int, microbatch: int) -> float:
        return order.index(point)

    def may_start(point: int, rank: int, held_down: int, held_up: int) -> bool:
        return point == F1 or held_down + held_up < 2 * ranks - 1

    return ListScheduler(ranks, placement.microbatches, priority, may_start, split=False, overtake=True).run()


def _many_waves(placement: Placement) -> list[ActionRun]:
    ranks, stages = placement.ranks, placement.stages
    every = np.arange(placement.microbatches)
    starts = 2 * stages * (every // ranks) + 2 * (every % ranks)
    runs = []
    for rank in range(ranks):
        own = placement.stages_of(rank)
        forwards = [(forward(stage, every), starts + stage) for stage in own]
        backwards = [(backward(stage, every), starts + 2 * stages - 1 - stage) for stage in own]
        runs.append(by_slot(forwards + backwards))
    return runs
