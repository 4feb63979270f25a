"""1F1B: the backward of a microbatch follows its forward as soon as possible and frees its memory.

    rank 0  0123...a4b5c.d.e.f      P=4, M=6
    rank 1  .012..a3b4c5d.e.f.
    rank 2  ..01.a2b3c4d5e.f..
    rank 3  ...0a1b2c3d4e5f...

Rank r runs P−1−r forwards ahead and then alternates, so it holds at most P−r microbatches. Eager 1F1B runs twice as
many ahead, which hides the transfers at twice the memory.
"""

from __future__ import annotations

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.runs import backward, forward, weave
from stageline.schedules.schedule import Schedule


@family("1f1b", "one forward, one backward in turns, P−1−r forwards ahead", aliases=["1F1B"])
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """P−1−r forwards ahead on rank r."""
    return _in_turns(ranks, microbatches, ahead=1)


@family("eager-1f1b", "1f1b with twice the forwards ahead, which hides the transfers", aliases=["Eager1F1B"])
def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """2(P−1−r) forwards ahead on rank r."""
    return _in_turns(ranks, microbatches, ahead=2)


def _in_turns(ranks: int, microbatches: int, ahead: int) -> Schedule:
    every = range(microbatches)
    runs = [
        weave((forward(rank, every), 0), (backward(rank, every), ahead * (ranks - 1 - rank))) for rank in range(ranks)
    ]
    return Schedule.from_runs(runs, Placement.loop(ranks, microbatches=microbatches))
