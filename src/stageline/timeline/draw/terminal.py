"""A Gantt chart in characters, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stageline.schedules.graph import Ints
from stageline.timeline.draw.palette import LOOKS, Boxes, boxes_of, label_of, number, summary
from stageline.timeline.timeline import Timeline, shown_bubble

LEAST_WIDTH = 30


class Segment(NamedTuple):
    """A piece of a line: its text, and how to colour it (the letter of a kind, or nothing)."""

    text: str
    letter: str = ""
    pale: bool = False


def chart(
    timeline: Timeline, width: int = 100, *, most_ranks: int = 64, until: float | None = None
) -> list[list[Segment]]:
    """One line per rank. `until` is the time at the right edge, so that several charts can share one axis.

    Capitals are the first chunk of a rank, small letters every second one.
    """
    schedule = timeline.schedule
    ranks = _shown(schedule.ranks, most_ranks)
    margin = len(f"rank {schedule.ranks - 1} ")
    columns = max(width, LEAST_WIDTH) - margin
    boxes = boxes_of(schedule)
    scale = columns / max(until or timeline.makespan, 1e-300)
    # Where the shortest box is some columns wide, make it a whole number of them: equal boxes then look equal.
    shortest = float((timeline.end - timeline.start)[boxes.first].min(initial=np.inf))
    if until is None and scale * shortest >= 2:
        scale = np.floor(scale * shortest) / shortest if np.isfinite(shortest) else scale
    crowded = scale * float(np.median((timeline.end - timeline.start)[boxes.first])) < 1
    edge = int(_columns(np.array([timeline.first_start + timeline.makespan]), timeline, scale)[0])
    low = _columns(timeline.start[boxes.first], timeline, scale)
    high = _columns(timeline.end[boxes.first], timeline, scale)
    lines = []
    for rank in ranks:
        if rank is None:
            lines.append([Segment("…".rjust(margin - 1) + f"  ({schedule.ranks - len(ranks) + 1} ranks not shown)")])
            continue
        line = [Segment(f"rank {rank} ".rjust(margin))]
        lines.append(line)
        mine = np.flatnonzero(boxes.rank == rank)
        if crowded:
            line += _majority(timeline, boxes, mine, scale, edge)
            continue
        at = 0
        for box in mine.tolist():
            start, end = max(int(low[box]), at), int(high[box])
            if end <= start:
                continue
            if start > at:
                line.append(Segment("." * (start - at)))
            letter, pale = str(boxes.letter[box]), bool(boxes.odd[box])
            label = label_of(schedule, int(boxes.first[box]), letter)
            line.append(Segment(_fit(label, letter, pale, end - start), letter, pale))
            at = end
        line.append(Segment("." * max(0, edge - at)))
    return lines


def _majority(timeline: Timeline, boxes: Boxes, mine: Ints, scale: float, columns: int) -> list[Segment]:
    """Where boxes are narrower than a column: in each column, what the rank does for most of its time."""
    edges = np.arange(columns + 1) / scale + timeline.first_start
    start, end = timeline.start[boxes.first[mine]], timeline.end[boxes.first[mine]]
    looks = [(letter, pale) for letter in LOOKS for pale in (False, True)]
    share = np.zeros((len(looks) + 1, columns))
    for number_of, (letter, pale) in enumerate(looks):
        chosen = (boxes.letter[mine] == letter) & (boxes.odd[mine] == pale)
        if chosen.any():
            times = np.stack([start[chosen], end[chosen]], axis=1).reshape(-1)
            spent = np.cumsum(end[chosen] - start[chosen])
            levels = np.stack([spent - (end - start)[chosen], spent], axis=1).reshape(-1)
            share[number_of] = np.diff(np.interp(edges, times, levels))
    share[-1] = 1 / scale - share[:-1].sum(axis=0)
    most = share.argmax(axis=0)
    line: list[Segment] = []
    for low, high in pairwise([0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), columns] if columns else []):
        if most[low] == len(looks):
            line.append(Segment("." * (high - low)))
        else:
            letter, pale = looks[most[low]]
            line.append(Segment((letter.lower() if pale else letter) * (high - low), letter, pale))
    return line


def _columns(times: NDArray[np.float64], timeline: Timeline, scale: float) -> NDArray[np.int64]:
    return np.rint((times - timeline.first_start) * scale).astype(np.int64)


def _shown(ranks: int, most: int) -> list[int | None]:
    """Which ranks are drawn: all, or the first and the last ones."""
    if ranks <= most:
        return list(range(ranks))
    half = max(1, most // 2)
    return [*range(half), None, *range(ranks - half, ranks)]


def _fit(label: str, letter: str, pale: bool, width: int) -> str:
    """As much as fits: kind and microbatch, or the kind alone; the rest is filled with the kind's own line."""
    words = label.lower() if pale else label
    if len(words) > width:
        words = (letter.lower() if pale else letter)[:width]
    return words + LOOKS[letter].line * (width - len(words))


def strip(timeline: Timeline, columns: int, until: float) -> str:
    """One line: what share of the ranks computes at each moment, from blank to a full block."""
    boxes = boxes_of(timeline.schedule)
    edges = np.linspace(0.0, until, columns + 1)
    start = timeline.start[boxes.first] - timeline.first_start
    end = timeline.end[boxes.first] - timeline.first_start
    # The time that all ranks have computed until each edge, by adding up what started less what ended.
    done = _ramp(start, edges) - _ramp(end, edges)
    share = np.diff(done) / max(until / columns, 1e-300) / timeline.schedule.ranks
    blocks = " ▁▂▃▄▅▆▇█"
    inside = edges[:-1] < timeline.makespan
    levels = np.where(inside, np.clip(np.ceil(share * 8 - 1e-9), 0, 8), 0).astype(int)
    return "".join(blocks[level] for level in levels.tolist())


def _ramp(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over all times t of max(0, edge − t), at each edge."""
    times = np.sort(times)
    count = np.searchsorted(times, edges)
    total = np.concatenate([[0.0], np.cumsum(times)])[count]
    return np.asarray(edges * count - total)


def legend(timelines: Sequence[Timeline], width: int = 100) -> list[list[Segment]]:
    """The kinds that appear, with their meaning, in as many lines as it takes."""
    boxes = [boxes_of(timeline.schedule) for timeline in timelines]
    present = {letter for each in boxes for letter in each.letter.tolist()}
    words = [
        [Segment(f" {letter} ", letter), Segment(f" {look.meaning}")]
        for letter, look in LOOKS.items()
        if letter in present
    ]
    if any(each.odd.any() for each in boxes):
        words.append([Segment("small letters: every second chunk of a rank")])
    lines: list[list[Segment]] = [[]]
    for word in words:
        taken = sum(len(segment.text) for segment in lines[-1])
        if taken and taken + 3 + sum(len(segment.text) for segment in word) > width:
            lines.append([])
        elif taken:
            lines[-1].append(Segment("   "))
        lines[-1] += word
    return lines


def figures(timeline: Timeline) -> list[str]:
    """The lines below a chart: times, bubbles and memory, each saying what it is."""
    peak = timeline.peak_memory
    return [
        f"makespan {number(timeline.makespan)}  bubble {shown_bubble(timeline)}   first start to last end, all ranks",
        f"span     {number(timeline.span)}  bubble {timeline.span_bubble:.1%}   the longest of any one rank",
        f"peak memory {summary(peak)}",
    ]


def text(timeline: Timeline, width: int = 100) -> str:
    """Draw a timeline in plain characters.

    >>> import stageline as sl
    >>> print(text(sl.simulate(sl.schedule("1f1b", ranks=2, microbatches=3)), width=44))
    rank 0 F0-F1-......B0====F2-B1====...B2====
    rank 1 ...F0-B0====F1-B1====F2-B2====......
    <BLANKLINE>
     F  forward    B  whole backward
    makespan 12  bubble 25.0%   first start to last end, all ranks
    span     12  bubble 25.0%   the longest of any one rank
    peak memory 2 1
    """
    drawn = ["".join(segment.text for segment in line) for line in chart(timeline, width)]
    key = ["".join(segment.text for segment in line) for line in legend([timeline], width)]
    return "\n".join([*drawn, "", *key, *figures(timeline)])
