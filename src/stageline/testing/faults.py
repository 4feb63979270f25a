"""A stage that fails once, in the forward or the backward of a chosen microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

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
