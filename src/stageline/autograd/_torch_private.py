"""Private torch API used by this package. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

__all__ = [
    "add_tensors",
    "any_hooks",
    "current_node",
    "has_hooks",
    "hooks_registered",
    "input_metadata",
    "prepend_hook",
    "pytree",
    "raise_recompile_limit",
    "run_engine",
    "saved",
    "saved_hook",
    "saved_names",
    "sequence_number",
    "storage_id",
    "tensor_hooks",
    "version_of",
    "without_torch_function",
]

run_engine: Any = getattr(graph, "_engine_run_backward", None)
"""The call into autograd's engine that `torch.autograd.backward` makes; None if torch has no such function."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was modified in place."""

without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses are treated as plain tensors."""

add_tensors: Any = torch._foreach_add_
"""Add the second tensors to the first ones in place, in as few kernels as possible."""

tensor_hooks: Callable[[Tensor], OrderedDict[int, Any] | None] = attrgetter("_backward_hooks")
"""The hooks of `Tensor.register_hook`."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The autograd node that runs now on this thread."""

input_metadata: Callable[[Any], Sequence[Any]] = attrgetter("_input_metadata")
"""Shape and dtype of each gradient that a node takes."""


def hooks_registered() -> int:
    """How many hooks were registered in this process so far, on tensors, nodes and modules."""
    return RemovableHandle.next_id


def raise_recompile_limit(limit: int) -> None:
    """Let torch compile the code of a function at least so often for different arguments."""
    import torch._dynamo  # takes a second

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)


def prepend_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call a hook before those that a tensor has; torch does not count it."""
    tensor._backward_hooks = OrderedDict({-1: hook, **(tensor._backward_hooks or {})})


def has_hooks(parameter: Tensor) -> bool:
    """Whether autograd calls a hook when the gradient of a parameter arrives or is accumulated."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def any_hooks(parameters: Iterable[Any]) -> bool:
    """Whether one of the parameters has such a hook."""
    return any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters)


def sequence_number(node: Any) -> int:
    """The place of a node in the order in which the forward created them."""
    return int(node._sequence_nr())


def saved(*names: str) -> Callable[[Any], Any]:
    """A function that returns what a node saved for its backward under these names: a tuple, or the only value."""
    return attrgetter(*(f"_saved_{name}" for name in names))


def saved_names(node: Any) -> list[str]:
    """The names of the tensors that a node saves; `saved_hook` takes them."""
    names = [name for name in dir(node) if name.startswith(_RAW) and not isinstance(getattr(node, name), tuple)]
    return [name.removeprefix(_RAW) for name in names]


@cache
def saved_hook(name: str) -> Callable[[Any], Any]:
    """A function that returns the hook that unpacks a tensor of this name; None if autograd itself holds the tensor."""
    return attrgetter(f"{_RAW}{name}.unpack_hook")


def storage_id(tensor: Tensor) -> int | None:
    """An identifier of the tensor's memory, which stays the same when the memory is freed; None if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


_RAW = "_raw_saved_"
