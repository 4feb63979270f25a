"""Private torch API used by this package. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import ActiveProfilerType as _ActiveProfilerType
from torch._utils import _flatten_dense_tensors
from torch.autograd import profiler as _profiler
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

__all__ = [
    "buffer_named",
    "called_as",
    "composable_wrappers",
    "emits_nvtx",
    "flatten_dense",
    "foreach_mul_",
    "foreach_norm",
    "forget_unsharded_gradients",
    "has_accumulate_hooks",
    "has_gradient_hooks",
    "mark_stepped",
    "optimizer_hooks",
    "parameters_of",
    "profiler_is_on",
    "profiles_this_thread",
    "pytree",
    "share_gradient_hooks",
    "sparse_values",
    "storage_id",
    "version_of",
]

foreach_mul_ = torch._foreach_mul_
"""Multiplies each tensor of a list by a scalar tensor, in place."""

foreach_norm: Callable[[list[Tensor], float], Sequence[Tensor]] = torch._foreach_norm
"""The norm of each tensor of a list, in few kernels."""

version_of = attrgetter("_version")
"""How often a tensor was changed in place."""


profiler_is_on: Callable[[], bool] = partial(getattr, _profiler, "_is_profiler_enabled")
"""Whether torch's profiler or `emit_nvtx` runs, on this thread or another."""


profiles_this_thread: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler that was started in this thread records it, and not all threads."""


def emits_nvtx() -> bool:
    """Whether `torch.autograd.profiler.emit_nvtx` is on in this thread."""
    return torch._C._autograd._profiler_type() == _ActiveProfilerType.NVTX


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether `Tensor.register_hook` was called."""
    return bool(tensor._backward_hooks)


def has_accumulate_hooks(tensor: Tensor) -> bool:
    """Whether `Tensor.register_post_accumulate_grad_hook` was called."""
    return bool(tensor._post_accumulate_grad_hooks)


def share_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Let `target` call the gradient hooks of `source`, and no others."""
    if source._backward_hooks or target._backward_hooks:
        target._backward_hooks = OrderedDict(source._backward_hooks or {})


def storage_id(tensor: Tensor) -> int | None:
    """An identifier of the tensor's memory; None if it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse COO tensor, which need not be coalesced."""
    return tensor._values()


flatten_dense: Callable[[Sequence[Tensor]], Tensor] = _flatten_dense_tensors
"""The elements of dense tensors, one after the other, in one copy."""


def buffer_named(module: nn.Module, name: str) -> Tensor | None:
    """A buffer of this module itself, not of a submodule; it may be None."""
    return module._buffers[name]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of this module itself, not of its submodules; they may be replaced."""
    return module._parameters


def optimizer_hooks(optimizer: Optimizer) -> list[Any]:
    """The functions that an optimizer calls before and after it steps."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def called_as(module: nn.Module, function: Callable[[Any], Any], value: Any) -> Any:
    """Call a module with another forward: its hooks run around `function`."""
    module.__dict__["forward"] = function
    try:
        return module(value)
    finally:
        del module.__dict__["forward"]


def forget_unsharded_gradients(module: Any) -> None:
    """Drop the gradients that an FSDP2 module has accumulated and not reduced, and end its step."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        for parameter in () if group is None else group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        if group is not None:
            group._training_state = type(group._training_state).IDLE
    state._training_state = type(state._training_state).IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def mark_stepped(optimizer: Optimizer) -> None:
    """Let learning-rate schedulers see that an optimizer has stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def composable_wrappers(module: nn.Module) -> set[str]:
    """The names of composable wrappers, such as `replicate`, that were applied to a module."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    return set() if contract is None else set(contract._get_registry(module) or ())
