"""ZB-V: two stages per rank, r and 2P−1−r, so that a microbatch goes down the ranks and up again.

    rank 0 F0F1F2F3F4f0i0w0f1i1w1f2i2w2I0W0f3i3w3I1W1f4i4w4I2W2I3W3I4W4....      P=3, M=5
    rank 1 ..F0F1F2f0F3f1i0w0f2i1w1F4I0W0f3i2w2I1W1f4i3w3I2i4I3W2I4W3w4W4..
    rank 2 ....F0f0F1f1F2f2i0w0F3I0W0f3i1w1F4I1W1f4i2w2I2i3I3i4I4W2w3w4W3W4

The first rank holds the first and the last stage, so the loss is computed where the batch enters, and the first
backward starts at once. It has the bubble of zb-h2 (none in the span if F = I = W) in the memory of 1f1b.
"""

from __future__ import annotations

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.runs import (
    ActionRun,
    backward_input,
    backward_weight,
    forward,
    join,
    keep_microbatches,
    take_turns,
)
from stageline.schedules.schedule import Schedule


@family("zb-v", "zero bubble on a V: two stages per rank, down and up again", aliases=["ZBVZeroBubble", "ZBV"])
def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build it for at least 2P−1 microbatches, and drop those beyond the requested number."""
    full = max(microbatches, 2 * ranks - 1)
    runs = [keep_microbatches(_program(rank, ranks, full), microbatches) for rank in range(ranks)]
    return Schedule.from_runs(runs, Placement.v(ranks, microbatches=microbatches))


def _program(rank: int, ranks: int, microbatches: int) -> ActionRun:
    """Return the phases of one rank; 0 is its stage on the way down, 1 the one on the way up."""
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
