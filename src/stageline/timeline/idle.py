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


def waits_of(timeline: Timeline, part: slice | None = None) -> Waits:
    """Return what every entry waited for; before its first entry, a rank is free from the start of the step.

    `part` is a range of actions of whole ranks: only their entries are returned.
    """
    graph = timeline.schedule.graph
    start, end = entry_times(timeline, part)
    sent, arrived = _inputs(timeline, part)
    free = np.concatenate([end[:1], end[:-1]])
    first, entries = graph.first[:-1][np.diff(graph.first) > 0], _entries(timeline, part)
    free[first[(first >= entries.start) & (first < entries.stop)] - entries.start] = timeline.first_start
    sent = np.clip(sent, free, start)
    return Waits(free, sent, np.clip(arrived, sent, start), start)


def idle_of(timeline: Timeline) -> tuple[Idle, ...]:
    """Attribute every gap between two entries of a rank to what the second one waited for."""
    schedule, graph = timeline.schedule, timeline.schedule.graph
    begin = timeline.first_start
    finish = begin + timeline.makespan
    by_rank = [Idle(0.0, 0.0, 0.0, 0.0, finish - begin)] * schedule.ranks
    for part in schedule.windows():
        _, end = entry_times(timeline, part)
        waits, offset = waits_of(timeline, part), _entries(timeline, part).start
        for rank in np.unique(graph.rank[part]).tolist():
            low, high = int(graph.first[rank]) - offset, int(graph.first[rank + 1]) - offset
            free, sent, arrived, start = (times[low + 1 : high] for times in waits)
            by_rank[rank] = Idle(
                warmup=float(waits.start[low] - begin),
                transfer=float((arrived - sent).sum()),
                peer=float((sent - free).sum()),
                host=float((start - arrived).sum()),
                drain=max(0.0, float(finish - end[high - 1])),
            )
    return tuple(by_rank)


def entry_times(timeline: Timeline, part: slice | None = None) -> tuple[Floats, Floats]:
    """Return the start and end of each entry; with `part`, of those of a range of actions of whole ranks."""
    if timeline.schedule.graph.pairs is None:
        part = part or slice(None)
        return timeline.start[part], timeline.end[part]
    lead = leads_of(timeline)[_entries(timeline, part)]
    return timeline.start[lead], timeline.end[lead]


def leads_of(timeline: Timeline) -> Ints:
    """Return one action of each entry."""
    actions = timeline.schedule.graph.actions_of_entries()
    return actions[0] if len(actions) == 1 else np.maximum(*actions)


def _entries(timeline: Timeline, part: slice | None) -> slice:
    """Return the entries of a range of actions of whole ranks; all by default."""
    graph = timeline.schedule.graph
    if part is None or graph.pairs is None:
        return part or slice(0, graph.entries)
    return slice(int(graph.pairs.entry_of[part.start]), int(graph.pairs.entry_of[part.stop - 1]) + 1)


def _inputs(timeline: Timeline, part: slice | None) -> tuple[Floats, Floats]:
    """Return when the last input of each entry was sent, and when it arrived."""
    if timeline.schedule.graph.pairs is None:
        return _action_inputs(timeline, part)
    sent, arrived = _action_inputs(timeline)
    forward, backward = timeline.schedule.graph.actions_of_entries()
    pick = np.where((backward < 0) | ((forward >= 0) & (arrived[forward] >= arrived[backward])), forward, backward)
    pick = pick[_entries(timeline, part)]
    return sent[pick], arrived[pick]


def _action_inputs(timeline: Timeline, part: slice | None = None) -> tuple[Floats, Floats]:
    """Return when the input of each action was sent, and when it arrived; −inf if it has none."""
    part = slice(0, timeline.schedule.num_actions) if part is None else part
    source, transfers = timeline.schedule.graph.source[part], timeline.transfers.of_actions(part)
    sent = np.where(source >= 0, timeline.end[source], -np.inf)
    arrived = sent.copy()
    arrived[transfers.receivers - part.start] = transfers.arrived
    return sent, arrived


def critical_path(timeline: Timeline) -> tuple[TimedAction, ...]:
    """Return the chain of actions that determines the makespan."""
    from stageline.timeline.timeline import TimedAction

    schedule, path = timeline.schedule, critical_actions(timeline)
    return tuple(
        TimedAction(schedule.where(index)[0], schedule.action(index), *map(float, times))
        for index, *times in zip(path, timeline.start[path], timeline.end[path], strict=True)
    )


def critical_actions(timeline: Timeline) -> list[int]:
    """Return the indices of the chain: from the last end, go back to what each action waited for last."""
    graph = timeline.schedule.graph
    if graph.entries == 0:
        return []
    _, end = entry_times(timeline)
    lead = leads_of(timeline)
    _, arrived = _action_inputs(timeline)
    actions = graph.actions_of_entries()
    entry_of = graph.entries_of(np.arange(len(graph.source), dtype=np.int32))
    first = set(graph.first[:-1].tolist())

    path = []
    entry = int(np.argmax(end))
    while True:
        path.append(int(lead[entry]))
        waited = [(float(end[entry - 1]), entry - 1)] if entry not in first else []
        for slot in actions:
            mine = int(slot[entry])
            if mine >= 0 and graph.source[mine] >= 0:
                waited.append((float(arrived[mine]), int(entry_of[graph.source[mine]])))
        if not waited:
            return path[::-1]
        # In a tie, stay on the rank.
        entry = max(waited, key=lambda candidate: (candidate[0], candidate[1] == entry - 1))[1]
