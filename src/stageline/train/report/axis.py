"""Axes: from values to places between 0 and 1, and round numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SKEWED = 20.0
"""Where the largest value is more than so many times the median, a chart with a logarithmic axis shows more."""
SMALLEST = 1e-30


@dataclass(frozen=True)
class Axis:
    """From the least to the largest value that is shown, evenly or by powers of ten."""

    low: float
    high: float
    log: bool = False

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where values lie, from 0 to 1.

        >>> Axis(1, 100, log=True).place(np.array([1.0, 10.0, 100.0]))
        array([0. , 0.5, 1. ])
        """
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(np.maximum(values, low)), math.log10(low), math.log10(high)
        return np.asarray((values - low) / (high - low), dtype=np.float64)

    def ticks(self, about: int = 5, unit: float = 1.0) -> list[float]:
        """Values on it that are round in a unit.

        >>> Axis(2.13, 4.9).ticks(), Axis(0.02, 90, log=True).ticks()
        ([2.5, 3.0, 3.5, 4.0, 4.5], [0.1, 1.0, 10.0])
        >>> [tick / 1024 for tick in Axis(0, 5000).ticks(unit=1024)]
        [0.0, 1.0, 2.0, 3.0, 4.0]
        """
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 1:
                every = -(-(last - first + 1) // about)
                return [10.0**power for power in range(first, last + 1, every)]
        rough = (self.high - self.low) / unit / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.7) * power * unit
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def axis_of(values: Sequence[NDArray[np.float64]], *, zero: bool = False, skewed: bool = False) -> Axis:
    """An axis for all these values: from 0 if asked for, and by powers of ten if asked for and it shows more.

    >>> axis_of([np.array([1.0, 3.0])], zero=True), axis_of([np.array([1.0, 1.0, 500.0])], skewed=True).log
    (Axis(low=0.0, high=3.15, log=False), True)
    """
    found = np.concatenate([each[np.isfinite(each)] for each in values] or [np.zeros(0)])
    if not len(found):
        return Axis(0.0, 1.0)
    low, high = float(found.min()), float(found.max())
    if skewed and low > SMALLEST and high > SKEWED * float(np.median(found)):
        return Axis(low / 1.1, high * 1.1, log=True)
    low = min(low, 0.0) if zero else low
    size = max(abs(low), abs(high))
    # Values that differ by less than rounding are the same, and stand in the middle.
    room = (high - low) * 0.05 if high - low > 1e-9 * size else max(0.1 * size, SMALLEST)
    return Axis(low if zero and low == 0 else low - room, high + room)


def step_axis(first: int, last: int) -> Axis:
    """The axis of the steps, which all charts of a page share."""
    return Axis(float(first), float(last)) if last > first else Axis(first - 0.5, first + 0.5)
