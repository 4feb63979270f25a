"""Documents from text, .jsonl and .parquet files, Hugging Face datasets or Python's own source, and their tokens."""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import StagelineError, nearest, shorten
from stageline.common.files import atomic_file
from stageline.common.imports import require
from stageline.train.data.source import Tokens, digest
from stageline.train.data.tokenizer import Tokenizer, encode_documents, smallest

LIBRARY_BYTES = 4_000_000
"""Maximum number of bytes to read of the standard library."""

MAX_LINE = 100
"""Longer lines are left out: they are mostly tables of data."""

MAX_DIGITS = 5
"""Lines with more digits are left out, too."""

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that are not part of the library's own code."""

SKIPPED = {"encodings", "pydoc_data", "lib2to3", "idlelib", "turtledemo", "ensurepip"}
"""Folders of tables, texts and programs that are of little use to a language model."""


@dataclass(frozen=True)
class Documents:
    """Texts, or rows of tokens, that are read on demand."""

    name: str
    about: str
    """What the tokens are of, for messages."""
    digest: str
    read: Callable[[], Iterable[Any]]


def text_documents(paths: str) -> Documents:
    """Return the text files of a path or of several comma-separated ones; a folder stands for all its files by name."""
    files = find_files(paths)
    description = f"{len(files):,} files" if len(files) > 1 else files[0].name
    return Documents(paths, description, digest_files(files), lambda: map(read_text, files))


def python_documents() -> Documents:
    """Return the code of Python's standard library: the first megabytes of its source, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _walk(folder, NOT_LIBRARY | SKIPPED)
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    ]
    selected, total = [], 0
    for file in files:
        total += file.stat().st_size
        if total > LIBRARY_BYTES:
            break
        selected.append(file)
    if not selected:
        raise StagelineError(
            f"the source of the standard library is not in {folder}; set training.dataset to text, and "
            "training.dataset_path to your own files"
        )
    description = f"the standard library of Python {sys.version_info[0]}.{sys.version_info[1]}"
    identity = digest(digest_files(selected), "statements without tables")
    return Documents("python", description, identity, lambda: _statements(map(read_text, selected)))


def _statements(sources: Iterable[str]) -> list[str]:
    """Return Python code with one statement per line, without comments, docstrings and tables of data.

    >>> print(_statements(["x = f(1,  # one\\n      2)\\ndef g():\\n    'Two.'\\n    return x\\n"])[0], end="")
    x = f(1, 2)
    <BLANKLINE>
    def g():
        return x
    """
    collects = gc.isenabled()
    gc.disable()  # trees have no cycles, and looking for them takes as long as parsing
    try:
        texts = []
        for source in sources:
            tree = ast.parse(source)
            _remove_docstrings(tree)
            lines = ast.unparse(tree).split("\n")
            texts.append("".join(f"{line}\n" for line in lines if not _is_table(line)))
        return texts
    finally:
        if collects:
            gc.enable()


def _is_table(line: str) -> bool:
    """Whether a line is likely part of a table of data. Lines that open a block are kept.

    >>> _is_table("codes = (112, 113, 114)"), _is_table("if size == 112:")
    (True, False)
    """
    digits = sum(character.isdigit() for character in line)
    return not line.endswith(":") and (len(line) > MAX_LINE or digits > MAX_DIGITS)


def _remove_docstrings(tree: ast.Module) -> None:
    blocks: list[Any] = [tree]
    while blocks:
        block = blocks.pop()
        if isinstance(block, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            block.body = [statement for statement in block.body if not _is_text(statement)] or [ast.Pass()]
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            blocks += getattr(block, name, ())


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def document_tokens(
    documents: Documents, tokenizer: Tokenizer, seq_len: int, *, cache: str | Path | None = None
) -> Tokens:
    """Encode documents and concatenate them with separators; rows of tokens are used as they are.

    With `cache`, a folder, the tokens from a tokenizer file are stored there and reused.
    """
    key = digest(documents.digest, tokenizer.fingerprint)
    cache_file = Path(cache) / f"tokens-{key}.npy" if cache is not None and tokenizer.name != "bytes" else None
    if cache_file is None:
        array = _encode(documents, tokenizer)
    else:
        if not cache_file.exists():
            _write_atomically(cache_file, _encode(documents, tokenizer))
        array = np.load(cache_file, mmap_mode="r", allow_pickle=False)
    return _tokens_of(documents, tokenizer, seq_len, array)


def python_tokens(tokenizer: Tokenizer, seq_len: int) -> Tokens:
    """Encode the code of Python's standard library, or read the tokens from the user's cache folder.

    Making them takes seconds, at every start of every rank. The checksums of the file tell whether it is damaged.
    """
    documents = python_documents()
    file = cache_folder() / f"python-{digest(documents.digest, tokenizer.fingerprint)}.npz"
    with suppress(OSError, EOFError, KeyError, ValueError, BadZipFile), np.load(file, allow_pickle=False) as saved:
        return _tokens_of(documents, tokenizer, seq_len, saved["tokens"])
    array = _encode(documents, tokenizer)
    with suppress(OSError):  # a cache is not needed
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as opened:
            np.savez(opened, tokens=array)
    return _tokens_of(documents, tokenizer, seq_len, array)


def cache_folder() -> Path:
    """Return the folder of files that can be made again: in `XDG_CACHE_HOME`, or in `.cache` of the home folder."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path(os.path.expanduser("~"), ".cache")) / "stageline"


def _tokens_of(documents: Documents, tokenizer: Tokenizer, seq_len: int, array: NDArray[Any]) -> Tokens:
    return Tokens(
        array,
        seq_len,
        name=documents.name,
        about=f"tokens of {documents.about}",
        digest=documents.digest,
        tokenizer=tokenizer.fingerprint,
    )


def _encode(documents: Documents, tokenizer: Tokenizer) -> NDArray[Any]:
    contents = (document for document in documents.read() if document is not None)
    first = next(contents, None)
    if first is None:
        parts: Iterable[NDArray[Any]] = ()
    elif isinstance(first, str):
        parts = encode_documents(tokenizer, (_text(document, documents.name) for document in chain([first], contents)))
    else:
        parts = (_row(row, documents.name) for row in chain([first], contents))
    return np.concatenate([np.empty(0, smallest(1)), *parts])


def _text(document: Any, name: str) -> str:
    if not isinstance(document, str):
        raise StagelineError(
            f"{name} contains text and a {type(document).__name__}, {shorten(document)}; use only text, or only rows "
            "of tokens"
        )
    return document


def _row(tokens: Any, name: str) -> NDArray[Any]:
    row = np.asarray(tokens)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise StagelineError(
            f"{name} contains {row.dtype} of shape {row.shape}; use a column of text or rows of tokens"
        )
    # Keep the sign, so that reading a batch detects a token below 0.
    return row.astype(np.uint32) if row.size and row.min() >= 0 and row.max() < 1 << 32 else row.astype(np.int64)


def _write_atomically(path: Path, array: NDArray[Any]) -> None:
    """Write a file of tokens atomically, because other processes may look for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            np.save(file, array, allow_pickle=False)
    except OSError as error:
        raise StagelineError(
            f"cannot write tokens to {path}: {error.strerror}; free space or use another folder"
        ) from error


def find_files(paths: str, endings: Sequence[str] = ()) -> list[Path]:
    """Return the files of a path, or of several comma-separated ones.

    A folder stands for all its files that are not hidden and have one of the endings. Raise `StagelineError` if there
    are none.
    """
    if not paths.strip():
        raise StagelineError("training.dataset_path is empty; use a file, a folder, or several separated by commas")
    files: list[Path] = []
    for part in [paths] if os.path.exists(paths) else filter(None, map(str.strip, paths.split(","))):
        path = Path(part)
        if not os.path.exists(path):
            raise StagelineError(
                f"{part} does not exist (in {Path.cwd()}); training.dataset_path must name files or folders"
            )
        matching = [file for file in _walk(path, set()) if not endings or file.suffix in endings]
        if path.is_dir() and not matching:
            raise StagelineError(
                f"the folder {part} contains no files{' ending in ' * bool(endings)}{', '.join(endings)}"
            )
        files += matching if path.is_dir() else [path]
    return files


def read_text(path: Path) -> str:
    """Read a UTF-8 file."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise StagelineError(
            f"{path} is not UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}; convert or remove it"
        ) from error
    except OSError as error:
        raise StagelineError(f"cannot read {path}: {error.strerror}") from error


def digest_files(files: Iterable[Path]) -> str:
    """Return a digest of the contents of files, in order."""
    combined = hashlib.blake2b(digest_size=8)
    for path in files:
        try:
            with path.open("rb") as file:
                combined.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise StagelineError(f"cannot read {path}: {error.strerror}") from error
    return combined.hexdigest()


def _walk(folder: Path, excluded: set[str]) -> Iterator[Path]:
    """Yield all files of a folder that are not hidden, sorted by path."""
    files = []
    for directory, folders, names in os.walk(folder):
        folders[:] = [child for child in folders if child not in excluded and not child.startswith(".")]
        files += [Path(directory, name) for name in names if not name.startswith(".")]
    yield from sorted(files, key=lambda file: file.relative_to(folder).as_posix())


TABLES = (".jsonl", ".parquet")


def dataset_documents(path: str, column: str, split: str = "train") -> Documents:
    """Return one column of a dataset written by `save_to_disk`, or of .jsonl or .parquet files or a folder of them."""
    if not is_saved(path):
        try:
            files = find_files(path, TABLES)
        except StagelineError as error:
            raise StagelineError(
                f"{error}. A dataset is a folder written by save_to_disk, or .jsonl or .parquet files"
            ) from None
        if invalid := next((file for file in files if file.suffix not in TABLES), None):
            raise StagelineError(
                f"{invalid} is not a dataset: use a folder written by save_to_disk, or .jsonl or .parquet files"
            )
        description = files[0].name if len(files) == 1 else f"{len(files):,} files"
        return Documents(path, description, digest(digest_files(files), column), lambda: _table_rows(files, column))
    data = _load_split(path, split)
    check_column(path, column, data.column_names)
    return Documents(path, f"{len(data):,} rows", digest(data._fingerprint, column), lambda: _column_rows(data, column))


def is_saved(path: str) -> bool:
    """Whether a folder was written by `save_to_disk` of the `datasets` library."""
    return any(Path(path, name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))


def splits(path: str) -> list[str]:
    """Return the split names of a saved dataset; empty if it has none."""
    try:
        names = json.loads(Path(path, "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        return [str(name) for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def check_column(path: str, column: str, known: Sequence[str]) -> None:
    """Raise `StagelineError` if there is no such column."""
    if column not in known:
        raise StagelineError(
            f"{path} has no column {column!r}{nearest(column, known)}: it has {', '.join(known)}; set "
            "training.dataset_column"
        )


def _load_split(path: str, split: str) -> Any:
    library = require("datasets", f"the dataset {path}")
    try:
        data = library.load_from_disk(path)
    except Exception as error:
        raise StagelineError(f"the datasets library cannot read {path}: {error}") from error
    if isinstance(data, dict):
        if split not in data:
            raise StagelineError(
                f"the dataset {path} has no split {split!r}{nearest(split, data)}: it has {', '.join(data)}; use "
                "the folder of one of them as training.dataset_path"
            )
        data = data[split]
    return data


def _column_rows(data: Any, column: str) -> Iterator[Any]:
    for start in range(0, len(data), 1000):
        yield from data[start : start + 1000][column]


def _table_rows(files: Sequence[Path], column: str) -> Iterator[Any]:
    for file in files:
        yield from _json_rows(file, column) if file.suffix == ".jsonl" else _parquet_rows(file, column)


def _json_rows(file: Path, column: str) -> Iterator[Any]:
    # splitlines() would also split at characters that JSON strings may contain.
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise StagelineError(f"line {number:,} of {file} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise StagelineError(
                f"line {number:,} of {file} is a {type(row).__name__}; each line must be a JSON object"
            )
        check_column(f"line {number:,} of {file}", column, list(row))
        yield row[column]


def _parquet_rows(file: Path, column: str) -> Iterable[Any]:
    parquet = require("pyarrow.parquet", f"the dataset {file}", "pyarrow")
    try:
        table = parquet.ParquetFile(file)
    except Exception as error:
        raise StagelineError(f"pyarrow cannot read {file}: {error}") from error
    with table:
        check_column(str(file), column, table.schema_arrow.names)
        for batch in table.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()
