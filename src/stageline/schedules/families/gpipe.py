"""GPipe and looped BFS: all forwards, then all backwards.

    rank 0  012....abc      GPipe, P=3, M=3: the simplest order; it keeps the activations of all microbatches
    rank 1  .012..abc.
    rank 2  ..012abc..

    rank 0 F0F1F2f0f1f2....b0b1b2B0B1B2      looped BFS, P=2, V=2, M=3: the chunk changes only once every M actions,
    rank 1 ..F0F1F2f0f1f2b0b1b2B0B1B2..      so sharded weights are gathered least often

Backwards take the chunks in reverse, but the microbatches in order, so that gradients accumulate as in one process.
"""

from __future__ import annotations

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.runs import backward, forward, join
from stageline.schedules.schedule import Schedule


@family("gpipe", "all forwards, then all backwards", aliases=["GPipe"])
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All F, then all B, on every rank."""
    return looped_bfs(ranks, microbatches, chunks=1)


@family(
    "looped-bfs",
    "all microbatches of one chunk, then of the next: chunks change least often",
    constraints="any chunks V ≥ 1",
    aliases=["LoopedBFS"],
)
def looped_bfs(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """All F chunk by chunk, then all B with the chunks reversed."""
    every = range(microbatches)
    runs = [
        join(
            *(forward(chunk * ranks + rank, every) for chunk in range(chunks)),
            *(backward(chunk * ranks + rank, every) for chunk in reversed(range(chunks))),
        )
        for rank in range(ranks)
    ]
    return Schedule.from_runs(runs, Placement.loop(ranks, chunks, microbatches))
