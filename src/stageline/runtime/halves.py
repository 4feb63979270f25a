"""The weight half of single backward nodes, computed by hand: no node has to stay alive for it.

A whole node such as AddmmBackward computes the gradients of its input and of its parameters at once. Run a second time
for the parameters alone, it keeps every tensor that the graph saved until then. By hand, W needs only what is listed
here: for a linear layer, what went into it and the gradient that came out of it. Every entry calls the kernels that
autograd itself would call, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

Saved = tuple[Any, ...]
Shapes = Sequence[tuple[torch.Size, torch.dtype]]
"""The shape and type of the gradient that each edge wants."""


class Half(NamedTuple):
    """How the gradients of a node's parameters are computed."""

    data: frozenset[int]
    """The edges of the node that may lead on to the inputs."""
    tensors: tuple[str, ...]
    """The names of the saved tensors that the weight half reads."""
    take: Callable[[Node], Saved]
    """What to keep of a node, asked for while I runs."""
    give: Callable[[Saved, Tensor, Sequence[int], Shapes], list[Tensor]]
    """The gradients of the given edges."""
    fits: Callable[[Node], bool] = lambda node: True
    """Whether this node is of the usual kind."""


def _second_factor(first: Tensor, grad: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The gradient of B in A·B; a B that is a transposed weight gets a transposed gradient, as autograd gives it."""
    if strides[0] == 1 and strides[1] == sizes[0]:
        return grad.t().mm(first).t()
    return first.t().mm(grad)


def _reduced(grad: Tensor, shape: tuple[torch.Size, torch.dtype]) -> Tensor:
    """Sum over what was broadcast, then take the type of what it is the gradient of."""
    size, dtype = shape
    found = grad if grad.shape == size else grad.sum_to_size(size)
    return found if found.dtype == dtype else found.to(dtype)


def _take_addmm(node: Any) -> Saved:
    return node._saved_mat1, node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides


def _give_addmm(saved: Saved, grad: Tensor, edges: Sequence[int], shapes: Shapes) -> list[Tensor]:
    first, sizes, strides = saved
    return [
        _second_factor(first, grad, sizes, strides) if edge == 2 else _reduced(grad, shape)
        for edge, shape in zip(edges, shapes, strict=True)
    ]


def _fits_addmm(node: Any) -> bool:
    return bool(node._saved_alpha == 1 and node._saved_beta == 1)


def _take_mm(node: Any) -> Saved:
    return node._saved_self, node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides


def _give_mm(saved: Saved, grad: Tensor, edges: Sequence[int], shapes: Shapes) -> list[Tensor]:
    first, sizes, strides = saved
    return [_second_factor(first, grad, sizes, strides)]


def _take_layer_norm(node: Any) -> Saved:
    return (
        node._saved_input, node._saved_normalized_shape, node._saved_result1, node._saved_result2,
        node._saved_weight, node._saved_bias,
    )  # fmt: skip


def _give_layer_norm(saved: Saved, grad: Tensor, edges: Sequence[int], shapes: Shapes) -> list[Tensor]:
    found = torch.ops.aten.native_layer_norm_backward(grad, *saved, [False, 1 in edges, 2 in edges])
    return [found[edge] for edge in edges]


def _take_convolution(node: Any) -> Saved:
    return (
        node._saved_input, node._saved_weight, node._saved_bias_sym_sizes_opt, node._saved_stride, node._saved_padding,
        node._saved_dilation, node._saved_transposed, node._saved_output_padding, node._saved_groups,
    )  # fmt: skip


def _give_convolution(saved: Saved, grad: Tensor, edges: Sequence[int], shapes: Shapes) -> list[Tensor]:
    found = torch.ops.aten.convolution_backward(grad, *saved, [False, 1 in edges, 2 in edges])
    return [found[edge] for edge in edges]


def _take_mul(node: Any) -> Saved:
    return node._saved_self, node._saved_other


def _give_mul(saved: Saved, grad: Tensor, edges: Sequence[int], shapes: Shapes) -> list[Tensor]:
    (edge,) = edges
    return [_reduced(grad * saved[1 - edge], shapes[0])]


def _give_add(saved: Saved, grad: Tensor, edges: Sequence[int], shapes: Shapes) -> list[Tensor]:
    return [_reduced(grad, shape) for shape in shapes]


def _fits_add(node: Any) -> bool:
    return bool(node._saved_alpha == 1)


_EITHER = frozenset([0, 1])

HALVES: dict[str, Half] = {
    "AddmmBackward0": Half(frozenset([1]), ("mat1",), _take_addmm, _give_addmm, _fits_addmm),
    "MmBackward0": Half(frozenset([0]), ("self",), _take_mm, _give_mm),
    "NativeLayerNormBackward0": Half(
        frozenset([0]), ("input", "result1", "result2"), _take_layer_norm, _give_layer_norm
    ),
    "ConvolutionBackward0": Half(frozenset([0]), ("input", "weight"), _take_convolution, _give_convolution),
    "MulBackward0": Half(_EITHER, ("self", "other"), _take_mul, _give_mul),
    "AddBackward0": Half(_EITHER, (), lambda node: (), _give_add, _fits_add),
}
"""By the name of the node. Where a node is not listed, the graph is kept, and the node runs again in W."""
