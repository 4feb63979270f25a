"""When actions ran: by the host's clock, or by the GPU's own where a GPU computes and the host runs ahead of it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
import torch

Times = np.ndarray[Any, np.dtype[np.float64]]


class Clock(Protocol):
    """Notes the start and the end of every action of a rank."""

    def start(self, position: int) -> float:
        """The action at this position begins now; gives back the host's time."""

    def end(self, position: int) -> float:
        """The action at this position is over."""

    def read(self) -> tuple[Times, Times]:
        """Starts and ends in seconds, on the scale of time.perf_counter; waits until they are known."""


class HostClock:
    """Reads the host's clock.

    >>> clock = HostClock(1)
    >>> clock.start(0) <= clock.end(0)
    True
    >>> start, end = clock.read()
    >>> bool(start[0] <= end[0])
    True
    """

    def __init__(self, actions: int) -> None:
        """For so many actions."""
        self._start, self._end = [0.0] * actions, [0.0] * actions

    def start(self, position: int) -> float:
        """Note the time."""
        now = self._start[position] = time.perf_counter()
        return now

    def end(self, position: int) -> float:
        """Note the time."""
        now = self._end[position] = time.perf_counter()
        return now

    def read(self) -> tuple[Times, Times]:
        """The times noted."""
        return np.array(self._start), np.array(self._end)


class DeviceClock:
    """Puts events into a stream of a GPU; they are read when someone asks."""

    def __init__(self, actions: int, stream: Any, base: Any, moment: float) -> None:
        """For so many actions, counted from an event that was put into a stream at a moment of the host's clock."""
        make: Any = torch.cuda.Event
        self._start = [make(enable_timing=True) for _ in range(actions)]
        self._end = [make(enable_timing=True) for _ in range(actions)]
        self._stream, self._base, self._moment = stream, base, moment

    def start(self, position: int) -> float:
        """Put an event into the stream."""
        self._start[position].record(self._stream)
        return time.perf_counter()

    def end(self, position: int) -> float:
        """Put an event into the stream."""
        self._end[position].record(self._stream)
        return time.perf_counter()

    def read(self) -> tuple[Times, Times]:
        """Wait for the last event, and read all of them."""
        if self._end:
            self._end[-1].synchronize()
        start = [self._moment + self._base.elapsed_time(event) / 1e3 for event in self._start]
        end = [self._moment + self._base.elapsed_time(event) / 1e3 for event in self._end]
        return np.array(start), np.array(end)
