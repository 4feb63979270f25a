"""Files and folders of checkpoints on the disk: synced, with checksums, and with errors that name the path."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from stageline.common import files
from stageline.common.errors import CheckpointError, StagelineError
from stageline.train.checkpoint.manifest import File

CHUNK = 8 * 2**20
"""Bytes per write."""


class ChecksummedFile:
    """A new file, whose checksum another thread computes during the writes, and which is synced at the end."""

    def __init__(self, path: Path, check: Callable[[], object] = lambda: None) -> None:
        """The file must not exist yet. `check` is called before every write, and raises to abort."""
        self.path = path
        self._check = check
        self.bytes = 0
        self.sha256 = ""
        self._digest = hashlib.sha256()
        with writing(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stageline-checksum")
        self._pending_sum: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Append data, which must not change before the next call."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            self._check()
            self._wait()
            self._sum(chunk)
            with writing(self.path):
                while chunk:
                    written = os.write(self._file, chunk)
                    self.bytes += written
                    chunk = chunk[written:]
        self._wait()

    def _sum(self, chunk: memoryview) -> None:
        if len(chunk) >= CHUNK // 64:
            with suppress(RuntimeError):  # threads start nothing at interpreter shutdown
                self._pending_sum = self._pool.submit(self._digest.update, chunk)
                return
        self._digest.update(chunk)

    def _wait(self) -> None:
        if self._pending_sum is not None:
            self._pending_sum.result()
            self._pending_sum = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()
        try:
            with writing(self.path):
                if error is None:
                    os.fsync(self._file)
        finally:
            os.close(self._file)
        self.sha256 = self._digest.hexdigest()


Result = TypeVar("Result")


def run_parallel(tasks: Iterable[Callable[[], Result]]) -> list[Result]:
    """Run tasks on up to 4 threads, a quarter of the cores at most; return their results in order."""
    with ThreadPoolExecutor(min(4, max(1, (os.cpu_count() or 1) // 4))) as pool:
        started: list[Future[Result]] = []
        for task in tasks:
            try:
                started.append(pool.submit(task))
            except RuntimeError:  # threads start nothing at interpreter shutdown
                started.append(Future())
                started[-1].set_result(task())
        return [future.result() for future in started]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a failed write with the file, the cause, and the free space if the disk is full."""
    try:
        yield
    except OSError as error:
        text = f"cannot write {path}: {reason(error)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                text += f" ({shutil.disk_usage(path.parent).free:,} bytes are free)"
            text += "; free space, or keep fewer checkpoints"
        raise CheckpointError(text) from error


def write_file(path: Path, data: bytes) -> File:
    """Write a small file, synced."""
    with ChecksummedFile(path) as stream:
        stream.write(data)
    return File(stream.bytes, stream.sha256, 0)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file atomically, synced."""
    with writing(path), files.atomic_file(path, sync=True) as file:
        file.write(data)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file has that name" if isinstance(error, FileExistsError) else reason(error)
        raise CheckpointError(f"cannot create the folder {path}: {why}; choose another one") from error


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    with writing(path):
        files.sync_folder(path)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; an existing file is replaced, a folder is not."""
    try:
        os.replace(source, target)
    except OSError as error:
        raise CheckpointError(f"cannot rename {source} to {target}: {reason(error)}") from error


def remove_tree(path: Path) -> None:
    """Remove a folder as far as possible; errors are ignored."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def file_checksum(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stat_regular(path: Path) -> os.stat_result | None:
    """Return the status of a regular file; None for a pipe, which would block a reader, a link, or anything else."""
    status = os.lstat(path)
    return status if stat.S_ISREG(status.st_mode) else None


def reason(error: BaseException) -> str:
    """Return the message of an error, for another message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, StagelineError) else f"{type(error).__name__}: {error}"
