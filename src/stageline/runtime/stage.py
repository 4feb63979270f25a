"""One stage on one rank: its forward, its backward whole or in halves, and what it keeps between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import StagelineError
from stageline.runtime.cut import layers_of
from stageline.runtime.randomness import draws, random_numbers
from stageline.runtime.split import SplitBackward
from stageline.runtime.tree import flatten, tensors_of, unflatten
from stageline.transport.protocol import Leaf

Loss = Callable[[Any, Any], Any]
"""Of output and target: one number as a tensor, or that and a dict of metrics."""


@dataclass
class _Kept:
    """What a microbatch leaves between its forward and its backward."""

    inputs: list[Leaf]
    tree: str
    step: int
    outputs: list[Leaf] = field(default_factory=list)
    target: Any = None
    weight: float | None = None
    """Of the loss; None where there is no loss."""
    loss: Tensor | None = None
    split: SplitBackward | None = None


@dataclass(frozen=True)
class StageOptions:
    """How stages run."""

    loss_fn: Loss
    seed: int = 0
    recompute: bool = False
    """Keep only the inputs, and run the forward once more before the backward."""


class Stage:
    """A part of the model, run microbatch by microbatch.

    Tensors that arrive are leaves of this stage's own graph, so a backward stops at them, and their gradients are what
    the stage before waits for.
    """

    def __init__(self, index: int, part: nn.Sequential, options: StageOptions) -> None:
        """`part` holds the layers by their names in the whole model."""
        self.index = index
        self.part = part
        self.options = options
        self._layers = layers_of(part)
        self._random = {name for name, layer in self._layers if draws(layer)}
        # A stage of one layer is called as that layer is; several are chained, as nn.Sequential chains them.
        self._takes_one = len(self._layers) != 1 or _takes_one(self._layers[0][1])
        self._kept: dict[int, _Kept] = {}
        self._unsplit = self._total = 0

    def forward(
        self, microbatch: int, step: int, leaves: Sequence[Leaf], tree: str, wants: Sequence[bool], training: bool
    ) -> tuple[list[Leaf], str]:
        """Run F; give back the output's leaves and the shape of its tree."""
        inputs: list[Leaf] = [
            leaf.detach().requires_grad_(want) if isinstance(leaf, Tensor) else leaf
            for leaf, want in zip(leaves, wants, strict=True)
        ]
        kept = _Kept(inputs, tree, step)
        with torch.set_grad_enabled(training and not self.options.recompute):
            outputs, shape = flatten(self._run(kept, microbatch), f"stage {self.index}")
        if training:
            kept.outputs = outputs
            self._kept[microbatch] = kept
            if self.options.recompute:
                outputs = self._announce(kept, outputs)
        return outputs, shape

    def _announce(self, kept: _Kept, outputs: list[Leaf]) -> list[Leaf]:
        """Say which outputs will want a gradient: without a graph, all that can have one if anything here can."""
        wants = any(parameter.requires_grad for parameter in self.part.parameters()) or any(
            leaf.requires_grad for leaf in tensors_of(kept.inputs)
        )
        return [
            leaf.detach().requires_grad_(wants) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for leaf in outputs
        ]

    def _run(self, kept: _Kept, microbatch: int) -> Any:
        """Run the layers; those that draw random numbers draw what step, microbatch and their name say."""
        value = unflatten(kept.inputs, kept.tree)
        for number, (name, layer) in enumerate(self._layers):
            if name in self._random:
                with random_numbers(self.options.seed, kept.step, microbatch, name):
                    value = self._call(layer, value, number == 0)
            else:
                value = self._call(layer, value, number == 0)
        return value

    def _call(self, layer: nn.Module, value: Any, first: bool) -> Any:
        if first and not self._takes_one and isinstance(value, tuple):
            return layer(*value)
        if first and not self._takes_one and isinstance(value, dict):
            return layer(**value)
        return layer(value)

    def loss(
        self, microbatch: int, output: Any, target: Any, weight: float, training: bool
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of the last stage, and its metrics; the backward starts from loss × weight."""
        with torch.set_grad_enabled(training and not self.options.recompute):
            scaled, metrics = self._loss(output, target, weight)
        if training:
            kept = self._kept[microbatch]
            kept.target, kept.weight, kept.loss = target, weight, scaled
        return scaled.detach(), metrics

    def _loss(self, output: Any, target: Any, weight: float) -> tuple[Tensor, dict[str, float]]:
        loss = self.options.loss_fn(output, target)
        given: Any = {}
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], dict):
            loss, given = loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise StagelineError(
                f"loss_fn must return one number as a tensor, or that and a dict of metrics; got one of {found}"
            )
        plain = {name: value.detach() if isinstance(value, Tensor) else value for name, value in given.items()}
        return loss * weight, {str(name): float(value) * weight for name, value in plain.items()}

    def _recompute(self, kept: _Kept, microbatch: int) -> None:
        """Run the forward once more, with a graph; buffers stay as the first run left them."""
        buffers = [(buffer, buffer.clone()) for buffer in self.part.buffers()]
        with torch.enable_grad():
            kept.outputs, shape = flatten(self._run(kept, microbatch), f"stage {self.index}")
            if kept.weight is not None:
                kept.loss, _ = self._loss(unflatten(kept.outputs, shape), kept.target, kept.weight)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # through .data: to the graph, which may have saved it, it has not changed

    def backward(self, microbatch: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Run B; give back the gradients of the inputs."""
        kept = self._kept.pop(microbatch)
        if self.options.recompute:
            self._recompute(kept, microbatch)
        outputs, given = self._roots(kept, grads)
        if outputs:
            torch.autograd.backward(outputs, given)
        return [_take_gradient(leaf) for leaf in tensors_of(kept.inputs)]

    def backward_input(self, microbatch: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Run I; give back the gradients of the inputs."""
        kept = self._kept[microbatch]
        if self.options.recompute:
            self._recompute(kept, microbatch)
        outputs, given = self._roots(kept, grads)
        arrived = tensors_of(kept.inputs)
        wanted = [leaf for leaf in arrived if leaf.requires_grad]
        kept.split = SplitBackward(outputs, given, wanted)
        found = iter(kept.split.input_gradients()) if outputs else iter([None] * len(wanted))
        kept.inputs, kept.outputs, kept.loss, kept.target = [], [], None, None
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
