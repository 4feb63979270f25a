"""The trade-off between memory and time as an SVG image or a page: a step curve, its lower bound, and named points."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from stageline.timeline.draw.palette import number
from stageline.timeline.draw.svg import ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 520, 76, 150, 40, 56
HIGHEST = 2.0
"""The time axis ends at this many times the shortest time; what takes longer is drawn at the upper edge."""


class Mark(NamedTuple):
    """A named point."""

    name: str
    memory: float
    time: float
    filled: bool


class _Plane:
    """The two axes."""

    def __init__(self, curve: Sequence[tuple[float, float, float]], marks: Sequence[Mark]) -> None:
        memory = [point[0] for point in curve] + [mark.memory for mark in marks]
        times = [point[1] for point in curve] + [mark.time for mark in marks]
        bounds = [point[2] for point in curve]
        self.right = (max(memory, default=0.0) or 1.0) * 1.05
        least = min([*times, *bounds], default=0.0)
        self.high = min(max(times, default=0.0), HIGHEST * min(times, default=0.0)) * 1.05 or 1.0
        self.low = min(least * 0.93, self.high * 0.9)

    def x(self, memory: float) -> float:
        return LEFT + memory / self.right * (WIDTH - LEFT - RIGHT)

    def y(self, time: float) -> float:
        share = (min(time, self.high) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def axes(self, objective: str) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = [f'<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#888" fill="none"/>']
        for tick in ticks(self.right):
            x = self.x(tick)
            parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#888"/>')
            parts.append(f'<text class="s" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{number(tick)}</text>')
        for tick in ticks(self.high):
            if tick >= self.low:
                y = self.y(tick)
                parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#eee"/>')
                parts.append(f'<text class="s" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        parts.append(
            f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 14}" text-anchor="middle">'
            "peak memory of a rank, in the unit of the costs</text>"
        )
        parts.append(f'<text x="{LEFT}" y="{TOP - 14}">{escape(objective)}, in the unit of the costs</text>')
        return parts

    def staircase(self, points: Sequence[tuple[float, float]]) -> str:
        """Return the path that holds each value from its memory to the next one's."""
        first, *rest = points
        steps = [f"M{self.x(first[0]):.1f} {self.y(first[1]):.1f}"]
        steps += [f"H{self.x(memory):.1f}V{self.y(time):.1f}" for memory, time in rest]
        return "".join(steps) + f"H{self.x(self.right):.1f}"


class _Labels:
    """Places labels beside points, above or below each other where they would overlap."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._boxes = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]

    def place(self, x: float, y: float, text: str) -> str:
        """Return the attributes of a label as near to its point as there is room."""
        width = 7.2 * len(text)
        for distance in range(0, 60, 3):
            for middle in (y - distance, y + distance):
                for left, anchor, edge in ((x + 9, "start", x + 9), (x - 9 - width, "end", x - 9)):
                    box = (left, middle - 6, left + width, middle + 6)
                    inside = box[0] >= LEFT and box[1] >= TOP and box[3] <= HEIGHT - BOTTOM
                    if inside and not any(_overlap(box, other) for other in self._boxes):
                        self._boxes.append(box)
                        return f'x="{edge:.1f}" y="{middle + 4:.1f}" text-anchor="{anchor}"'
        return f'x="{x + 9:.1f}" y="{y + 4:.1f}"'


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def tradeoff_svg(curve: Sequence[tuple[float, float, float]], marks: Sequence[Mark], objective: str) -> str:
    """Draw (memory, time, lower bound) points as a staircase, and named points beside it.

    >>> picture = tradeoff_svg([(1, 20, 18), (2, 12, 12)], [Mark("1f1b", 2, 13, True)], "makespan")
    >>> picture.startswith("<svg"), "1f1b" in picture, picture.count("<circle")
    (True, True, 3)
    """
    plane = _Plane(curve, marks)
    parts = plane.axes(objective)
    if curve:
        bound = plane.staircase([(memory, least) for memory, _, least in curve])
        parts.append(f'<path class="bound" d="{bound}"><title>lower bound</title></path>')
        parts.append(f'<path class="curve" d="{plane.staircase([point[:2] for point in curve])}"/>')
    for memory, time, least in curve:
        text = f"cap {number(memory)}: {objective} {number(time)}, at least {number(least)}"
        place = f'cx="{plane.x(memory):.1f}" cy="{plane.y(time):.1f}"'
        parts.append(f'<circle class="curve dot" {place} r="4"><title>{escape(text)}</title></circle>')
        if time > plane.high:
            parts.append(f'<text x="{plane.x(memory) + 9:.1f}" y="{plane.y(time) + 16:.1f}">↑ {number(time)}</text>')
    labels, dots = _Labels([(plane.x(mark.memory), plane.y(mark.time)) for mark in marks]), []
    for mark in sorted(marks, key=lambda mark: plane.y(mark.time)):
        x, y = plane.x(mark.memory), plane.y(mark.time)
        text = f"{mark.name}: memory {number(mark.memory)}, {objective} {number(mark.time)}"
        style = "family" if mark.filled else "family other"
        dots.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(text)}</title></circle>')
        name = mark.name + (f" ↑ {number(mark.time)}" if mark.time > plane.high else "")
        parts.append(f'<text class="label" {labels.place(x, y, name)}>{escape(name)}</text>')
    parts += dots
    legend = "line: synthesized; dashed: lower bound; ● family in this placement; ○ family in another placement"
    parts.append(f'<text class="s" x="{WIDTH - 8}" y="{TOP - 14}" text-anchor="end">{legend}</text>')
    rules = (
        "text{fill:#222}.label{paint-order:stroke;stroke:#ffffff;stroke-width:3px}.s{fill:#555}.curve{fill:none;stroke:#0072b2;stroke-width:2}.dot{fill:#0072b2}"
        ".bound{fill:none;stroke:#0072b2;stroke-dasharray:5 4}.family{fill:#c4540a;stroke:#c4540a}"
        ".other{fill:#ffffff;stroke-width:1.5}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n<style>{rules}</style>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def tradeoff_html(
    curve: Sequence[tuple[float, float, float]], marks: Sequence[Mark], objective: str, *, title: str
) -> str:
    """Return a self-contained page: the picture, and all points as a table."""
    rows = [(memory, f"synthesized, at least {number(least)}", time) for memory, time, least in curve]
    rows += [(mark.memory, mark.name, mark.time) for mark in marks]
    cells = "".join(
        f"<tr><td>{number(memory)}</td><td>{number(time)}</td><th>{escape(name)}</th></tr>"
        for memory, name, time in sorted(rows, key=lambda row: (row[0], row[2]))
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>{escape(title)}</title>\n<style>body{{font:14px system-ui,sans-serif;margin:24px;color:#222}}"
        "td{text-align:right;padding:2px 16px 2px 0}th{text-align:left;font-weight:400}svg{max-width:100%;height:auto}"
        f"</style>\n<h1>{escape(title)}</h1>\n{tradeoff_svg(curve, marks, objective)}\n<table>"
        f"<tr><td>memory</td><td>{escape(objective)}</td><th>schedule</th></tr>{cells}</table></html>\n"
    )
