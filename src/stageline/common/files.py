"""Files written atomically: a reader sees the old one or the new one. Text files read with clear errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stageline.common.errors import StagelineError

MAX_TEXT_SIZE = 512 * 2**20
"""Bytes. A schedule of ten million actions on a thousand ranks takes a fifth of it."""


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


def read_text(
    source: Path,
    what: str,
    error: Callable[[str], StagelineError] = StagelineError,
    max_size: int = MAX_TEXT_SIZE,
) -> str:
    """Read a UTF-8 file that should contain `what`; raise `error` if that fails.

    >>> read_text(Path("nowhere.json"), "schedule")
    Traceback (most recent call last):
    ...
    stageline.StagelineError: cannot read nowhere.json: No such file or directory
    """
    try:
        if source.stat().st_size > max_size:
            raise error(f"{source} is not a {what}: it is larger than {max_size // 2**20} MiB")
        return source.read_text(encoding="utf-8-sig")
    except OSError as failure:
        raise error(f"cannot read {source}: {failure.strerror or failure}") from None
    except UnicodeDecodeError as failure:
        raise error(f"{source} is not a {what}: invalid UTF-8 at byte {failure.start}") from None


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk; raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
