"""A folder of checkpoints: what its names mean, which are kept, and what is left over of attempts that failed.

step-00000100/                 published: whole when it appeared
step-00000100.a1b2.partial/    being written, by the attempt a1b2
step-00000100.17.replaced/     published, and about to give way to a newer one of the same step
step-00000100.removed/         being removed
latest                         the name of the last that was published
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
    """The name of a step's checkpoint.

    >>> step_name(100)
    'step-00000100'
    """
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MOST_STEPS:
        raise CheckpointError(f"a step is a whole number from 0, got {shorten(step)}")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a published checkpoint's name says.

    >>> step_of("step-00000100"), step_of("step-00000100.a1.partial")
    (100, None)
    """
    found = _PUBLISHED.fullmatch(name)
    return int(found[1]) if found else None


def partial_name(step: int, attempt: str) -> str:
    """Where an attempt writes; attempts never share a folder.

    >>> partial_name(100, "a1")
    'step-00000100.a1.partial'
    """
    plain = attempt if re.fullmatch("[A-Za-z0-9_-]{1,64}", attempt) else hashlib.sha256(attempt.encode()).hexdigest()
    return f"{step_name(step)}.{plain}.partial"


def published(folder: str | Path) -> list[Path]:
    """The checkpoints of a folder, the oldest step first; whether they are whole is not looked at.

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
    # One that is about to give way counts less than the newer one of its step.
    names.sort(key=lambda name: (step_of(name) or 0, "." not in name, name))
    return [where / name for name in names if (where / name).is_dir()]


def left_over(folder: Path, but: str) -> list[Path]:
    """What attempts and writers that ended in the middle left, except the folder of the attempt that begins now."""
    return [
        folder / name
        for name in sorted(os.listdir(folder), reverse=True)
        if (_LEFT_OVER.fullmatch(name) or name.startswith((MARK, f".{LATEST}."))) and name != but
    ]


def sweep(found: Iterable[Path]) -> None:
    """Remove what is left over; a checkpoint that stepped aside for one that never came steps back."""
    for path in found:
        if path.suffix == ".replaced":
            plain = path.with_name(path.name.partition(".")[0])
            discard(path) if plain.exists() else rename(path, plain)
        elif path.is_dir():
            remove_tree(path)
        else:
            with suppress(OSError):
                path.unlink()


def publish(partial: Path, step: int) -> tuple[Path, Path]:
    """Give a finished folder its name; at every moment there is a whole checkpoint of the step if there was one.

    Returns where it is, and where the earlier one of the step went, if there was one.
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
    """Remove a checkpoint unless somebody reads it; it loses its name first, so that no half of one is ever seen."""
    try:
        handle = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        handle = None  # there is nothing that a reader could hold
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
    """Keep a checkpoint from being removed while it is read: a handle to close, or None where locks do not work."""
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
    """Leave a mark in a folder, which is made if need be, and return what to tell the others.

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
    """Whether the mark is seen from here; file systems of a network may take seconds to show it."""
    end = time.monotonic() + within
    while True:
        try:
            # A list of the folder is asked of the server anew, where a single name may be remembered as absent.
            if MARK + nonce in os.listdir(folder):
                return True
        except OSError:
            pass
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def remove_mark(folder: str | Path, nonce: str) -> None:
    """Take the mark away; one that is gone is no error."""
    (Path(folder) / (MARK + nonce)).unlink(missing_ok=True)
