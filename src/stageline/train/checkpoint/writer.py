"""Write checkpoints in the background, atomically, and prune old ones."""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors
import torch
from torch import Tensor

from stageline._version import __version__
from stageline.common.errors import CheckpointError, JsonError, shorten
from stageline.common.temporary_folder import TemporaryFolder
from stageline.distributed.bootstrap import lost_rank
from stageline.train.checkpoint.folder import (
    LATEST,
    clean_up,
    discard,
    leftovers,
    make_folder,
    partial_folder,
    publish,
    published,
    reason,
    remove_tree,
    replace_file,
    run_parallel,
    step_name,
    write_file,
)
from stageline.train.checkpoint.manifest import INDEX, MANIFEST, File, Manifest, TensorEntry, plain_name
from stageline.train.checkpoint.reader import open_checkpoint
from stageline.train.checkpoint.remote import Location, location
from stageline.train.checkpoint.shards import (
    HostCopies,
    TensorSource,
    WriterReport,
    assemble,
    cut,
    gather,
    report_name,
    tensor_source,
    write_tensors,
)

SHARD = 4 * 2**30
"""Maximum bytes of a file of tensors, unless a single tensor is larger."""


@dataclass(frozen=True)
class Saved:
    """A published checkpoint; `seconds` is the time from `save` to its publication."""

    step: int
    attempt: str
    path: Location
    bytes: int
    seconds: float


@dataclass(frozen=True)
class _Job:
    """One call of `save`, with everything that it needs in the background."""

    step: int
    attempt: str
    partial: Location
    leftovers: list[Location]
    model: list[TensorSource]
    optimizer: list[TensorSource]
    slots: Mapping[str, list[str]]
    state: Any
    assets: Mapping[str, bytes]
    world: Mapping[str, Any]
    began: float


class Writer:
    """One of `count` writers to a shared folder of checkpoints; the first one publishes and prunes.

    Every writer saves its own tensors; each name belongs to one writer. `keep` is the number of undamaged checkpoints
    to keep (0: all), `deadline` the seconds without any progress of another writer after which the first one fails, and
    `max_shard_bytes` the maximum size of a file of tensors.

    >>> import torch
    >>> from stageline.train.checkpoint import newest
    >>> weight = torch.ones(2)
    >>> with Writer("checkpoint", keep=2) as writer:
    ...     for step in (100, 200, 300):
    ...         writer.save(step, {"weight": weight}, {"weight": {"momentum": weight / 2}}, {"seen": 64 * step})
    ...         weight += 1      # the writer has a copy
    >>> sorted(os.listdir("checkpoint"))
    ['latest', 'step-00000200', 'step-00000300']
    >>> newest("checkpoint").read_model(["weight"])
    {'weight': tensor([3., 3.])}
    """

    def __init__(
        self,
        folder: str | Location,
        number: int = 0,
        count: int = 1,
        *,
        keep: int = 3,
        deadline: float = 60.0,
        max_shard_bytes: int = SHARD,
    ) -> None:
        """Create the folder if necessary."""
        if not 0 <= number < count:
            raise CheckpointError(f"number must be from 0 to count - 1, got {number} of {count}")
        for name, value, least in (("keep", keep, 0), ("max_shard_bytes", max_shard_bytes, 1)):
            if value < least:
                raise CheckpointError(f"{name} must be an integer >= {least}, got {shorten(value)}")
        self.folder = location(folder)
        self.number = number
        self.count = count
        self.keep = keep
        self.deadline = deadline
        self.max_shard_bytes = max_shard_bytes
        self.last: Saved | None = None
        """The last published checkpoint, in the first writer."""
        self._weight_copies, self._state_copies = HostCopies(), HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        make_folder(self.folder)

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Mapping[str, Tensor]] | None = None,
        state: Any = None,
        assets: Mapping[str, bytes] | None = None,
        *,
        attempt: str | None = None,
        world: Mapping[str, Any] | None = None,
        background: bool = True,
    ) -> None:
        """Save the checkpoint of a step: return once the tensors are copied, and write in the background.

        Waits for the previous checkpoint, and raises its error. `state` is JSON data, `assets` are small files
        (config.json, a tokenizer), and `world` describes the job (ranks, replicas, schedule); those of the first writer
        are used. With several writers, `attempt` is the same text on all of them, and different in every call.
        """
        self.wait()
        began = time.perf_counter()
        # Validate everything, so that this call raises and not the thread.
        step_name(step)
        if attempt is None:
            if self.count > 1:
                raise CheckpointError(
                    f"save() with {self.count} writers needs attempt=, the same string on all of them"
                )
            attempt = os.urandom(6).hex()
        aside = partial_folder(self.folder, step, attempt)
        slots = {name: list(state) for name, state in (optimizer or {}).items()}
        weights = [tensor_source(_key(name), tensor) for name, tensor in model.items()]
        states = [
            tensor_source(f"{_key(name)}/{_slot(name, slot)}", tensor)
            for name, tensors in (optimizer or {}).items()
            for slot, tensor in tensors.items()
        ]
        plain_state, plain_world = check_json(state, "state"), check_json(dict(world or {}), "world")
        _check_assets(assets or {})
        if background:
            weights, states = self._weight_copies.take(weights), self._state_copies.take(states)
        try:
            local = self.number == 0 and isinstance(self.folder, Path)  # an object store is listed in the background
            old = leftovers(self.folder, but=aside.name) if local else []
        except OSError as error:
            raise CheckpointError(f"cannot read the folder {self.folder}: {reason(error)}") from error
        job = _Job(
            step, attempt, aside, old, weights, states, slots, plain_state, dict(assets or {}), plain_world, began
        )
        if background:
            self._thread = threading.Thread(target=self._run, args=(job,), name="stageline-checkpoint")
            self._thread.start()
        else:
            self._run(job)
            self.wait()

    @property
    def failed(self) -> BaseException | None:
        """The error of the checkpoint in the background, or None; the next `wait`, `save` or `close` raises it."""
        return self._error

    def wait(self) -> None:
        """Wait for the checkpoint in the background; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and free the copies."""
        try:
            self.wait()
        finally:
            self._weight_copies.release()
            self._state_copies.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close; an error of the block is raised first, with that of the checkpoint as a note."""
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))

    def _run(self, job: _Job) -> None:
        try:
            if self.number == 0 and not isinstance(self.folder, Path):
                clean_up(leftovers(self.folder, but=job.partial.name))
            clean_up(job.leftovers)
            report = self._write(job)
            if self.number == 0:
                self._publish(job, report)
            else:
                report.write(job.partial, self.number)
        except BaseException as error:
            self._error = self._failed(job, error)

    def _failed(self, job: _Job, error: BaseException) -> BaseException:
        """Remove the partial checkpoint, and report the failure to the first writer."""
        if self.last is not None and self.last.attempt == job.attempt:
            return CheckpointError(
                f"the checkpoint of step {job.step} was saved, but a later operation failed: {reason(error)}"
            )
        gone = self.number > 0 and isinstance(job.partial, Path) and not job.partial.exists()
        why = "the first writer aborted it" if gone else reason(error)
        if self.number == 0:
            remove_tree(job.partial)
        elif not gone:
            if isinstance(job.partial, Path):
                for path in job.partial.glob(f"*-{self.number:05d}-*.safetensors"):
                    path.unlink(missing_ok=True)
            with suppress(CheckpointError, OSError):  # otherwise the first writer notices at its deadline
                WriterReport(error=why).write(job.partial, self.number)
        if not isinstance(error, Exception):
            return error
        failed = CheckpointError(f"the checkpoint of step {job.step} was not saved: {why}; {self._last_good()}")
        failed.__cause__ = error
        return failed

    def _last_good(self) -> str:
        """Name the checkpoint to resume from."""
        paths: list[Location] = []
        with suppress(CheckpointError):
            paths = published(self.folder)
        return f"the last intact one is {paths[-1]}" if paths else f"{self.folder} has no other checkpoint"

    def _write(self, job: _Job) -> WriterReport:
        """Write the files of this writer; `assemble` gives them their final names."""
        make_folder(job.partial)
        if (job.partial / report_name(self.number)).exists():
            raise CheckpointError(
                f"{job.partial} belongs to an earlier attempt with the same name, {shorten(job.attempt)}; pass a new "
                "attempt= to every save()"
            )
        parts = {
            f"{kind}-{self.number:05d}-{place:05d}.safetensors": part
            for kind, entries in (("model", job.model), ("optimizer", job.optimizer))
            for place, part in enumerate(cut(entries, self.max_shard_bytes))
        }
        done = run_parallel(partial(self._write_file, job.partial / name, parts[name]) for name in parts)
        files: dict[str, dict[str, File]] = {"model": {}, "optimizer": {}}
        written: dict[str, dict[str, TensorEntry]] = {"model": {}, "optimizer": {}}
        for name, (file, tensors) in zip(parts, done, strict=True):
            kind = name.partition("-")[0]
            files[kind][name] = file
            written[kind] |= tensors
        slots = {
            name: {slot: written["optimizer"][f"{name}/{slot}"] for slot in names} for name, names in job.slots.items()
        }
        model = {entry.key: written["model"][entry.key] for entry in job.model}
        return WriterReport(files["model"], model, files["optimizer"], slots)

    def _write_file(self, path: Location, entries: list[TensorSource]) -> tuple[File, Mapping[str, TensorEntry]]:
        """Write a file of tensors; one for an object store is written to a local disk first."""
        if isinstance(path, Path):
            return write_tensors(path, entries, self.number, _check_ranks)
        with TemporaryFolder("upload-") as local:
            written = write_tensors(local / path.name, entries, self.number, _check_ranks)
            path.upload(local / path.name)
        return written

    def _publish(self, job: _Job, own: WriterReport) -> None:
        reports = gather(job.partial, own, self.count, self.deadline, _check_ranks)
        files, model, optimizer = assemble(job.partial, reports)
        for name, data in job.assets.items():
            files[name] = write_file(job.partial / name, data)
        world = {**job.world, "writers": self.count}
        manifest = Manifest(
            job.step, job.attempt, time.time(), world, files, model, optimizer, job.state, environment()
        )
        path, replaced = publish(job.partial, job.step, manifest)
        self.last = Saved(job.step, job.attempt, path, manifest.size, time.perf_counter() - job.began)
        replace_file(self.folder / LATEST, f"{path.name}\n".encode())
        discard(replaced)
        if self.keep:
            prune(self.folder, self.keep, spare=path)


def _check_ranks() -> None:
    """Abort a checkpoint if the job lost a rank, whose files will never be written."""
    lost = lost_rank()
    if lost:
        raise CheckpointError(lost)


def environment() -> dict[str, Any]:
    """Return the versions and the host that write a checkpoint."""
    return {
        "stageline": __version__,
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
    }


def _key(name: str) -> str:
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise CheckpointError(f"the name of a parameter is {shorten(name)}, expected its name in the model")
    return name


def _slot(name: str, slot: str) -> str:
    if not isinstance(slot, str) or not slot or "/" in slot:
        raise CheckpointError(
            f"the optimizer state of {name!r} has the key {shorten(slot)}, expected a name without a /"
        )
    return slot


def check_json(value: Any, where: str) -> Any:
    """Return a copy of JSON data; raise an error that names the place of a value that JSON cannot represent."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [check_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: check_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{where} is {shorten(value)}, which JSON cannot represent; expected numbers, strings, bools, None, lists "
        "and dicts"
    )


def _check_assets(assets: Mapping[str, bytes]) -> None:
    for name, data in assets.items():
        try:
            plain_name(name)
        except JsonError as wrong:
            raise CheckpointError(f"assets: {wrong}") from None
        if name in (MANIFEST, INDEX) or name.endswith(".safetensors") or name.startswith("writer-"):
            raise CheckpointError(f"assets: {name!r} is reserved for the checkpoint itself; choose another name")
        if not isinstance(data, bytes):
            raise CheckpointError(f"assets: {name!r} is {shorten(data)}, expected its bytes")


def prune(folder: Location, keep: int, spare: Location) -> list[Location]:
    """Remove checkpoints that are older than the newest `keep` undamaged ones; return the removed ones.

    `spare`, and checkpoints that are being read, stay. Only presence and sizes of files are checked. A damaged
    checkpoint does not count, and is removed if it is older than all that stay.
    """
    num_kept = 0
    removed = []
    for path in reversed(published(folder)):
        if path.suffix == ".replaced":
            continue  # there is a newer one of its step
        if path != spare and num_kept >= keep:
            if discard(path):
                removed.append(path)
        elif _is_undamaged(path):
            num_kept += 1
    return removed


def _is_undamaged(path: Location) -> bool:
    try:
        with open_checkpoint(path) as checkpoint:
            return not checkpoint.verify(deep=False)
    except CheckpointError:
        return False
