"""Write tensors to safetensors files of limited size, with checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stageline.common.errors import CheckpointError, shorten
from stageline.train.checkpoint.disk import ChecksummedFile
from stageline.train.checkpoint.manifest import DTYPES, File, TensorEntry


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write: its entry in the header of the file, and a function that returns it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    take: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def tensor_source(key: str, tensor: Tensor) -> TensorSource:
    """Return the entry of a tensor; raise if it cannot be written.

    >>> tensor_source("weight", torch.ones(2, 3)).bytes
    24
    >>> tensor_source("weight", torch.ones(2, device="meta"))
    Traceback (most recent call last):
    ...
    stageline.common.errors.CheckpointError: 'weight' is on the meta device and has no values; pass a writer
    only the tensors that its rank holds
    """
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{shorten(key)} is {shorten(tensor)}, expected a tensor")
    if tensor.is_meta:
        raise CheckpointError(
            f"{shorten(key)} is on the meta device and has no values; pass a writer only the tensors that its rank "
            "holds"
        )
    if tensor.layout != torch.strided or dtype_name(tensor.dtype) not in DTYPES:
        raise CheckpointError(
            f"{shorten(key)} is a tensor of {tensor.layout} and {tensor.dtype}, which safetensors cannot hold; "
            f"expected a dense one of {', '.join(DTYPES)}"
        )
    return TensorSource(key, tensor.dtype, tuple(tensor.shape), _giver(tensor))


def cut(entries: Iterable[TensorSource], most: int) -> Iterator[list[TensorSource]]:
    """Group tensors into files of at most `most` bytes, in order; a larger tensor gets a file of its own.

    >>> rows = [tensor_source(f"{k} numbers", torch.ones(k)) for k in (1, 2, 9, 1)]
    >>> [[entry.key for entry in file] for file in cut(rows, most=12)]
    [['1 numbers', '2 numbers'], ['9 numbers'], ['1 numbers']]
    """
    file: list[TensorSource] = []
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
    path: Path, entries: Iterable[TensorSource], writer: int = 0, check: Callable[[], object] = lambda: None
) -> tuple[File, Mapping[str, TensorEntry]]:
    """Write one safetensors file, and return what it contains; `check` is called meanwhile, and raises to abort.

    >>> file, tensors = write_tensors(Path("a.safetensors"), [tensor_source("w", torch.ones(2))])
    >>> tensors["w"].dtype, tensors["w"].shape
    ('float32', (2,))
    >>> from safetensors.torch import load_file
    >>> load_file("a.safetensors")
    {'w': tensor([1., 1.])}
    """
    # The widest dtypes first, so that every tensor is aligned to its own and can be mapped into memory.
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        name = DTYPES[dtype_name(entry.dtype)]
        header[entry.key] = {"dtype": name, "shape": entry.shape, "data_offsets": [offset, offset + entry.bytes]}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with ChecksummedFile(path, check) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            stream.write(raw_bytes(entry.take()))
    tensors = {entry.key: TensorEntry(path.name, dtype_name(entry.dtype), entry.shape) for entry in ordered}
    return File(stream.bytes, stream.sha256, writer), tensors


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy if it is a contiguous one on the host.

    >>> bytes(raw_bytes(torch.tensor([1, 2], dtype=torch.int16)))
    b'\\x01\\x00\\x02\\x00'
    """
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    # A single number is contiguous with any stride, but only a stride of 1 can be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


class HostCopies:
    """Copies of tensors in host memory, which is reused from one call to the next.

    Tensors of a GPU are copied asynchronously into pinned memory.

    >>> weight = torch.ones(2)
    >>> copies = HostCopies()
    >>> (copy,) = copies.take([tensor_source("weight", weight)])
    >>> _ = weight.zero_()
    >>> copy.take()
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, entries: Iterable[TensorSource]) -> list[TensorSource]:
        """Copy the tensors; overwrites the copies of an earlier call."""
        sources = [(entry, entry.take().detach()) for entry in entries]
        devices = {source.device for _, source in sources if source.is_cuda}
        for device in devices:  # the last step may have run on streams other than this thread's
            torch.cuda.synchronize(device)
        earlier, self._kept = self._kept, {}
        copies = []
        for entry, source in sources:
            copy = earlier.pop(entry.key, None)
            if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
                copy = torch.empty(entry.shape, dtype=entry.dtype, device="cpu", pin_memory=source.is_cuda)
            copy.copy_(source, non_blocking=source.is_cuda)
            self._kept[entry.key] = copy
            copies.append(TensorSource(entry.key, entry.dtype, entry.shape, _giver(copy)))
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def release(self) -> None:
        """Free the memory."""
        self._kept = {}


def _giver(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor
