"""Tensors whose parts are on several processes (DTensor): this process's part, the whole, and parts of a whole."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from stageline.tensors._torch_private import is_on_its_way


def is_sharded(value: object) -> TypeGuard[Any]:
    """Whether a value is a DTensor. One that was never imported made none, and importing it is slow.

    >>> is_sharded(torch.ones(2))
    False
    """
    if type(value) is Tensor:
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory; a plain tensor is its own part.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    with torch.no_grad():
        return torch.as_tensor(tensor.to_local()) if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; all processes that hold a part of it must call this together."""
    return torch.as_tensor(tensor.full_tensor()) if is_sharded(tensor) else tensor


def part_like(full: Tensor, target: Tensor) -> Tensor:
    """Cut this process's part out of a whole tensor, as `target` is cut; sends nothing.

    >>> part_like(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if not is_sharded(target) or is_sharded(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    full = full.detach().to(target.device_mesh.device_type)
    cut = distribute_tensor(full, target.device_mesh, list(target.placements), src_data_rank=None)
    return torch.as_tensor(cut.contiguous())


class _Arrived(torch.autograd.Function):
    """Waits for the result of a collective."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return torch.as_tensor(tensor.trigger_wait().detach())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def arrived(tensor: Tensor) -> Tensor:
    """A plain tensor in place of one that a collective still computes; any other as it is.

    >>> arrived(torch.ones(1))
    tensor([1.])
    """
    if type(tensor) is Tensor or not is_on_its_way(tensor):
        return tensor
    call: Any = _Arrived.apply
    return torch.as_tensor(call(tensor))


def settle_gradient(parameter: nn.Parameter) -> None:
    """Bring a gradient into the form of its parameter, where every process has only a term of the sum so far.

    All processes that hold a part of the parameter must call this together.
    """
    grad = parameter.grad
    if is_sharded(parameter) and is_sharded(grad) and tuple(grad.placements) != tuple(parameter.placements):
        parameter.grad = grad.redistribute(placements=list(parameter.placements))


def processes_of(tensor: Tensor) -> list[int]:
    """The processes that hold parts or copies of a tensor; none for a plain tensor."""
    return [int(process) for process in tensor.device_mesh.mesh.flatten().tolist()] if is_sharded(tensor) else []
