"""One figure over the steps of a run, smoothed, and reduced to what a chart can show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stageline.train.events.figures import number_of
from stageline.train.events.metrics_file import Row

MAX_FINITE = 1e30
"""Larger values count as infinite."""


@dataclass(frozen=True, eq=False)
class Series:
    """Values by step, in step order; a value may be NaN or infinite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[Row], name: str) -> Series:
        """Extract one figure from the events that have it.

        >>> Series.of([{"step": 2, "loss": 3.0}, {"step": 1, "loss": float("nan")}, {"step": 3}], "loss").values
        array([nan,  3.])
        """
        pairs = sorted((row["step"], value) for row in rows if (value := number_of(row.get(name))) is not None)
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
        """Return an exponential moving average over about a fiftieth of all values; skip values that are not finite.

        >>> Series(np.arange(4), np.array([4.0, np.inf, 4.0, 4.0])).smoothed().values
        array([4., 4., 4.])
        """
        is_finite = np.isfinite(self.values)
        decay = 1 - 1 / max(5.0, len(self) / 50)
        averages, total, weight = [], 0.0, 0.0
        for value in self.values[is_finite].tolist():
            total, weight = decay * total + value, decay * weight + 1
            averages.append(total / weight)
        return Series(self.steps[is_finite], np.array(averages, dtype=np.float64))

    def thinned(self, bins: int) -> Series:
        """Keep the smallest and the largest value of each bin of the chart, and one that is not finite.

        >>> wave = Series(np.arange(1000), np.sin(np.arange(1000.0)))
        >>> few = wave.thinned(50)
        >>> len(few), bool(few.values.max() == wave.values.max()), few.steps[[0, -1]].tolist()
        (102, True, [0, 999])
        """
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
