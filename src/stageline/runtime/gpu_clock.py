"""When actions ran on a GPU: by events in its stream, since the host runs ahead of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class GpuClock:
    """Puts an event into a stream before and after every action; they are read when the times are needed."""

    def __init__(self, actions: int, stream: Any, base: Any, moment: float) -> None:
        """Count from `base`, an event that was put into a stream at a moment of the host's clock."""
        new_event: Any = torch.cuda.Event
        self._starts = [new_event(enable_timing=True) for _ in range(actions)]
        self._ends = [new_event(enable_timing=True) for _ in range(actions)]
        self._stream, self._base, self._moment = stream, base, moment

    def start(self, position: int) -> None:
        """The action at this position of the program begins."""
        self._starts[position].record(self._stream)

    def end(self, position: int) -> None:
        """The action at this position has ended."""
        self._ends[position].record(self._stream)

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Wait for the last event; return starts and ends in seconds, on the scale of `time.perf_counter`."""
        if self._ends:
            self._ends[-1].synchronize()
        starts = [self._moment + self._base.elapsed_time(event) / 1e3 for event in self._starts]
        ends = [self._moment + self._base.elapsed_time(event) / 1e3 for event in self._ends]
        return np.array(starts), np.array(ends)
