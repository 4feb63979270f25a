"""Timelines as SVG images."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

import numpy as np

from stageline.common.units import pluralize
from stageline.schedules.dependencies import Ints
from stageline.timeline.costs import Floats
from stageline.timeline.draw.palette import (
    IDLE,
    LOOKS,
    SHARD_LOOKS,
    Boxes,
    boxes_of,
    label_of,
    number,
    shard_boxes,
    shown_memory,
    shown_time,
    time_scale,
)
from stageline.timeline.timeline import Timeline, shown_bubble

LEFT, ROW, GAP, HEAD, AXIS = 64, 24, 3, 34, 26
LINE, LETTER = 17, 6.4
"""The height of another line of a heading, and the width of a letter of a wide font."""
STRIP = 5
"""The height of shard actions at the lower edge of a row."""
MAX_LABELLED = 4000
"""Above this many boxes, omit labels and tooltips, which would be too small to read."""


def svg(timelines: Timeline | Sequence[Timeline], width: int = 1000, *, names: Sequence[str] | None = None) -> str:
    """Render one timeline, or several below each other on one time axis.

    `names` are the headings, by default the names of the schedules.

    >>> import stageline as sl
    >>> picture = svg(sl.simulate(sl.schedule("1f1b", ranks=2, microbatches=2)))
    >>> picture.startswith("<svg"), picture.count("<title>")
    (True, 8)
    """
    panels = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    end = max((timeline.makespan for timeline in panels), default=0.0) or 1.0
    scale = (width - LEFT - 16) / end
    parts: list[str] = []
    top = 8
    titles = [timeline.schedule.name for timeline in panels] if names is None else names
    headings = [_heading(timeline, title) for timeline, title in zip(panels, titles, strict=True)]
    # All on one line, or all on lines of their own.
    fits = all(7 * len(name) + 12 + LETTER * len(figures) <= width - LEFT for name, figures in headings)
    for timeline, (name, figures) in zip(panels, headings, strict=True):
        lines = [figures] if fits else textwrap.wrap(figures, int((width - LEFT) / LETTER))
        parts.append(f'<text x="{LEFT}" y="{top + 14}"><tspan class="t">{escape(name)}</tspan>')
        place = 'dx="12"' if fits else f'x="{LEFT}" dy="{LINE}"'
        parts.append("".join(f'<tspan class="s" {place}>{escape(line)}</tspan>' for line in lines) + "</text>")
        top += 0 if fits else LINE * len(lines)
        parts.append(_panel(timeline, top, scale))
        top += HEAD + timeline.schedule.ranks * (ROW + GAP) + 10
    parts.append(_axis(end, scale, top, *time_scale(panels)))
    letters = {letter for timeline in panels for letter in boxes_of(timeline.schedule).letter.tolist()}
    two_chunks = any(bool(boxes_of(timeline.schedule).odd.any()) for timeline in panels)
    letters |= {box.letter for timeline in panels for box in shard_boxes(timeline)}
    legend, height = _legend(letters, two_chunks, top + AXIS + 12, width)
    parts.append(legend)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n{_style()}\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _style() -> str:
    rules = ["text{fill:#222}", ".t{font-weight:600}", ".s{fill:#555}", "[class]{shape-rendering:auto}"]
    for index, look in enumerate(LOOKS.values()):
        rules.append(f".k{index}{{fill:{look.fill};stroke:#fff;stroke-width:.6}}")
        rules.append(f".p{index}{{fill:{look.pale};stroke:#fff;stroke-width:.6}}")
        rules.append(f".i{index}{{fill:{look.ink};text-anchor:middle;pointer-events:none;font-size:11px}}")
    return "<style>" + "".join(rules) + "</style>"


def _shards(timeline: Timeline, top: int, scale: float) -> list[str]:
    """Return a thin strip at the lower edge of each rank's row: what it gathers, frees and reduces."""
    parts = []
    for box in shard_boxes(timeline):
        x, y = (box.start - timeline.first_start) * scale + LEFT, top + HEAD - 8 + box.rank * (ROW + GAP) + ROW - STRIP
        length = max((box.end - box.start) * scale, 1.5)
        parts.append(
            f'<rect fill="{SHARD_LOOKS[box.letter].fill}" x="{x:.2f}" y="{y}" width="{length:.2f}" height="{STRIP}">'
            f"<title>{escape(box.text)}</title></rect>"
        )
    return parts


def _heading(timeline: Timeline, title: str) -> tuple[str, str]:
    """Return the name and the figures of a timeline."""
    schedule = timeline.schedule
    figures = [
        f"makespan {shown_time(timeline, timeline.makespan)} (bubble {shown_bubble(timeline)})",
        f"span {shown_time(timeline, timeline.span)} (bubble {timeline.span_bubble:.1%})",
        f"utilisation {timeline.utilisation or 0:.1%}",
        *([f"imbalance {timeline.imbalance:.1%}"] if (timeline.imbalance or 0) >= 0.0005 else []),
        f"peak memory {shown_memory(timeline)}",
    ]
    name = f"{title}, {pluralize(schedule.ranks, 'rank')}, {pluralize(schedule.microbatches, 'microbatch')}"
    return name, ", ".join(figures)


def _panel(timeline: Timeline, top: int, scale: float) -> str:
    schedule = timeline.schedule
    boxes = boxes_of(schedule)
    parts = []
    for rank in range(schedule.ranks):
        y = top + HEAD - 8 + rank * (ROW + GAP)
        host = timeline.hosts[rank] if timeline.ranks_by_host else ""
        parts.append(f'<text x="{LEFT - 8}" y="{y + ROW - (13 if host else 8)}" text-anchor="end">rank {rank}</text>')
        if host:
            place = f'x="{LEFT - 8}" y="{y + ROW - 3}" text-anchor="end" font-size="8"'
            parts.append(f'<text class="s" {place}>{escape(host[-14:])}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{timeline.makespan * scale:.2f}" height="{ROW}" fill="{IDLE}"/>')
    start = (timeline.start[boxes.first] - timeline.first_start) * scale + LEFT
    length = (timeline.end[boxes.first] - timeline.start[boxes.first]) * scale
    row = top + HEAD - 8 + boxes.rank * (ROW + GAP)
    if len(boxes.first) > MAX_LABELLED:
        parts += _outlines(boxes, start, length, row)
    else:
        order = list(LOOKS)
        for box, (x, y, box_width) in enumerate(zip(start.tolist(), row.tolist(), length.tolist(), strict=True)):
            first, letter = int(boxes.first[box]), str(boxes.letter[box])
            look = order.index(letter)
            label = label_of(schedule, first, letter)
            ends = (float(times[first]) - timeline.first_start for times in (timeline.start, timeline.end))
            times = " to ".join(shown_time(timeline, time) for time in ends)
            tooltip = escape(f"{label}, stage {schedule.stage_ids[first]}: {times}")
            parts.append(
                f'<rect class="{"p" if boxes.odd[box] else "k"}{look}" x="{x:.2f}" y="{y}" width="{box_width:.2f}" '
                f'height="{ROW}"><title>{tooltip}</title></rect>'
            )
            if box_width >= 5.6 * len(label) + 2:
                size = "" if box_width >= 7.2 * len(label) + 2 else "font-size:8.5px;"
                ink = "fill:#000" if boxes.odd[box] else ""
                style = f' style="{size}{ink}"' if size + ink else ""
                middle = f'x="{x + box_width / 2:.2f}" y="{y + ROW - 8}"'
                parts.append(f'<text class="i{look}"{style} {middle}>{escape(label)}</text>')
    return "\n".join([*parts, *_shards(timeline, top, scale)])


def _outlines(boxes: Boxes, start: Floats, length: Floats, row: Ints) -> list[str]:
    """Return one path per style, for images with many thousand boxes."""
    paths = []
    for index, kind in enumerate(LOOKS):
        for pale in (False, True):
            selected = np.flatnonzero((boxes.letter == kind) & (boxes.odd == pale))
            if len(selected):
                outline = "".join(
                    f"M{start[box]:.2f} {row[box]}h{length[box]:.2f}v{ROW}h-{length[box]:.2f}z" for box in selected
                )
                paths.append(f'<path class="{"p" if pale else "k"}{index}" style="stroke:none" d="{outline}"/>')
    return paths


def _axis(end: float, scale: float, top: int, factor: float, unit: str) -> str:
    right = LEFT + end * scale
    parts = [f'<path d="M{LEFT} {top}H{right:.2f}" stroke="#888" fill="none"/>']
    title = f"time, {unit}" if unit else "time"
    parts.append(f'<text class="s" x="{LEFT - 8}" y="{top + 18}" text-anchor="end">{title}</text>')
    for tick in ticks(factor * end):
        x = LEFT + tick / factor * scale
        parts.append(f'<path d="M{x:.2f} {top}v5" stroke="#888" fill="none"/>')
        parts.append(f'<text class="s" x="{x:.2f}" y="{top + 18}" text-anchor="middle">{number(tick)}</text>')
    return "\n".join(parts)


def ticks(end: float) -> list[float]:
    """Return round tick values for an axis from 0 to `end`.

    >>> ticks(51.0)
    [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    """
    rough = end / 10
    power = 10.0 ** np.floor(np.log10(rough))
    step = float(next(step for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999) * power)
    return [index * step for index in range(int(end / step + 1e-9) + 1)]


def _legend(letters: set[str], two_chunks: bool, top: int, width: int) -> tuple[str, int]:
    """Return the legend of the kinds that appear, and the height of the image below it."""
    x, parts = LEFT, []
    entries: list[tuple[int | None, str, str]] = [
        (index, letter, look.meaning) for index, (letter, look) in enumerate(LOOKS.items()) if letter in letters
    ]
    shards = {letter: look for letter, look in SHARD_LOOKS.items() if letter in letters}
    entries += [(None, letter, f"{look.meaning} (strip)") for letter, look in shards.items()]
    if two_chunks:
        entries.append((None, "", "paler: every second chunk of a rank"))
    for index, letter, meaning in entries:
        entry_width = 44 + 7 * len(meaning)
        if x > LEFT and x + entry_width > width:
            x, top = LEFT, top + 20
        if index is not None:
            parts.append(f'<rect class="k{index}" x="{x}" y="{top}" width="18" height="14"/>')
            parts.append(f'<text class="i{index}" x="{x + 9}" y="{top + 11}">{escape(letter)}</text>')
        elif letter:
            parts.append(f'<rect fill="{shards[letter].fill}" x="{x}" y="{top + 5}" width="18" height="{STRIP}"/>')
        parts.append(f'<text x="{x + 24 if letter else x}" y="{top + 11}">{meaning}</text>')
        x += entry_width
    return "\n".join(parts), top + 24
