"""Interleaved 1F1B: every rank holds several chunks of layers, so the pipeline fills V times faster.

    rank 0 F0F1f0f1F2b0F3b1f2B0f3B1..b2..b3B2B3      P=2, V=2, M=4 in two groups of P: chunk 0 of the group,
    rank 1 ..F0F1f0b0f1b1F2B0F3B1f2b2f3b3B2B3..      then chunk 1; backwards take the chunks in reverse

Rank r runs 2(P−1−r) + (V−1)·g forwards ahead, where g is the largest group, and then alternates between F and B. A last
group smaller than the others can deadlock (P=5, M=7, V=2 does), so it is merged into the one before it.

`interleaved-zb` splits the backward: ranks run the input gradient first, as the previous rank waits for it, and defer
the weight gradient, which no rank waits for. `forward-only` is for inference.

    rank 0 F0F1f0f1F2i0w0F3i1w1f2I0W0f3I1W1i2w2..i3w3I2W2I3W3
    rank 1 ..F0F1f0i0f1i1w0F2I0w1F3I1W0f2i2W1f3i3w2I2w3I3W2W3      rank r defers W by r turns
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family, require
from stageline.schedules.runs import delayed_backwards, forward, weave
from stageline.schedules.schedule import Schedule


@family(
    "interleaved",
    "1f1b with V chunks per rank, microbatches in groups: a bubble V times smaller",
    constraints="any chunks V ≥ 1; group ≥ min(P, M), P by default",
    aliases=["Interleaved1F1B"],
)
def interleaved(ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Schedule:
    """Weave F and B of one common order."""
    return _interleaved(ranks, microbatches, chunks, group, split=False)


@family(
    "interleaved-zb",
    "interleaved with a split backward: the weight gradients fill the bubble",
    constraints="any chunks V ≥ 1; group ≥ min(P, M), P by default",
    aliases=["InterleavedZeroBubble"],
)
def interleaved_zb(ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Schedule:
    """Weave F, I and W of one common order; rank r defers W by r turns."""
    return _interleaved(ranks, microbatches, chunks, group, split=True)


@family(
    "forward-only", "inference: forwards alone", constraints="any chunks V ≥ 1; group defaults to P", training=False
)
def forward_only(ranks: int, microbatches: int, *, chunks: int = 1, group: int | None = None) -> Schedule:
    """All F in the order of `interleaved`; with one chunk, one after the other."""
    chunk, microbatch, _ = _order(ranks, microbatches, chunks, group)
    runs = [forward(chunk * ranks + rank, microbatch) for rank in range(ranks)]
    return Schedule.from_runs(runs, Placement.loop(ranks, chunks, microbatches), training=False)


def _interleaved(ranks: int, microbatches: int, chunks: int, group: int | None, split: bool) -> Schedule:
    least = min(ranks, microbatches)
    require(
        chunks == 1 or group is None or group >= least,
        f"a group of {group} microbatches is too small for {ranks} ranks: the first one returns to rank 0 only after "
        f"{ranks} steps, so a smaller group deadlocks; nearest: {least}",
    )
    chunk, microbatch, largest_group = _order(ranks, microbatches, chunks, group)
    runs = []
    for rank in range(ranks):
        warmup = 2 * (ranks - 1 - rank) + (chunks - 1) * largest_group
        reversed_stages = (chunks - 1 - chunk) * ranks + rank
        backwards = delayed_backwards(reversed_stages, microbatch, warmup, rank if split else None)
        runs.append(weave((forward(chunk * ranks + rank, microbatch), 0), *backwards))
    return Schedule.from_runs(runs, Placement.loop(ranks, chunks, microbatches))


def _order(
    ranks: int, microbatches: int, chunks: int, group: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the chunk and the microbatch of every turn, group by group and chunk by chunk, and the largest group."""
    size = min(group or ranks, microbatches)
    groups = np.minimum(np.arange(microbatches) // size, microbatches // size - 1)
    chunk, microbatch = np.divmod(np.arange(chunks * microbatches), microbatches)
    order = np.argsort(groups[microbatch], kind="stable")
    return chunk[order], microbatch[order], int(np.bincount(groups).max())
