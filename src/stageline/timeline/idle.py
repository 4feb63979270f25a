"""Where the idle time of each rank went."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stageline.schedules.dependencies import Ints
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


class Waits(NamedTuple):
    """For each entry, from its rank being free to its start: when its input was made, and when it had arrived."""

    free: Floats
    made: Floats
    arrived: Floats
    start: Floats


def waits_of(timeline: Timeline) -> Waits:
    """Find what every entry waited for; before its first entry a rank is free from the start of the step."""
    graph = timeline.schedule.graph
    start, end = entry_times(timeline)
    made, arrived = _inputs(timeline)
    free = np.concatenate([end[:1], end[:-1]])
    free[graph.first[:-1][np.diff(graph.first) > 0]] = timeline.first_start
    ready = np.clip(made, free, start)
    return Waits(free, ready, np.clip(arrived, ready, start), start)


def idle_of(timeline: Timeline) -> tuple[Idle, ...]:
    """Attribute every gap between two entries of a rank to what the second one waited for."""
    graph = timeline.schedule.graph
    _, end = entry_times(timeline)
    waits = waits_of(timeline)
    begin = timeline.first_start
    finish = begin + timeline.makespan
    found = []
    for rank in range(timeline.schedule.ranks):
        low, high = int(graph.first[rank]), int(graph.first[rank + 1])
        if low == high:
            found.append(Idle(0.0, 0.0, 0.0, 0.0, finish - begin))
            continue
        free, made, arrived, start = (times[low + 1 : high] for times in waits)
        found.append(
            Idle(
                warmup=float(waits.start[low] - begin),
                transfer=float((arrived - made).sum()),
                peer=float((made - free).sum()),
                host=float((start - arrived).sum()),
                drain=max(0.0, float(finish - end[high - 1])),
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
