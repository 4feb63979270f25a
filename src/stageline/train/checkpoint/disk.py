"""Bytes that are on the disk when we say so: written, counted, summed and synced; folders that appear whole."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from stageline.common import files
from stageline.common.errors import CheckpointError, StagelineError

CHUNK = 8 * 2**20
"""Bytes that are written and summed at once."""


class Stream:
    """A new file: what is written to it is summed by another thread meanwhile, and is on the disk at the end.

    >>> with Stream(Path("a.bin")) as stream:
    ...     stream.write(b"abc")
    >>> stream.bytes, stream.sha256[:8], Path("a.bin").read_bytes()
    (3, 'ba7816bf', b'abc')
    """

    def __init__(self, path: Path, check: Callable[[], object] = lambda: None) -> None:
        """The file must not be there yet. `check` is called now and then, and raises to give it up."""
        self.path = path
        self._check = check
        self.bytes = 0
        self.sha256 = ""
        self._digest = hashlib.sha256()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unwritten(path, error) from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stageline-checksum")
        self._summed: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Append; the data must stay as it is until the next call."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            self._check()
            self._wait()
            self._sum(chunk)
            try:
                while chunk:
                    written = os.write(self._file, chunk)
                    self.bytes += written
                    chunk = chunk[written:]
            except OSError as error:
                raise unwritten(self.path, error) from error
        self._wait()

    def _sum(self, chunk: memoryview) -> None:
        if len(chunk) >= CHUNK // 64:
            with suppress(RuntimeError):  # no thread begins anything once the interpreter ends
                self._summed = self._pool.submit(self._digest.update, chunk)
                return
        self._digest.update(chunk)

    def _wait(self) -> None:
        if self._summed is not None:
            self._summed.result()
            self._summed = None

    def __enter__(self) -> Self:
        """Sync and close at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing counts as written before the disk has it."""
        self._pool.shutdown()
        try:
            if error is None:
                os.fsync(self._file)
        except OSError as failed:
            raise unwritten(self.path, failed) from failed
        finally:
            os.close(self._file)
        self.sha256 = self._digest.hexdigest()


Result = TypeVar("Result")


def side_by_side(tasks: Iterable[Callable[[], Result]]) -> list[Result]:
    """Run tasks on a few threads, a quarter of the cores at most, and give their results in order.

    >>> side_by_side([lambda: 1, lambda: 2])
    [1, 2]
    """
    with ThreadPoolExecutor(min(4, max(1, (os.cpu_count() or 1) // 4))) as pool:
        started: list[Future[Result]] = []
        for task in tasks:
            try:
                started.append(pool.submit(task))
            except RuntimeError:  # no thread begins anything once the interpreter ends
                started.append(Future())
                started[-1].set_result(task())
        return [each.result() for each in started]


def unwritten(path: Path, error: OSError) -> CheckpointError:
    """The error for what could not be written: the file, the cause, and the room that is left if that is the cause."""
    text = f"cannot write {path}: {reason(error)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            text += f" ({shutil.disk_usage(path.parent).free:,} bytes are free)"
        text += "; make room, or keep fewer checkpoints"
    return CheckpointError(text)


def write_file(path: Path, data: bytes) -> Stream:
    """Write a small file, synced."""
    with Stream(path) as stream:
        stream.write(data)
    return stream


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file atomically, synced."""
    try:
        with files.atomic_file(path, sync=True) as file:
            file.write(data)
    except OSError as error:
        raise unwritten(path, error) from error


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless they are there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "there is a file of that name" if isinstance(error, FileExistsError) else reason(error)
        raise CheckpointError(f"cannot make the folder {path}: {why}; choose another one") from error


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    try:
        files.sync_folder(path)
    except OSError as error:
        raise unwritten(path, error) from error


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; a file in the way is replaced, a folder is not."""
    try:
        os.replace(source, target)
    except OSError as error:
        raise CheckpointError(f"cannot rename {source} to {target}: {reason(error)}") from error


def remove_tree(path: Path) -> None:
    """Remove a folder, or as much of it as can be; what is left is nobody's checkpoint."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def sum_file(path: Path) -> str:
    """The sha256 of a file's bytes.

    >>> _ = write_file(Path("a.txt"), b"abc")
    >>> sum_file(Path("a.txt"))[:8]
    'ba7816bf'
    """
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def regular(path: Path) -> os.stat_result | None:
    """What the system says of a plain file, or None: a pipe would hang a reader, and a link may lead anywhere."""
    found = os.lstat(path)
    return found if stat.S_ISREG(found.st_mode) else None


def reason(error: BaseException) -> str:
    """Why, in the system's words.

    >>> reason(OSError(28, "No space left on device"))
    'No space left on device'
    >>> reason(KeyError("x"))
    "KeyError: 'x'"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, StagelineError) else f"{type(error).__name__}: {error}"
