"""Interleaved 1F1B: every rank holds several chunks of layers, so the pipeline fills V times faster.

    rank 0 F0F1f0f1F2b0F3b1f2B0f3B1..b2..b3B2B3      P=2, V=2, M=4 in two groups of P: chunk 0 of the group,
    rank 1 ..F0F1f0b0f1b1F2B0F3B1f2b2f3b3B2B3..      then chunk 1; backwards take the chunks in reverse

Rank r runs 2(P−1−r) + (V−1)·g forwards ahead, where g is the largest group, and then alternates between F and B. A last
group smaller than the others can deadlock (P=5, M=7, V=2 does), so it is merged into the one before it.

`interleaved-zb` splits the backward: ranks run the input gradient first, as the previous rank waits for it, and defer
the weight gradient, which no rank waits for.

    rank 0 F0F1f0f1F2i0w0F3i1w1f2I0W0f3I1W1i2w2..i3w3I2W2I3W3
    rank 1 ..F0F1f0i0f1i1w0F2I0w1F3I1W0f2i2W1f3i3w2I2w3I3W2W3      rank r defers W by r turns
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stageline.schedules.placement import Placement
from stageline.schedules.registry import family, require
from stageline.schedules.runs import ActionRun, backward, backward_input, backward_weight, forward, weave
from stageline.schedules.schedule import Schedule


@dataclass(frozen=True)
class GroupOrder:
    """The order of (chunk, microbatch) that every rank follows: group by group, chunk by chunk."""

    chunks: NDArray[np.int32]
    microbatches: NDArray[np.int32]
    largest_group: int
    num_chunks: int

    @classmethod
    def of(cls, ranks: int, microbatches: int, num_chunks: int, group: int | None) -> GroupOrder:
        """Cut the microbatches into groups; a short last one joins the group before it."""
        group = min(group or ranks, microbatches)
        starts = np.arange(0, microbatches - microbatches % group, group)
        ends = np.append(starts[1:], microbatches)
        pieces = [
            (np.full(end - start, chunk), np.arange(start, end))
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
            for chunk in range(num_chunks)
        ]
        chunk_column, microbatch_column = (
            np.concatenate(column).astype(np.int32) for column in zip(*pieces, strict=True)
        )
        return cls(chunk_column, microbatch_column, int((ends - starts).max()), num_chunks)

    def warmup(self, rank: int, ranks: int) -> int:
        """Return the number of forwards that a rank runs before its first backward."""
        return 2 * (ranks - 1 - rank) + (self.num_chunks - 1) * self.largest_group

    def forwards(self, rank: int, ranks: int) -> ActionRun:
        """Return F of all chunks and microbatches."""
        return forward(self.chunks * ranks + rank, self.microbatches)

    def reversed_stages(self, rank: int, ranks: int) -> NDArray[np.int32]:
        """Return the stages in the order of the backward, where each group runs its chunks in reverse."""
        return (self.num_chunks - 1 - self.chunks) * ranks + rank


def _order(ranks: int, microbatches: int, chunks: int, group: int | None) -> GroupOrder:
    least = min(ranks, microbatches)
    require(
        chunks == 1 or group is None or group >= least,
        f"a group of {group} microbatches is too small for {ranks} ranks: the first one returns to rank 0 only after "
        f"{ranks} steps, so a smaller group deadlocks; nearest: {least}",
    )
    return GroupOrder.of(ranks, microbatches, chunks, group)


@family(
    "interleaved",
    "1f1b with V chunks per rank, microbatches in groups: a bubble V times smaller",
    constraints="any chunks V ≥ 1; group ≥ min(P, M), P by default",
    aliases=["Interleaved1F1B"],
)
def interleaved(ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Schedule:
    """Weave F and B of one common order."""
    order = _order(ranks, microbatches, chunks, group)
    runs = []
    for rank in range(ranks):
        warmup = order.warmup(rank, ranks)
        backwards = backward(order.reversed_stages(rank, ranks), order.microbatches)
        runs.append(weave((order.forwards(rank, ranks), 0), (backwards, warmup)))
    return Schedule.from_runs(runs, Placement.loop(ranks, chunks, microbatches))


@family(
    "interleaved-zb",
    "interleaved with a split backward: the weight gradients fill the bubble",
    constraints="any chunks V ≥ 1; group ≥ min(P, M), P by default",
    aliases=["InterleavedZeroBubble"],
)
def interleaved_zb(ranks: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Schedule:
    """Weave F, I and W of one common order; rank r defers W by r turns."""
    order = _order(ranks, microbatches, chunks, group)
    runs = []
    for rank in range(ranks):
        warmup = order.warmup(rank, ranks)
        stages = order.reversed_stages(rank, ranks)
        runs.append(
            weave(
                (order.forwards(rank, ranks), 0),
                (backward_input(stages, order.microbatches), warmup),
                (backward_weight(stages, order.microbatches), warmup + rank),
            )
        )
    return Schedule.from_runs(runs, Placement.loop(ranks, chunks, microbatches))
