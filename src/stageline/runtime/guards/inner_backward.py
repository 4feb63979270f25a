"""Forwards that run a backward of their own, as `torch.autograd.grad` in a forward does, where activations are dropped.

What such a forward saves is needed before it ends. The first run keeps everything as long as it lasts, and notes
whether something was read; those after it keep or drop accordingly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stageline.common.errors import StagelineError


class Dropping:
    """What the forward and the loss of a stage run in, where their graphs are dropped."""

    def __init__(self) -> None:
        """Nothing ran yet."""
        self._reads: dict[str, bool] = {}

    def around(self, what: str) -> AbstractContextManager[Any]:
        """What this runs in: "stage 1", or its loss function."""
        reads = self._reads.get(what)
        if reads is None:
            self._reads[what] = False
            return saved_tensors_hooks(_same, self._noting(what))
        if reads:
            return nullcontext()  # the graph lasts as long as the forward, and is gone with it
        return saved_tensors_hooks(_nothing, self._refusing(what))

    def _noting(self, what: str) -> Callable[[Any], Tensor]:
        def unpack(tensor: Tensor) -> Tensor:
            self._reads[what] = True
            return tensor

        return unpack

    def _refusing(self, what: str) -> Callable[[Any], Tensor]:
        def unpack(nothing: None) -> Tensor:
            raise StagelineError(
                f"{what} runs a backward inside of its forward (torch.autograd.grad or .backward()), and did not the "
                f"first time, so recompute='stage' dropped what it needs; let it do so always, or use recompute='none'"
            )

        return unpack


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nothing(tensor: Tensor) -> None:
    return None
