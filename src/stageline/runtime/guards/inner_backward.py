"""Inner backwards: forwards that call `torch.autograd.grad` or `.backward()` while activations are dropped.

Such a forward needs its saved tensors before it ends. The first run keeps them all and records whether any was read.
Later runs keep or drop them accordingly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stageline.common.errors import StagelineError


class ActivationDropping:
    """Context managers in which the forward and the loss of a stage run when their graphs are dropped."""

    def __init__(self) -> None:
        self._reads: dict[str, bool] = {}

    def around(self, what: str) -> AbstractContextManager[Any]:
        """The context manager for `what`: "stage 1", or its loss function."""
        reads = self._reads.get(what)
        if reads is None:
            self._reads[what] = False
            return saved_tensors_hooks(_same, self._noting(what))
        if reads:
            return nullcontext()  # the graph is freed when the forward ends
        return saved_tensors_hooks(_nothing, self._refusing(what))

    def _noting(self, what: str) -> Callable[[Any], Tensor]:
        def unpack(tensor: Tensor) -> Tensor:
            self._reads[what] = True
            return tensor

        return unpack

    def _refusing(self, what: str) -> Callable[[Any], Tensor]:
        def unpack(nothing: None) -> Tensor:
            raise StagelineError(
                f"{what} runs a backward inside its forward (torch.autograd.grad or .backward()) and did not the first "
                "time, so recompute='stage' dropped the tensors it needs; let it do so every time, or use "
                "recompute='none'"
            )

        return unpack


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nothing(tensor: Tensor) -> None:
    return None
