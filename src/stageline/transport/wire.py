"""A message as bytes: a prefix of five numbers, a header of typed JSON, and the bytes of the tensors. No pickle.

The prefix says how long the rest is, so a header that cannot be read costs one message and not the channel: what
belongs to it is taken off the wire, and the next message starts where it should.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stageline.errors import shorten
from stageline.transport.protocol import Header, Leaf, Message, Traffic, TransportError

HEAD = 4096
"""Bytes of the first part of every message; a header that does not fit into it follows as a second part."""

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
TRAFFIC: tuple[Traffic, ...] = ("forward", "backward")
_PREFIX = struct.Struct("<5q")
_MAGIC = 0x7374_6167_656C_696E
_LONGEST = 1 << 40


class Prefix(NamedTuple):
    """What every message starts with: the turn it belongs to, how long the rest is, and a check sum of the header."""

    turn: int
    text: int
    payload: int
    check: int

    @property
    def long(self) -> bool:
        """Whether the header does not fit into the first part and follows it."""
        return self.text > HEAD - _PREFIX.size


class Described(NamedTuple):
    """A tensor as its header tells it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    apart: bool
    """Whether it travels on a group of its own, and not with the header."""

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Letter:
    """A header that was read: the message without the contents of its tensors."""

    header: Header
    leaves: list[Leaf | Described]
    tree: str
    wants_gradient: list[bool]
    kinds: list[str] | None

    def described(self) -> list[Described]:
        """The tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Described)]

    def message(self, tensors: Sequence[Tensor]) -> Message:
        """Put the tensors in their places."""
        found = iter(tensors)
        leaves = [next(found) if isinstance(leaf, Described) else leaf for leaf in self.leaves]
        return Message(self.header, leaves, self.tree, self.wants_gradient, tuple(self.kinds or ()))


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in its own memory where it is contiguous.

    >>> bytes_of(torch.ones(2, 3, dtype=torch.bfloat16)).shape
    torch.Size([12])
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def write_text(message: Message, apart: Callable[[Tensor], bool] = lambda tensor: False) -> bytes:
    """Describe a message: all that it is, but for the contents of its tensors.

    >>> header = Header(0, 1, "forward", 0, 0, 0)
    >>> read_text(write_text(Message(header, [torch.zeros(3), 2, None], "*", [True, False, False]))).leaves
    [Described(dtype=torch.float32, shape=(3,), device='cpu', apart=False), 2, None]
    """
    described: list[Any] = [
        [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.device.type, apart(leaf)]
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in message.leaves
    ]
    head = message.header
    fields = [head.source, head.target, head.traffic, head.stage, head.microbatch, head.step]
    # What was announced goes along only where it is not what is sent, which is a fault that the receiver will name.
    kinds = None if message.announced else list(message.kinds)
    wants = [bool(want) for want in message.wants_gradient]
    return json.dumps([fields, described, message.tree, wants, kinds]).encode()


def read_text(text: bytes) -> Letter:
    """Read a header again, refusing what is not one."""
    try:
        fields, described, tree, wants, kinds = json.loads(text)
        source, target, traffic, stage, microbatch, step = fields
        numbers = [source, target, stage, microbatch, step]
        if traffic not in TRAFFIC or not all(type(number) is int for number in numbers):
            raise ValueError(f"its fields are {shorten(fields)}")
        return Letter(
            Header(source, target, traffic, stage, microbatch, step),
            [_described(item) if isinstance(item, list) else _plain(item) for item in described],
            str(tree),
            [bool(want) for want in wants],
            None if kinds is None else [str(kind) for kind in kinds],
        )
    except (ValueError, TypeError, KeyError) as error:
        raise TransportError(f"a header that cannot be read arrived: {type(error).__name__}: {error}") from error


def _described(item: list[Any]) -> Described:
    dtype, shape, device, apart = item
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a tensor of shape {shorten(shape)}")
    return Described(DTYPES[dtype], tuple(shape), str(device), bool(apart))


def _plain(item: Any) -> Leaf:
    if isinstance(item, int | float | str | bool | None):
        return item
    raise ValueError(f"a leaf that is {shorten(item)}")


def write_prefix(buffer: Tensor, turn: int, text: bytes, payload: int) -> Prefix:
    """Fill the first part of a message: the prefix, and the header if it fits."""
    prefix = Prefix(turn, len(text), payload, zlib.crc32(text))
    head = bytearray(HEAD)
    _PREFIX.pack_into(head, 0, _MAGIC, *prefix)
    if not prefix.long:
        head[_PREFIX.size : _PREFIX.size + len(text)] = text
    buffer[:HEAD] = torch.frombuffer(head, dtype=torch.uint8)
    return prefix


def read_prefix(buffer: Tensor) -> Prefix:
    """Read the prefix; where there is none, nothing that follows can be understood."""
    magic, *numbers = _PREFIX.unpack(buffer[: _PREFIX.size].numpy().tobytes())
    prefix = Prefix(*numbers)
    if magic != _MAGIC or not 0 < prefix.text < _LONGEST or not 0 <= prefix.payload < _LONGEST:
        raise TransportError(
            f"bytes that are no message arrived (they start with {magic:#x}, and {_MAGIC:#x} was expected)"
        )
    return prefix


def text_in(buffer: Tensor, prefix: Prefix) -> bytes:
    """The header that fitted into the first part."""
    return bytes(buffer[_PREFIX.size : _PREFIX.size + prefix.text].numpy())


def check_text(text: bytes, prefix: Prefix) -> None:
    """Refuse a header that is not as it was sent."""
    if zlib.crc32(text) != prefix.check:
        raise TransportError(f"a header arrived with check sum {zlib.crc32(text):#x}, and {prefix.check:#x} was sent")


def cut(payload: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut bytes into pieces of these sizes, in the same memory.

    >>> [piece.tolist() for piece in cut(torch.arange(4), [1, 0, 3])]
    [[0], [], [1, 2, 3]]
    """
    ends = list(accumulate(sizes, initial=0))
    return [payload[start:end] for start, end in pairwise(ends)]


def tensor_in(piece: Tensor, described: Described) -> Tensor:
    """Make the tensor of its bytes, with memory of its own: aligned, and not kept alive by its neighbours."""
    if not described.size:
        return torch.empty(described.shape, dtype=described.dtype)
    return piece.clone().view(described.dtype).reshape(described.shape)
