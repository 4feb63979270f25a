"""The tensor files of a checkpoint: written with checksums, and gathered from all writers by the first one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from stageline.common.checked_json import from_json, parse_json
from stageline.common.errors import CheckpointError, JsonError, shorten
from stageline.train.checkpoint.folder import ChecksummedFile, reason, rename, replace_file, write_file
from stageline.train.checkpoint.manifest import DTYPES, INDEX, File, TensorEntry, check_tensors
from stageline.train.checkpoint.remote import Location, RemotePath


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
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def tensor_source(key: str, tensor: Tensor) -> TensorSource:
    """Return the entry of a tensor; raise if it cannot be written."""
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{shorten(key)} is {shorten(tensor)}, expected a tensor")
    if tensor.is_meta:
        raise CheckpointError(
            f"{shorten(key)} is on the meta device and has no data; pass each writer only the tensors that its rank "
            "holds"
        )
    if tensor.layout != torch.strided or dtype_name(tensor.dtype) not in DTYPES:
        raise CheckpointError(
            f"{shorten(key)} is a tensor of {tensor.layout} and {tensor.dtype}, which safetensors cannot store; "
            f"expected a dense tensor of {', '.join(DTYPES)}"
        )
    return TensorSource(key, tensor.dtype, tuple(tensor.shape), _giver(tensor))


def cut(entries: Iterable[TensorSource], most: int) -> Iterator[list[TensorSource]]:
    """Group tensors into files of at most `most` bytes, in order; a larger tensor gets a file of its own."""
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
    """Write one safetensors file, and return what it contains; `check` is called meanwhile, and raises to abort."""
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
    """Return the bytes of a tensor in row-major order, without a copy if it is a contiguous one on the host."""
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    # A single number is contiguous with any stride, but only a stride of 1 can be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


class HostCopies:
    """Copies of tensors in host memory, which is reused from one call to the next.

    Tensors of a GPU are copied asynchronously into pinned memory.
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


@dataclass(frozen=True)
class WriterReport:
    """The files of one writer, in order, and the tensors in them; or its error."""

    model_files: Mapping[str, File] = field(default_factory=dict)
    model: Mapping[str, TensorEntry] = field(default_factory=dict)
    optimizer_files: Mapping[str, File] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict)
    error: str = ""

    def write(self, partial: Location, number: int) -> None:
        """Write the report for the first writer, after the files are synced."""
        replace_file(partial / report_name(number), json.dumps(asdict(self)).encode())

    @staticmethod
    def read(path: Location) -> WriterReport:
        """Read what another writer left."""
        try:
            report = from_json(WriterReport, parse_json(path.read_bytes()), "the report", prefix="")
            check_tensors(report.model_files, {"model": report.model})
            check_tensors(report.optimizer_files, report.optimizer)
            return report
        except (OSError, JsonError) as error:
            raise CheckpointError(f"cannot read a writer's report in {path}: {reason(error)}") from error


def report_name(number: int) -> str:
    """Return the name of a writer's report."""
    return f"writer-{number:05d}.json"


def gather(
    partial: Location, own: WriterReport, count: int, deadline: float, check: Callable[[], object] = lambda: None
) -> list[WriterReport]:
    """Wait for the reports of all writers; raise if none of the missing ones makes progress for the deadline.

    `check` is called meanwhile, and raises to abort.
    """
    reports = {0: own}
    seen: object = None
    heard = time.monotonic()
    pause = 0.005
    while len(reports) < count:
        sizes = _sizes(partial)
        for number in range(1, count):
            if number not in reports and report_name(number) in sizes:
                reports[number] = report = WriterReport.read(partial / report_name(number))
                if report.error:
                    raise CheckpointError(f"writer {number} of {count} failed: {report.error}")
        if len(reports) == count:
            break
        check()
        if sizes != seen:  # a slow writer makes progress
            seen, heard = sizes, time.monotonic()
        if time.monotonic() - heard > deadline:
            raise _late([number for number in range(count) if number not in reports], count, deadline, partial)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return [reports[number] for number in range(count)]


def _sizes(partial: Location) -> dict[str, int]:
    if isinstance(partial, RemotePath):
        return partial.sizes()
    try:
        with os.scandir(partial) as entries:
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {partial}: {reason(error)}") from error


def _late(missing: Sequence[int], count: int, deadline: float, partial: Location) -> CheckpointError:
    names = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
    who = f"writer {names}" if len(missing) == 1 else f"writers {names}"
    return CheckpointError(
        f"{who} of {count} did not finish, and wrote nothing to {partial} for {deadline:g} s; check that the process "
        "is alive and that its machine shares this folder"
    )


def assemble(
    partial: Location, reports: Sequence[WriterReport]
) -> tuple[dict[str, File], dict[str, TensorEntry], dict[str, dict[str, TensorEntry]]]:
    """Rename the files of all writers, write the index, and return the files and tensors: model, optimizer."""
    files: dict[str, File] = {}
    model: dict[str, TensorEntry] = {}
    optimizer: dict[str, dict[str, TensorEntry]] = {}
    _check_once("parameter", [report.model for report in reports])
    _check_once("optimizer state of", [report.optimizer for report in reports])
    names = {
        **_number(partial, "model", [report.model_files for report in reports], files),
        **_number(partial, "optimizer", [report.optimizer_files for report in reports], files),
    }
    for report in reports:
        model |= {name: replace(entry, file=names[entry.file]) for name, entry in report.model.items()}
        for name, slots in report.optimizer.items():
            optimizer[name] = {slot: replace(entry, file=names[entry.file]) for slot, entry in slots.items()}
    if model:
        files[INDEX] = write_index(partial, model)
    for number in range(len(reports)):
        (partial / report_name(number)).unlink(missing_ok=True)
    return files, model, optimizer


def write_index(folder: Location, model: Mapping[str, TensorEntry]) -> File:
    """Write the index of the tensors of several files, as Hugging Face and `sl.load_weights` read it."""
    size = sum(getattr(torch, entry.dtype).itemsize * torch.Size(entry.shape).numel() for entry in model.values())
    index = {"metadata": {"total_size": size}, "weight_map": {name: entry.file for name, entry in model.items()}}
    return write_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")


def _check_once(what: str, groups: Sequence[Mapping[str, object]]) -> None:
    first: dict[str, int] = {}
    for number, names in enumerate(groups):
        for name in names:
            if name in first:
                raise CheckpointError(
                    f"the {what} {name!r} was passed to writers {first[name]} and {number}; pass it to only one of them"
                )
            first[name] = number


def _number(
    partial: Location, kind: str, written: Sequence[Mapping[str, File]], files: dict[str, File]
) -> dict[str, str]:
    """Give the files of a kind their final names, in the order of the writers; return the new name of each.

    In an object store they keep their names.
    """
    listed = [(name, file) for names_of_writer in written for name, file in names_of_writer.items()]
    names = {}
    sizes = _sizes(partial)
    for place, (name, file) in enumerate(listed, 1):
        names[name] = name if isinstance(partial, RemotePath) else shard_name(kind, place, len(listed))
        if sizes.get(name) != file.bytes:
            raise CheckpointError(
                f"{partial / name} has {sizes.get(name, 'no')} bytes here, but writer {file.writer} wrote "
                f"{file.bytes}; check that its machine shares this folder"
            )
        if isinstance(partial, Path):
            rename(partial / name, partial / names[name])
        files[names[name]] = file
    return names


def shard_name(kind: str, place: int, count: int) -> str:
    """Return the name of one of several files, in the style of Hugging Face."""
    return f"{kind}-{place:05d}-of-{count:05d}.safetensors"
