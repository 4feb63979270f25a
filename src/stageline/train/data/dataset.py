"""Hugging Face datasets on disk, and documents in .jsonl and .parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stageline.common.errors import StagelineError, nearest
from stageline.train.data.documents import Documents, digest_files, find_files, read_text
from stageline.train.data.source import digest
from stageline.train.data.tokenizer import require

TABLES = (".jsonl", ".parquet")


def dataset_documents(path: str, column: str, split: str = "train") -> Documents:
    """Return one column of a dataset written by `save_to_disk`, or of .jsonl or .parquet files or a folder of them.

    >>> _ = Path("a.jsonl").write_text('{"text": "one"}\\n{"text": "two"}\\n')
    >>> list(dataset_documents("a.jsonl", "text").read())
    ['one', 'two']
    """
    if not is_saved(path):
        try:
            files = find_files(path, TABLES)
        except StagelineError as error:
            raise StagelineError(
                f"{error}. A dataset is a folder written by save_to_disk, or .jsonl or .parquet files"
            ) from None
        if invalid := next((file for file in files if file.suffix not in TABLES), None):
            raise StagelineError(
                f"{invalid} is not a dataset: give a folder written by save_to_disk, or .jsonl or .parquet files"
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
        raise StagelineError(f"datasets cannot read {path}: {error}") from error
    if isinstance(data, dict):
        if split not in data:
            raise StagelineError(
                f"the dataset {path} has no split {split!r}{nearest(split, data)}: it has {', '.join(data)}; give "
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
