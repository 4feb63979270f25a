"""Where the idle time of each rank went."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stageline.schedules.graph import Ints
from stageline.timeline.costs import Floats

if TYPE_CHECKING:
    from stageline.timeline.timeline import Timeline


class Idle(NamedTuple):
    """The idle time of one rank over the makespan, by its cause; the parts add up to all of it."""

    warmup: float
    """Before its first action."""
    transfer: float
    """Its input was made and on its way."""
    peer: float
    """Another rank had not yet made its input."""
    host: float
    """Its input was there and the rank free, and still it did not start; 0 in a simulation."""
    drain: float
    """After its last action, until the last rank ends."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def idle_of(timeline: Timeline) -> tuple[Idle, ...]:
    """Attribute every gap between two entries of a rank to what the second one waited for."""
    graph = timeline.schedule.graph
    start, end = entry_times(timeline)
    made, arrived = _inputs(timeline)
    ranks = timeline.schedule.ranks
    begin = timeline.first_start
    finish = begin + timeline.makespan
    found = []
    for rank in range(ranks):
        low, high = int(graph.first[rank]), int(graph.first[rank + 1])
        if low == high:
            found.append(Idle(0.0, 0.0, 0.0, 0.0, finish - begin))
            continue
        free, go = end[low : high - 1], start[low + 1 : high]
        ready = np.clip(made[low + 1 : high], free, go)
        there = np.clip(arrived[low + 1 : high], ready, go)
        found.append(
            Idle(
                warmup=float(start[low] - begin),
                transfer=float((there - ready).sum()),
                peer=float((ready - free).sum()),
                host=float((go - there).sum()),
                drain=float(finish - end[high - 1]),
            )
        )
    return tuple(found)


def entry_times(timeline: Timeline) -> tuple[Floats, Floats]:
    """Start and end of each entry; the actions of an overlapped pair have the same."""
    lead = leads_of(timeline)
    return timeline.start[lead], timeline.end[lead]


def leads_of(timeline: Timeline) -> Ints:
    """One action of each entry."""
    actions = timeline.schedule.graph.actions_of_entries()
    return actions[0] if len(actions) == 1 else np.maximum(*actions)


def _inputs(timeline: Timeline) -> tuple[Floats, Floats]:
    """When the input that each entry had to wait longest for was made, and when it arrived."""
    graph = timeline.schedule.graph
    made = np.full(len(graph.source), -np.inf)
    arrived = np.full(len(graph.source), -np.inf)
    taken = np.flatnonzero(graph.source >= 0)
    made[taken] = arrived[taken] = timeline.end[graph.source[taken]]
    arrived[timeline.transfers.receivers] = timeline.transfers.arrived
    actions = graph.actions_of_entries()
    if len(actions) == 1:
        return made, arrived
    forward, backward = actions
    pick = np.where((backward < 0) | ((forward >= 0) & (arrived[forward] >= arrived[backward])), forward, backward)
    return made[pick], arrived[pick]
