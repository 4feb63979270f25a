"""Charts over the steps: inline SVG that needs no script, and the same points for a script that reads them out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from stageline.train.logs import figures
from stageline.train.report.axis import Axis, axis_of
from stageline.train.report.series import Series

PLACES = 300
"""How many places of the step axis keep their least and largest value."""
WIDE, HIGH = 2000, 1000
MANY = 40
"""Points beyond which they are drawn smaller."""


@dataclass(frozen=True)
class Line:
    """One series on a chart."""

    name: str
    series: Series
    look: str
    """Its class in the page's style: thin, strong, points, plan, second."""


@dataclass(frozen=True)
class Chart:
    """What is drawn together."""

    title: str
    kind: str
    """How its values are written: loss, count, share, size, number."""
    lines: tuple[Line, ...]
    zero: bool = False
    """Whether the axis begins at 0."""
    skewed: bool = False
    """Whether a logarithmic axis may be taken."""


WRITTEN: dict[str, Callable[[float], str]] = {
    "loss": figures.loss,
    "count": figures.count,
    "share": lambda value: figures.share(value, 1),
    "size": figures.size,
    "number": lambda value: f"{value:.3g}",
}


def draw(chart: Chart, steps: Axis, name: str) -> tuple[str, dict[str, Any]]:
    """Draw a chart; gives the element, whose id is `name`, and the points for the script."""
    shown = [Line(line.name, line.series.thinned(PLACES), line.look) for line in chart.lines if len(line.series)]
    values = axis_of([line.series.values for line in shown], zero=chart.zero, skewed=chart.skewed)
    unit = 1024.0 ** max(0, int(math.log2(values.high) / 10)) if chart.kind == "size" and values.high > 1 else 1.0
    ticks = values.ticks(unit=unit)
    title = f"{chart.title}, logarithmic" if values.log else chart.title
    broken = sum(int((~np.isfinite(line.series.values)).sum()) for line in chart.lines)
    parts = [
        f'<figure class="chart" id="{name}"><figcaption><b>{escape(title)}</b> {_legend(shown, broken)}'
        f"<output>{escape(_last(chart))}</output></figcaption>",
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(title)} over the steps; '
        'arrow keys move from step to step">',
        f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img">',
        f"<title>{escape(_words(chart))}</title>",
        _grid(steps, values, ticks),
        *(_path(line, steps, values) for line in shown),
        '</svg><i class="cursor"></i>',
        *_labels(steps, values, ticks, WRITTEN[chart.kind]),
        "</div></figure>",
    ]
    data = {"id": name, "kind": chart.kind, "lines": [_points(line) for line in shown]}
    return "".join(parts), data


def _legend(lines: list[Line], broken: int) -> str:
    words = [f'<span><i class="{line.look}"></i>{escape(line.name)}</span>' for line in lines if len(lines) > 1]
    if broken:
        words.append(f'<span><i class="broken"></i>{broken} not finite</span>')
    return f'<span class="key">{"".join(words)}</span>'


def _last(chart: Chart) -> str:
    """What the chart says at its end, until somebody points at another place."""
    lines, write = [line for line in chart.lines if len(line.series)], WRITTEN[chart.kind]
    if not lines:
        return ""
    step = max(int(line.series.steps[-1]) for line in lines)
    told = []
    for line in lines:
        at, value = int(line.series.steps[-1]), write(float(line.series.values[-1]))
        name = f"{line.name} " if len(lines) > 1 else ""
        told.append(f"{name}{value}" if at == step else f"{name}{value} at {at}")
    return f"step {step}: {', '.join(told)}"


def _words(chart: Chart) -> str:
    """The chart in a sentence, for those who cannot see it."""
    write = WRITTEN[chart.kind]
    said = []
    for line in chart.lines:
        found = line.series.finite
        if len(found):
            least, most = write(float(found.min())), write(float(found.max()))
            said.append(f"{line.name} from {least} to {most}, at last {write(float(found[-1]))}")
    return f"{chart.title}: {'; '.join(said) or 'nothing finite'}"


def _grid(steps: Axis, values: Axis, ticks: list[float]) -> str:
    across = "".join(f"M0 {_y(values, tick)}h{WIDE}" for tick in ticks)
    down = "".join(f"M{_x(steps, tick)} 0v{HIGH}" for tick in _whole(steps))
    return f'<path class="grid" d="{across}{down}"/>'


def _labels(steps: Axis, values: Axis, ticks: list[float], write: Callable[[float], str]) -> list[str]:
    """Beside the SVG, not in it: letters keep their size, however wide the chart is."""
    beside = [
        f'<span class="y" style="top:{_y(values, tick) * 100 / HIGH:.4g}%">{escape(_tick(tick, write))}</span>'
        for tick in ticks
    ]
    below = [
        f'<span class="x" style="left:{_x(steps, tick) * 100 / WIDE:.4g}%">{tick:,.0f}</span>' for tick in _whole(steps)
    ]
    return beside + below


def _tick(value: float, write: Callable[[float], str]) -> str:
    """A round number, without the places that a value has."""
    if write is WRITTEN["share"]:
        return f"{100 * value:g}%"
    return f"{value:g}" if write in (WRITTEN["loss"], WRITTEN["number"]) else write(value)


def _whole(steps: Axis) -> list[float]:
    return [tick for tick in steps.ticks(6) if tick == int(tick)]


def _x(steps: Axis, value: float) -> int:
    return round(WIDE * float(steps.place(np.array([value]))[0]))


def _y(values: Axis, value: float) -> int:
    return round(HIGH * (1 - float(values.place(np.array([value]))[0])))


def _path(line: Line, steps: Axis, values: Axis) -> str:
    """The line, broken where a value is not finite, and a mark at the top where that is."""
    finite = np.isfinite(line.series.values)
    x = np.rint(WIDE * steps.place(line.series.steps.astype(np.float64))).astype(np.int64)
    y = np.rint(HIGH * (1 - values.place(np.where(finite, line.series.values, values.low)))).astype(np.int64)
    drawn, dots, pen = [], [], "M"
    for across, down, good in zip(x.tolist(), y.tolist(), finite.tolist(), strict=True):
        if good:
            drawn.append(f"{pen}{across} {down}")
            # A line of no length with round ends is a point, and stays round however the chart is stretched.
            dots.append(f"M{across} {down}h0")
        pen = "L" if good else "M"
    path = f'<path class="{line.look}" d="{"".join(drawn)}"/>'
    if line.look == "points" or len(dots) == 1:
        many = " many" if len(dots) > MANY else ""
        path += f'<path class="{line.look} dots{many}" d="{"".join(dots)}"/>'
    marks = "".join(f"M{across} 0v90" for across in x[~finite].tolist())
    return path + (f'<path class="broken" d="{marks}"/>' if marks else "")


def _points(line: Line) -> dict[str, Any]:
    """Steps as differences, values in five figures; what is not finite in words."""
    steps = np.diff(line.series.steps, prepend=0).tolist()
    values = [float(f"{value:.5g}") if math.isfinite(value) else str(value) for value in line.series.values.tolist()]
    return {"name": line.name, "steps": steps, "values": values}
