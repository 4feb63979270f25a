"""Autograd's engine, called directly: what surrounds it in `torch.autograd` costs more than a small action's own work.

`torch.autograd.backward` and `.grad` look at every tensor they are given, in Python, before they call the engine. Here
the roots are known to be in order, and the engine itself refuses gradients that do not fit. Tensors of other classes
than torch's own have a say in how they are run backwards, so those go the usual way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import GradientEdge, Node

Root = Tensor | GradientEdge

_PLAIN = frozenset([Tensor, nn.Parameter, GradientEdge])
_engine: Any = getattr(graph, "_engine_run_backward", None)


def backward(roots: Sequence[Root], grads: Sequence[Tensor | None]) -> None:
    """Add the gradients of all leaves behind some roots to them; None is the gradient of a single number by itself.

    >>> leaf = torch.ones(2, requires_grad=True)
    >>> backward([(3 * leaf).sum()], [None])
    >>> leaf.grad
    tensor([3., 3.])
    """
    if _usual(roots):
        _engine(tuple(roots), _filled(roots, grads), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(list(roots), list(grads))  # type: ignore[arg-type]


def gradients(
    roots: Sequence[Root], grads: Sequence[Tensor | None], inputs: Sequence[Root], *, keep: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of some tensors or edges, None where there is none; `keep` says whether the graph stays.

    >>> leaf = torch.ones(2, requires_grad=True)
    >>> gradients([(3 * leaf).sum()], [None], [leaf], keep=False)
    (tensor([3., 3.]),)
    """
    if _usual(roots) and _usual(inputs):
        found = _engine(
            tuple(roots), _filled(roots, grads), keep, False, tuple(inputs), allow_unreachable=True,
            accumulate_grad=False,
        )  # fmt: skip
        return tuple(found)
    return torch.autograd.grad(list(roots), list(inputs), list(grads), retain_graph=keep, allow_unused=True)  # type: ignore[arg-type]


def node_of(tensor: Tensor) -> Node:
    """The node that a tensor's gradient comes to first.

    >>> leaf = torch.ones(2, requires_grad=True)
    >>> node_of(leaf).name().split("::")[-1], node_of(leaf * 2).name()
    ('AccumulateGrad', 'MulBackward0')
    """
    if type(tensor) not in _PLAIN:
        # A class of the user's would have view_as give a view of a view, which is one node further away.
        with torch._C.DisableTorchFunctionSubclass():
            return _node_of(tensor)
    return _node_of(tensor)


def _node_of(tensor: Tensor) -> Node:
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    if torch.is_grad_enabled():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr, return-value]
    return graph.get_gradient_edge(tensor).node


def _usual(roots: Sequence[Root]) -> bool:
    return _engine is not None and all(type(root) in _PLAIN for root in roots)


def _filled(roots: Sequence[Root], grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(
        torch.ones_like(root) if grad is None else grad  # type: ignore[arg-type]
        for root, grad in zip(roots, grads, strict=True)
    )
