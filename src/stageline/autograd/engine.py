"""Autograd's engine, called directly, and the hooks around it.

`torch.autograd.backward` and `.grad` check every tensor in Python before they call the engine, which takes longer than
the work of a small action. The roots are valid here, and the engine itself refuses gradients that do not fit. Tensor
subclasses may override the backward, so they use torch's own functions.

By default, torch runs the nodes of a GPU in a thread of its own, which costs an action two switches of threads. Where
one rank uses the GPU, the engine runs in the rank's own thread (`in_this_thread`).

A hook on a tensor or node may change a gradient or count its calls, so it must run exactly once, in I or in W. torch
does not reveal which nodes have hooks, but it numbers every hook that Python registers. If the number grew between a
forward and its backward, the graph may have hooks, and its backward is not split.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from stageline.autograd._torch_private import (
    hooks_registered,
    prepend_hook,
    run_engine,
    tensor_hooks,
    version_of,
    without_torch_function,
)

Root = Tensor | GradientEdge

Versions = dict[int, list[tuple[Tensor, int]]]
"""By the number of a leaf: its gradients before its hooks ran, and the versions of these gradients."""

_PLAIN = frozenset([Tensor, nn.Parameter, GradientEdge])
_lock = threading.Lock()
_uncounted = 0
"""How many of the registered hooks are from `add_prehook`."""
_MARK = "stageline"


def in_this_thread() -> AbstractContextManager[Any]:
    """Run backwards of a GPU in the calling thread."""
    context: AbstractContextManager[Any] = torch.autograd.set_multithreading_enabled(False)
    return context


@cache
def start_thread(device: int) -> None:
    """Start autograd's thread of a GPU: if the first thing it ran were a product, cuBLAS would warn."""
    with torch.enable_grad():
        torch.zeros(1, device=torch.device("cuda", device), requires_grad=True).exp().sum().backward()  # type: ignore[no-untyped-call]


def backward(roots: Sequence[Root], grads: Sequence[Tensor | None]) -> None:
    """Accumulate the gradients of all leaves behind some roots; None stands for the gradient 1 of a scalar.

    >>> leaf = torch.ones(2, requires_grad=True)
    >>> backward([(3 * leaf).sum()], [None])
    >>> leaf.grad
    tensor([3., 3.])
    """
    if _usual(roots):
        run_engine(tuple(roots), _filled(roots, grads), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(list(roots), list(grads))  # type: ignore[arg-type]


def gradients(
    roots: Sequence[Root], grads: Sequence[Tensor | None], inputs: Sequence[Root], *, keep: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of some tensors or edges, None if there is none; `keep` says whether the graph stays.

    >>> leaf = torch.ones(2, requires_grad=True)
    >>> gradients([(3 * leaf).sum()], [None], [leaf], keep=False)
    (tensor([3., 3.]),)
    """
    if _usual(roots) and _usual(inputs):
        return tuple(
            run_engine(
                tuple(roots), _filled(roots, grads), keep, False, tuple(inputs), allow_unreachable=True,
                accumulate_grad=False,
            )
        )  # fmt: skip
    return torch.autograd.grad(list(roots), list(inputs), list(grads), retain_graph=keep, allow_unused=True)  # type: ignore[arg-type]


def backward_to(
    leaves: Sequence[Tensor], roots: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], list[bool]]:
    """Run a whole backward; return the gradient of each leaf, and whether a hook on the leaf changed it.

    The second list is empty if no leaf has hooks.

    >>> leaf = torch.ones(2, requires_grad=True)
    >>> backward_to([leaf], [(3 * leaf).sum()], [None])
    ([tensor([3., 3.])], [])
    """
    versions = watch_hooks(leaves)
    with ArrivingGradients(leaves) as arrived:
        if roots:
            backward(roots, grads)
    return arrived, changed_by_hooks(arrived, versions)


class ArrivingGradients:
    """Collects the gradients of leaves during a backward, exactly as they arrive.

    Accumulated in `.grad`, a transposed or expanded gradient would be copied into the layout of its leaf, and the
    kernels that take it next could choose a different algorithm.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        # Keep the nodes: no graph holds that of a leaf that is only passed on, and a new one would have no hook.
        self._hooks: list[tuple[Node, RemovableHandle]] = []

    def __enter__(self) -> list[Tensor | None]:
        """Return the list to be filled: a gradient for each leaf, None if none arrives."""
        arrived: list[Tensor | None] = [None] * len(self._leaves)
        for index, leaf in enumerate(self._leaves):
            if leaf.requires_grad:
                node = node_of(leaf)
                self._hooks.append((node, add_prehook(node, _taking(arrived, index))))
        return arrived

    def __exit__(self, *error: object) -> None:
        for _, handle in self._hooks:
            handle.remove()


def _taking(arrived: list[Tensor | None], index: int) -> Callable[[tuple[Tensor | None, ...]], tuple[None]]:
    def hook(grads: tuple[Tensor | None, ...]) -> tuple[None]:
        arrived[index] = grads[0]
        return (None,)

    return hook


def node_of(tensor: Tensor) -> Node:
    """The node that the gradient of a tensor arrives at first.

    >>> leaf = torch.ones(2, requires_grad=True)
    >>> node_of(leaf).name().split("::")[-1], node_of(leaf * 2).name()
    ('AccumulateGrad', 'MulBackward0')
    """
    if type(tensor) not in _PLAIN:
        # Otherwise view_as of a subclass may return a view of a view, which is one node further away.
        with without_torch_function():
            return _node_of(tensor)
    return _node_of(tensor)


def _node_of(tensor: Tensor) -> Node:
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    if torch.is_grad_enabled():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr, return-value]
    return graph.get_gradient_edge(tensor).node


def _usual(roots: Sequence[Root]) -> bool:
    return run_engine is not None and all(type(root) in _PLAIN for root in roots)


def _filled(roots: Sequence[Root], grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(
        [
            torch.ones_like(root) if grad is None else grad  # type: ignore[arg-type]
            for root, grad in zip(roots, grads, strict=True)
        ]
    )


# Hooks.


def registered_hooks() -> int:
    """How many hooks were registered in this process so far, except those of `add_prehook`.

    >>> leaf, before = torch.ones(2, requires_grad=True), registered_hooks()
    >>> handle = (leaf * 2).register_hook(print)
    >>> registered_hooks() - before
    1
    """
    with _lock:
        return hooks_registered() - _uncounted


def add_prehook(node: Any, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a prehook that a split backward calls correctly, so that `registered_hooks` need not count it."""
    global _uncounted
    with _lock:
        handle: RemovableHandle = node.register_prehook(hook)
        _uncounted += 1
    return handle


def accumulators_held(parameters: Iterable[Tensor]) -> bool:
    """Whether something holds the node that accumulates a parameter's gradient, as a hook on that node requires.

    Call this while no graph of these parameters is alive, since a graph holds these nodes too.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> accumulators_held([weight])
    False
    >>> node = weight.view_as(weight).grad_fn.next_functions[0][0]
    >>> accumulators_held([weight])
    True
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        _metadata(parameter)[_MARK] = True
    return any(_metadata(parameter).pop(_MARK, False) for parameter in trained)


def _metadata(parameter: Tensor) -> dict[str, Any]:
    """The metadata of the node that accumulates a parameter's gradient; it is lost with the node."""
    node: Any = node_of(parameter)
    metadata: dict[str, Any] = node.metadata
    return metadata


def watch_hooks(leaves: Sequence[Tensor]) -> Versions:
    """Before a backward: record the gradients of leaves with hooks as they are before the hooks run.

    In one process, an input of a stage is the output of the stage before, and hooks of both stages run in the order in
    which they were registered: those of the stage before come first. In a pipeline they come last, which makes no
    difference only if the others change nothing.
    """
    versions: Versions = {}
    for index, leaf in enumerate(leaves):
        if tensor_hooks(leaf):
            noted = versions[index] = []
            prepend_hook(leaf, lambda grad, noted=noted: noted.append((grad, version_of(grad))))  # type: ignore[misc]
    return versions


def changed_by_hooks(grads: Sequence[Tensor | None], versions: Versions) -> list[bool]:
    """After a backward: whether a hook changed the gradient of each leaf; empty if no leaf has hooks."""
    if not versions:
        return []
    return [
        any(after is not grad or version_of(grad) != version for grad, version in versions.get(index, ()))
        for index, after in enumerate(grads)
    ]
