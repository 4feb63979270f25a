"""Axes: map values to positions between 0 and 1, and choose round tick values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
        """Return the positions of values, from 0 to 1.

        >>> Axis(1, 100, log=True).position(np.array([1.0, 10.0, 100.0]))
        array([0. , 0.5, 1. ])
        """
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(np.maximum(values, low)), math.log10(low), math.log10(high)
        return np.asarray((values - low) / (high - low), dtype=np.float64)

    def ticks(self, count: int = 5, unit: float = 1.0) -> list[float]:
        """Return values on the axis that are round multiples of a unit.

        >>> Axis(2.13, 4.9).ticks(), Axis(0.02, 90, log=True).ticks()
        ([2.5, 3.0, 3.5, 4.0, 4.5], [0.1, 1.0, 10.0])
        >>> [tick / 1024 for tick in Axis(0, 5000).ticks(unit=1024)]
        [0.0, 1.0, 2.0, 3.0, 4.0]
        """
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 1:
                stride = -(-(last - first + 1) // count)
                return [10.0**power for power in range(first, last + 1, stride)]
        rough = (self.high - self.low) / unit / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.7) * power * unit
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def axis_of(values: Sequence[NDArray[np.float64]], *, zero: bool = False, skewed: bool = False) -> Axis:
    """Return an axis for all values: from 0 if `zero`, and logarithmic if `skewed` and the values are.

    >>> axis_of([np.array([1.0, 3.0])], zero=True), axis_of([np.array([1.0, 1.0, 500.0])], skewed=True).log
    (Axis(low=0.0, high=3.15, log=False), True)
    """
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
