"""Tensors into safetensors files: cut into files of a size, and summed while they are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stageline.common.errors import CheckpointError, shorten
from stageline.train.checkpoint.disk import Stream
from stageline.train.checkpoint.manifest import DTYPES, File, Held


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: what the file's header says of it, and how to get it when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    take: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls it, without the torch.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def make_entry(key: str, tensor: Tensor) -> Entry:
    """A tensor that can be written, or an error with its name.

    >>> make_entry("weight", torch.ones(2, 3)).bytes
    24
    >>> make_entry("weight", torch.ones(2, device="meta"))
    Traceback (most recent call last):
    ...
    stageline.common.errors.CheckpointError: 'weight' is on the meta device and has no values; give a writer
    only the tensors that its rank holds
    """
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{shorten(key)} is {shorten(tensor)}, expected a tensor")
    if tensor.is_meta:
        raise CheckpointError(
            f"{shorten(key)} is on the meta device and has no values; give a writer only the tensors that its rank "
            "holds"
        )
    if tensor.layout != torch.strided or dtype_name(tensor.dtype) not in DTYPES:
        raise CheckpointError(
            f"{shorten(key)} is a tensor of {tensor.layout} and {tensor.dtype}, which safetensors cannot hold; "
            f"expected a dense one of {', '.join(DTYPES)}"
        )
    return Entry(key, tensor.dtype, tuple(tensor.shape), _giver(tensor))


def cut(entries: Iterable[Entry], most: int) -> Iterator[list[Entry]]:
    """Cut into files of at most so many bytes each, in order; a tensor that is larger has a file of its own.

    >>> rows = [make_entry(f"{k} numbers", torch.ones(k)) for k in (1, 2, 9, 1)]
    >>> [[entry.key for entry in file] for file in cut(rows, most=12)]
    [['1 numbers', '2 numbers'], ['9 numbers'], ['1 numbers']]
    """
    file: list[Entry] = []
    size = 0
    for entry in entries:
        if file and size + entry.bytes > most:
            yield file
            file, size = [], 0
        file.append(entry)
        size += entry.bytes
    if file:
        yield file


def write_tensors(
    path: Path, entries: Iterable[Entry], writer: int = 0, check: Callable[[], object] = lambda: None
) -> tuple[File, Mapping[str, Held]]:
    """Write one safetensors file, and say what it holds; `check` is called meanwhile, and raises to give it up.

    >>> file, held = write_tensors(Path("a.safetensors"), [make_entry("w", torch.ones(2))])
    >>> held["w"].dtype, held["w"].shape
    ('float32', (2,))
    >>> from safetensors.torch import load_file
    >>> load_file("a.safetensors")
    {'w': tensor([1., 1.])}
    """
    # The widest numbers first: then every tensor begins at a multiple of its own, and can be mapped into memory.
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        name = DTYPES[dtype_name(entry.dtype)]
        header[entry.key] = {"dtype": name, "shape": entry.shape, "data_offsets": [offset, offset + entry.bytes]}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with Stream(path, check) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            stream.write(raw_bytes(entry.take()))
    held = {entry.key: Held(path.name, dtype_name(entry.dtype), entry.shape) for entry in ordered}
    return File(stream.bytes, stream.sha256, writer), held


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row, without a copy if it lies so in the host's memory.

    >>> bytes(raw_bytes(torch.tensor([1, 2], dtype=torch.int16)))
    b'\\x01\\x00\\x02\\x00'
    """
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    # A single number is contiguous whatever its stride, and only a stride of 1 can be seen as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


class HostCopies:
    """Copies of tensors in the host's memory, which is kept from one time to the next: fresh memory is slow.

    What comes from a GPU is copied into pinned memory, all of it at once.

    >>> weight = torch.ones(2)
    >>> copies = HostCopies()
    >>> (copy,) = copies.take([make_entry("weight", weight)])
    >>> _ = weight.zero_()
    >>> copy.take()
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        """There are none yet."""
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, entries: Iterable[Entry]) -> list[Entry]:
        """Copy; a later call overwrites the copies of an earlier one."""
        sources = [(entry, entry.take().detach()) for entry in entries]
        devices = {source.device for _, source in sources if source.is_cuda}
        for device in devices:  # the last step may have run on other streams than this thread's
            torch.cuda.synchronize(device)
        earlier, self._kept = self._kept, {}
        copies = []
        for entry, source in sources:
            copy = earlier.pop(entry.key, None)
            if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
                copy = torch.empty(entry.shape, dtype=entry.dtype, device="cpu", pin_memory=source.is_cuda)
            copy.copy_(source, non_blocking=source.is_cuda)
            self._kept[entry.key] = copy
            copies.append(Entry(entry.key, entry.dtype, entry.shape, _giver(copy)))
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def release(self) -> None:
        """Give the memory back."""
        self._kept = {}


def _giver(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor
