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
from functools import lru_cache
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
    strides: tuple[int, ...] | None = None
    """How it lies in memory, where it is not contiguous: kernels choose by it, and so it decides bits."""

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
    """The bytes of a tensor as they lie in memory, in that same memory if there are no gaps in it.

    >>> bytes_of(torch.ones(2, 3, dtype=torch.bfloat16)).shape
    torch.Size([12])
    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T).tolist()
    [1, 2, 3, 4]
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if _extent(plain.shape, plain.stride()) == plain.numel():
        return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """How many elements of memory a tensor spans; None where two elements may share one."""
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < span:
            return None
        span += stride * (size - 1)
    return span


def _strides(tensor: Tensor, apart: bool) -> tuple[int, ...] | None:
    """The layout to be kept: any without gaps, and those with gaps that do not blow the tensor up."""
    if tensor.is_contiguous() or not tensor.numel():
        return None
    span = _extent(tensor.shape, tensor.stride())
    kept = span is not None and span <= (1 if apart else 4) * tensor.numel()
    return tuple(tensor.stride()) if kept else None


def room_for(described: Described, device: str | torch.device = "cpu") -> Tensor:
    """Memory for a tensor, laid out as the sender's is."""
    if described.strides is None:
        return torch.empty(described.shape, dtype=described.dtype, device=device)
    return torch.empty_strided(described.shape, described.strides, dtype=described.dtype, device=device)


def fill(room: Tensor, piece: Tensor) -> Tensor:
    """Put bytes into a tensor's memory; the copy does not wait where one side is on a GPU and the other pinned."""
    if _extent(room.shape, room.stride()) == room.numel():
        bytes_of(room).copy_(piece, non_blocking=True)
        return room
    whole = torch.empty(room.shape, dtype=room.dtype, device=room.device)
    bytes_of(whole).copy_(piece, non_blocking=True)
    return room.copy_(whole)


def write_text(message: Message, apart: Callable[[Tensor], bool] = lambda tensor: False) -> bytes:
    """Describe a message: all that it is, but for the contents of its tensors.

    >>> header = Header(0, 1, "forward", 0, 0, 0)
    >>> read_text(write_text(Message(header, [torch.zeros(3), 2, None], "*", [True, False, False]))).leaves
    [Described(dtype=torch.float32, shape=(3,), device='cpu', apart=False, strides=None), 2, None]
    """
    head = message.header
    fields = [head.source, head.target, head.traffic, head.stage, head.microbatch, head.step]
    if all(isinstance(leaf, Tensor) for leaf in message.leaves):
        # From one microbatch to the next only the header changes, so the rest is written once.
        described = tuple(_form(leaf, apart(leaf)) for leaf in message.leaves)  # type: ignore[arg-type]
        kinds = None if message.announced else tuple(message.kinds)
        rest = _rest_of(described, message.tree, tuple(map(bool, message.wants_gradient)), kinds)
    else:
        leaves: list[Any] = [_form(leaf, apart(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in message.leaves]
        # What was announced goes along only where it is not what is sent, which is a fault that the receiver will name.
        announced = None if message.announced else list(message.kinds)
        rest = json.dumps([leaves, message.tree, [bool(want) for want in message.wants_gradient], announced])
    return f"{json.dumps(fields)}\n{rest}".encode()


@lru_cache(maxsize=4096)
def _rest_of(described: tuple[Any, ...], tree: str, wants: tuple[bool, ...], kinds: tuple[str, ...] | None) -> str:
    return json.dumps([described, tree, wants, kinds])


def _form(tensor: Tensor, apart: bool) -> tuple[Any, ...]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (dtype, tuple(tensor.shape), tensor.device.type, apart, _strides(tensor, apart))


def read_text(text: bytes) -> Letter:
    """Read a header again, refusing what is not one."""
    try:
        first, rest = text.split(b"\n", 1)
        fields = json.loads(first)
        source, target, traffic, stage, microbatch, step = fields
        numbers = [source, target, stage, microbatch, step]
        if traffic not in TRAFFIC or not all(type(number) is int for number in numbers):
            raise ValueError(f"its fields are {shorten(fields)}")
        leaves, tree, wants, kinds = _read_rest(rest)
        return Letter(Header(source, target, traffic, stage, microbatch, step), leaves, tree, wants, kinds)
    except (ValueError, TypeError, KeyError) as error:
        raise TransportError(f"a header that cannot be read arrived: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=4096)
def _read_rest(rest: bytes) -> tuple[list[Leaf | Described], str, list[bool], list[str] | None]:
    """All but the fields; it is the same from one microbatch to the next, and is not changed by who reads it."""
    described, tree, wants, kinds = json.loads(rest)
    return (
        [_described(item) if isinstance(item, list) else _plain(item) for item in described],
        str(tree),
        [bool(want) for want in wants],
        None if kinds is None else [str(kind) for kind in kinds],
    )


def _described(item: list[Any]) -> Described:
    dtype, shape, device, apart, strides = item
    if not all(type(size) is int and size >= 0 for size in [*shape, *(strides or [])]):
        raise ValueError(f"a tensor of shape {shorten(shape)} and strides {shorten(strides)}")
    if strides is not None and len(strides) != len(shape):
        raise ValueError(f"a tensor of shape {shorten(shape)} and strides {shorten(strides)}")
    return Described(DTYPES[dtype], tuple(shape), str(device), bool(apart), None if strides is None else tuple(strides))


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
