"""Private torch API used by this package. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "any_autocast_enabled",
    "buffers_of",
    "children_of",
    "cut_of_first",
    "is_on_its_way",
    "is_traceable_wrapper_subclass",
    "pytree",
    "register_namedtuple",
    "saved_tensors_hooks",
    "version_of",
    "without_torch_function",
]

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was modified in place; fails for inference tensors."""

buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""The buffers that a module itself registered; the dictionary may be changed."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""The modules that a module itself holds."""

register_namedtuple: Callable[..., None] = pytree._register_namedtuple
"""Register a named tuple under the name by which other processes know it."""

without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses are treated as plain tensors."""

any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on in this thread, for any type of device."""


def cut_of_first(placement: Any) -> Any:
    """The same cut, of the first dimension: FSDP2 over tensor parallel has a class of its own for it."""
    from torch.distributed.tensor import placement_types

    if isinstance(placement, placement_types._StridedShard):
        return placement_types._StridedShard(0, split_factor=placement.split_factor)
    return placement_types.Shard(0)


def is_on_its_way(tensor: Tensor) -> bool:
    """Whether a tensor is the result of a collective that may not have ended."""
    module: Any = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def saved_tensors_hooks() -> tuple[Any, ...] | None:
    """The innermost hooks for saved tensors in this thread; None if there are none."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(True)
    return None if top is None else tuple(top)
