"""Hanayo waves: the stages go down and up the ranks W times, with the weights held once.

    rank 0  ╲    ╱╲    ╱      W=2 waves over P=4 ranks: 16 stages, four a rank
    rank 1   ╲  ╱  ╲  ╱
    rank 2    ╲╱    ╲╱        at the turns the next stage is on the same rank: no transfer
    rank 3

    rank 0 F0F1F2F3......f0b0f1b1f2b2f3b3B0..B1..B2..B3      W=1, P=4, M=4
    rank 1 ..F0F1F2F3..f0..f1b0f2b1f3b2B0b3B1..B2..B3..
    rank 2 ....F0F1F2f0F3f1..f2b0f3b1B0b2B1b3B2..B3....
    rank 3 ......F0f0F1f1F2f2F3f3b0B0b1B1b2B2b3B3......

Every action has a time slot. A microbatch runs F of stage k in slot k and B in slot 2S−1−k; the next one follows two
slots later, in the gaps that the first leaves on every rank. After P microbatches the gaps are full, and the next P
follow 2S slots later, in the gaps of the drain. No two actions of a rank share a slot, and the bubble is that of 1f1b
divided by 2W (for B = F).

With one wave, forwards run as early as possible within the memory of 1f1b instead, which also helps where B takes
longer than F. With more waves, early forwards of one sweep would overtake those of another on the channel they share,
so the slots are kept.
"""

from __future__ import annotations

import numpy as np

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.runs import ActionRun, backward, by_slot, forward
from stageline.schedules.schedule import Schedule
from stageline.schedules.v_scheduling import B0, B1, F0, F1, list_v


@family("hanayo", "waves: stages go down and up the ranks `waves` times", constraints="any waves ≥ 1")
def hanayo(ranks: int, microbatches: int, *, waves: int = 1) -> Schedule:
    """One wave by list scheduling, more by slots."""
    placement = Placement.v(ranks, 2 * waves, microbatches)
    runs = _one_wave(ranks, microbatches) if waves == 1 else _by_slots(placement)
    return Schedule.from_runs(runs, placement)


def _one_wave(ranks: int, microbatches: int) -> list[ActionRun]:
    first = {F1: 0, F0: 1, B1: 2, B0: 3}

    def may_start(point: int, rank: int, held_down: int, held_up: int) -> bool:
        return point == F1 or held_down + held_up < 2 * ranks - 1

    return list_v(ranks, microbatches, lambda point, *_: first[point], may_start, split=False, overtake=True)


def _by_slots(placement: Placement) -> list[ActionRun]:
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
