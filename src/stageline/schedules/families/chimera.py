"""Chimera: two pipelines in opposite directions, each filling the bubble of the other. Weights are held twice.

    rank 0  01.2c3da.b      P=4, M=4: 0 and 1 go down, 2 and 3 go up
    rank 1  .0213cadb.
    rank 2  .2031acbd.      F of stage s, j-th of its direction, at slot s + 2j, B at 2P−1−s + 2j
    rank 3  23.0a1bc.d      (up: the same on mirrored ranks), so that no two share a slot

More than P microbatches repeat the unit; the last unit may be incomplete. Each copy of a stage runs the backwards of
its own direction in order; there is no common order of both copies.
"""

from __future__ import annotations

import numpy as np

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family, require_even
from stageline.schedules.runs import backward, by_slot, forward
from stageline.schedules.schedule import Schedule


@family(
    "chimera",
    "two directions at once, weights twice: half the bubble of 1f1b at M = P",
    constraints="an even number of ranks",
)
def chimera(ranks: int, microbatches: int) -> Schedule:
    """Units of P microbatches, the first half of each going down, the second up."""
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
