"""Copies of tensors that a stage works on: their class, strides and attributes, and the memory they shared.

In one process, the next layer gets the same tensor. A stage gets another tensor, which must differ from the first in
nothing but its graph, not even in the class or the attributes that a user gave it. In one process, an in-place change
of one tensor also changes those that share its memory. Between stages such a change would be lost, so the sender says
which tensors of a message share memory, and a stage that changes one of them in place is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.tensors._torch_private import version_of, without_torch_function
from stageline.tensors.pytree import Leaf
from stageline.tensors.sharded import is_sharded, local

_PLAIN = frozenset([Tensor, nn.Parameter])


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether its class is torch's own, not a subclass."""
    return type(tensor) in _PLAIN


def detached(tensor: Tensor, wants: bool = False) -> Tensor:
    """The same values without a graph, of the same class and with the same attributes."""
    if type(tensor) in _PLAIN:
        bare = tensor.detach()
        return bare.requires_grad_() if wants else bare
    if is_sharded(tensor):
        return torch.as_tensor(tensor.detach().requires_grad_(wants))
    with without_torch_function():
        return _like(tensor.detach(), tensor).requires_grad_(wants)


def cloned(tensor: Tensor) -> Tensor:
    """A copy in the same graph, of the same class and strides and with the same attributes."""
    if type(tensor) in _PLAIN:
        return _same_strides(tensor)
    if is_sharded(tensor):
        return torch.as_tensor(tensor.clone())
    with without_torch_function():
        return _like(_same_strides(tensor), tensor)


def _same_strides(tensor: Tensor) -> Tensor:
    """Clone a tensor; one with gaps keeps them, because kernels may add in a different order without them."""
    copy = tensor.clone()
    if tensor.layout != torch.strided or copy.stride() == tensor.stride() or 0 in tensor.stride():
        return copy
    spaced = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return spaced.copy_(tensor)


def data_of(tensor: Tensor) -> Tensor:
    """`tensor.data`, of the same class and with the same attributes."""
    if type(tensor) in _PLAIN:
        return tensor.data
    with without_torch_function():
        return _like(tensor.data, tensor)


def _like(copy: Tensor, tensor: Tensor) -> Tensor:
    if type(copy) is Tensor:
        copy = copy.as_subclass(type(tensor))
    copy.__dict__.update(tensor.__dict__)
    return copy


# Tensors of one message that share memory

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Places of leaves that share memory, two by two."""

Joined: TypeAlias = Mapping[int, int]
"""Addresses of memory that would be the same in one process, each with the address that stands for all of them."""

_MARK = "\n"
_Geometry: TypeAlias = tuple[int, torch.Size, tuple[int, ...], int]


def sharing(leaves: Sequence[Leaf], joined: Joined) -> Pairs:
    """Which leaves share memory with each other.

    >>> whole = torch.zeros(4, 4)
    >>> sharing([whole, 1, whole[:, :2], torch.zeros(4)], {}), sharing(whole.chunk(2, dim=1), {})
    (((0, 2),), ())
    """
    tensors = [(place, local(leaf)) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(tensors) < 2:
        return ()
    addresses = [address_of(tensor) for _, tensor in tensors]
    if joined:
        addresses = [joined.get(address, address) for address in addresses]
    if len(set(addresses)) == len(addresses):
        return ()
    return tuple(
        (one, other)
        for ((one, first), here), ((other, second), there) in combinations(zip(tensors, addresses, strict=True), 2)
        if here == there != 0
        and (address_of(first) != address_of(second) or _overlap(_geometry(first), _geometry(second)))
    )


def address_of(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none."""
    return local(tensor).untyped_storage().data_ptr()


def _geometry(tensor: Tensor) -> _Geometry:
    return tensor.element_size(), tensor.shape, tensor.stride(), int(tensor.storage_offset())


@lru_cache(maxsize=1024)
def _overlap(one: _Geometry, other: _Geometry) -> bool:
    """Whether two tensors of one memory have an element in common."""
    (size, shape, strides, offset), (_, other_shape, other_strides, other_offset) = one, other
    if not shape.numel() or not other_shape.numel():
        return False
    if one == other or size != other[0]:
        return True
    first = min(offset, other_offset)
    end = max(offset + _span(shape, strides), other_offset + _span(other_shape, other_strides))
    touched = torch.zeros(end - first, dtype=torch.bool)
    once = [1 if stride == 0 else length for length, stride in zip(shape, strides, strict=True)]
    touched.as_strided(once, strides, offset - first).fill_(True)
    return bool(touched.as_strided(other_shape, other_strides, other_offset - first).any())


def _span(shape: torch.Size, strides: tuple[int, ...]) -> int:
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def noted(tree: str, pairs: Pairs) -> str:
    """Add the places of leaves that share memory to the text of a tree."""
    return f"{tree}{_MARK}{json.dumps(pairs)}" if pairs else tree


@lru_cache(maxsize=1024)
def read_pairs(text: str) -> tuple[str, Pairs]:
    """Split what `noted` returned."""
    if _MARK not in text:
        return text, ()
    tree, pairs = text.rsplit(_MARK, 1)
    return tree, tuple((int(one), int(other)) for one, other in json.loads(pairs))


class Shared:
    """The inputs of one forward that share memory: whether it changed one of them, and which outputs share it."""

    def __init__(self, pairs: Pairs, arrived: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Create it before the forward; `inputs` are what the layers get, copies of what arrived or the same."""
        self._pairs = pairs
        self._kept = (arrived, inputs)  # keeps their memory from being reused
        self._before = {place: _state(inputs[place]) for pair in pairs for place in pair}

    def refuse_changes(self, stage: int, microbatch: int) -> None:
        """Refuse a forward that changed one of them in place."""
        inputs = self._kept[1]
        unchanged = {place: _is_as(inputs[place], state) for place, state in self._before.items()}
        for one, other in self._pairs:
            if not unchanged[one] or not unchanged[other]:
                changed, same = (other, one) if unchanged[one] else (one, other)
                raise StagelineError(
                    f"stage {stage} changes its input {changed} in place in microbatch {microbatch}, which shares "
                    f"memory with its input {same}; in one process that changes both, but between stages only one; "
                    "use a copy (x = x.clone()), or pass a copy of one of them to the stage"
                )

    def joined(self) -> dict[int, int]:
        """Addresses of its memory that would be the same in one process."""
        groups: dict[int, int] = {}
        for one, other in self._pairs:
            groups[one] = groups[other] = groups.get(one, one)
        return {
            address_of(leaves[place]): address_of(self._kept[0][group])
            for place, group in groups.items()
            for leaves in self._kept
        }


def _state(tensor: Tensor) -> int | Tensor:
    """What shows whether a tensor changed: its version, or its values if it has no version."""
    return tensor.clone() if tensor.is_inference() else version_of(tensor)


def _is_as(tensor: Tensor, state: int | Tensor) -> bool:
    return version_of(tensor) == state if isinstance(state, int) else torch.equal(tensor, state)
