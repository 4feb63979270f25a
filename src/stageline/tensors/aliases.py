"""Values of one message that share memory: in one process a change of one in place is a change of the others.

A stage works on copies of what it changes, and processes have no memory in common, so such a change would be lost. The
sender tells which values share memory, and the stage that changes one of them in place refuses to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias

import torch
from torch import Tensor

from stageline.tensors.pytree import Leaf

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Places of leaves that share memory, two by two."""

Joined: TypeAlias = Mapping[int, int]
"""Addresses of memory that would be one in one process, each with the address that stands for all of them."""

_MARK = "\n"
_Geometry: TypeAlias = tuple[int, torch.Size, tuple[int, ...], int]


def sharing(leaves: Sequence[Leaf], joined: Joined) -> Pairs:
    """Which leaves share memory with each other.

    >>> whole = torch.zeros(4, 4)
    >>> sharing([whole, 1, whole[:, :2], torch.zeros(4)], {}), sharing(whole.chunk(2, dim=1), {})
    (((0, 2),), ())
    """
    tensors = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
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
    """Where the memory of a tensor begins; 0 where it has none."""
    return tensor.untyped_storage().data_ptr()


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
    """The text of a tree with the places of leaves that share memory.

    >>> read_pairs(noted("tree", ((0, 2),))), read_pairs(noted("tree", ()))
    (('tree', ((0, 2),)), ('tree', ()))
    """
    return f"{tree}{_MARK}{json.dumps(pairs)}" if pairs else tree


def read_pairs(text: str) -> tuple[str, Pairs]:
    """Read the text of a tree, and which of its leaves share memory."""
    if _MARK not in text:
        return text, ()
    tree, pairs = text.rsplit(_MARK, 1)
    return tree, tuple((int(one), int(other)) for one, other in json.loads(pairs))


class Shared:
    """The inputs of one forward that share memory: whether it changed one of them, and what it passes on of them."""

    def __init__(self, pairs: Pairs, arrived: Sequence[Leaf], inputs: Sequence[Leaf]) -> None:
        """Begin before the forward; `inputs` are what it is given, copies of what arrived or the same."""
        self._pairs = pairs
        self._kept = (arrived, inputs)  # as long as they live, no other tensor gets their memory
        self._before = {place: _state(inputs[place]) for pair in pairs for place in pair}

    def changed(self) -> tuple[int, int] | None:
        """The first input that was changed in place, and one that it shares memory with."""
        inputs = self._kept[1]
        after = {place: _is_as(inputs[place], state) for place, state in self._before.items()}
        for one, other in self._pairs:
            if not after[one] or not after[other]:
                return (other, one) if after[one] else (one, other)
        return None

    def joined(self) -> dict[int, int]:
        """What of its memory would be one in one process."""
        groups: dict[int, int] = {}
        for one, other in self._pairs:
            group = groups.get(one, one)
            groups[one] = group
            groups[other] = group
        addresses: dict[int, int] = {}
        for place, group in groups.items():
            for leaves in self._kept:
                addresses[_address(leaves[place])] = _address(self._kept[0][group])
        return addresses


def _address(leaf: Leaf) -> int:
    assert isinstance(leaf, Tensor)
    return address_of(leaf)


def _state(leaf: Leaf) -> int | Tensor:
    """What tells whether a tensor is changed: its version, or its values where it has none."""
    assert isinstance(leaf, Tensor)
    return leaf.clone() if leaf.is_inference() else leaf._version


def _is_as(leaf: Leaf, state: int | Tensor) -> bool:
    assert isinstance(leaf, Tensor)
    return leaf._version == state if isinstance(state, int) else torch.equal(leaf, state)
