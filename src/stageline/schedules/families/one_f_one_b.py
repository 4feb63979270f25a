"""1F1B: the backward of a microbatch follows its forward as soon as possible and frees its memory.

    rank 0  0123...a4b5c.d.e.f      P=4, M=6
    rank 1  .012..a3b4c5d.e.f.
    rank 2  ..01.a2b3c4d5e.f..
    rank 3  ...0a1b2c3d4e5f...

Rank r runs P−1−r forwards ahead and then alternates, so it holds at most P−r microbatches. Eager 1F1B runs twice as
many ahead, which hides the transfers at twice the memory.

ZB-H1 and ZB-H2 split the backward and defer the weight gradients into the bubble.

    rank 0  0123...aA4bBcCdDeE      ZB-H1, P=4, M=5
    rank 1  .012..a3bA4cBdCeDE
    rank 2  ..01.a2b3cA4dBeCDE      rank r runs k(P−1−r) forwards ahead (k=1 for H1, 2 for H2), then F, I and W in
    rank 3  ...0a1b2c3dA4eBCDE      turns, with W k·r turns after I: the rank that starts last defers most

H1 holds as many microbatches as 1f1b; H2 about twice as many, and its span has no bubble if F = I = W.
"""

from __future__ import annotations

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.runs import delayed_backwards, forward, weave
from stageline.schedules.schedule import Schedule


@family("1f1b", "one forward, one backward in turns, P−1−r forwards ahead", aliases=["1F1B"])
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """P−1−r forwards ahead on rank r."""
    return _in_turns(ranks, microbatches, depth=1, split=False)


@family("eager-1f1b", "1f1b with twice the forwards ahead, which hides the transfers", aliases=["Eager1F1B"])
def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """2(P−1−r) forwards ahead on rank r."""
    return _in_turns(ranks, microbatches, depth=2, split=False)


@family(
    "zb-h1",
    "1f1b with a split backward: a third of the bubble, in the memory of 1f1b",
    aliases=["ZB-H1", "ZB1P"],
)
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """P−1−r forwards ahead, W deferred by r turns."""
    return _in_turns(ranks, microbatches, depth=1, split=True)


@family("zb-h2", "zb-h1 with twice the forwards ahead: no bubble in the span, twice the memory", aliases=["ZB2P"])
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """2(P−1−r) forwards ahead, W deferred by 2r turns."""
    return _in_turns(ranks, microbatches, depth=2, split=True)


def _in_turns(ranks: int, microbatches: int, depth: int, split: bool) -> Schedule:
    every = range(microbatches)
    runs = []
    for rank in range(ranks):
        backwards = delayed_backwards(rank, every, depth * (ranks - 1 - rank), depth * rank if split else None)
        runs.append(weave((forward(rank, every), 0), *backwards))
    return Schedule.from_runs(runs, Placement.loop(ranks, microbatches=microbatches))
