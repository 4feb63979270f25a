"""Chimera: two pipelines in opposite directions, each filling the bubble of the other. Weights are held twice.

    down  rank 0  0.1....b.c.      P=4: half of a unit of P microbatches goes down, half goes up
          rank 1  .0.1..b.c..      F of stage s, j-th of its direction, at slot s + 2j, B at 2P−1−s + 2j
    up    rank 2  .2.3..d.e..      (up: the same on mirrored ranks), so that no two share a slot
          rank 3  2.3....d.e.

More than P microbatches repeat the unit; a last unit that is not full leaves out what is missing. Each copy of
a stage runs the backwards of its own direction in order; there is no one order over both copies.
"""

from __future__ import annotations

import numpy as np

from stageline.schedules.build import backward, by_slot, forward
from stageline.schedules.placement import Placement
from stageline.schedules.registry import ask_even, family
from stageline.schedules.schedule import Schedule


@family(
    "chimera",
    "two directions at once, weights twice: half the bubble of 1f1b at M = P",
    constraints="an even number of ranks",
)
def chimera(ranks: int, microbatches: int) -> Schedule:
    """Units of P microbatches, the first half of each going down, the second up."""
    ask_even("chimera", ranks)
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
