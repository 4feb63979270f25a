"""ZB-H1 and ZB-H2: split backwards, with the weight gradients deferred into the bubble.

    rank 0  0123...aA4bBcCdDeE      ZB-H1, P=4, M=5
    rank 1  .012..a3bA4cBdCeDE
    rank 2  ..01.a2b3cA4dBeCDE      rank r runs k(P−1−r) forwards ahead (k=1 for H1, 2 for H2), then F, I and W in
    rank 3  ...0a1b2c3dA4eBCDE      turns, with W k·r turns after I: the rank that starts last defers most

H1 holds as many microbatches as 1f1b; H2 about twice as many, and its span has no bubble if F = I = W.
"""

from __future__ import annotations

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.runs import backward_input, backward_weight, forward, weave
from stageline.schedules.schedule import Schedule


@family(
    "zb-h1",
    "1f1b with a split backward: a third of the bubble, in the memory of 1f1b",
    aliases=["ZB-H1", "ZB1P"],
)
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """P−1−r forwards ahead, W deferred by r turns."""
    return _zero_bubble(ranks, microbatches, depth=1)


@family("zb-h2", "zb-h1 with twice the forwards ahead: no bubble in the span, twice the memory", aliases=["ZB2P"])
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """2(P−1−r) forwards ahead, W deferred by 2r turns."""
    return _zero_bubble(ranks, microbatches, depth=2)


def _zero_bubble(ranks: int, microbatches: int, depth: int) -> Schedule:
    every = range(microbatches)
    runs = []
    for rank in range(ranks):
        warmup = depth * (ranks - 1 - rank)
        runs.append(
            weave(
                (forward(rank, every), 0),
                (backward_input(rank, every), warmup),
                (backward_weight(rank, every), warmup + depth * rank),
            )
        )
    return Schedule.from_runs(runs, Placement.loop(ranks, microbatches=microbatches))
