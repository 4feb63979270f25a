"""The gradient norm, where each process holds a part of the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stageline.distributed.rank_host import Floats
from stageline.runtime.shared_parameters import Placed
from stageline.schedules.placement import Placement


def norms_of(names: Sequence[str], own: Mapping[str, Tensor | None], norm_type: float = 2.0) -> Floats:
    """The norm of each parameter's gradient, in the order of the model; 0 for parameters that are not in `own`."""
    numbers = {name: index for index, name in enumerate(names)}
    norm_by_index = {
        numbers[name]: torch.linalg.vector_norm(_real(gradient), norm_type, dtype=norm_dtype([gradient])).double()
        for name, gradient in own.items()
        if gradient is not None
    }
    norms = np.zeros(len(names))
    for device in {norm.device for norm in norm_by_index.values()}:  # one transfer per device: each one stalls a GPU
        here = [index for index, norm in norm_by_index.items() if norm.device == device]
        norms[here] = torch.stack([norm_by_index[index] for index in here]).cpu().numpy()
    return norms


def _real(gradient: Tensor) -> Tensor:
    return gradient.abs() if gradient.is_complex() else gradient


def norm_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The type in which a norm is computed: float32, or float64 if any gradient is.

    >>> norm_dtype([torch.ones(1, dtype=torch.bfloat16)]), norm_dtype([torch.ones(1, dtype=torch.complex128)])
    (torch.float32, torch.float64)
    """
    exact = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return torch.float64 if exact else torch.float32


def total_norm(norms: Floats, norm_type: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm of norms."""
    return torch.as_tensor(torch.linalg.vector_norm(torch.from_numpy(norms).to(dtype), norm_type))


def clip_factor(max_norm: float, total: Tensor) -> Tensor:
    """The factor that scales gradients of this norm to at most `max_norm`.

    >>> clip_factor(1.0, torch.tensor(0.5)), round(float(clip_factor(1.0, torch.tensor(4.0))), 4)
    (tensor(1.), 0.25)
    """
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def owners_of(model: nn.Module, parts: Sequence[nn.Module], placement: Placement, placed: Placed) -> dict[str, int]:
    """The rank that each parameter and buffer belongs to: the first that uses it."""
    owners: dict[str, int] = {}
    for stage, part in enumerate(parts):
        tensors = (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False))
        for name, _ in tensors:
            owners.setdefault(name, int(placement.table[0, stage]))
    first = {parameter: uses[0].rank for parameter, uses in placed.uses.items()}
    owners.update({name: first[parameter] for name, parameter in model.named_parameters() if parameter in first})
    return owners
