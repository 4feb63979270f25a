"""Charts over steps: series, axes, and inline SVG that needs no script."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.common.checked_json import number_or_none
from stageline.common.units import format_count, format_loss, format_percent, format_seconds, format_size
from stageline.train.events import Row

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
    "loss": format_loss,
    "count": format_count,
    "time": format_seconds,
    "share": lambda value: format_percent(value, 1),
    "size": partial(format_size, fixed=True),
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


SKEW_RATIO = 20.0
"""Use a logarithmic axis if the largest value exceeds the median by this factor."""
MIN_POSITIVE = 1e-30


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def position(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the positions of values, from 0 to 1."""
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(np.maximum(values, low)), math.log10(low), math.log10(high)
        return np.asarray((values - low) / (high - low), dtype=np.float64)

    def ticks(self, count: int = 5, unit: float = 1.0) -> list[float]:
        """Return values on the axis that are round multiples of a unit."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 1:
                stride = -(-(last - first + 1) // count)
                return [10.0**power for power in range(first, last + 1, stride)]
        rough = (self.high - self.low) / unit / count
        if rough <= sys.float_info.min:  # numbers this small have no round multiples
            return [self.low, self.high]
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.7) * power * unit
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def axis_of(values: Sequence[NDArray[np.float64]], *, zero: bool = False, skewed: bool = False) -> Axis:
    """Return an axis for all values: from 0 if `zero`, and logarithmic if `skewed` and the values are."""
    finite = np.concatenate([array[np.isfinite(array)] for array in values] or [np.zeros(0)])
    if not len(finite):
        return Axis(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    if skewed and low > MIN_POSITIVE and high > SKEW_RATIO * float(np.median(finite)):
        return Axis(low / 1.1, high * 1.1, log=True)
    low = min(low, 0.0) if zero else low
    magnitude = max(abs(low), abs(high))
    # Treat values that differ only by rounding as equal, and centre them.
    margin = (high - low) * 0.05 if high - low > 1e-9 * magnitude else max(0.1 * magnitude, MIN_POSITIVE)
    return Axis(low if zero and low == 0 else low - margin, high + margin)


def step_axis(first: int, last: int) -> Axis:
    """Return the step axis, which all charts of a page share."""
    return Axis(float(first), float(last)) if last > first else Axis(first - 0.5, first + 0.5)


MAX_FINITE = 1e30
"""Larger values count as infinite."""


@dataclass(frozen=True, eq=False)
class Series:
    """Values by step, in step order; a value may be NaN or infinite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[Row], name: str) -> Series:
        """Extract one figure from the events that have it."""
        pairs = sorted((row["step"], value) for row in rows if (value := number_or_none(row.get(name))) is not None)
        steps = np.array([step for step, _ in pairs], dtype=np.int64)
        values = np.array([value for _, value in pairs], dtype=np.float64)
        values[np.abs(values) > MAX_FINITE] *= np.inf
        return cls(steps, values)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> NDArray[np.float64]:
        """The finite values."""
        return self.values[np.isfinite(self.values)]

    def median(self, leave_out: int = 0) -> float | None:
        """Return the median of the finite values, without the first `leave_out` if there are others."""
        finite = self.finite
        finite = finite[leave_out:] if len(finite) > leave_out else finite
        return float(np.median(finite)) if len(finite) else None

    def smoothed(self) -> Series:
        """Return an exponential moving average over about a fiftieth of all values; skip values that are not finite."""
        is_finite = np.isfinite(self.values)
        decay = 1 - 1 / max(5.0, len(self) / 50)
        averages, total, weight = [], 0.0, 0.0
        for value in self.values[is_finite].tolist():
            total, weight = decay * total + value, decay * weight + 1
            averages.append(total / weight)
        return Series(self.steps[is_finite], np.array(averages, dtype=np.float64))

    def thinned(self, bins: int) -> Series:
        """Keep the smallest and the largest value of each bin of the chart, and one that is not finite."""
        if len(self) <= 2 * bins:
            return self
        low, high = int(self.steps[0]), int(self.steps[-1])
        bin_of = ((self.steps - low) * bins // (high - low + 1)).astype(np.int64)
        finite = np.isfinite(self.values)
        indices = [np.array([0, len(self) - 1])]
        order = np.lexsort((self.values, bin_of))  # NaN sorts last
        for part in (order[finite[order]], order[~finite[order]]):
            cuts = np.flatnonzero(np.diff(bin_of[part])) + 1
            firsts = part[np.concatenate([[0], cuts]).astype(np.int64)] if len(part) else part
            lasts = part[np.concatenate([cuts - 1, [len(part) - 1]]).astype(np.int64)] if len(part) else part
            indices += [firsts, lasts]
        index = np.unique(np.concatenate(indices))
        return Series(self.steps[index], self.values[index])
