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


class Wanted(NamedTuple):
    """The gradient that an edge of a node wants."""

    edge: int
    shape: torch.Size
    dtype: torch.dtype
    turned: bool = False
    """Transposed: what lies behind the edge would only transpose it back."""


class Half(NamedTuple):
    """How the gradients of a node's parameters are computed."""

    data: frozenset[int]
    """The edges of the node that may lead on to the inputs."""
    tensors: tuple[str, ...]
    """The names of the saved tensors that the weight half reads."""
    take: Callable[[Node], Saved]
    """What to keep of a node, asked for while I runs."""
    give: Callable[[Saved, Tensor, Sequence[Wanted]], list[Tensor]]
    """The gradients that are wanted."""
    fits: Callable[[Node], bool] = lambda node: True
    """Whether this node is of the usual kind."""


def _second_factor(first: Tensor, grad: Tensor, sizes: Sequence[int], strides: Sequence[int], turned: bool) -> Tensor:
    """The gradient of B in A·B; where B is a transposed weight, autograd computes it transposed."""
    if strides[0] == 1 and strides[1] == sizes[0]:
        found = grad.t().mm(first)
        return found if turned else found.t()
    found = first.t().mm(grad)
    return found.t() if turned else found


def _reduced(grad: Tensor, wanted: Wanted) -> Tensor:
    """Sum over what was broadcast, then take the type of what it is the gradient of."""
    shape = wanted.shape[::-1] if wanted.turned else wanted.shape
    if grad.dim() == 2 and len(shape) == 1 and grad.shape[1] == shape[0]:
        found = grad.sum(0)  # a bias: the same kernel as below, in one call
    else:
        found = grad if grad.shape == shape else grad.sum_to_size(shape)
    found = found if found.dtype == wanted.dtype else found.to(wanted.dtype)
    return found.t() if wanted.turned else found


def _take_addmm(node: Any) -> Saved:
    return node._saved_mat1, node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides


def _give_addmm(saved: Saved, grad: Tensor, wanted: Sequence[Wanted]) -> list[Tensor]:
    first, sizes, strides = saved
    return [
        _second_factor(first, grad, sizes, strides, each.turned) if each.edge == 2 else _reduced(grad, each)
        for each in wanted
    ]


def _fits_addmm(node: Any) -> bool:
    return bool(node._saved_alpha == 1 and node._saved_beta == 1)


def _take_mm(node: Any) -> Saved:
    return node._saved_self, node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides


def _give_mm(saved: Saved, grad: Tensor, wanted: Sequence[Wanted]) -> list[Tensor]:
    first, sizes, strides = saved
    return [_second_factor(first, grad, sizes, strides, wanted[0].turned)]


def _take_layer_norm(node: Any) -> Saved:
    return (
        node._saved_input, node._saved_normalized_shape, node._saved_result1, node._saved_result2,
        node._saved_weight, node._saved_bias,
    )  # fmt: skip


def _give_layer_norm(saved: Saved, grad: Tensor, wanted: Sequence[Wanted]) -> list[Tensor]:
    edges = [each.edge for each in wanted]
    found = torch.ops.aten.native_layer_norm_backward(grad, *saved, [False, 1 in edges, 2 in edges])
    return [found[each.edge].t() if each.turned else found[each.edge] for each in wanted]


def _take_convolution(node: Any) -> Saved:
    return (
        node._saved_input, node._saved_weight, node._saved_bias_sym_sizes_opt, node._saved_stride, node._saved_padding,
        node._saved_dilation, node._saved_transposed, node._saved_output_padding, node._saved_groups,
    )  # fmt: skip


def _give_convolution(saved: Saved, grad: Tensor, wanted: Sequence[Wanted]) -> list[Tensor]:
    edges = [each.edge for each in wanted]
    found = torch.ops.aten.convolution_backward(grad, *saved, [False, 1 in edges, 2 in edges])
    return [found[each.edge].t() if each.turned else found[each.edge] for each in wanted]


def _take_mul(node: Any) -> Saved:
    return node._saved_self, node._saved_other


def _give_mul(saved: Saved, grad: Tensor, wanted: Sequence[Wanted]) -> list[Tensor]:
    return [_reduced(grad * saved[1 - each.edge], each) for each in wanted]


def _take_bmm(node: Any) -> Saved:
    return node._saved_self, node._saved_mat2


def _give_bmm(saved: Saved, grad: Tensor, wanted: Sequence[Wanted]) -> list[Tensor]:
    first, second = saved
    return [grad.bmm(second.transpose(1, 2)) if each.edge == 0 else first.transpose(1, 2).bmm(grad) for each in wanted]


def _give_add(saved: Saved, grad: Tensor, wanted: Sequence[Wanted]) -> list[Tensor]:
    return [_reduced(grad, each) for each in wanted]


def _fits_add(node: Any) -> bool:
    return bool(node._saved_alpha == 1)


_EITHER = frozenset([0, 1])

HALVES: dict[str, Half] = {
    "AddmmBackward0": Half(frozenset([1]), ("mat1",), _take_addmm, _give_addmm, _fits_addmm),
    "MmBackward0": Half(frozenset([0]), ("self",), _take_mm, _give_mm),
    "BmmBackward0": Half(_EITHER, ("self", "mat2"), _take_bmm, _give_bmm),
    "NativeLayerNormBackward0": Half(
        frozenset([0]), ("input", "result1", "result2"), _take_layer_norm, _give_layer_norm
    ),
    "ConvolutionBackward0": Half(frozenset([0]), ("input", "weight"), _take_convolution, _give_convolution),
    "MulBackward0": Half(_EITHER, ("self", "other"), _take_mul, _give_mul),
    "AddBackward0": Half(_EITHER, (), lambda node: (), _give_add, _fits_add),
}
"""By the name of the node. Where a node is not listed, the graph is kept, and the node runs again in W."""
