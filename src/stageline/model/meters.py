"""Meters of a call: how long it takes on host and GPU, and how far it raises the memory of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from stageline.common.errors import StagelineError
from stageline.model._torch_private import sleep_on_gpu

Value = TypeVar("Value")

AHEAD = 2e-3
"""Seconds by which the host runs ahead of the GPU; enough for the kernels of a unit."""
ENGINE_CALLS = 10
"""Backwards of an almost empty graph, to measure what a call of autograd's engine takes."""


class Duration(NamedTuple):
    """The seconds of a call: on the GPU, and on the host that launches its kernels. Without a GPU both are the same."""

    device: float = 0.0
    host: float = 0.0


class Timer:
    """Measures the duration of a call with the host's clock, and on a GPU with its events, too."""

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise StagelineError(f"device must be 'cpu' or 'cuda', got {str(device)!r}")
        self._device = device

    @cached_property
    def engine_call(self) -> float:
        """The host's seconds for a call of autograd's engine on a GPU, which every stage makes once, not every unit."""
        if self._device.type == "cpu":
            return 0.0
        leaf = torch.zeros((), device=self._device, requires_grad=True)
        run = lambda: torch.autograd.backward(leaf + 0)  # noqa: E731
        return min(self(run)[0].host for _ in range(ENGINE_CALLS))

    def __call__(self, call: Callable[[], Value]) -> tuple[Duration, Value]:
        """Return the seconds, and the result of the call."""
        if self._device.type == "cpu":
            start_time = time.perf_counter()
            value = call()
            seconds = time.perf_counter() - start_time
            return Duration(seconds, seconds), value
        make: Any = torch.cuda.Event
        start, end = make(enable_timing=True), make(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()
        # In a step, the host runs ahead of the GPU. The GPU waits for it here, so that it is not idle between kernels.
        with torch.cuda.device(self._device):
            sleep_on_gpu(AHEAD)
        start.record(stream)
        start_time = time.perf_counter()
        value = call()
        on_host = time.perf_counter() - start_time
        end.record(stream)
        end.synchronize()
        on_host -= 0.0 if on_host < AHEAD else AHEAD  # it waited for the GPU
        return Duration(float(start.elapsed_time(end)) / 1e3, on_host), value


class PeakMeter:
    """Measures how far the memory of a GPU rises above its level before or after a call; nothing on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def above_end(self, call: Callable[[], Value]) -> tuple[int, Value]:
        """Return the peak above what the call leaves allocated, and its result."""
        peak, value = self._peak(call)
        return (0 if self._device is None else max(0, peak - torch.cuda.memory_allocated(self._device))), value

    def above_start(self, call: Callable[[], Value]) -> tuple[int, Value]:
        """Return the peak above what was allocated before the call, and its result."""
        before = 0 if self._device is None else torch.cuda.memory_allocated(self._device)
        peak, value = self._peak(call)
        return max(0, peak - before), value

    def _peak(self, call: Callable[[], Value]) -> tuple[int, Value]:
        if self._device is None:
            return 0, call()
        torch.cuda.reset_peak_memory_stats(self._device)
        value = call()
        return torch.cuda.max_memory_allocated(self._device), value
