"""One figure over the steps of a run, smoothed, and thinned to what a chart can show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stageline.train.logs.figures import number_of
from stageline.train.logs.metrics import Row

LARGEST = 1e30
"""What is beyond this counts as infinite: no chart has an axis for it."""


@dataclass(frozen=True, eq=False)
class Series:
    """Values at steps, in the order of the steps; a value may be NaN or infinite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[Row], name: str) -> Series:
        """Take one figure out of the events that have it.

        >>> Series.of([{"step": 2, "loss": 3.0}, {"step": 1, "loss": float("nan")}, {"step": 3}], "loss").values
        array([nan,  3.])
        """
        found = sorted((row["step"], value) for row in rows if (value := number_of(row.get(name))) is not None)
        steps = np.array([step for step, _ in found], dtype=np.int64)
        values = np.array([value for _, value in found], dtype=np.float64)
        values[np.abs(values) > LARGEST] *= np.inf
        return cls(steps, values)

    def __len__(self) -> int:
        """How many values there are."""
        return len(self.steps)

    @property
    def finite(self) -> NDArray[np.float64]:
        """The values that are finite."""
        return self.values[np.isfinite(self.values)]

    def median(self, leave_out: int = 0) -> float | None:
        """The median of what is finite, without the first few if there are others."""
        found = self.finite
        found = found[leave_out:] if len(found) > leave_out else found
        return float(np.median(found)) if len(found) else None

    def smoothed(self) -> Series:
        """A mean that forgets: of about the last fiftieth of all values; what is not finite is passed over.

        >>> Series(np.arange(4), np.array([4.0, np.inf, 4.0, 4.0])).smoothed().values
        array([4., 4., 4.])
        """
        keep = np.isfinite(self.values)
        forget = 1 - 1 / max(5.0, len(self) / 50)
        out, total, weight = [], 0.0, 0.0
        for value in self.values[keep].tolist():
            total, weight = forget * total + value, forget * weight + 1
            out.append(total / weight)
        return Series(self.steps[keep], np.array(out, dtype=np.float64))

    def thinned(self, places: int) -> Series:
        """Keep the least and the largest of what falls on one place of the chart, and one that is not finite.

        >>> wave = Series(np.arange(1000), np.sin(np.arange(1000.0)))
        >>> few = wave.thinned(50)
        >>> len(few), bool(few.values.max() == wave.values.max()), few.steps[[0, -1]].tolist()
        (102, True, [0, 999])
        """
        if len(self) <= 2 * places:
            return self
        low, high = int(self.steps[0]), int(self.steps[-1])
        place = ((self.steps - low) * places // (high - low + 1)).astype(np.int64)
        finite = np.isfinite(self.values)
        kept = [np.array([0, len(self) - 1])]
        order = np.lexsort((self.values, place))  # NaN sorts last
        for chosen in (order[finite[order]], order[~finite[order]]):
            cuts = np.flatnonzero(np.diff(place[chosen])) + 1
            firsts = chosen[np.concatenate([[0], cuts]).astype(np.int64)] if len(chosen) else chosen
            lasts = chosen[np.concatenate([cuts - 1, [len(chosen) - 1]]).astype(np.int64)] if len(chosen) else chosen
            kept += [firsts, lasts]
        index = np.unique(np.concatenate(kept))
        return Series(self.steps[index], self.values[index])
