"""Forward only: inference and evaluation.

rank 0  0123..      P=3, M=4
rank 1  .0123.
rank 2  ..0123
"""

from __future__ import annotations

from stageline.schedules.families.interleaved import GroupOrder
from stageline.schedules.placement import Placement
from stageline.schedules.registry import family
from stageline.schedules.schedule import Schedule


@family(
    "forward-only",
    "inference: forwards alone",
    constraints="any chunks V ≥ 1; group defaults to P",
)
def forward_only(ranks: int, microbatches: int, *, chunks: int = 1, group: int | None = None) -> Schedule:
    """All F in the order of `interleaved`; with one chunk, one after the other."""
    order = GroupOrder.of(ranks, microbatches, chunks, group)
    runs = [order.forwards(rank, ranks) for rank in range(ranks)]
    return Schedule.from_runs(runs, Placement.loop(ranks, chunks, microbatches), training=False)
