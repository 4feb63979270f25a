"""A folder of checkpoints: the names in it, publishing, removing, and leftovers of failed attempts.

step-00000100/                 published: complete since it has this name
step-00000100.a1b2.partial/    being written by the attempt a1b2
step-00000100.17.replaced/     published, and about to be replaced by a newer one of the same step
step-00000100.removed/         being removed
latest                         the name of the last one that was published
.stageline-mark-a1b2           written by one rank, to check that all ranks see the folder
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from stageline.common import files
from stageline.common.errors import CheckpointError, StagelineError, shorten
from stageline.train.checkpoint.manifest import MANIFEST, MOST_STEPS, File, Manifest
from stageline.train.checkpoint.remote import Location, RemotePath, location

LATEST = "latest"
FOLDER = "folder"
"""In the world of a manifest of an object store: the name of the folder with its files."""
_PUBLISHED = re.compile(r"step-([0-9]{8,16})(\.[0-9]+\.replaced)?")
_LEFT_OVER = re.compile(r"step-[0-9]{8,16}\.([A-Za-z0-9_-]+\.partial|[0-9]+\.replaced|removed)")


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MOST_STEPS:
        raise CheckpointError(f"a step must be an integer >= 0, got {shorten(step)}")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a published checkpoint's name; None for another name."""
    match = _PUBLISHED.fullmatch(name)
    return int(match[1]) if match else None


def partial_folder(folder: Location, step: int, attempt: str) -> Location:
    """Return the folder that an attempt writes to; attempts never share one."""
    plain = attempt if re.fullmatch("[A-Za-z0-9_-]{1,64}", attempt) else hashlib.sha256(attempt.encode()).hexdigest()
    if isinstance(folder, RemotePath):
        return folder / step_name(step) / plain
    return folder / f"{step_name(step)}.{plain}.partial"


def published(folder: str | Location) -> list[Location]:
    """Return the checkpoints of a folder, oldest step first, without verifying them.

    >>> Path("checkpoint/step-00000100").mkdir(parents=True)
    >>> Path("checkpoint/step-00000200.a1.partial").mkdir()
    >>> [path.name for path in published("checkpoint")]
    ['step-00000100']
    """
    where = location(folder)
    if isinstance(where, RemotePath):
        steps = [where / name for name in where.folders() if step_of(name) is not None]
        return [path for path in steps if MANIFEST in path.sizes()]
    try:
        names = [name for name in os.listdir(where) if step_of(name) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {where}: {reason(error)}") from error
    # One that is about to be replaced comes before the newer one of its step.
    names.sort(key=lambda name: (step_of(name) or 0, "." not in name, name))
    return [where / name for name in names if (where / name).is_dir()]


def leftovers(folder: Location, but: str) -> list[Location]:
    """Return what interrupted attempts and writers left behind, except the folder of the attempt that starts now."""
    if isinstance(folder, RemotePath):
        return [
            folder / step / attempt
            for step in folder.folders()
            for attempt in ((folder / step).folders() if step_of(step) is not None else ())
            if attempt not in (but, _published_attempt(folder / step))
        ]
    return [
        folder / name
        for name in sorted(os.listdir(folder), reverse=True)
        if (_LEFT_OVER.fullmatch(name) or name.startswith((MARK, f".{LATEST}."))) and name != but
    ]


def _published_attempt(step: RemotePath) -> str:
    """The folder of the files of a checkpoint in an object store; empty if it is not published."""
    try:
        return str(Manifest.from_bytes((step / MANIFEST).read_bytes()).world.get(FOLDER, ""))
    except (CheckpointError, FileNotFoundError):
        return ""


def clean_up(paths: Iterable[Location]) -> None:
    """Remove leftovers; a checkpoint whose replacement never came gets its name back."""
    for path in paths:
        if isinstance(path, RemotePath):
            path.remove()
        elif path.suffix == ".replaced":
            plain = path.with_name(path.name.partition(".")[0])
            discard(path) if plain.exists() else rename(path, plain)
        elif path.is_dir():
            remove_tree(path)
        else:
            with suppress(OSError):
                path.unlink()


def publish(partial: Location, step: int, manifest: Manifest) -> tuple[Location, Location]:
    """Write the manifest, and rename the folder to its final name; an earlier checkpoint of the step stays until then.

    Return the new path, and the path that an earlier one of the step was moved to, if there was one.
    """
    if isinstance(partial, RemotePath):
        return _publish_remote(partial, manifest)
    write_file(partial / MANIFEST, manifest.to_bytes())
    folder, target = partial.parent, partial.with_name(step_name(step))
    replaced = target.with_name(f"{target.name}.{time.time_ns():020d}.replaced")
    sync_folder(partial)
    if target.exists():
        rename(target, replaced)
    rename(partial, target)
    sync_folder(folder)
    return target, replaced


def _publish_remote(partial: RemotePath, manifest: Manifest) -> tuple[RemotePath, RemotePath]:
    """Write the manifest beside the folder of the attempt: an object appears, or replaces another one, at once."""
    target = partial.parent
    earlier = _published_attempt(target)
    named = replace(manifest, world={**manifest.world, FOLDER: partial.name})
    (target / MANIFEST).write_bytes(named.to_bytes())
    return target, target / (earlier or "replaced")


def discard(path: Location) -> bool:
    """Remove a checkpoint unless it is being read, and rename it first, so that no reader sees a part of it.

    In an object store, which has neither locks nor renaming, its manifest is removed first.
    """
    if isinstance(path, RemotePath):
        (path / MANIFEST).unlink(missing_ok=True)
        path.remove()
        return True
    try:
        handle = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        handle = None  # nothing that a reader could lock
    try:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removed = path.with_name(path.name.partition(".")[0] + ".removed")
        remove_tree(removed)
        os.replace(path, removed)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    remove_tree(removed)
    return True


def hold(path: Path) -> int | None:
    """Lock a checkpoint for reading; return a handle to close, or None if locks are not supported."""
    handle = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(path / MANIFEST)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(handle)
        return None
    os.close(handle)
    raise FileNotFoundError(errno.ENOENT, "it is being removed", str(path))


MARK = ".stageline-mark-"


def leave_mark(folder: str | Location) -> str:
    """Write a mark into a folder, which is created if necessary; return the nonce to look for.

    >>> nonce = leave_mark("shared")
    >>> sees_mark("shared", nonce), sees_mark("elsewhere", nonce, within=0)
    (True, False)
    >>> remove_mark("shared", nonce)
    """
    where, nonce = location(folder), os.urandom(8).hex()
    make_folder(where)
    write_file(where / (MARK + nonce), b"")
    if isinstance(where, Path):
        sync_folder(where)
    return nonce


def sees_mark(folder: str | Location, nonce: str, within: float = 5.0) -> bool:
    """Whether this process sees the mark within some seconds, which a network file system may take."""
    end, where = time.monotonic() + within, location(folder)
    while True:
        try:
            # List the folder: a client may cache that a single name does not exist.
            if MARK + nonce in (where.sizes() if isinstance(where, RemotePath) else os.listdir(where)):
                return True
        except OSError:
            pass
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def remove_mark(folder: str | Location, nonce: str) -> None:
    """Remove the mark, if it exists."""
    (location(folder) / (MARK + nonce)).unlink(missing_ok=True)


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


def write_file(path: Location, data: bytes) -> File:
    """Write a small file, synced."""
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return File(len(data), hashlib.sha256(data).hexdigest(), 0)
    with ChecksummedFile(path) as stream:
        stream.write(data)
    return File(stream.bytes, stream.sha256, 0)


def replace_file(path: Location, data: bytes) -> None:
    """Write a small file atomically, synced."""
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    with writing(path), files.atomic_file(path, sync=True) as file:
        file.write(data)


def make_folder(path: Location) -> None:
    """Create a folder and its parents, unless they exist; an object store needs none."""
    if isinstance(path, RemotePath):
        path.exists()  # raises if the store cannot be reached
        return
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


def remove_tree(path: Location) -> None:
    """Remove a folder as far as possible; errors are ignored."""
    if isinstance(path, RemotePath):
        with suppress(CheckpointError):
            path.remove()
        return
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
