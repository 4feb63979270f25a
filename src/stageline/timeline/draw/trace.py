"""A timeline as a trace that chrome://tracing and Perfetto open: one track per rank, arrows for transfers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from stageline.timeline.draw.palette import LOOKS
from stageline.timeline.timeline import Timeline


def trace(timelines: Timeline | Sequence[Timeline], unit: float = 1000.0, *, names: Sequence[str] | None = None) -> str:
    """Write the trace; `unit` is how many microseconds one unit of the timeline's time is drawn as.

    Several timelines are several processes of the trace, on one time axis, each from its own first start.

    >>> import json, stageline as sl
    >>> events = json.loads(trace(sl.simulate(sl.schedule("gpipe", ranks=2, microbatches=1))))["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X"]
    ['0F0', '0B0', '1F0', '1B0']
    """
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    titles = [f"stageline {timeline.schedule.name}" for timeline in shown] if names is None else names
    arrows = count()
    events = (
        event
        for number, (timeline, name) in enumerate(zip(shown, titles, strict=True))
        for event in _events(timeline, unit, number, name, arrows)
    )
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _events(
    timeline: Timeline, unit: float, process: int, name: str, arrows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    schedule = timeline.schedule
    timeline.require_one_clock("trace on one time axis")
    begin = timeline.first_start
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for rank in range(schedule.ranks):
        yield {"ph": "M", "pid": process, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
    box = {}
    for timed in timeline.actions():
        box[timed.action] = ((timed.start - begin) * unit, (timed.end - timed.start) * unit)
        yield {
            "ph": "X",
            "pid": process,
            "tid": timed.rank,
            "name": str(timed.action),
            "cat": LOOKS[timed.action.kind].meaning,
            "ts": (timed.start - begin) * unit,
            "dur": (timed.end - timed.start) * unit,
            "args": {"kind": timed.action.kind, "stage": timed.action.stage, "microbatch": timed.action.microbatch},
        }
    for moved in timeline.messages():
        arrow = f"{moved.sender} to {moved.receiver}"
        common = {"pid": process, "cat": "transfer", "name": arrow, "id": next(arrows)}
        # Viewers hang an arrow on the box that is open at its time, so it leaves just before its sender ends and
        # comes in just after its receiver starts; when the message itself was on its way is told beside it.
        sender, receiver = box[moved.sender], box[moved.receiver]
        way = {"sent": (moved.start - begin) * unit, "arrived": (moved.end - begin) * unit}
        yield {"ph": "s", "tid": moved.source_rank, "ts": sender[0] + 0.99 * sender[1], "args": way, **common}
        yield {"ph": "f", "bp": "e", "tid": moved.target_rank, "ts": receiver[0] + 0.01 * receiver[1], **common}
    for rank in range(schedule.ranks):
        times, levels = timeline.memory(rank)
        for time, level in zip(times.tolist(), levels.tolist(), strict=True):
            yield {
                "ph": "C",
                "pid": process,
                "name": f"memory of rank {rank}",
                "ts": (time - begin) * unit,
                "args": {"held": level},
            }
