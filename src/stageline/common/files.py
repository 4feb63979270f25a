"""Atomic file writing: a reader sees the old file or the new one, never a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stageline.common.errors import StagelineError


@contextmanager
def atomic_file(target: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that replaces `target` when the block ends; an error in the block leaves `target` as it was.

    `sync` waits until the file and its name are on the disk. Raises OSError.

    >>> with atomic_file(Path("a.bin")) as file:
    ...     _ = file.write(b"abc")
    >>> Path("a.bin").read_bytes(), os.listdir()
    (b'abc', ['a.bin'])
    """
    temporary = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(target.parent)


def write_text(
    target: Path, text: str | Iterable[str], error: Callable[[str], StagelineError] = StagelineError
) -> None:
    """Write a UTF-8 file atomically from its text or its lines; raise `error` if that fails.

    >>> write_text(Path("a.txt"), ["one\\n", "two\\n"])
    >>> Path("a.txt").read_text()
    'one\\ntwo\\n'
    >>> write_text(Path("nowhere/a.txt"), "")
    Traceback (most recent call last):
    ...
    stageline.StagelineError: cannot write nowhere/a.txt: No such file or directory
    """
    try:
        with atomic_file(target) as file:
            for part in (text,) if isinstance(text, str) else text:
                file.write(part.encode())
    except OSError as failure:
        raise error(f"cannot write {target}: {failure.strerror or failure}") from None


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk; raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
