"""Timelines as Gantt charts in text, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stageline.schedules.dependencies import Ints
from stageline.timeline.draw.palette import (
    LOOKS,
    OWN_UNIT,
    SHARD_LOOKS,
    Boxes,
    boxes_of,
    label_of,
    shard_boxes,
    shown_memory,
    shown_time,
)
from stageline.timeline.timeline import Timeline, shown_bubble

MIN_WIDTH = 30


class Segment(NamedTuple):
    """Part of a line: its text, and the letter of the kind that sets its colour (empty for none)."""

    text: str
    letter: str = ""
    pale: bool = False


def chart(
    timeline: Timeline, width: int = 100, *, most_ranks: int = 64, until: float | None = None
) -> list[list[Segment]]:
    """Return one line per rank. `until` is the time at the right edge, so that several charts can share one axis.

    Uppercase letters mark the first chunk of a rank, lowercase letters every second one. Above `most_ranks`, the ranks
    in the middle are left out. If the ranks are on several machines, they are grouped by machine, each below its name.
    """
    schedule = timeline.schedule
    order = [rank for group in timeline.ranks_by_host.values() for rank in group] or list(range(schedule.ranks))
    ranks = [None if place is None else order[place] for place in _visible_ranks(schedule.ranks, most_ranks)]
    first_of = {group[0]: host for host, group in timeline.ranks_by_host.items()}
    margin = len(f"rank {schedule.ranks - 1} ")
    columns = max(width, MIN_WIDTH) - margin
    boxes = boxes_of(schedule)
    scale = columns / max(until or timeline.makespan, 1e-300)
    # If the shortest box spans several columns, make it a whole number of columns, so that equal boxes look equal.
    shortest = float((timeline.end - timeline.start)[boxes.first].min(initial=np.inf))
    if until is None and scale * shortest >= 2:
        scale = np.floor(scale * shortest) / shortest if np.isfinite(shortest) else scale
    crowded = scale * float(np.median((timeline.end - timeline.start)[boxes.first])) < 1
    edge = int(_columns(np.array([timeline.first_start + timeline.makespan]), timeline, scale)[0])
    first_column = _columns(timeline.start[boxes.first], timeline, scale)
    last_column = _columns(timeline.end[boxes.first], timeline, scale)
    lines = []
    shards = _shard_lines(timeline, scale, edge) if timeline.shards is not None else {}
    for rank in ranks:
        if rank is None:
            lines.append([Segment("…".rjust(margin - 1) + f"  ({schedule.ranks - len(ranks) + 1} ranks not shown)")])
            continue
        if rank in first_of:
            lines.append([Segment(f"on {first_of[rank]}:")])
        line = [Segment(f"rank {rank} ".rjust(margin))]
        lines.append(line)
        rank_boxes = np.flatnonzero(boxes.rank == rank)
        if rank in shards:
            lines.append([Segment(" " * margin), *shards[rank]])
        if crowded:
            line += _majority(timeline, boxes, rank_boxes, scale, edge)
            continue
        column = 0
        for box in rank_boxes.tolist():
            start, end = max(int(first_column[box]), column), int(last_column[box])
            if end <= start:
                continue
            if start > column:
                line.append(Segment("." * (start - column)))
            letter, pale = str(boxes.letter[box]), bool(boxes.odd[box])
            label = label_of(schedule, int(boxes.first[box]), letter)
            line.append(Segment(_fit(label, letter, pale, end - start), letter, pale))
            column = end
        line.append(Segment("." * max(0, edge - column)))
    return lines


def _shard_lines(timeline: Timeline, scale: float, edge: int) -> dict[int, list[Segment]]:
    """Return a line below each rank with sharded stages: when it gathers (U), frees (R) and reduces (G)."""
    by_rank: dict[int, list[str]] = {}
    for box in shard_boxes(timeline):
        cells = by_rank.setdefault(box.rank, [" "] * (edge + 1))
        first, last = _columns(np.array([box.start, box.end]), timeline, scale).tolist()
        for column in range(first, min(max(last, first + 1), edge + 1)):
            free = cells[column] == " "
            cells[column] = box.letter if column == first and (free or box.letter != "R") else cells[column]
            cells[column] = SHARD_LOOKS[box.letter].line if column > first else cells[column]
    return {rank: [Segment("".join(cells).rstrip())] for rank, cells in by_rank.items()}


def _majority(timeline: Timeline, boxes: Boxes, rank_boxes: Ints, scale: float, columns: int) -> list[Segment]:
    """For boxes narrower than a column: show what the rank does for most of each column."""
    edges = np.arange(columns + 1) / scale + timeline.first_start
    start, end = timeline.start[boxes.first[rank_boxes]], timeline.end[boxes.first[rank_boxes]]
    looks = [(letter, pale) for letter in LOOKS for pale in (False, True)]
    share = np.zeros((len(looks) + 1, columns))
    for row, (letter, pale) in enumerate(looks):
        selected = (boxes.letter[rank_boxes] == letter) & (boxes.odd[rank_boxes] == pale)
        if selected.any():
            times = np.stack([start[selected], end[selected]], axis=1).reshape(-1)
            total = np.cumsum(end[selected] - start[selected])
            levels = np.stack([total - (end - start)[selected], total], axis=1).reshape(-1)
            share[row] = np.diff(np.interp(edges, times, levels))
    share[-1] = 1 / scale - share[:-1].sum(axis=0)
    majority = share.argmax(axis=0)
    line: list[Segment] = []
    for low, high in pairwise([0, *(np.flatnonzero(np.diff(majority)) + 1).tolist(), columns] if columns else []):
        if majority[low] == len(looks):
            line.append(Segment("." * (high - low)))
        else:
            letter, pale = looks[majority[low]]
            line.append(Segment((letter.lower() if pale else letter) * (high - low), letter, pale))
    return line


def _columns(times: NDArray[np.float64], timeline: Timeline, scale: float) -> NDArray[np.int64]:
    return np.rint((times - timeline.first_start) * scale).astype(np.int64)


def _visible_ranks(ranks: int, limit: int) -> list[int | None]:
    """Return the ranks to draw: all, or the first and the last, with None for those left out."""
    if ranks <= limit:
        return list(range(ranks))
    half = max(1, limit // 2)
    return [*range(half), None, *range(ranks - half, ranks)]


def _fit(label: str, letter: str, pale: bool, width: int) -> str:
    """Return as much of the label as fits, or the kind alone; pad with the character of the kind."""
    content = label.lower() if pale else label
    if len(content) > width:
        content = (letter.lower() if pale else letter)[:width]
    return content + LOOKS[letter].line * (width - len(content))


def strip(timeline: Timeline, columns: int, until: float) -> str:
    """Return one line that shows the share of busy ranks over time, from blank to a full block."""
    boxes = boxes_of(timeline.schedule)
    edges = np.linspace(0.0, until, columns + 1)
    start = timeline.start[boxes.first] - timeline.first_start
    end = timeline.end[boxes.first] - timeline.first_start
    # The busy time of all ranks up to each edge: time since each start minus time since each end.
    busy = _ramp(start, edges) - _ramp(end, edges)
    share = np.diff(busy) / max(until / columns, 1e-300) / timeline.schedule.ranks
    blocks = " ▁▂▃▄▅▆▇█"
    inside = edges[:-1] < timeline.makespan
    levels = np.where(inside, np.clip(np.ceil(share * 8 - 1e-9), 0, 8), 0).astype(int)
    return "".join(blocks[level] for level in levels.tolist())


def _ramp(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum over all times t of max(0, edge − t), at each edge."""
    times = np.sort(times)
    count = np.searchsorted(times, edges)
    total = np.concatenate([[0.0], np.cumsum(times)])[count]
    return np.asarray(edges * count - total)


def legend(timelines: Sequence[Timeline], width: int = 100) -> list[list[Segment]]:
    """Return the kinds that appear, with their meaning, wrapped to the width."""
    boxes = [boxes_of(timeline.schedule) for timeline in timelines]
    present = {letter for panel in boxes for letter in panel.letter.tolist()}
    entries = [
        [Segment(f" {letter} ", letter), Segment(f" {look.meaning}")]
        for letter, look in LOOKS.items()
        if letter in present
    ]
    drawn = {box.letter for timeline in timelines for box in shard_boxes(timeline)}
    entries += [
        [Segment(f" {letter} "), Segment(f" {look.meaning}")] for letter, look in SHARD_LOOKS.items() if letter in drawn
    ]
    if any(panel.odd.any() for panel in boxes):
        entries.append([Segment("small letters: every second chunk of a rank")])
    lines: list[list[Segment]] = [[]]
    for entry in entries:
        used = sum(len(segment.text) for segment in lines[-1])
        if used and used + 3 + sum(len(segment.text) for segment in entry) > width:
            lines.append([])
        elif used:
            lines[-1].append(Segment("   "))
        lines[-1] += entry
    return lines


def figures(timeline: Timeline) -> list[str]:
    """Return the lines below a chart: times, bubbles and memory."""
    makespan, span = (shown_time(timeline, time) for time in (timeline.makespan, timeline.span))
    clocks = shown_time(timeline, timeline.uncertainty or 0.0)
    return [
        f"makespan {makespan}  bubble {shown_bubble(timeline)}   first start to last end, all ranks",
        f"span     {span}  bubble {timeline.span_bubble:.1%}   first start to last end, slowest rank",
        f"utilisation {shown_share(timeline.utilisation)}",
        f"imbalance {shown_share(timeline.imbalance)}   idle because the busiest rank has more work",
        f"peak memory {shown_memory(timeline)}",
        *([f"clocks of the ranks agree within {clocks}"] if timeline.uncertainty else []),
        *([] if timeline.in_seconds else [f"times are in {OWN_UNIT}"]),
    ]


def shown_share(share: float | None) -> str:
    """Return a share of ranks × makespan as text."""
    return "unknown: clocks not aligned" if share is None else f"{share:.1%}"


def text(timeline: Timeline, width: int = 100) -> str:
    """Render a timeline as plain text.

    >>> import stageline as sl
    >>> print(text(sl.simulate(sl.schedule("1f1b", ranks=2, microbatches=3)), width=44))
    rank 0 F0-F1-......B0====F2-B1====...B2====
    rank 1 ...F0-B0====F1-B1====F2-B2====......
    <BLANKLINE>
     F  forward    B  whole backward
    makespan 12  bubble 25.0%   first start to last end, all ranks
    span     12  bubble 25.0%   first start to last end, slowest rank
    utilisation 75.0%
    imbalance 0.0%   idle because the busiest rank has more work
    peak memory 2, 1 microbatches
    times are in units of the costs
    """
    drawn = ["".join(segment.text for segment in line) for line in chart(timeline, width)]
    key = ["".join(segment.text for segment in line) for line in legend([timeline], width)]
    return "\n".join([*drawn, "", *key, *figures(timeline)])
