"""Private torch API used by this package. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["NormBase", "TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

# Modules

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that every module has: its tensors, its children and its hooks."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
non_persistent_buffers: Callable[[nn.Module], set[str]] = operator.attrgetter("_non_persistent_buffers_set")

MODULE_DICTIONARIES = ("_modules", "_parameters", "_buffers")
COMPILED_CALL = "_compiled_call_impl"
"""Where `module.compile()` keeps the compiled call of a module; None if it is not compiled."""
WRAPPED = "_orig_mod"
"""The module inside the wrapper of `torch.compile(module)`."""
COMPILED_FUNCTION = "_torchdynamo_orig_callable"
"""The function that `torch.compile(function)` compiled."""


def module_dictionaries(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the dictionaries with a module's children, parameters and buffers, by attribute name."""
    return {name: module.__dict__[name] for name in MODULE_DICTIONARIES}


def remove_forward_hooks(module: nn.Module, keep: Callable[[Any], bool]) -> None:
    """Remove the forward hooks and pre-hooks of a module, except the hooks for which `keep` is true."""
    module._forward_pre_hooks.clear()
    for key, hook in list(module._forward_hooks.items()):
        if not keep(hook):
            del module._forward_hooks[key]


# Tensors

GPU_CLOCK = 2e9
"""Cycles per second of a GPU, roughly."""


def sleep_on_gpu(seconds: float) -> None:
    """Let the current stream wait for about this long."""
    torch.cuda._sleep(int(seconds * GPU_CLOCK))  # type: ignore[no-untyped-call]


raw_version: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was modified in place; fails for inference tensors."""


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was modified in place; -1 for inference tensors, which do not count."""
    return -1 if tensor.is_inference() else tensor._version


def storage_pointer(storage: torch.UntypedStorage) -> int:
    """Return an identifier of a storage, unique while it is alive."""
    return int(storage._cdata)


def storage_id(tensor: Tensor) -> Hashable:
    """Return what a tensor and its views have in common."""
    try:
        return storage_pointer(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse, or a wrapper around other tensors
        return id(tensor)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors of a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a pytree with its tensors changed."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def wrapper_tensor(kind: type[Tensor], meta: Tensor, device: torch.device | str) -> Any:
    """Return a tensor of a subclass, without memory, with the form of a meta tensor and this device."""
    return Tensor._make_wrapper_subclass(
        kind, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device(device)
    )


def make_subclass(kind: type[Tensor], value: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor of a subclass on the memory of another tensor."""
    return Tensor._make_subclass(kind, value, requires_grad)


neg_view: Callable[[Tensor], Tensor] = torch._neg_view


def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has gradient hooks."""
    return bool(tensor._backward_hooks)


def hook_dictionaries(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """Return the non-empty dictionaries of a parameter's gradient hooks."""
    hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [dictionary for dictionary in hooks if dictionary]


# Dispatch

disable_torch_function: Any = torch._C.DisableTorchFunction
"""A context manager that calls operators without `__torch_function__`."""
no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The value of `__torch_function__` for a tensor subclass that does not want it."""
without_dispatch_modes: Any = _disable_current_modes
"""A context manager that disables all dispatch modes."""


def schema_arguments(operator: Any) -> list[Any]:
    """Return the arguments in the schema of an operator."""
    return list(operator._schema.arguments)


@contextmanager
def patched_trunc_normal(replacement: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Iterator[None]:
    """Let `nn.init.trunc_normal_` draw with `replacement(original)`."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = replacement(original)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
