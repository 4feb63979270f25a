"""Weight-gradient formulas: how W computes the gradients of a node's parameters without the node.

A node such as AddmmBackward computes the gradients of its input and of its parameters at once. To run it a second time
for the parameters alone, the graph would have to keep every tensor that it saved. With a formula, W needs only what is
listed here: for a linear layer, its input and the gradient of its output. Every formula calls the kernels that autograd
itself would call, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from stageline.autograd._torch_private import saved
from stageline.autograd.graphs.backward import compiled_backward, defer

Saved = tuple[Any, ...]


class WantedGradient(NamedTuple):
    """The gradient that an edge of a node needs."""

    edge: int
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool = False
    """Whether to return it transposed: what lies behind the edge would only transpose it back."""


class Formula(NamedTuple):
    """How the gradients of a node's parameters are computed."""

    data: frozenset[int]
    """The edges of the node that may lead on to the inputs."""
    tensors: tuple[str, ...]
    """The names of the saved tensors that it reads."""
    take: Callable[[Node], Saved]
    """Returns what to keep of a node; called while I runs."""
    compute: Callable[[Saved, Any, Sequence[WantedGradient]], Sequence[Tensor | None]]
    """Returns the requested gradients; None for a parameter that gets none."""
    fits: Callable[[Node], bool] | None = None
    """Whether the formula holds for a node; None if it holds for all."""
    deferred: bool = False
    """Whether the node itself keeps what W needs when I runs it; then `compute` needs no gradient."""


def _second_factor(
    first: Tensor, grad: Tensor, sizes: Sequence[int], strides: Sequence[int], transposed: bool
) -> Tensor:
    """The gradient of B in A·B; where B is a transposed weight, autograd computes it transposed."""
    if strides[0] == 1 and strides[1] == sizes[0]:
        product = grad.t().mm(first)
        return product if transposed else product.t()
    product = first.t().mm(grad)
    return product.t() if transposed else product


def _reduced(grad: Tensor, wanted: WantedGradient) -> Tensor:
    """Sum over what was broadcast, then convert to the dtype of the parameter."""
    shape = wanted.shape
    if len(shape) == 1 and grad.dim() == 2 and grad.shape[1] == shape[0]:
        total = grad.sum(0)  # a bias: the same kernel as below, in one call
    else:
        shape = shape[::-1] if wanted.transposed else shape
        total = grad if grad.shape == shape else grad.sum_to_size(shape)
    total = total if total.dtype == wanted.dtype else total.to(wanted.dtype)
    return total.t() if wanted.transposed else total


def _selected(gradients: Sequence[Tensor], wanted: Sequence[WantedGradient]) -> list[Tensor]:
    return [gradients[want.edge].t() if want.transposed else gradients[want.edge] for want in wanted]


_take_addmm = saved("mat1", "mat2_sym_sizes", "mat2_sym_strides")


def _compute_addmm(kept: Saved, grad: Tensor, wanted: Sequence[WantedGradient]) -> list[Tensor]:
    first, sizes, strides = kept
    return [
        _second_factor(first, grad, sizes, strides, want.transposed) if want.edge == 2 else _reduced(grad, want)
        for want in wanted
    ]


_take_mm = saved("self", "mat2_sym_sizes", "mat2_sym_strides")


def _compute_mm(kept: Saved, grad: Tensor, wanted: Sequence[WantedGradient]) -> list[Tensor]:
    first, sizes, strides = kept
    return [_second_factor(first, grad, sizes, strides, wanted[0].transposed)]


_take_bmm = saved("self", "mat2")


def _compute_bmm(kept: Saved, grad: Tensor, wanted: Sequence[WantedGradient]) -> list[Tensor]:
    first, second = kept
    return [grad.bmm(second.transpose(1, 2)) if want.edge == 0 else first.transpose(1, 2).bmm(grad) for want in wanted]


_take_layer_norm = saved("input", "normalized_shape", "result1", "result2", "weight", "bias")


def _compute_layer_norm(kept: Saved, grad: Tensor, wanted: Sequence[WantedGradient]) -> list[Tensor]:
    edges = [want.edge for want in wanted]
    mask = [False, 1 in edges, 2 in edges]
    return _selected(torch.ops.aten.native_layer_norm_backward(grad, *kept, mask), wanted)


_take_convolution = saved(
    "input", "weight", "bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed", "output_padding", "groups"
)


def _compute_convolution(kept: Saved, grad: Tensor, wanted: Sequence[WantedGradient]) -> list[Tensor]:
    edges = [want.edge for want in wanted]
    mask = [False, 1 in edges, 2 in edges]
    return _selected(torch.ops.aten.convolution_backward(grad, *kept, mask), wanted)


_take_mul = saved("self", "other")


def _compute_mul(kept: Saved, grad: Tensor, wanted: Sequence[WantedGradient]) -> list[Tensor]:
    return [_reduced(grad * kept[1 - want.edge], want) for want in wanted]


def _compute_add(kept: Saved, grad: Tensor, wanted: Sequence[WantedGradient]) -> list[Tensor]:
    return [_reduced(grad, want) for want in wanted]


_alpha, _alpha_and_beta = saved("alpha"), saved("alpha", "beta")


def _is_plain_add(node: Node) -> bool:
    return bool(_alpha(node) == 1)


def _is_plain_addmm(node: Node) -> bool:
    return bool(_alpha_and_beta(node) == (1, 1))


_EITHER = frozenset([0, 1])

FORMULAS: dict[str, Formula] = {
    "AddmmBackward0": Formula(frozenset([1]), ("mat1",), _take_addmm, _compute_addmm, _is_plain_addmm),
    "MmBackward0": Formula(frozenset([0]), ("self",), _take_mm, _compute_mm),
    "BmmBackward0": Formula(_EITHER, ("self", "mat2"), _take_bmm, _compute_bmm),
    "NativeLayerNormBackward0": Formula(
        frozenset([0]), ("input", "result1", "result2"), _take_layer_norm, _compute_layer_norm
    ),
    "ConvolutionBackward0": Formula(frozenset([0]), ("input", "weight"), _take_convolution, _compute_convolution),
    "MulBackward0": Formula(_EITHER, ("self", "other"), _take_mul, _compute_mul),
    "AddBackward0": Formula(_EITHER, (), lambda node: (), _compute_add, _is_plain_add),
}
"""By the name of the node. For a node that is not listed, the graph is kept, and the node runs again in W."""


def _compute_deferred(kept: Saved, grad: None, wanted: Sequence[WantedGradient]) -> list[Tensor | None]:
    gradients: dict[int, Tensor] = kept[0].gradients()
    ways = [(gradients.get(want.edge), want.transposed) for want in wanted]
    return [gradient.t() if transposed and gradient is not None else gradient for gradient, transposed in ways]


def formula_of(node: Node) -> Formula | None:
    """The formula for a node; None if it has to run again in W.

    >>> layer = torch.nn.Linear(2, 2)
    >>> formula_of(layer(torch.ones(1, 2)).grad_fn).tensors
    ('mat1',)
    """
    formula = FORMULAS.get(node.name())
    if formula is None and (backward := compiled_backward(node)) is not None:
        edges = frozenset(range(len(node.next_functions))) - backward.edges
        return Formula(edges, (), lambda node: (defer(node),), _compute_deferred, deferred=True)
    return formula
