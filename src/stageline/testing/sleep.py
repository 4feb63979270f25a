"""Stages that sleep: every action takes a known time and almost no CPU, so the rest is the runtime's overhead."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.autograd.engine import add_prehook


class Slept(NamedTuple):
    """One sleep: F, I or W, and its measured duration."""

    kind: str
    seconds: float


class SleepStage(nn.Module):
    """Adds its weight to its input, and sleeps in F, in I and in W, each in an autograd node of its own.

        output ── Add ── sleeps I ── input        a whole backward runs both branches; a split one puts each
                   │                              into its own half
                   sleeps W ── weight

    The output has the shape of the input, so stages can be chained. Sleeping lets other threads run. A first stage,
    whose input needs no gradient, sleeps I too, so that every stage takes the same time.

    >>> import stageline as sl
    >>> stages = [SleepStage(0.0, 0.0, 0.0, width=2) for _ in range(2)]
    >>> pipe = sl.Pipeline(stages, loss_fn=torch.nn.functional.mse_loss, schedule="zb-h1", microbatches=3)
    >>> pipe.step(torch.ones(3, 2), torch.ones(3, 2)).unsplit
    0.0
    >>> [[slept.kind for slept in stage.slept].count(kind) for stage in stages for kind in "FIW"]
    [3, 3, 3, 3, 3, 3]
    """

    def __init__(
        self, forward: float = 0.01, backward_input: float = 0.01, backward_weight: float = 0.01, *, width: int = 8
    ) -> None:
        """Take the seconds of F, I and W, and the size of the last dimension of its input."""
        super().__init__()
        self.seconds = {"F": forward, "I": backward_input, "W": backward_weight}
        self.weight = nn.Parameter(torch.zeros(width))
        self.slept: list[Slept] = []
        """Every sleep so far, in order."""

    def forward(self, x: Tensor) -> Tensor:
        """Sleep F, and prepare to sleep I and W."""
        self.sleep("F")
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_() * 1  # so that its gradient is computed although it is not needed
        if not torch.is_grad_enabled():
            return x + self.weight
        through, weight = x.view_as(x), self.weight.view_as(self.weight)
        for node, kind in ((through.grad_fn, "I"), (weight.grad_fn, "W")):
            if node is not None:  # the weight may be frozen
                add_prehook(node, partial(self._sleep_before, kind))
        return through + weight

    def _sleep_before(self, kind: str, grads: Any) -> None:
        self.sleep(kind)

    def sleep(self, kind: str) -> None:
        """Sleep as long as an action of this kind takes."""
        _sleep_exactly()
        began = time.perf_counter()
        time.sleep(self.seconds[kind])
        self.slept.append(Slept(kind, time.perf_counter() - began))


_thread = threading.local()


def _sleep_exactly() -> None:
    """Ask Linux to end this thread's sleeps on time; by default they may take 50 microseconds longer."""
    if sys.platform == "linux" and not getattr(_thread, "exact", False):
        _thread.exact = True
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


_PR_SET_TIMERSLACK = 29
