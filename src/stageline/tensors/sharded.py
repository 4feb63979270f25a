"""Tensors whose parts are on several processes (DTensor): this process's part, the whole, and parts of a whole.

Between stages, a process sends its part, and how it was cut as plain data; the receiver joins the same part of its own
group of processes to a sharded tensor again.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.tensors._torch_private import cut_of_first, is_on_its_way, is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return arrived(tensor.to_local())


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors with the values of a tensor on this process: its part, or the inner tensors of a subclass.

    >>> list(plain_tensors(torch.ones(2)))
    [tensor([1., 1.])]
    """
    value: Any = tensor
    if is_sharded(value):
        inner = [local(value)]
    elif type(value) is not Tensor and is_traceable_wrapper_subclass(value):
        inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    else:
        yield value
        return
    for part in inner:
        yield from plain_tensors(part)


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


class Piece(NamedTuple):
    """Where a piece of a tensor lies in the whole, and in this process's part."""

    whole: tuple[slice, ...]
    part: tuple[slice, ...]


def pieces_of(tensor: Tensor) -> list[Piece]:
    """The pieces that this process's part of a tensor consists of; none if it is empty. Sends nothing.

    A part is one piece, but for placements that take every n-th block.

    >>> pieces_of(torch.ones(4, 2))
    [Piece(whole=(slice(0, 4, None), slice(0, 2, None)), part=(slice(0, 4, None), slice(0, 2, None)))]
    """
    runs = [_runs(tensor, dimension, size) for dimension, size in enumerate(tensor.shape)]
    held = [sum(stop - start for start, stop in of_dimension) for of_dimension in runs]
    if is_sharded(tensor) and held != list(local(tensor).shape):
        raise StagelineError(
            f"a tensor of shape {tuple(tensor.shape)} with placements {tensor.placements} has a part of shape "
            f"{tuple(local(tensor).shape)} here, but {tuple(held)} was expected; cut it evenly"
        )
    offsets = [[0, *itertools.accumulate(stop - start for start, stop in of_dimension)] for of_dimension in runs]
    pieces = []
    for chosen in itertools.product(*(range(len(of_dimension)) for of_dimension in runs)):
        whole = tuple(slice(*runs[dimension][run]) for dimension, run in enumerate(chosen))
        part = tuple(slice(*offsets[dimension][run : run + 2]) for dimension, run in enumerate(chosen))
        pieces.append(Piece(whole, part))
    return pieces


def _runs(tensor: Tensor, dimension: int, size: int) -> list[tuple[int, int]]:
    """The ranges of a dimension's indices that this process holds."""
    if not is_sharded(tensor):
        return [(0, size)] if size else []
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = [
        cut_of_first(placement) if getattr(placement, "dim", None) == dimension else Replicate()
        for placement in tensor.placements
    ]
    if all(placement.is_replicate() for placement in placements):
        return [(0, size)] if size else []
    mesh = tensor.device_mesh
    indices = torch.arange(size, device=mesh.device_type)
    held = distribute_tensor(indices, mesh, placements, src_data_rank=None).to_local().tolist()
    starts = [at for at in range(len(held)) if at == 0 or held[at] != held[at - 1] + 1]
    return [(held[start], held[stop - 1] + 1) for start, stop in itertools.pairwise([*starts, len(held)])]


def read_part(source: Any, target: Tensor) -> Tensor:
    """This process's part of a whole tensor that is read by slices, as `target` is cut: a plain tensor.

    >>> read_part(torch.arange(3), torch.zeros(3))
    tensor([0, 1, 2])
    """
    pieces = pieces_of(target)
    if len(pieces) == 1:
        return torch.as_tensor(source[pieces[0].whole])
    part = torch.empty(local(target).shape, dtype=target.dtype)
    for number, piece in enumerate(pieces):
        values = source[piece.whole]
        part = part if number else part.to(values.dtype)
        part[piece.part] = values
    return part


def with_part(part: Tensor, target: Tensor) -> Tensor:
    """A tensor of which this is the part here, cut as `target` is; a plain one if that is plain."""
    if not is_sharded(target):
        return part
    from torch.distributed.tensor import DTensor

    placed = part.to(local(target).device)
    return DTensor.from_local(
        placed, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


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


def part_bytes(tensor: Tensor) -> int:
    """The average size in bytes of the parts of a tensor, which is the same on all processes that hold one.

    >>> part_bytes(torch.ones(3))
    12
    """
    parts = 1
    if is_sharded(tensor):
        cuts = [getattr(placement, "dim", None) is not None for placement in tensor.placements]
        parts = math.prod(size for size, cut in zip(tensor.device_mesh.shape, cuts, strict=True) if cut)
    return -(-tensor.numel() // parts) * tensor.element_size()


def sharding_text(tensor: Tensor) -> str:
    """How a tensor is cut, in words.

    >>> sharding_text(torch.ones(2))
    'is whole'
    """
    if not is_sharded(tensor):
        return "is whole"
    mesh = tensor.device_mesh
    sizes = zip(mesh.mesh_dim_names or ("?",) * mesh.ndim, mesh.shape, strict=True)
    return f"is cut by {tensor.placements} over {', '.join(f'{name} {size}' for name, size in sizes)}"


def processes_of(tensor: Tensor) -> list[int]:
    """The processes that hold parts or copies of a tensor; none for a plain tensor."""
    return [int(process) for process in tensor.device_mesh.mesh.flatten().tolist()] if is_sharded(tensor) else []


# Between stages

_MARK = "\t"


def send_parts(
    leaves: Sequence[Any], tree: str, dimensions: Collection[str], name: Callable[[], str]
) -> tuple[list[Any], str]:
    """The leaves of a message with this process's parts of sharded tensors, and its tree with how they are cut.

    `dimensions` are those of the mesh that both ends have; `name` says whose message it is.
    """
    parts, cuts = list(leaves), []
    for place, leaf in enumerate(leaves):
        if is_sharded(leaf):
            axes = list(leaf.device_mesh.mesh_dim_names or ())
            if not axes or not set(axes) <= set(dimensions):
                raise StagelineError(
                    f"{name()} passes on a DTensor on a mesh of dimensions {', '.join(axes) or 'without names'}; "
                    f"between stages, it is on the mesh of parallelize ({', '.join(dimensions) or 'no dimensions'}): "
                    "use that mesh, or pass on x.to_local() or x.full_tensor()"
                )
            placements = [_plain_placement(placement, name) for placement in leaf.placements]
            cuts.append([place, axes, placements, list(leaf.shape), list(leaf.stride())])
            parts[place] = local(leaf).detach().requires_grad_(leaf.requires_grad)
    return parts, f"{tree}{_MARK}{json.dumps(cuts)}" if cuts else tree


def receive_parts(leaves: Sequence[Any], text: str, mesh: DeviceMesh | None) -> tuple[list[Any], str]:
    """What `send_parts` was called with, on this process's mesh."""
    tree, mark, cuts = text.partition(_MARK)
    joined = list(leaves)
    if mark:
        from torch.distributed.tensor import DTensor

        assert mesh is not None
        for place, axes, placements, shape, stride in _read_cuts(cuts):
            joined[place] = DTensor.from_local(
                joined[place], _sub_mesh(mesh, axes), placements, run_check=False, shape=shape, stride=stride
            )
    return joined, tree


def describe_parts(text: str) -> str:
    """How the tensors of a message are cut, in words; empty if none is.

    >>> describe_parts('tensor\\t[[0, ["tp"], [["shard", 1]], [2, 4], [4, 1]]]')
    'a DTensor of shape (2, 4) with Shard(dim=1) over tp'
    """
    cuts = _read_cuts(text.partition(_MARK)[2] or "[]")
    return " and ".join(
        f"a DTensor of shape {tuple(shape)} with {', '.join(map(repr, placements))} over {', '.join(axes)}"
        for _, axes, placements, shape, _ in cuts
    )


def _plain_placement(placement: Any, name: Callable[[], str]) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    raise StagelineError(
        f"{name()} passes on a DTensor with the placement {placement!r}; between stages, it has Shard, Replicate or "
        "Partial: redistribute it, or pass on x.to_local() or x.full_tensor()"
    )


_Cut = tuple[int, tuple[str, ...], list[Any], torch.Size, tuple[int, ...]]
"""The place of a sharded tensor among the leaves, the dimensions of its mesh, its placements, shape and strides."""


@lru_cache(maxsize=1024)
def _read_cuts(text: str) -> list[_Cut]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds: dict[str, Any] = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    return [
        (int(place), tuple(axes), [kinds[kind](*rest) for kind, *rest in placements], torch.Size(shape), tuple(stride))
        for place, axes, placements, shape, stride in json.loads(text)
    ]


@lru_cache(maxsize=64)
def _sub_mesh(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    return mesh if axes == mesh.mesh_dim_names else mesh[axes]
