"""Numeric precision: autocast, and the loss scale for float16."""

from __future__ import annotations

import faulthandler
import os
import signal
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from stageline.common.errors import StagelineError


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Return the autocast context of a step.

    >>> with autocast(torch.device("cpu"), "bfloat16"):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))


def disable_broken_bfloat16(device: torch.device, *dtypes: str) -> str:
    """Disable bfloat16 kernels that crash on this machine; return a note if so, else an empty string.

    A processor may report bfloat16 instructions that its operating system does not allow; the first matrix product then
    kills the process. A child process tries one, and if it crashes, torch's other kernels are used.
    """
    if device.type != "cpu" or "bfloat16" not in dtypes or not torch.backends.mkldnn.enabled or _bfloat16_works():
        return ""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    return "oneDNN's kernels for bfloat16 crash on this machine; using torch's own kernels"


@cache
def _bfloat16_works() -> bool:
    if not hasattr(os, "fork"):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other threads, which the child does not have
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            signal.alarm(20)
            torch.set_num_threads(1)
            for size in (8, 16, 24, 32, 64):
                layer = torch.nn.Linear(size, 3 * size).bfloat16()
                layer(torch.ones(2, 16, size, dtype=torch.bfloat16)).sum().backward()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


class LossScale:
    """The factor by which a float16 loss is multiplied, so that small gradients do not underflow.

    It doubles after `interval` finite steps, and halves when gradients are not finite; that step is skipped. All ranks
    see the same gradient norm, so they all make the same decision.

    >>> scale = LossScale(enabled=True, value=8.0, interval=2)
    >>> [scale.update(finite) for finite in (True, True, False)], scale.value
    ([True, True, False], 8.0)
    """

    def __init__(self, enabled: bool, value: float = 2.0**16, interval: int = 2000) -> None:
        """If not enabled, the scale is always 1."""
        self.enabled = enabled
        self.value = value if enabled else 1.0
        self.interval = interval
        self._finite_steps = 0
        self._skipped = 0

    def update(self, finite: bool) -> bool:
        """Update the scale; return whether to take the step."""
        if not self.enabled:
            return True
        if finite:
            self._finite_steps += 1
            self._skipped = 0
            if self._finite_steps >= self.interval:
                self.value, self._finite_steps = min(self.value * 2.0, 2.0**24), 0
            return True
        self._finite_steps, self._skipped = 0, self._skipped + 1
        self.value /= 2.0
        if self.value < 2.0**-14:
            raise StagelineError(
                f"{self._skipped} consecutive steps had gradients that are not finite, at ever smaller loss scales; "
                "float16 is not the cause: check the data, lower optimizer.lr, or use bfloat16"
            )
        return False

    def state(self) -> dict[str, float]:
        """Return the state to resume from."""
        return {"value": self.value, "good": self._finite_steps, "skipped": self._skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """Load a state."""
        if self.enabled:
            self.value, self._finite_steps = float(state["value"]), int(state["good"])
            self._skipped = int(state.get("skipped", 0))
