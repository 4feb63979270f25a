"""Folders of checkpoints in an object store, through fsspec. Nothing is renamed there: the manifest is written last.

s3://bucket/run/step-00000100/manifest.json    published since this object exists; it names the folder of its files
s3://bucket/run/step-00000100/a1b2/            the files of the attempt a1b2
s3://bucket/run/latest                         the name of the last checkpoint that was published
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from stageline.common.errors import CheckpointError
from stageline.common.imports import require
from stageline.common.temporary_folder import TemporaryFolder


class RemotePath:
    """A folder or a file of an object store, with the methods of `pathlib.Path` that checkpoints use.

    >>> folder = RemotePath("memory://run")
    >>> (folder / "step-00000001" / "a.json").write_bytes(b"{}")
    >>> (folder / "step-00000001").sizes(), folder.folders(), str(folder / "latest")
    ({'a.json': 2}, ['step-00000001'], 'memory://run/latest')
    >>> folder.remove()
    """

    def __init__(self, url: str) -> None:
        """Nothing is read or written yet."""
        self._url = url.rstrip("/")
        self._fsspec = require("fsspec", f"the folder {url}", "'stageline[fsspec]'")

    @cached_property
    def _system(self) -> tuple[Any, str]:
        try:
            system, path = self._fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"cannot open {self}: {error}") from error
        return system, path

    @property
    def name(self) -> str:
        """The last part."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that it is in."""
        return RemotePath(self._url.rpartition("/")[0])

    @property
    def suffix(self) -> str:
        """Names in an object store have none that means anything."""
        return ""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def exists(self) -> bool:
        """Whether there is such a file or folder."""
        with self._reaching("read") as (system, path):
            system.invalidate_cache()
            return bool(system.exists(path))

    def is_dir(self) -> bool:
        """Whether it is a folder, that is, the beginning of the name of a file."""
        with self._reaching("read") as (system, path):
            system.invalidate_cache()
            return bool(system.isdir(path))

    def read_bytes(self) -> bytes:
        """Return the contents of a file."""
        with self._reaching("read") as (system, path):
            return bytes(system.cat_file(path))

    def write_bytes(self, data: bytes) -> None:
        """Write a file, which is there as a whole or not at all."""
        with self._reaching("write") as (system, path):
            system.makedirs(system._parent(path), exist_ok=True)
            system.pipe_file(path, data)

    def upload(self, source: Path) -> None:
        """Copy a local file to here."""
        with self._reaching("write") as (system, path):
            system.makedirs(system._parent(path), exist_ok=True)
            system.put_file(str(source), path)

    def download(self, target: Path) -> None:
        """Copy the file to the local disk."""
        with self._reaching("read") as (system, path):
            system.get_file(path, str(target))

    def checksum(self) -> str:
        """Return the sha256 of a file."""
        digest = hashlib.sha256()
        with self._reaching("read") as (system, path), system.open(path, "rb") as file:
            while chunk := file.read(8 * 2**20):
                digest.update(chunk)
        return digest.hexdigest()

    def sizes(self) -> dict[str, int]:
        """The files in this folder and their bytes; none if there is no such folder."""
        return {entry: size for entry, (kind, size) in self._entries().items() if kind != "directory"}

    def folders(self) -> list[str]:
        """The names of the folders in this folder."""
        return sorted(entry for entry, (kind, _) in self._entries().items() if kind == "directory")

    def _entries(self) -> dict[str, tuple[str, int]]:
        try:
            with self._reaching("read") as (system, path):
                system.invalidate_cache()
                rows = system.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        own = path.strip("/")
        entries = {row["name"].strip("/"): (str(row["type"]), int(row.get("size") or 0)) for row in rows}
        return {name.rpartition("/")[2]: entry for name, entry in entries.items() if name != own}

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            with self._reaching("remove") as (system, path):
                system.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove a folder and everything in it, if it exists."""
        try:
            with self._reaching("remove") as (system, path):
                system.rm(path, recursive=True)
        except FileNotFoundError:
            pass

    @contextmanager
    def _reaching(self, verb: str) -> Iterator[tuple[Any, str]]:
        """Raise what a store or its library raises as an error that names the path; a missing file stays one."""
        system = self._system
        try:
            yield system
        except (FileNotFoundError, NotADirectoryError, CheckpointError):
            raise
        except Exception as error:  # each library of a store has errors of its own
            text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise CheckpointError(f"cannot {verb} {self}: {text}") from error


Location = Path | RemotePath
"""A folder of this machine, or one of an object store."""


def is_remote(folder: object) -> bool:
    """Whether a text is the URL of an object store.

    >>> is_remote("s3://bucket/run"), is_remote("outputs/checkpoint"), is_remote("file:///shared/run")
    (True, False, False)
    """
    return isinstance(folder, RemotePath) or ("://" in str(folder) and not str(folder).startswith("file://"))


def location(path: str | Location) -> Location:
    """Return the path of a text: a URL, or a folder of this machine, which may be written as file://.

    >>> location("file:///shared/run"), location("s3://bucket/run").name
    (PosixPath('/shared/run'), 'run')
    """
    if not isinstance(path, str):
        return path
    return RemotePath(path) if is_remote(path) else Path(re.sub("^file://", "", path))


def checkpoint_folder(run: Path, name: str) -> Location:
    """Return the folder of a job's checkpoints: a URL of an object store, or a name inside the run's folder.

    >>> checkpoint_folder(Path("outputs"), "checkpoint"), checkpoint_folder(Path("outputs"), "s3://bucket/run")
    (PosixPath('outputs/checkpoint'), RemotePath('s3://bucket/run'))
    """
    return location(name) if "://" in name else run / name


class Mirror:
    """The files of a remote checkpoint that are read, in a local folder that is removed with this object."""

    def __init__(self, folder: RemotePath) -> None:
        """Nothing is copied yet."""
        self.folder = folder
        self._lock = threading.Lock()
        self._temporary: TemporaryFolder | None = None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The remote files and their bytes."""
        return self.folder.sizes()

    @cached_property
    def _local(self) -> Path:
        self._temporary = TemporaryFolder("checkpoint-")
        return self._temporary.path

    def fetch(self, name: str) -> Path:
        """Return a local copy of a file."""
        with self._lock:
            target = self._local / name
            if not target.exists():
                (self.folder / name).download(target)
        return target

    def close(self) -> None:
        """Remove the local copies."""
        if self._temporary is not None:
            self._temporary.remove()
