"""What numbers are computed in: autocast, and the scale of a float16 loss."""

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

from stageline.errors import StagelineError


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """What a step runs in.

    >>> with autocast(torch.device("cpu"), "bfloat16"):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))


def mend_bfloat16(device: torch.device, *dtypes: str) -> str:
    """Turn kernels off that end the process on this machine; say so, or nothing.

    A processor may promise instructions for bfloat16 that its system does not allow, and the first product then ends
    the process without a word. A child process tries, and torch's other kernels are used if it does not come back.
    """
    if device.type != "cpu" or "bfloat16" not in dtypes or not torch.backends.mkldnn.enabled or _bfloat16_runs():
        return ""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    return "oneDNN's kernels for bfloat16 crash on this machine, so torch's own are used"


@cache
def _bfloat16_runs() -> bool:
    if not hasattr(os, "fork"):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be other threads; the child has only its own
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
    """How much larger than it is a float16 loss is made, so that small gradients are not lost.

    It doubles after so many good steps, and halves when gradients are not finite; that step is then skipped. All ranks
    see the same norm of all gradients, so all decide the same.

    >>> scale = LossScale(enabled=True, value=8.0, interval=2)
    >>> [scale.update(finite) for finite in (True, True, False)], scale.value
    ([True, True, False], 8.0)
    """

    def __init__(self, enabled: bool, value: float = 2.0**16, interval: int = 2000) -> None:
        """Where it is not enabled, the scale is 1 and stays so."""
        self.enabled = enabled
        self.value = value if enabled else 1.0
        self.interval = interval
        self._good = 0
        self._skipped = 0

    def update(self, finite: bool) -> bool:
        """Learn whether the gradients of a step were finite; give back whether to step with them."""
        if not self.enabled:
            return True
        if finite:
            self._good += 1
            self._skipped = 0
            if self._good >= self.interval:
                self.value, self._good = min(self.value * 2.0, 2.0**24), 0
            return True
        self._good, self._skipped = 0, self._skipped + 1
        self.value /= 2.0
        if self.value < 2.0**-14:
            raise StagelineError(
                f"{self._skipped} steps in a row gave gradients that are not finite, at smaller and smaller scales of "
                "the loss: it is no matter of float16; look at the data, lower optimizer.lr, or use bfloat16"
            )
        return False

    def state(self) -> dict[str, float]:
        """What to go on from."""
        return {"value": self.value, "good": self._good, "skipped": self._skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from a state."""
        if self.enabled:
            self.value, self._good = float(state["value"]), int(state["good"])
            self._skipped = int(state.get("skipped", 0))
