"""A message as bytes: a prefix of five numbers, a header of typed JSON, and the bytes of the tensors. No pickle.

The prefix holds the length of the rest, so a header that cannot be read costs one message and not the channel: its
bytes are skipped, and the next message begins where it should.
"""

from __future__ import annotations

import ctypes
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, TransportError, shorten
from stageline.tensors.pytree import Leaf
from stageline.transport.protocol import Header, Message, Traffic, tensor_kind

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
TRAFFIC: tuple[Traffic, ...] = ("forward", "backward")
_PREFIX = struct.Struct("<5q")
HEAD = 512
"""How many bytes every message begins with: the prefix, and as much of the header as fits."""
ROOM = HEAD - _PREFIX.size
_MAGIC = 0x7374_6167_656C_696E
_LONGEST, _LONGEST_TEXT = 1 << 40, 1 << 30


class Prefix(NamedTuple):
    """What every message begins with: the turn it belongs to, the length of the rest, and a checksum of the header."""

    turn: int
    text: int
    payload: int
    check: int


class TensorMeta(NamedTuple):
    """What a header says about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    apart: bool
    """Whether it travels on a process group of its own, not with the header."""
    strides: tuple[int, ...] | None = None
    """Its strides if it is not contiguous: kernels choose by them, so they affect bits."""
    expanded: tuple[int, ...] | None = None
    """The shape that it is expanded to on arrival."""

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    @property
    def simple(self) -> bool:
        """Whether its bytes can be read straight into its memory."""
        dense = self.strides is None or _extent(self.shape, self.strides) == torch.Size(self.shape).numel()
        return dense and self.device == "cpu" and not self.apart


@dataclass(frozen=True)
class Contents:
    """What a header says, without its first line; the same from one microbatch to the next."""

    leaves: list[Leaf | TensorMeta]
    tree: str
    wants_gradient: list[bool]
    kinds: list[str] | None

    @cached_property
    def metas(self) -> list[TensorMeta]:
        """The tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorMeta)]

    @cached_property
    def size(self) -> int:
        """How many bytes of tensors travel with the header."""
        return sum(meta.size for meta in self.metas if not meta.apart)

    @cached_property
    def simple(self) -> bool:
        """Whether all tensors are on the host and without gaps, so that each can be read into its own memory."""
        return all(meta.simple for meta in self.metas)


class Announcement(NamedTuple):
    """A header that was read: the message without the values of its tensors."""

    header: Header
    contents: Contents

    def message(self, tensors: Sequence[Tensor]) -> Message:
        """The message with these tensors."""
        contents = self.contents
        remaining = iter(_expanded(tensors, contents.metas))
        leaves = [next(remaining) if isinstance(leaf, TensorMeta) else leaf for leaf in contents.leaves]
        return Message(self.header, leaves, contents.tree, contents.wants_gradient, tuple(contents.kinds or ()))


def _expanded(tensors: Sequence[Tensor], metas: Sequence[TensorMeta]) -> list[Tensor]:
    return [
        tensor if meta.expanded is None else tensor.expand(meta.expanded)
        for tensor, meta in zip(tensors, metas, strict=True)
    ]


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in memory order; a view of its memory if it has no gaps.

    >>> bytes_of(torch.ones(2, 3, dtype=torch.bfloat16)).shape
    torch.Size([12])
    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T).tolist()
    [1, 2, 3, 4]
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if _extent(plain.shape, plain.stride()) == plain.numel():
        return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    return plain.contiguous().reshape(-1).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a host tensor without gaps; valid as long as the tensor lives.

    >>> t = torch.zeros(2, dtype=torch.int16)
    >>> memory_of(t)[2] = 7
    >>> t.tolist()
    [0, 7]
    """
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def pieces_of(tensor: Tensor) -> tuple[Tensor, memoryview]:
    """The tensor that owns the bytes of a host tensor, and these bytes."""
    form = _form(tensor.dtype, tensor.shape, tensor.stride(), "cpu", False)
    plain = form.dense and not tensor.is_neg() and not tensor.is_conj()
    kept = tensor if plain else bytes_of(tensor)
    return kept, memory_of(kept)


def base_of(tensor: Tensor) -> Tensor:
    """A tensor without the repetitions of an expanded one, which need not be sent.

    >>> base_of(torch.ones(2, 1).expand(2, 5)).shape
    torch.Size([2, 1])
    """
    if 0 not in tensor.stride() or not tensor.numel():
        return tensor
    for dimension, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """How many elements of memory a tensor spans; None if two elements may share one."""
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < span:
            return None
        span += stride * (size - 1)
    return span


def room_for(described: TensorMeta, device: str | torch.device = "cpu") -> Tensor:
    """An uninitialized tensor with the strides of the sender's."""
    if described.strides is None:
        return torch.empty(described.shape, dtype=described.dtype, device=device)
    return torch.empty_strided(described.shape, described.strides, dtype=described.dtype, device=device)


def fill(room: Tensor, piece: Tensor) -> Tensor:
    """Copy bytes into a tensor's memory, asynchronously if one side is on a GPU and the other pinned."""
    if _extent(room.shape, room.stride()) == room.numel():
        bytes_of(room).copy_(piece, non_blocking=True)
        return room
    whole = torch.empty(room.shape, dtype=room.dtype, device=room.device)
    bytes_of(whole).copy_(piece, non_blocking=True)
    return room.copy_(whole)


def encode(message: Message, turn: int) -> tuple[list[memoryview], list[Tensor]]:
    """A message with tensors of the host as pieces of memory, and the tensors that own this memory."""
    tensors = [base_of(leaf) for leaf in message.leaves if isinstance(leaf, Tensor)]
    size = sum([tensor.nbytes for tensor in tensors])
    pieces, owners = [memoryview(write_head(turn, encode_announcement(message), size))], []
    for tensor in tensors:
        if tensor.numel():
            owner, memory = pieces_of(tensor)
            owners.append(owner)
            pieces.append(memory)
    return pieces, owners


class Pattern(NamedTuple):
    """What the messages of a channel have in common as long as their tensors have the same form."""

    rest: bytes
    """The text of a header after its first line."""
    contents: Contents


def expect(header: Header, turn: int, pattern: Pattern) -> tuple[bytes, Message, list[memoryview]]:
    """The head of a message of this pattern, the message without the values of its tensors, and their memory."""
    contents = pattern.contents
    tensors = [room_for(meta) for meta in contents.metas]
    message = Announcement(header, contents).message(tensors)
    head = write_head(turn, write_fields(header) + pattern.rest, contents.size)
    return head, message, [memory_of(tensor) for tensor in tensors if tensor.numel()]


def encode_announcement(message: Message, apart: Callable[[Tensor], bool] = lambda tensor: False) -> bytes:
    """The header of a message as text.

    >>> header = Header(0, 1, "forward", 0, 0, 0)
    >>> message = Message(header, [torch.zeros(3), 2, None], "*", [True, False, False])
    >>> decode_announcement(encode_announcement(message)).contents.leaves
    [TensorMeta(dtype=torch.float32, shape=(3,), device='cpu', apart=False, strides=None, expanded=None), 2, None]
    """
    # What was announced is sent only if it is not what the message holds; the receiver reports that.
    forms = [_form_of(leaf, apart(leaf)) if isinstance(leaf, Tensor) else None for leaf in message.leaves]
    wants = tuple([bool(want) for want in message.wants_gradient])
    if None not in forms:
        # From one microbatch to the next only the header changes, so the rest is written once.
        announced = tuple(message.kinds)
        kinds = None if not announced or announced == tuple([form.kind for form in forms if form]) else announced
        rest = _written(tuple([form.meta for form in forms if form]), message.tree, wants, kinds)
    else:
        kinds = None if message.announced else tuple(message.kinds)
        leaves = [leaf if form is None else form.meta for leaf, form in zip(message.leaves, forms, strict=True)]
        rest = json.dumps([leaves, message.tree, wants, kinds]).encode()
    return write_fields(message.header) + b"\n" + rest


def refuse_classes(message: Message) -> None:
    """Refuse tensor subclasses: the class and its attributes would not arrive."""
    for leaf in message.leaves:
        if isinstance(leaf, Tensor) and type(leaf) is not Tensor and not isinstance(leaf, nn.Parameter):
            name, head = type(leaf).__name__, message.header
            raise StagelineError(
                f"stage {head.stage} passes on a {name} in microbatch {head.microbatch}, a subclass of torch.Tensor, "
                "but only plain tensors can be sent to another process; pass on x.as_subclass(torch.Tensor), and "
                f"rebuild the {name} in the stage that needs it"
            )


def write_fields(head: Header) -> bytes:
    """The first line of a header: who sends what, and when."""
    numbers = (head.source, head.target, head.stage, head.microbatch, head.step)
    if all(type(number) is int for number in numbers):
        fields = f'[{head.source}, {head.target}, "{head.traffic}", {head.stage}, {head.microbatch}, {head.step}]'
    else:  # the receiver reports that
        fields = json.dumps([head.source, head.target, head.traffic, head.stage, head.microbatch, head.step])
    return fields.encode()


@lru_cache(maxsize=4096)
def _written(described: tuple[Any, ...], tree: str, wants: tuple[bool, ...], kinds: tuple[str, ...] | None) -> bytes:
    return json.dumps([described, tree, wants, kinds]).encode()


class _TensorForm(NamedTuple):
    """How tensors of one dtype, shape and layout are sent."""

    dense: bool
    """Whether there are no gaps in its memory."""
    meta: tuple[Any, ...]
    """The fields of its `TensorMeta`, as the header has them."""
    kind: str
    """What a message announces it to be."""


@lru_cache(maxsize=4096)
def _form(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], device: str, apart: bool) -> _TensorForm:
    kind = tensor_kind(dtype, shape)
    base = tuple(1 if stride == 0 else size for stride, size in zip(strides, shape, strict=True))
    expanded = tuple(shape) if 0 in strides and shape.numel() and base != tuple(shape) else None
    shape = shape if expanded is None else torch.Size(base)
    span = _extent(shape, strides) if shape.numel() else None
    kept: tuple[int, ...] | None = None
    if shape.numel() and strides != _contiguous(shape):
        # Any layout without gaps, and those whose gaps take little memory.
        kept = strides if span is not None and span <= (1 if apart else 4) * shape.numel() else None
    meta = (str(dtype).removeprefix("torch."), tuple(shape), device, apart, kept, expanded)
    return _TensorForm(expanded is None and span == shape.numel(), meta, kind)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _form_of(tensor: Tensor, apart: bool) -> _TensorForm:
    return _form(tensor.dtype, tensor.shape, tensor.stride(), tensor.device.type, apart)


def decode_announcement(text: bytes) -> Announcement:
    """Read a header; refuse what is not one."""
    try:
        first, rest = text.split(b"\n", 1)
        fields = json.loads(first)
        source, target, traffic, stage, microbatch, step = fields
        numbers = [source, target, stage, microbatch, step]
        if traffic not in TRAFFIC or not all(type(number) is int for number in numbers):
            raise ValueError(f"its fields are {shorten(fields)}")
        return Announcement(Header(source, target, traffic, stage, microbatch, step), _read_rest(rest))
    except (ValueError, TypeError, KeyError) as error:
        raise TransportError(f"a header that cannot be read arrived: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=4096)
def _read_rest(rest: bytes) -> Contents:
    """Everything after the first line; readers do not change it."""
    described, tree, wants, kinds = json.loads(rest)
    return Contents(
        [_tensor(item) if isinstance(item, list) else _plain(item) for item in described],
        str(tree),
        [bool(want) for want in wants],
        None if kinds is None else [str(kind) for kind in kinds],
    )


def _tensor(item: list[Any]) -> TensorMeta:
    dtype, shape, device, apart, strides, expanded = item
    if not all(type(size) is int and size >= 0 for size in [*shape, *(strides or []), *(expanded or [])]):
        raise ValueError(f"a tensor of shape {shorten(shape)} and strides {shorten(strides)}")
    if expanded is not None and not (
        len(expanded) == len(shape) and all(one in (1, other) for one, other in zip(shape, expanded, strict=True))
    ):
        raise ValueError(f"a tensor of shape {shorten(shape)} that is to be expanded to {shorten(expanded)}")
    if strides is not None and len(strides) != len(shape):
        raise ValueError(f"a tensor of shape {shorten(shape)} and strides {shorten(strides)}")
    layout = None if strides is None else tuple(strides)
    widened = None if expanded is None else tuple(expanded)
    return TensorMeta(DTYPES[dtype], tuple(shape), str(device), bool(apart), layout, widened)


def _plain(item: Any) -> Leaf:
    if isinstance(item, int | float | str | bool | None):
        return item
    raise ValueError(f"a leaf that is {shorten(item)}")


def write_head(turn: int, text: bytes, payload: int) -> bytes:
    """Everything before the bytes of the tensors, of which there are `payload`."""
    prefix = _PREFIX.pack(_MAGIC, turn, len(text), payload, zlib.crc32(text))
    return (prefix + text).ljust(HEAD, b"\0")


def read_head(head: bytes) -> tuple[Prefix, bytes]:
    """Read the prefix, and the part of the header that follows it."""
    magic, *numbers = _PREFIX.unpack_from(head)
    prefix = Prefix(*numbers)
    if magic != _MAGIC or not 0 < prefix.text < _LONGEST_TEXT or not 0 <= prefix.payload < _LONGEST:
        raise TransportError(f"received bytes that are not a message: they start with {magic:#x}, expected {_MAGIC:#x}")
    return prefix, head[_PREFIX.size : _PREFIX.size + prefix.text]


def check_text(text: bytes, prefix: Prefix) -> None:
    """Refuse a header that does not match its checksum."""
    if zlib.crc32(text) != prefix.check:
        raise TransportError(f"a header arrived with checksum {zlib.crc32(text):#x}, but {prefix.check:#x} was sent")


def cut(payload: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut bytes into pieces of these sizes, in the same memory.

    >>> [piece.tolist() for piece in cut(torch.arange(4), [1, 0, 3])]
    [[0], [], [1, 2, 3]]
    """
    ends = list(accumulate(sizes, initial=0))
    return [payload[start:end] for start, end in pairwise(ends)]
