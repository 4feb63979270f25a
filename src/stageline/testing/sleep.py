"""Stages that sleep: they cost a known time in every action and next to no work, so what is left is the runtime's."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Slept(NamedTuple):
    """One sleep: F, I or W, and how long it really took."""

    kind: str
    seconds: float


class SleepStage(nn.Module):
    """Adds its weight to its input, and sleeps in F, in I and in W, each in an autograd node of its own.

        output ── Add ── sleeps I ── input        a whole backward runs both branches; a split one puts each
                   │                              into its own half
                   sleeps W ── weight

    The output has the shape of the input, so stages chain. Sleeping lets other threads run. A first stage, whose input
    wants no gradient, sleeps I all the same, so that every stage costs the same.

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
            x = x.detach().requires_grad_() * 1  # nobody asks for its gradient, and still it is computed
        slow: Any = _SleepInBackward.apply
        return torch.as_tensor(slow(x, self, "I") + slow(self.weight, self, "W"))

    def sleep(self, kind: str) -> None:
        """Sleep as long as an action of this kind takes."""
        began = time.perf_counter()
        time.sleep(self.seconds[kind])
        self.slept.append(Slept(kind, time.perf_counter() - began))


class _SleepInBackward(torch.autograd.Function):
    """Passes a tensor on, and sleeps when its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stage: SleepStage, kind: str) -> Tensor:
        ctx.stage, ctx.kind = stage, kind
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.stage.sleep(ctx.kind)
        return grad, None, None
