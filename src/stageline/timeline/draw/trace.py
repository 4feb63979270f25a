"""Timelines as traces for chrome://tracing and Perfetto: one track per rank, arrows for transfers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from stageline.timeline.draw.palette import LOOKS, SHARD_LOOKS, shard_boxes
from stageline.timeline.timeline import Timeline


def trace(timelines: Timeline | Sequence[Timeline], unit: float = 1000.0, *, names: Sequence[str] | None = None) -> str:
    """Return the trace as JSON; `unit` is the number of microseconds per time unit of the timeline.

    Each timeline becomes one process of the trace, or one per machine if its ranks are on several, with its first start
    at time 0. `names` are the process names. A label of the process says how well the clocks of the ranks agree.

    >>> import json, stageline as sl
    >>> events = json.loads(trace(sl.simulate(sl.schedule("gpipe", ranks=2, microbatches=1))))["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X"]
    ['0F0', '0B0', '1F0', '1B0']
    """
    processes = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    titles = [f"stageline {timeline.schedule.name}" for timeline in processes] if names is None else names
    arrows, numbers = count(), count()
    events = (
        event
        for timeline, name in zip(processes, titles, strict=True)
        for event in _events(timeline, unit, numbers, name, arrows)
    )
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _events(
    timeline: Timeline, unit: float, numbers: Iterator[int], name: str, arrows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    schedule = timeline.schedule
    timeline.require_one_clock("trace on one time axis")
    origin = timeline.first_start
    process_of: dict[int, int] = {}
    for host, ranks in (timeline.ranks_by_host or {"": list(range(schedule.ranks))}).items():
        process = next(numbers)
        process_of |= dict.fromkeys(ranks, process)
        yield {
            "ph": "M",
            "pid": process,
            "name": "process_name",
            "args": {"name": f"{name} on {host}" if host else name},
        }
        if timeline.uncertainty:
            label = f"clocks agree within {timeline.uncertainty * unit / 1e3:.3g} ms"
            yield {"ph": "M", "pid": process, "name": "process_labels", "args": {"labels": label}}
    for rank, process in sorted(process_of.items()):
        yield {"ph": "M", "pid": process, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
    slices: dict[Any, tuple[float, float]] = {}
    for entry in timeline.actions():
        slices[entry.action] = ((entry.start - origin) * unit, (entry.end - entry.start) * unit)
        yield {
            "ph": "X",
            "pid": process_of[entry.rank],
            "tid": entry.rank,
            "name": str(entry.action),
            "cat": LOOKS[entry.action.kind].meaning,
            "ts": (entry.start - origin) * unit,
            "dur": (entry.end - entry.start) * unit,
            "args": {"kind": entry.action.kind, "stage": entry.action.stage, "microbatch": entry.action.microbatch},
        }
    shards = schedule.ranks  # a track of their own below those of the ranks
    for box in shard_boxes(timeline):
        if shards + box.rank not in slices:
            slices[shards + box.rank] = (0.0, 0.0)
            process, name = process_of[box.rank], f"shards of rank {box.rank}"
            yield {"ph": "M", "pid": process, "tid": shards + box.rank, "name": "thread_name", "args": {"name": name}}
        yield {
            "ph": "X",
            "pid": process_of[box.rank],
            "tid": shards + box.rank,
            "name": f"{box.letter} stage {box.stage}",
            "cat": SHARD_LOOKS[box.letter].meaning,
            "ts": (box.start - origin) * unit,
            "dur": (box.end - box.start) * unit,
            "args": {"stage": box.stage},
        }
    for message in timeline.messages():
        arrow = f"{message.sender} to {message.receiver}"
        common = {"cat": "transfer", "name": arrow, "id": next(arrows)}
        # Viewers attach an arrow to the slice that is open at its time, so it starts just before its sender ends and
        # ends just after its receiver starts; the true times of the message are in its arguments.
        sender, receiver = slices[message.sender], slices[message.receiver]
        transit = {"sent": (message.start - origin) * unit, "arrived": (message.end - origin) * unit}
        source, target = message.source_rank, message.target_rank
        out, into = {"pid": process_of[source], "tid": source}, {"pid": process_of[target], "tid": target}
        yield {"ph": "s", **out, "ts": sender[0] + 0.99 * sender[1], "args": transit, **common}
        yield {"ph": "f", "bp": "e", **into, "ts": receiver[0] + 0.01 * receiver[1], **common}
    for rank in range(schedule.ranks):
        times, levels = timeline.memory(rank)
        for time, level in zip(times.tolist(), levels.tolist(), strict=True):
            yield {
                "ph": "C",
                "pid": process_of[rank],
                "name": f"memory of rank {rank}",
                "ts": (time - origin) * unit,
                "args": {"held": level},
            }
