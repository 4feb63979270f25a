"""The backward of a compiled unit, as one function or in two halves.

In an ordinary backward, a `CompiledBackward` runs both halves and returns all gradients. If `defer` was called for its
autograd node before, it runs I alone, and leaves W and what W needs in a `Deferred`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule

from stageline.autograd._torch_private import current_node

Run = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph; takes its arguments in a list, and clears it."""

Place = tuple[bool, int]
"""Where a kept value comes from: the arguments of I (True) or the values that I computed, and its index there."""

_DEFERRED = "_stageline_deferred"
"""The attribute of an autograd node that holds its `Deferred`."""


class Halves(NamedTuple):
    """The two graphs of a backward, and what goes from one to the other."""

    inputs: GraphModule
    """From all arguments of the backward to the gradients of inputs, and then the kept values it computed."""
    weights: GraphModule
    """From the kept values to the gradients of parameters."""
    kept: list[Place]
    """The arguments of `weights`."""
    input_outputs: list[int]
    """Which outputs of the whole backward the first outputs of `inputs` are."""
    weight_outputs: list[int]
    """Which outputs of the whole backward those of `weights` are."""
    kept_bytes: int
    """The bytes that are held from I to W, without parameters."""
    saved_bytes: int
    """The bytes that the forward saved for the backward, without parameters."""


@dataclass
class Deferred:
    """The second half of the backward of one autograd node: filled when I runs, used when W runs."""

    backward: CompiledBackward
    kept: list[Any] | None = None
    """What W needs; None if I did not run the node."""
    keep: Callable[[Any], Any] = lambda value: value
    """Applied to what W needs when I has run the node: it may have to be copied."""

    def gradients(self) -> dict[int, Tensor]:
        """Run W; return the gradients by the edge of the autograd node."""
        kept, self.kept = self.kept, None
        return {} if kept is None else self.backward.weight_gradients(kept)


def compiled_backward(node: Any) -> CompiledBackward | None:
    """The backward of an autograd node in two halves; None if the node is not one of ours."""
    function = getattr(type(node), "_forward_cls", None)
    backward = getattr(getattr(function, "compiled_bw", None), "halved", None)
    return backward if isinstance(backward, CompiledBackward) else None


def defer(node: Any) -> Deferred:
    """Let the next run of a node compute only the gradients of its inputs."""
    backward = compiled_backward(node)
    assert backward is not None
    deferred = Deferred(backward)
    setattr(node, _DEFERRED, deferred)
    return deferred


class CompiledBackward:
    """The backward of a compiled unit: a function from saved tensors and gradients of outputs to all gradients."""

    def __init__(
        self,
        halves: Halves,
        inputs: Run,
        weights: Run,
        outputs: int,
        edges: Sequence[int],
        parameters: Collection[int] = (),
    ) -> None:
        """`inputs` and `weights` run the halves; `edges` are the autograd edges that the outputs belong to.

        `parameters` are the outputs that belong to parameters, also to those that get no gradient.
        """
        self.halves = halves
        self._weight_edges = [edges[index] for index in halves.weight_outputs]
        self.edges = frozenset([*self._weight_edges, *(edges[index] for index in parameters)])
        """The edges of the autograd node that lead to parameters."""
        self._run_inputs, self._run_weights, self._outputs = inputs, weights, outputs
        self.halved = self  # a wrapper takes over what is in __dict__
        self._boxed_call = True

    def __call__(self, arguments: list[Any]) -> list[Tensor | None]:
        """Run the whole backward, or I alone if W was deferred."""
        node = current_node()
        deferred: Deferred | None = getattr(node, _DEFERRED, None)
        held = [arguments[index] if argument else None for argument, index in self.halves.kept]
        computed = self._run_inputs(arguments)
        arguments.clear()
        first = len(self.halves.input_outputs)
        kept = [
            value if argument else computed[first + index]
            for value, (argument, index) in zip(held, self.halves.kept, strict=True)
        ]
        gradients: list[Tensor | None] = [None] * self._outputs
        for output, gradient in zip(self.halves.input_outputs, computed, strict=False):
            gradients[output] = gradient
        if deferred is not None:
            deferred.kept = list(map(deferred.keep, kept))
            delattr(node, _DEFERRED)
            return gradients
        for output, gradient in zip(self.halves.weight_outputs, self._run_weights(kept), strict=True):
            gradients[output] = gradient
        return gradients

    def weight_gradients(self, kept: list[Any]) -> dict[int, Tensor]:
        """Run W; return the gradients by edge. None of them shares memory with what was kept."""
        storages = {value.untyped_storage().data_ptr() for value in kept if isinstance(value, Tensor)}
        gradients = self._run_weights(kept)
        return {
            edge: gradient.clone() if gradient.untyped_storage().data_ptr() in storages else gradient
            for edge, gradient in zip(self._weight_edges, gradients, strict=True)
        }
