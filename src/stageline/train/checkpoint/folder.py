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
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from stageline.common.errors import CheckpointError, shorten
from stageline.train.checkpoint.disk import make_folder, reason, remove_tree, rename, sync_folder, write_file
from stageline.train.checkpoint.manifest import MANIFEST, MOST_STEPS

LATEST = "latest"
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


def partial_name(step: int, attempt: str) -> str:
    """Return the folder that an attempt writes to; attempts never share one."""
    plain = attempt if re.fullmatch("[A-Za-z0-9_-]{1,64}", attempt) else hashlib.sha256(attempt.encode()).hexdigest()
    return f"{step_name(step)}.{plain}.partial"


def published(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest step first, without verifying them.

    >>> Path("checkpoint/step-00000100").mkdir(parents=True)
    >>> Path("checkpoint/step-00000200.a1.partial").mkdir()
    >>> [path.name for path in published("checkpoint")]
    ['step-00000100']
    """
    where = Path(folder)
    try:
        names = [name for name in os.listdir(where) if step_of(name) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {where}: {reason(error)}") from error
    # One that is about to be replaced comes before the newer one of its step.
    names.sort(key=lambda name: (step_of(name) or 0, "." not in name, name))
    return [where / name for name in names if (where / name).is_dir()]


def leftovers(folder: Path, but: str) -> list[Path]:
    """Return what interrupted attempts and writers left behind, except the folder of the attempt that starts now."""
    return [
        folder / name
        for name in sorted(os.listdir(folder), reverse=True)
        if (_LEFT_OVER.fullmatch(name) or name.startswith((MARK, f".{LATEST}."))) and name != but
    ]


def clean_up(paths: Iterable[Path]) -> None:
    """Remove leftovers; a checkpoint whose replacement never came gets its name back."""
    for path in paths:
        if path.suffix == ".replaced":
            plain = path.with_name(path.name.partition(".")[0])
            discard(path) if plain.exists() else rename(path, plain)
        elif path.is_dir():
            remove_tree(path)
        else:
            with suppress(OSError):
                path.unlink()


def publish(partial: Path, step: int) -> tuple[Path, Path]:
    """Rename a complete folder to its final name; an earlier checkpoint of the step stays available until then.

    Return the new path, and the path that an earlier one of the step was moved to, if there was one.
    """
    folder, target = partial.parent, partial.with_name(step_name(step))
    replaced = target.with_name(f"{target.name}.{time.time_ns():020d}.replaced")
    sync_folder(partial)
    if target.exists():
        rename(target, replaced)
    rename(partial, target)
    sync_folder(folder)
    return target, replaced


def discard(path: Path) -> bool:
    """Remove a checkpoint unless it is being read, and rename it first, so that no reader sees a part of it."""
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


def leave_mark(folder: str | Path) -> str:
    """Write a mark into a folder, which is created if necessary; return the nonce to look for.

    >>> nonce = leave_mark("shared")
    >>> sees_mark("shared", nonce), sees_mark("elsewhere", nonce, within=0)
    (True, False)
    >>> remove_mark("shared", nonce)
    """
    where, nonce = Path(folder), os.urandom(8).hex()
    make_folder(where)
    write_file(where / (MARK + nonce), b"")
    sync_folder(where)
    return nonce


def sees_mark(folder: str | Path, nonce: str, within: float = 5.0) -> bool:
    """Whether this process sees the mark within some seconds, which a network file system may take."""
    end = time.monotonic() + within
    while True:
        try:
            # List the folder: a client may cache that a single name does not exist.
            if MARK + nonce in os.listdir(folder):
                return True
        except OSError:
            pass
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def remove_mark(folder: str | Path, nonce: str) -> None:
    """Remove the mark, if it exists."""
    (Path(folder) / (MARK + nonce)).unlink(missing_ok=True)
