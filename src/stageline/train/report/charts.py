"""Charts over steps: inline SVG that needs no script, and the points for the script that shows their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from stageline.train.events import figures
from stageline.train.report.axis import Axis, axis_of
from stageline.train.report.series import Series

NUM_BINS = 300
"""Number of bins of the step axis; each keeps its smallest and largest value."""
WIDTH, HEIGHT = 2000, 1000
MAX_LARGE_POINTS = 40
"""Above this many points, they are drawn smaller."""


@dataclass(frozen=True)
class Line:
    """One series on a chart."""

    name: str
    series: Series
    style: str
    """Its CSS class: thin, strong, points or plan."""


@dataclass(frozen=True)
class Chart:
    """One chart with its series."""

    title: str
    kind: str
    """The format of its values: loss, count, share, size, number."""
    lines: tuple[Line, ...]
    zero: bool = False
    """Whether the axis starts at 0."""
    skewed: bool = False
    """Whether a logarithmic axis is allowed."""


FORMATS: dict[str, Callable[[float], str]] = {
    "loss": figures.loss,
    "count": figures.count,
    "share": lambda value: figures.share(value, 1),
    "size": figures.size,
    "number": lambda value: f"{value:.3g}",
}


def draw(chart: Chart, steps: Axis, name: str) -> tuple[str, dict[str, Any]]:
    """Return the HTML element of a chart, with `name` as its id, and the points for the script."""
    visible = [Line(line.name, line.series.thinned(NUM_BINS), line.style) for line in chart.lines if len(line.series)]
    values = axis_of([line.series.values for line in visible], zero=chart.zero, skewed=chart.skewed)
    unit = 1024.0 ** max(0, int(math.log2(values.high) / 10)) if chart.kind == "size" and values.high > 1 else 1.0
    ticks = values.ticks(unit=unit)
    title = f"{chart.title}, logarithmic" if values.log else chart.title
    broken = sum(int((~np.isfinite(line.series.values)).sum()) for line in chart.lines)
    parts = [
        f'<figure class="chart" id="{name}"><figcaption><b>{escape(title)}</b> {_legend(visible, broken)}'
        f"<output>{escape(_readout(chart))}</output></figcaption>",
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(title)} over the steps; '
        'arrow keys move from step to step">',
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img">',
        f"<title>{escape(_summary(chart))}</title>",
        _grid(steps, values, ticks),
        *(_path(line, steps, values) for line in visible),
        '</svg><i class="cursor"></i>',
        *_labels(steps, values, ticks, FORMATS[chart.kind]),
        "</div></figure>",
    ]
    data = {"id": name, "kind": chart.kind, "lines": [_points(line) for line in visible]}
    return "".join(parts), data


def _legend(lines: list[Line], broken: int) -> str:
    entries = [f'<span><i class="{line.style}"></i>{escape(line.name)}</span>' for line in lines if len(lines) > 1]
    if broken:
        entries.append(f'<span><i class="broken"></i>{broken} not finite</span>')
    return f'<span class="key">{"".join(entries)}</span>'


def _readout(chart: Chart) -> str:
    """Return the values at the last step, which are shown until the user points at another one."""
    lines, format_value = [line for line in chart.lines if len(line.series)], FORMATS[chart.kind]
    if not lines:
        return ""
    step = max(int(line.series.steps[-1]) for line in lines)
    values = []
    for line in lines:
        last_step, value = int(line.series.steps[-1]), format_value(float(line.series.values[-1]))
        name = f"{line.name} " if len(lines) > 1 else ""
        values.append(f"{name}{value}" if last_step == step else f"{name}{value} at {last_step}")
    return f"step {step}: {', '.join(values)}"


def _summary(chart: Chart) -> str:
    """Describe the chart in a sentence, for screen readers."""
    format_value = FORMATS[chart.kind]
    parts = []
    for line in chart.lines:
        finite = line.series.finite
        if len(finite):
            smallest, largest = format_value(float(finite.min())), format_value(float(finite.max()))
            parts.append(f"{line.name} from {smallest} to {largest}, at last {format_value(float(finite[-1]))}")
    return f"{chart.title}: {'; '.join(parts) or 'nothing finite'}"


def _grid(steps: Axis, values: Axis, ticks: list[float]) -> str:
    horizontal = "".join(f"M0 {_y(values, tick)}h{WIDTH}" for tick in ticks)
    vertical = "".join(f"M{_x(steps, tick)} 0v{HEIGHT}" for tick in _integer_ticks(steps))
    return f'<path class="grid" d="{horizontal}{vertical}"/>'


def _labels(steps: Axis, values: Axis, ticks: list[float], format_value: Callable[[float], str]) -> list[str]:
    """Return the labels as HTML outside the SVG, so that letters keep their size when the chart is stretched."""
    y_labels = [
        f'<span class="y" style="top:{_y(values, tick) * 100 / HEIGHT:.4g}%">{escape(_tick(tick, format_value))}</span>'
        for tick in ticks
    ]
    x_labels = [
        f'<span class="x" style="left:{_x(steps, tick) * 100 / WIDTH:.4g}%">{tick:,.0f}</span>'
        for tick in _integer_ticks(steps)
    ]
    return y_labels + x_labels


def _tick(value: float, format_value: Callable[[float], str]) -> str:
    """Format a round number, without the decimals that values have."""
    if format_value is FORMATS["share"]:
        return f"{100 * value:g}%"
    return f"{value:g}" if format_value in (FORMATS["loss"], FORMATS["number"]) else format_value(value)


def _integer_ticks(steps: Axis) -> list[float]:
    return [tick for tick in steps.ticks(6) if tick == int(tick)]


def _x(steps: Axis, value: float) -> int:
    return round(WIDTH * float(steps.position(np.array([value]))[0]))


def _y(values: Axis, value: float) -> int:
    return round(HEIGHT * (1 - float(values.position(np.array([value]))[0])))


def _path(line: Line, steps: Axis, values: Axis) -> str:
    """Return the path of a line, interrupted where a value is not finite, with a mark at the top there."""
    finite = np.isfinite(line.series.values)
    x = np.rint(WIDTH * steps.position(line.series.steps.astype(np.float64))).astype(np.int64)
    y = np.rint(HEIGHT * (1 - values.position(np.where(finite, line.series.values, values.low)))).astype(np.int64)
    segments, dots, pen = [], [], "M"
    for column, row, is_finite in zip(x.tolist(), y.tolist(), finite.tolist(), strict=True):
        if is_finite:
            segments.append(f"{pen}{column} {row}")
            # A line of zero length with round ends is a point that stays round when the chart is stretched.
            dots.append(f"M{column} {row}h0")
        pen = "L" if is_finite else "M"
    path = f'<path class="{line.style}" d="{"".join(segments)}"/>'
    if line.style == "points" or len(dots) == 1:
        small = " many" if len(dots) > MAX_LARGE_POINTS else ""
        path += f'<path class="{line.style} dots{small}" d="{"".join(dots)}"/>'
    marks = "".join(f"M{column} 0v90" for column in x[~finite].tolist())
    return path + (f'<path class="broken" d="{marks}"/>' if marks else "")


def _points(line: Line) -> dict[str, Any]:
    """Return steps as differences, values with five digits, and values that are not finite as strings."""
    steps = np.diff(line.series.steps, prepend=0).tolist()
    values = [float(f"{value:.5g}") if math.isfinite(value) else str(value) for value in line.series.values.tolist()]
    return {"name": line.name, "steps": steps, "values": values}
