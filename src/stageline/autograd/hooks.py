"""Hooks on graphs: whether someone may have registered one, and hooks of this package that do not count as such.

A hook on a tensor or node may change a gradient, or count its calls, so it must run once: neither in I and in W, nor in
neither. torch does not tell which nodes have hooks, but it numbers every hook that Python registers. If the number grew
between a forward and its backward, the graph may have hooks, and its backward is not split.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from stageline.autograd import engine

_lock = threading.Lock()
_own = 0
_MARK = "stageline"


def registered() -> int:
    """How many hooks were registered in this process so far, except those of `add_prehook`.

    >>> import torch
    >>> leaf, before = torch.ones(2, requires_grad=True), registered()
    >>> handle = (leaf * 2).register_hook(print)
    >>> registered() - before
    1
    """
    with _lock:
        return RemovableHandle.next_id - _own


def add_prehook(node: Any, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a prehook that a split backward calls as it should, so that it need not be counted."""
    global _own
    with _lock:
        handle: RemovableHandle = node.register_prehook(hook)
        _own += 1
    return handle


def accumulators_held(parameters: Iterable[Tensor]) -> bool:
    """Whether someone holds the node in which a parameter's gradients gather, as a hook on that node requires.

    Ask while no graph of these parameters is alive, since a graph holds these nodes too.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> accumulators_held([weight])
    False
    >>> node = weight.view_as(weight).grad_fn.next_functions[0][0]
    >>> accumulators_held([weight])
    True
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in wanted:
        _notes_of(parameter)[_MARK] = True
    return any(_notes_of(parameter).pop(_MARK, False) for parameter in wanted)


def _notes_of(parameter: Tensor) -> dict[str, Any]:
    """What can be noted with the node in which a parameter's gradients gather; it is lost with the node."""
    node: Any = engine.node_of(parameter)
    notes: dict[str, Any] = node.metadata
    return notes


class Watch:
    """Sees which gradients of a stage's inputs are changed by hooks on these inputs.

    In one process, an input is the output of the stage before, and hooks of both stages run in the order in which they
    were registered: first those of the stage before. In a pipeline they run last, which only goes unnoticed if the
    others change nothing.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        """Begin before the backward; `leaves` are the inputs."""
        self._before: dict[int, list[tuple[Tensor, int]]] = {}
        for index, leaf in enumerate(leaves):
            if leaf._backward_hooks:
                noted = self._before[index] = []
                first = {-1: lambda grad, noted=noted: noted.append((grad, grad._version))}
                leaf._backward_hooks = OrderedDict({**first, **leaf._backward_hooks})

    def changed(self, grads: Sequence[Tensor | None]) -> Sequence[bool]:
        """For the gradient of every leaf, whether a hook changed it; empty if no leaf has hooks."""
        return [
            any(after is not grad or grad._version != version for grad, version in self._before.get(index, ()))
            for index, after in enumerate(grads if self._before else ())
        ]
