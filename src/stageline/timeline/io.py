"""Timeline files: a schedule, and the times of its actions and messages. See `docs/formats.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stageline.common.checked_json import NonNegative, check_format, field, number_or_none, parse_json
from stageline.common.errors import JsonError, ScheduleError, shorten
from stageline.common.files import read_text, write_text
from stageline.schedules.dependencies import Ints
from stageline.schedules.io import format_error, naming, schedule_from, schedule_lines
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import ensure_progress
from stageline.timeline.costs import LARGEST_SUM, Costs, Floats
from stageline.timeline.idle import entry_times
from stageline.timeline.timeline import ShardTimes, Timeline, Transfers

FORMAT = "stageline-timeline"
VERSION = 1
PLANNED = "planned.json"
"""The plan of a run, in the folder of its measured steps: what every page and command calls planned."""

OUT_OF_ORDER = 0.1
"""How early an action may start before its input was sent in a file without an uncertainty, as a share of the longest
time of a rank."""


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as JSON. An existing file is replaced atomically."""
    target = Path(path)
    if target.suffix.lower() != ".json":
        raise ScheduleError(
            f"timelines are written as JSON; the file name must end in .json, got {target.name!r}", rule="format"
        )
    write_text(target, _lines(timeline), format_error)


def read_timeline(path: str | Path) -> Timeline:
    """Read a timeline that `Timeline.write` wrote.

    >>> import stageline as sl
    >>> sl.simulate(sl.schedule("zb-v", ranks=4, microbatches=8)).write("run.json")
    >>> sl.read_timeline("run.json").makespan
    51.0
    """
    source = Path(path)
    text = read_text(source, "timeline", format_error)
    with naming(source):
        return _timeline(check_format(parse_json(text), FORMAT, VERSION, "timeline"))


def _lines(timeline: Timeline) -> Iterator[str]:
    """Yield the JSON, with the times of a rank on one line, in program order."""
    schedule, moved = timeline.schedule, timeline.transfers
    costs = None if timeline.costs is None else timeline.costs.to_json()
    yield f'{{\n  "format": {json.dumps(FORMAT)},\n  "version": {VERSION},\n  "costs": {json.dumps(costs)},\n'
    yield f'  "uncertainty": {json.dumps(timeline.uncertainty)},\n'
    if timeline.hosts:
        yield f'  "hosts": {json.dumps(timeline.hosts)},\n'
    yield '  "schedule": '
    yield "".join(schedule_lines(schedule)).rstrip().replace("\n", "\n  ") + ",\n"
    cuts = np.searchsorted(moved.receivers, schedule.bounds)
    rows = {
        "start": [timeline.start[mine] for mine in schedule.slices()],
        "end": [timeline.end[mine] for mine in schedule.slices()],
        "sent": np.split(moved.sent, cuts[1:-1]),
        "arrived": np.split(moved.arrived, cuts[1:-1]),
    }
    if timeline.shards is not None and schedule.sharding is not None:
        for name, times in (("shard_start", timeline.shards.start), ("shard_end", timeline.shards.end)):
            rows[name] = np.split(times, schedule.sharding.bounds[1:-1])
    for name, by_rank in rows.items():
        inner = ",\n    ".join(json.dumps(row.tolist(), separators=(",", ":")) for row in by_rank)
        yield f'  "{name}": [\n    {inner}\n  ]{"" if name == list(rows)[-1] else ","}\n'
    yield "}\n"


def _timeline(data: Mapping[str, Any]) -> Timeline:
    schedule = schedule_from(data.get("schedule"))
    ensure_progress(schedule)
    graph = schedule.graph
    receivers = graph.receivers
    per_rank = np.diff(schedule.bounds)
    messages = np.bincount(graph.rank[receivers], minlength=schedule.ranks)
    start, end = (_times(data, name, per_rank, "actions") for name in ("start", "end"))
    sent, arrived = (_times(data, name, messages, "messages from other ranks") for name in ("sent", "arrived"))
    plain_costs = field(data, "costs", dict | None)
    costs = None if plain_costs is None else Costs.from_json(plain_costs)
    if costs is not None:
        costs.check_lengths(schedule.stages, schedule.microbatches)
    moved = Transfers(receivers, sent, arrived)
    shards = None
    if schedule.sharding is not None:
        per_rank = np.diff(schedule.sharding.bounds)
        shards = ShardTimes(*(_times(data, name, per_rank, "shard actions") for name in ("shard_start", "shard_end")))
    hosts = tuple(str(host) for host in (field(data, "hosts", list) if "hosts" in data else ()))
    if hosts and len(hosts) != schedule.ranks:
        raise JsonError(f"'hosts' has {len(hosts)} names for {schedule.ranks} ranks")
    timeline = Timeline(schedule, start, end, moved, costs, _uncertainty(data, schedule, start, moved), shards, hosts)
    _check_order(schedule, timeline)
    return timeline


def _uncertainty(data: Mapping[str, Any], schedule: Schedule, start: Floats, moved: Transfers) -> float | None:
    """Return the uncertainty of the clocks; files of early versions have none, so there it is inferred.

    If an action starts long before its input was sent, the two ranks had different clocks.
    """
    if "uncertainty" in data:
        uncertainty: float | None = field(data, "uncertainty", NonNegative | None)
        return uncertainty
    early = float((moved.sent - start[moved.receivers]).max(initial=0.0))
    spans = [float(np.ptp(start[mine])) for mine in schedule.slices() if mine.stop > mine.start]
    return None if early > OUT_OF_ORDER * max(spans, default=0.0) else 0.0


def _times(data: Mapping[str, Any], name: str, expected: Ints, what: str) -> Floats:
    """Return the times of all ranks, after checking that there are as many as the schedule needs."""
    rows = field(data, name, list)
    if len(rows) != len(expected):
        raise JsonError(f"{name!r} has {len(rows)} lists of times for {len(expected)} ranks")
    for rank, (row, count) in enumerate(zip(rows, expected.tolist(), strict=True)):
        if not isinstance(row, list) or len(row) != count:
            actual = f"{len(row)} times" if isinstance(row, list) else shorten(row)
            raise ScheduleError(
                f"{name!r} of rank {rank} has {actual} for its {count} {what}", rule="format", rank=rank
            )
        for at, value in enumerate(row):
            number = number_or_none(value)
            if number is None or not -LARGEST_SUM <= number <= LARGEST_SUM:
                raise ScheduleError(
                    f"{name!r} of rank {rank}, position {at}, must be a time, got {shorten(value)}",
                    rule="format",
                    rank=rank,
                    position=at,
                )
    return np.array([value for row in rows for value in row], dtype=np.float64)


def _check_order(schedule: Schedule, timeline: Timeline) -> None:
    """Raise `ScheduleError` if an action ends before it starts, or overlaps the one before it on its rank."""
    backwards = np.flatnonzero(timeline.end < timeline.start)
    if len(backwards):
        rank, position = schedule.where(int(backwards[0]))
        action = schedule.action(int(backwards[0]))
        raise ScheduleError(f"rank {rank}, position {position}: {action} ends before it starts", rule="format")
    start, end = entry_times(timeline)
    overlaps = start[1:] < end[:-1]
    first = schedule.graph.first[1:-1] - 1
    overlaps[first[(first >= 0) & (first < len(overlaps))]] = False  # from the last entry of a rank to the next rank
    if overlaps.any():
        entry = int(np.argmax(overlaps)) + 1
        rank = int(np.searchsorted(schedule.graph.first, entry, side="right")) - 1
        position = entry - int(schedule.graph.first[rank])
        raise ScheduleError(
            f"rank {rank}, position {position}: starts at {start[entry]:g}, before position {position - 1} ends at "
            f"{end[entry - 1]:g}",
            rule="format",
        )
