"""Folders for temporary files that do not outlive the jobs that made them, even if those are killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

from stageline.common import interrupts

PREFIX = "stageline-temporary-"


class TemporaryFolder:
    """A new folder of this user, until `remove`, an interrupt, or the end of this process.

    A process holds a lock on its folder, which the kernel releases even if the process is killed. Whoever creates the
    next folder removes those without a lock.

    >>> with TemporaryFolder("test-") as folder:
    ...     folder.is_dir()
    True
    >>> folder.exists()
    False
    """

    def __init__(self, name: str = "") -> None:
        place = tempfile.gettempdir()
        _remove_abandoned(Path(place))
        hidden = tempfile.mkdtemp(prefix=f".{PREFIX}{name}", dir=place)  # until it is locked
        self.path = Path(place, os.path.basename(hidden).removeprefix("."))
        self._lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody can take one either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(hidden, self.path)
        self._remove = weakref.finalize(self, _remove, str(self.path), self._lock, os.getpid())
        weakref.finalize(self, interrupts.at_end(self._remove))

    def remove(self) -> None:
        """Remove the folder; a no-op the second time, and in a forked child."""
        self._remove()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of this user's processes that were killed."""
    with contextlib.suppress(OSError):
        for folder in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid == os.geteuid():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
