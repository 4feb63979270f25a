"""GPipe: all forwards, then all backwards.

    rank 0  012....abc      P=3, M=3
    rank 1  .012..abc.
    rank 2  ..012abc..

The simplest order; it keeps the activations of all microbatches. Backwards run in microbatch order, not reversed, so
that gradients accumulate as in one process.
"""

from __future__ import annotations

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.runs import backward, forward, join
from stageline.schedules.schedule import Schedule


@family("gpipe", "all forwards, then all backwards", aliases=["GPipe"])
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All F, then all B, on every rank."""
    every = range(microbatches)
    runs = [join(forward(rank, every), backward(rank, every)) for rank in range(ranks)]
    return Schedule.from_runs(runs, Placement.loop(ranks, microbatches=microbatches))
