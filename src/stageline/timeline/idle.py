"""What every action waited for: the idle time of each rank by cause, and the critical path."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stageline.schedules.dependencies import Ints
from stageline.timeline.costs import Floats

if TYPE_CHECKING:
    from stageline.timeline.timeline import TimedAction, Timeline


class Idle(NamedTuple):
    """The idle time of one rank over the makespan, by cause."""

    warmup: float
    """Before its first action."""
    transfer: float
    """Its input was in transit."""
    peer: float
    """Another rank had not finished its input."""
    host: float
    """Its input had arrived and the rank was free, but the action had not started. In a simulation: its parameters were
    being gathered."""
    drain: float
    """After its last action, until the last rank ends."""

    @property
    def total(self) -> float:
        """The sum of all causes."""
        return sum(self)


class Waits(NamedTuple):
    """For each entry: when its rank was free, when its input was sent and had arrived, and when it started."""

    free: Floats
    sent: Floats
    arrived: Floats
    start: Floats


def waits_of(timeline: Timeline) -> Waits:
    """Return what every entry waited for; before its first entry, a rank is free from the start of the step."""
    graph = timeline.schedule.graph
    start, end = entry_times(timeline)
    sent, arrived = _inputs(timeline)
    free = np.concatenate([end[:1], end[:-1]])
    free[graph.first[:-1][np.diff(graph.first) > 0]] = timeline.first_start
    sent = np.clip(sent, free, start)
    return Waits(free, sent, np.clip(arrived, sent, start), start)


def idle_of(timeline: Timeline) -> tuple[Idle, ...]:
    """Attribute every gap between two entries of a rank to what the second one waited for."""
    graph = timeline.schedule.graph
    _, end = entry_times(timeline)
    waits = waits_of(timeline)
    begin = timeline.first_start
    finish = begin + timeline.makespan
    by_rank = []
    for rank in range(timeline.schedule.ranks):
        low, high = int(graph.first[rank]), int(graph.first[rank + 1])
        if low == high:
            by_rank.append(Idle(0.0, 0.0, 0.0, 0.0, finish - begin))
            continue
        free, sent, arrived, start = (times[low + 1 : high] for times in waits)
        by_rank.append(
            Idle(
                warmup=float(waits.start[low] - begin),
                transfer=float((arrived - sent).sum()),
                peer=float((sent - free).sum()),
                host=float((start - arrived).sum()),
                drain=max(0.0, float(finish - end[high - 1])),
            )
        )
    return tuple(by_rank)


def entry_times(timeline: Timeline) -> tuple[Floats, Floats]:
    """Return the start and end of each entry."""
    lead = leads_of(timeline)
    return timeline.start[lead], timeline.end[lead]


def leads_of(timeline: Timeline) -> Ints:
    """Return one action of each entry."""
    actions = timeline.schedule.graph.actions_of_entries()
    return actions[0] if len(actions) == 1 else np.maximum(*actions)


def _inputs(timeline: Timeline) -> tuple[Floats, Floats]:
    """Return when the last input of each entry was sent, and when it arrived."""
    sent, arrived = _action_inputs(timeline)
    actions = timeline.schedule.graph.actions_of_entries()
    if len(actions) == 1:
        return sent, arrived
    forward, backward = actions
    pick = np.where((backward < 0) | ((forward >= 0) & (arrived[forward] >= arrived[backward])), forward, backward)
    return sent[pick], arrived[pick]


def _action_inputs(timeline: Timeline) -> tuple[Floats, Floats]:
    """Return when the input of each action was sent, and when it arrived; −inf if it has none."""
    source = timeline.schedule.graph.source
    sent = np.where(source >= 0, timeline.end[source], -np.inf)
    arrived = sent.copy()
    arrived[timeline.transfers.receivers] = timeline.transfers.arrived
    return sent, arrived


def critical_path(timeline: Timeline) -> tuple[TimedAction, ...]:
    """Return the chain: from the last end, go back to what each action waited for last."""
    from stageline.timeline.timeline import TimedAction

    schedule, graph = timeline.schedule, timeline.schedule.graph
    if graph.entries == 0:
        return ()
    start, end = entry_times(timeline)
    lead = leads_of(timeline)
    _, arrived = _action_inputs(timeline)
    actions = graph.actions_of_entries()
    first = set(graph.first[:-1].tolist())

    path = []
    entry = int(np.argmax(end))
    while True:
        index = int(lead[entry])
        rank, _ = schedule.where(index)
        path.append(TimedAction(rank, schedule.action(index), float(start[entry]), float(end[entry])))
        waited = [(float(end[entry - 1]), entry - 1)] if entry not in first else []
        for slot in actions:
            mine = int(slot[entry])
            if mine >= 0 and graph.source[mine] >= 0:
                sender = graph.source[mine : mine + 1]
                waited.append((float(arrived[mine]), int(graph.place(sender)[0] - graph.rank[sender][0] - 1)))
        if not waited:
            return tuple(reversed(path))
        # In a tie, stay on the rank.
        entry = max(waited, key=lambda candidate: (candidate[0], candidate[1] == entry - 1))[1]
