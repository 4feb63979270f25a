"""Simulation of ranks that share cores or a GPU: they slow each other down while more of them compute than fit.

    two ranks on two cores     four ranks on two cores
    0 ▕███▏▕███▏               0 ▕██████▏▕██████▏        an action that is never alone takes twice as long
    1    ▕███▏▕███▏            1    ▕██████▏▕██████▏
                               2      ▕██████▏ …

Every start and every end changes the speed of the others, so the walk goes from event to event.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from stageline.common.errors import CostError
from stageline.schedules.dependencies import Graph
from stageline.timeline.costs import Floats, Share


def binding(shares: Sequence[Share], ranks: int) -> list[Share]:
    """Return the shares that can slow a rank down; refuse those of ranks that do not exist."""
    for share in shares:
        if max(share.ranks) >= ranks:
            raise CostError(f"shares name rank {max(share.ranks)}, and the schedule has {ranks} ranks, counted from 0")
    return [share for share in shares if len(share.ranks) > share.capacity]


def run_shared(graph: Graph, duration: Floats, hop: Floats, shares: Sequence[Share]) -> tuple[Floats, Floats]:
    """Return the start and end of every action, where `duration` is its time at full speed."""
    inputs = [(source.tolist(), wait.tolist()) for source, wait in zip(graph.sources, graph.by_place(hop), strict=True)]
    work = np.maximum.reduce(graph.by_place(duration)).tolist()
    ends = graph.fences[1:].tolist()
    at = (graph.fences[:-1] + 1).tolist()
    ranks = range(len(at))
    start, end = np.zeros(graph.places), np.full(graph.places, inf)
    end[graph.fences] = 0.0
    left: list[float | None] = [None] * len(at)  # work of the running entry of each rank
    now = 0.0
    while any(at[rank] < ends[rank] for rank in ranks):
        arrivals = [inf] * len(at)
        for rank in ranks:
            if left[rank] is None and at[rank] < ends[rank]:
                arrivals[rank] = max(float(end[source[at[rank]]]) + wait[at[rank]] for source, wait in inputs)
                if arrivals[rank] <= now:
                    start[at[rank]], left[rank] = now, work[at[rank]]
        speeds = _speeds(left, shares)
        finish = [inf if rest is None else now + rest / speed for rest, speed in zip(left, speeds, strict=True)]
        following = min(*finish, *(arrival for arrival in arrivals if arrival > now), inf)
        for rank in ranks:
            rest = left[rank]
            if rest is None:
                continue
            if finish[rank] <= following:
                end[at[rank]], left[rank] = following, None
                at[rank] += 1
            else:
                left[rank] = rest - (following - now) * speeds[rank]
        now = following
    return graph.by_action(start), graph.by_action(end)


def _speeds(left: Sequence[float | None], shares: Sequence[Share]) -> list[float]:
    """Return the speed of each rank, as a fraction of full speed."""
    speeds = [1.0] * len(left)
    for share in shares:
        running = sum(left[rank] is not None for rank in share.ranks)
        for rank in share.ranks if running > share.capacity else ():
            speeds[rank] = min(speeds[rank], share.capacity / running)
    return speeds
