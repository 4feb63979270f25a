"""List scheduling on a V placement: in every time slot, each rank takes one of the actions that are ready.

Rank r holds stages r (on the way down) and 2P−1−r (on the way up). Each microbatch passes four points of a rank, in
this order, and every point has one predecessor:

    F0  forward on the way down      after F0 of the previous rank
    F1  forward on the way up        after F1 of the next rank (on the last rank: after its own F0)
    B1  backward of the way up       after B1 of the previous rank (on the first rank: after its own F1)
    B0  backward of the way down     after B0 of the next rank (on the last rank: after its own B1)

With a split backward, B1 and B0 are input gradients, and weight gradients fill the slots in which nothing else can run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.runs import ActionRun

F0, F1, B1, B0 = range(4)

Priority = Callable[[int, int, int], float]
"""Maps (point, rank, microbatch) to a number; the smallest goes first."""

Limit = Callable[[int, int, int, int], bool]
"""Whether a forward may start, given (point, rank, activations held on the way down, on the way up)."""


def list_v(
    ranks: int, microbatches: int, priority: Priority, may_start: Limit, *, split: bool, overtake: bool
) -> list[ActionRun]:
    """Let every rank take the ready action with the smallest priority in every slot.

    Without `overtake`, a rank waits for the action with the smallest priority even if another one is ready, and only
    weight gradients run meanwhile.
    """
    done = [[0] * ranks for _ in range(4)]  # the number of microbatches that have passed each point
    freed = [[0, 0] for _ in range(ranks)]  # the number of activations freed, by way
    deferred: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]  # weight gradients still to run
    programs: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    backward = kinds.I if split else kinds.B
    codes = (kinds.F, kinds.F, backward, backward)
    left = microbatches * ranks * (6 if split else 4)

    def is_ready(point: int, rank: int, microbatch: int) -> bool:
        if point == F0:
            return rank == 0 or done[F0][rank - 1] > microbatch
        if point == B1:
            return done[B1][rank - 1] > microbatch if rank else done[F1][0] > microbatch
        if rank < ranks - 1:
            return done[point][rank + 1] > microbatch
        return done[F0 if point == F1 else B1][rank] > microbatch

    def choose(rank: int) -> int | None:
        order = sorted(
            (priority(point, rank, done[point][rank]), point)
            for point in (F0, F1, B1, B0)
            if done[point][rank] < microbatches
        )
        held = (done[F0][rank] - freed[rank][0], done[F1][rank] - freed[rank][1])
        for _, point in order:
            allowed = point in (B1, B0) or may_start(point, rank, *held)
            if allowed and is_ready(point, rank, done[point][rank]):
                return point
            if not overtake:
                return None
        return None

    def stage(point: int, rank: int) -> int:
        return rank if point in (F0, B0) else 2 * ranks - 1 - rank

    while left:
        passed = []
        for rank in range(ranks):
            point = choose(rank)
            if point is not None:
                microbatch = done[point][rank]
                programs[rank].append((codes[point], stage(point, rank), microbatch))
                passed.append((point, rank))
            elif deferred[rank]:
                point, microbatch = deferred[rank].popleft()
                programs[rank].append((kinds.W, stage(point, rank), microbatch))
                freed[rank][point == B1] += 1
                left -= 1
        for point, rank in passed:
            if point in (B1, B0):
                if split:
                    deferred[rank].append((point, done[point][rank]))
                else:
                    freed[rank][point == B1] += 1
            done[point][rank] += 1
        left -= len(passed)
    return [np.array(program, dtype=np.int32).reshape(-1, 3) for program in programs]
