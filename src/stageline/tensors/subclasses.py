"""Subclasses of torch.Tensor that users define, as they pass from stage to stage.

In one process, the next layer gets the same tensor, with its class and attributes. A stage gets another tensor with the
same memory, which must not differ from the first in anything but its graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stageline.tensors._torch_private import pytree, without_torch_function

_PLAIN = frozenset([Tensor, nn.Parameter])


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether its class is torch's own, not a subclass.

    >>> is_plain_tensor(torch.ones(2)), is_plain_tensor(torch.ones(2).as_subclass(type("Named", (Tensor,), {})))
    (True, False)
    """
    return type(tensor) in _PLAIN


def detached(tensor: Tensor, wants: bool = False) -> Tensor:
    """The same values without a graph, of the same class and with the same attributes.

    >>> class Named(Tensor):
    ...     pass
    >>> tensor = torch.ones(2).as_subclass(Named)
    >>> tensor.label = "weights"
    >>> type(detached(tensor)).__name__, detached(tensor).label
    ('Named', 'weights')
    """
    if type(tensor) in _PLAIN:
        bare = tensor.detach()
        return bare.requires_grad_() if wants else bare
    with without_torch_function():
        return _like(tensor.detach(), tensor).requires_grad_(wants)


def cloned(tensor: Tensor) -> Tensor:
    """A copy in the same graph, of the same class and strides and with the same attributes.

    >>> cloned(torch.ones(4, 4)[:, :2]).stride()
    (4, 1)
    """
    if type(tensor) in _PLAIN:
        return _same_strides(tensor)
    with without_torch_function():
        return _like(_same_strides(tensor), tensor)


def _same_strides(tensor: Tensor) -> Tensor:
    """Clone a tensor; one with gaps keeps them, because kernels may add in a different order without them."""
    copy = tensor.clone()
    if tensor.layout != torch.strided or copy.stride() == tensor.stride() or 0 in tensor.stride():
        return copy
    spaced = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return spaced.copy_(tensor)


def data_of(tensor: Tensor) -> Tensor:
    """`tensor.data`, of the same class and with the same attributes."""
    if type(tensor) in _PLAIN:
        return tensor.data
    with without_torch_function():
        return _like(tensor.data, tensor)


def _like(copy: Tensor, tensor: Tensor) -> Tensor:
    if type(copy) is Tensor:
        copy = copy.as_subclass(type(tensor))
    copy.__dict__.update(tensor.__dict__)
    return copy


def graph_attribute(tensor: Tensor) -> str:
    """The first attribute of such a tensor that requires a gradient, which no message would return; or ''.

    >>> class Named(Tensor):
    ...     pass
    >>> tensor = torch.ones(2).as_subclass(Named)
    >>> tensor.scale = torch.ones(2, requires_grad=True)
    >>> graph_attribute(tensor)
    'scale'
    """
    if type(tensor) in _PLAIN:
        return ""
    for name, value in tensor.__dict__.items():
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value)):
            return name
    return ""
