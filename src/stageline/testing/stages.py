"""Stages for tests: one fails in the forward or backward of a chosen microbatch, one sleeps for a known time."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stageline.autograd.engine import add_prehook

Fault = Callable[[Tensor], Tensor]
"""Takes the output or its gradient and returns another one; or raises, sleeps, or kills the process."""


class FaultyStage(nn.Module):
    """A stage that works normally before and after a planted fault.

    >>> import stageline as sl
    >>> stages = [FaultyStage(nn.Linear(2, 2)) for _ in range(2)]
    >>> pipe = sl.Pipeline(stages, loss_fn=nn.functional.mse_loss, microbatches=4)
    >>> stages[1].plant(lambda output: output * float("nan"), "F", microbatch=2)
    >>> pipe.step(torch.ones(4, 2), torch.ones(4, 2))
    Traceback (most recent call last):
        ...
    stageline.PipelineError: rank 1 failed in F of stage 1, microbatch 2: ...
    """

    def __init__(self, inner: nn.Module) -> None:
        """Wrap a stage of one input and one output."""
        super().__init__()
        self.inner = inner
        self._forwards = 0
        self._planted: tuple[Fault, str, int] | None = None

    def plant(self, fault: Fault, action: Literal["F", "B"] = "F", microbatch: int = 0) -> None:
        """Plant a fault in the forward or the backward of a microbatch, counted from the next forward."""
        self._forwards, self._planted = 0, (fault, action, microbatch)

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage, and a planted fault."""
        output: Tensor = self.inner(x)
        if self._planted is None:
            return output
        fault, action, microbatch = self._planted
        self._forwards += 1
        if self._forwards <= microbatch:
            return output
        self._planted = None
        if action == "F":
            return fault(output)
        in_backward: Any = _InBackward.apply
        return torch.as_tensor(in_backward(output, fault))


class _InBackward(torch.autograd.Function):
    """The identity, whose backward applies a fault to the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.fault(grad), None


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
