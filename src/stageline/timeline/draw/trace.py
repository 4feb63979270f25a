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
    timeline.require_one_clock("trace on one time axis")
    tracks = _Tracks(timeline, unit)
    yield from tracks.titles(numbers, name)
    yield from tracks.actions()
    yield from tracks.shards()
    yield from tracks.messages(arrows)
    yield from tracks.memory()


class _Tracks:
    """The events of one timeline: one process per host, and one track per rank."""

    def __init__(self, timeline: Timeline, unit: float) -> None:
        self._timeline, self._unit, self._origin = timeline, unit, timeline.first_start
        self._process_of: dict[int, int] = {}
        self._slices: dict[Any, tuple[float, float]] = {}
        """The start and the length of every action."""

    def titles(self, numbers: Iterator[int], name: str) -> Iterator[dict[str, Any]]:
        timeline = self._timeline
        for host, ranks in (timeline.ranks_by_host or {"": list(range(timeline.schedule.ranks))}).items():
            process = next(numbers)
            self._process_of |= dict.fromkeys(ranks, process)
            yield self._title(process, "process_name", {"name": f"{name} on {host}" if host else name})
            if timeline.uncertainty:
                label = f"clocks agree within {timeline.uncertainty * self._unit / 1e3:.3g} ms"
                yield self._title(process, "process_labels", {"labels": label})
        for rank, process in sorted(self._process_of.items()):
            yield self._title(process, "thread_name", {"name": f"rank {rank}"}, track=rank)

    def actions(self) -> Iterator[dict[str, Any]]:
        for entry in self._timeline.actions():
            action = entry.action
            self._slices[action] = (self._at(entry.start), (entry.end - entry.start) * self._unit)
            meaning = {"kind": action.kind, "stage": action.stage, "microbatch": action.microbatch}
            yield self._slice(entry, entry.rank, str(action), LOOKS[action.kind].meaning, meaning)

    def shards(self) -> Iterator[dict[str, Any]]:
        """Shard actions have a track of their own, below those of the ranks."""
        titled: set[int] = set()
        for box in shard_boxes(self._timeline):
            track = self._timeline.schedule.ranks + box.rank
            if track not in titled:
                titled.add(track)
                text = {"name": f"shards of rank {box.rank}"}
                yield self._title(self._process_of[box.rank], "thread_name", text, track=track)
            name, meaning = f"{box.letter} stage {box.stage}", SHARD_LOOKS[box.letter].meaning
            yield self._slice(box, track, name, meaning, {"stage": box.stage})

    def messages(self, arrows: Iterator[int]) -> Iterator[dict[str, Any]]:
        for message in self._timeline.messages():
            arrow = f"{message.sender} to {message.receiver}"
            common = {"cat": "transfer", "name": arrow, "id": next(arrows)}
            # Viewers attach an arrow to the slice that is open at its time, so it starts just before its sender ends
            # and ends just after its receiver starts; the true times of the message are in its arguments.
            sender, receiver = self._slices[message.sender], self._slices[message.receiver]
            transit = {"sent": self._at(message.start), "arrived": self._at(message.end)}
            source, target = message.source_rank, message.target_rank
            out, into = ({"pid": self._process_of[rank], "tid": rank} for rank in (source, target))
            yield {"ph": "s", **out, "ts": sender[0] + 0.99 * sender[1], "args": transit, **common}
            yield {"ph": "f", "bp": "e", **into, "ts": receiver[0] + 0.01 * receiver[1], **common}

    def memory(self) -> Iterator[dict[str, Any]]:
        for rank in range(self._timeline.schedule.ranks):
            times, levels = self._timeline.memory(rank)
            common = {"ph": "C", "pid": self._process_of[rank], "name": f"memory of rank {rank}"}
            for time, level in zip(times.tolist(), levels.tolist(), strict=True):
                yield {**common, "ts": self._at(time), "args": {"held": level}}

    def _at(self, time: float) -> float:
        return (time - self._origin) * self._unit

    def _title(self, process: int, name: str, text: dict[str, str], track: int | None = None) -> dict[str, Any]:
        of_track = {} if track is None else {"tid": track}
        return {"ph": "M", "pid": process, **of_track, "name": name, "args": text}

    def _slice(self, box: Any, track: int, name: str, category: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            "ph": "X",
            "pid": self._process_of[box.rank],
            "tid": track,
            "name": name,
            "cat": category,
            "ts": self._at(box.start),
            "dur": (box.end - box.start) * self._unit,
            "args": arguments,
        }
