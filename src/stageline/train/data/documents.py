"""Text as documents, from files and folders or from Python's own source, and their tokens."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.errors import StagelineError, shorten
from stageline.train.data.source import Tokens, digest
from stageline.train.data.tokenizer import Tokenizer, encode_documents, smallest

LIBRARY_BYTES = 4_000_000
"""The most that is taken of the standard library."""

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that are not the library's own code."""

DULL = {"encodings", "pydoc_data", "lib2to3", "idlelib", "turtledemo", "ensurepip"}
"""Folders of tables, texts and programs that a language model learns little from."""


@dataclass(frozen=True)
class Documents:
    """Texts, or rows of tokens, that are read when they are needed."""

    name: str
    about: str
    """What follows "tokens of"."""
    digest: str
    read: Callable[[], Iterable[Any]]


def text_documents(paths: str) -> Documents:
    """The files that a path means, or several with commas between; of a folder all in it, in the order of their names.

    >>> _ = Path("b.txt").write_text("two"), Path("a.txt").write_text("one")
    >>> list(text_documents("b.txt,a.txt").read())
    ['two', 'one']
    >>> list(text_documents(".").read())
    ['one', 'two']
    """
    files = find_files(paths)
    about = f"{len(files):,} files" if len(files) > 1 else files[0].name
    return Documents(paths, about, digest_files(files), lambda: map(read_text, files))


def python_documents() -> Documents:
    """The source of Python's standard library, the first megabytes in the order of the names.

    >>> python_documents().about[:31]
    'the standard library of Python '
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _walk(folder, NOT_LIBRARY | DULL)
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    ]
    taken, total = [], 0
    for file in files:
        total += file.stat().st_size
        if total > LIBRARY_BYTES:
            break
        taken.append(file)
    if not taken:
        raise StagelineError(
            f"the source of the standard library is not in {folder}; give text of your own: training.dataset = "
            '"text" and training.dataset_path'
        )
    about = f"the standard library of Python {sys.version_info[0]}.{sys.version_info[1]}"
    return Documents("python", about, digest_files(taken), lambda: map(read_text, taken))


def document_tokens(
    documents: Documents, tokenizer: Tokenizer, seq_len: int, *, cache: str | Path | None = None
) -> Tokens:
    """Encode documents, one after the other with separators between; rows of tokens are taken as they are.

    With a `cache`, a folder, the tokens of a tokenizer from a file are kept in it and found again.

    >>> from stageline.train.data.tokenizer import Bytes
    >>> letters = Documents("letters", "letters", "", lambda: ["abc", "de"])
    >>> document_tokens(letters, Bytes(), seq_len=2).array[:].tolist()
    [97, 98, 99, 255, 100, 101]
    """
    key = digest(documents.digest, tokenizer.fingerprint)
    kept = Path(cache) / f"tokens-{key}.npy" if cache is not None and tokenizer.name != "bytes" else None
    if kept is None:
        array = _encode(documents, tokenizer)
    else:
        if not kept.exists():
            _write(kept, _encode(documents, tokenizer))
        array = np.load(kept, mmap_mode="r", allow_pickle=False)
    return Tokens(
        array,
        seq_len,
        name=documents.name,
        about=f"tokens of {documents.about}",
        digest=documents.digest,
        tokenizer=tokenizer.fingerprint,
    )


def _encode(documents: Documents, tokenizer: Tokenizer) -> NDArray[Any]:
    read = (each for each in documents.read() if each is not None)
    first = next(read, None)
    if first is None:
        parts: Iterable[NDArray[Any]] = ()
    elif isinstance(first, str):
        parts = encode_documents(tokenizer, (_text(each, documents.name) for each in chain([first], read)))
    else:
        parts = (_row(each, documents.name) for each in chain([first], read))
    return np.concatenate([np.empty(0, smallest(1)), *parts])


def _text(document: Any, name: str) -> str:
    if not isinstance(document, str):
        raise StagelineError(f"{name} holds text and also a {type(document).__name__}, {shorten(document)}; give one")
    return document


def _row(tokens: Any, name: str) -> NDArray[Any]:
    row = np.asarray(tokens)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise StagelineError(f"{name} holds {row.dtype} of shape {row.shape}; give a column of text or rows of tokens")
    # Signed ones stay as they are, so that a token below 0 is found when a batch is read.
    return row.astype(np.uint32) if row.size and row.min() >= 0 and row.max() < 1 << 32 else row.astype(np.int64)


def _write(path: Path, array: NDArray[Any]) -> None:
    """Write a file of tokens whole or not at all: other processes may look for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise StagelineError(f"cannot keep tokens in {path}: {error.strerror}; free or name another folder") from error


def find_files(paths: str, endings: Sequence[str] = ()) -> list[Path]:
    """The files that a path means, or several with commas between; of a folder all with an ending, and not hidden."""
    if not paths.strip():
        raise StagelineError("training.dataset_path is empty: give a file, a folder, or several with commas between")
    found: list[Path] = []
    for part in [paths] if Path(paths).exists() else filter(None, map(str.strip, paths.split(","))):
        path = Path(part)
        if not path.exists():
            raise StagelineError(f"there is no {part} (in {Path.cwd()}); training.dataset_path names files or folders")
        inside = [each for each in _walk(path, set()) if not endings or each.suffix in endings]
        if path.is_dir() and not inside:
            raise StagelineError(f"the folder {part} holds no files{' ending in ' * bool(endings)}{', '.join(endings)}")
        found += inside if path.is_dir() else [path]
    return found


def read_text(path: Path) -> str:
    """The text of a file of UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise StagelineError(
            f"{path} is not UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}; convert it, or take it out"
        ) from error
    except OSError as error:
        raise StagelineError(f"cannot read {path}: {error.strerror}") from error


def digest_files(files: Iterable[Path]) -> str:
    """A digest of what is in some files, one after the other."""
    found = hashlib.blake2b(digest_size=8)
    for path in files:
        try:
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise StagelineError(f"cannot read {path}: {error.strerror}") from error
    return found.hexdigest()


def _walk(folder: Path, without: set[str]) -> Iterator[Path]:
    """All files under a folder, in the order of their paths, but for hidden ones."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each not in without and not each.startswith(".")]
        found += [Path(here, name) for name in names if not name.startswith(".")]
    yield from sorted(found, key=lambda file: file.relative_to(folder).as_posix())
