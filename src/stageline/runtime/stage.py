"""One stage on one rank: its forward, its backward whole or in halves, and what it keeps between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import StagelineError
from stageline.runtime.split import SplitBackward
from stageline.runtime.tree import flatten, tensors_of, unflatten
from stageline.transport.protocol import Leaf

Loss = Callable[[Any, Any], Tensor]


@dataclass
class _Kept:
    """What a microbatch leaves between its forward and its backward."""

    inputs: list[Leaf]
    outputs: list[Leaf]
    loss: Tensor | None = None
    split: SplitBackward | None = None


class Stage:
    """A part of the model, run microbatch by microbatch.

    Tensors that arrive are leaves of this stage's own graph, so a backward stops at them, and their gradients are what
    the stage before waits for.
    """

    def __init__(self, index: int, module: nn.Module, loss_fn: Loss | None = None) -> None:
        """`loss_fn` makes it the last stage."""
        self.index = index
        # A stage of one layer is called as that layer is; nn.Sequential would hand it everything as one argument.
        self.module = module[0] if isinstance(module, nn.Sequential) and len(module) == 1 else module
        self.loss_fn = loss_fn
        self._kept: dict[int, _Kept] = {}
        self._takes_one = _takes_one(self.module)
        self._unsplit = self._total = 0

    def forward(
        self, microbatch: int, leaves: Sequence[Leaf], tree: str, wants: Sequence[bool], training: bool
    ) -> tuple[list[Leaf], str]:
        """Run F; give back the output's leaves and the shape of its tree."""
        inputs: list[Leaf] = [
            leaf.detach().requires_grad_(want) if isinstance(leaf, Tensor) else leaf
            for leaf, want in zip(leaves, wants, strict=True)
        ]
        value = unflatten(inputs, tree)
        with torch.set_grad_enabled(training):
            output = self._call(value)
        outputs, shape = flatten(output, f"stage {self.index}")
        if training:
            self._kept[microbatch] = _Kept(inputs, outputs)
        return outputs, shape

    def _call(self, value: Any) -> Any:
        if isinstance(value, tuple) and not self._takes_one:
            return self.module(*value)
        if isinstance(value, dict) and not self._takes_one:
            return self.module(**value)
        return self.module(value)

    def loss(self, microbatch: int, output: Any, target: Any, weight: float, training: bool) -> Tensor:
        """Compute the loss of the last stage; its backward starts from loss × weight."""
        assert self.loss_fn is not None
        with torch.set_grad_enabled(training):
            loss = self.loss_fn(output, target)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                found = (
                    f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
                )
                raise StagelineError(f"loss_fn must return one number as a tensor, got {found}")
            scaled = loss * weight
        if training:
            self._kept[microbatch].loss = scaled
        return scaled.detach()

    def backward(self, microbatch: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Run B; give back the gradients of the inputs."""
        kept = self._kept.pop(microbatch)
        outputs, given = self._roots(kept, grads)
        if outputs:
            torch.autograd.backward(outputs, given)
        return [_take_gradient(leaf) for leaf in tensors_of(kept.inputs)]

    def backward_input(self, microbatch: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Run I; give back the gradients of the inputs."""
        kept = self._kept[microbatch]
        outputs, given = self._roots(kept, grads)
        arrived = tensors_of(kept.inputs)
        wanted = [leaf for leaf in arrived if leaf.requires_grad]
        kept.split = SplitBackward(outputs, given, wanted)
        found = iter(kept.split.input_gradients()) if outputs else iter([None] * len(wanted))
        kept.inputs, kept.outputs, kept.loss = [], [], None
        return [next(found) if leaf.requires_grad else None for leaf in arrived]

    def backward_weight(self, microbatch: int) -> None:
        """Run W."""
        split = self._kept.pop(microbatch).split
        assert split is not None
        split.weight_gradients()
        self._unsplit += split.unsplit
        self._total += split.total

    def _roots(self, kept: _Kept, grads: Sequence[Tensor | None] | None) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where the backward starts: the loss, or the outputs that got a gradient."""
        if kept.loss is not None:
            return ([kept.loss], [None]) if kept.loss.requires_grad else ([], [])
        pairs = [
            (output, grad)
            for output, grad in zip(tensors_of(kept.outputs), grads or [], strict=True)
            if output.requires_grad and grad is not None
        ]
        return [output for output, _ in pairs], [grad for _, grad in pairs]

    def take_counts(self) -> tuple[int, int]:
        """Of the elements of parameters that I and W gave gradients in this step: all, and those that came with I."""
        counts = (self._total, self._unsplit)
        self._total = self._unsplit = 0
        return counts

    def forget(self) -> None:
        """Drop everything kept, after a step that failed."""
        self._kept.clear()
        self.take_counts()

    @property
    def live(self) -> int:
        """How many microbatches are between their forward and the end of their backward."""
        return len(self._kept)


def _take_gradient(leaf: Tensor) -> Tensor | None:
    grad, leaf.grad = leaf.grad, None
    return grad


def _takes_one(module: nn.Module) -> bool:
    """Whether a module takes its whole input as one argument, as nn.Sequential does, rather than one per part."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return True
    kinds = inspect.Parameter
    if any(parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) for parameter in parameters):
        return False
    return sum(parameter.default is kinds.empty for parameter in parameters) <= 1 and len(parameters) == 1
