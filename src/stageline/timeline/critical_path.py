"""The critical path: the chain of actions that determines the makespan of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stageline.timeline.idle import entry_times, leads_of

if TYPE_CHECKING:
    from stageline.timeline.timeline import TimedAction, Timeline


def critical_path(timeline: Timeline) -> tuple[TimedAction, ...]:
    """Return the chain: from the last end, go back to what each action waited for last."""
    from stageline.timeline.timeline import TimedAction

    schedule, graph = timeline.schedule, timeline.schedule.graph
    if graph.entries == 0:
        return ()
    start, end = entry_times(timeline)
    lead = leads_of(timeline)
    arrived = np.full(len(graph.source), -np.inf)
    taken = np.flatnonzero(graph.source >= 0)
    arrived[taken] = timeline.end[graph.source[taken]]
    arrived[timeline.transfers.receivers] = timeline.transfers.arrived
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
