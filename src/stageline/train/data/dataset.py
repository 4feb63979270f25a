"""Data sets of Hugging Face on disk, and tables of documents in .jsonl and .parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stageline.errors import StagelineError, nearest
from stageline.train.data.documents import Documents, digest_files, find_files, read_text
from stageline.train.data.source import digest
from stageline.train.data.tokenizer import needed

TABLES = (".jsonl", ".parquet")


def dataset_documents(path: str, column: str, split: str = "train") -> Documents:
    """One column of what `save_to_disk` of `datasets` wrote, or of .jsonl or .parquet files or a folder of them.

    >>> _ = Path("a.jsonl").write_text('{"text": "one"}\\n{"text": "two"}\\n')
    >>> list(dataset_documents("a.jsonl", "text").read())
    ['one', 'two']
    """
    if not is_saved(path):
        try:
            files = find_files(path, TABLES)
        except StagelineError as error:
            raise StagelineError(
                f"{error}. A data set is what save_to_disk wrote, or .jsonl or .parquet files"
            ) from None
        if bad := next((file for file in files if file.suffix not in TABLES), None):
            raise StagelineError(f"{bad} is no data set: give what save_to_disk wrote, or .jsonl or .parquet files")
        about = files[0].name if len(files) == 1 else f"{len(files):,} files"
        return Documents(path, about, digest(digest_files(files), column), lambda: _tables(files, column))
    data = _saved(path, split)
    check_column(path, column, data.column_names)
    return Documents(path, f"{len(data):,} rows", digest(data._fingerprint, column), lambda: _column(data, column))


def is_saved(path: str) -> bool:
    """Whether a folder is what `save_to_disk` of the library `datasets` writes."""
    return any(Path(path, name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))


def splits(path: str) -> list[str]:
    """The names of the parts that a saved data set has; none if it is one."""
    try:
        found = json.loads(Path(path, "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        return [str(each) for each in found]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def check_column(path: str, column: str, known: Sequence[str]) -> None:
    """Refuse a column that is not there."""
    if column not in known:
        raise StagelineError(
            f"{path} has no column {column!r}{nearest(column, known)}: it has {', '.join(known)}; set "
            "training.dataset_column"
        )


def _saved(path: str, split: str) -> Any:
    library = needed("datasets", f"the data set {path}")
    try:
        data = library.load_from_disk(path)
    except Exception as error:
        raise StagelineError(f"datasets cannot read {path}: {error}") from error
    if isinstance(data, dict):
        if split not in data:
            raise StagelineError(
                f"the data set {path} has no part {split!r}{nearest(split, data)}: it has {', '.join(data)}; give the "
                "folder of one of them as training.dataset_path"
            )
        data = data[split]
    return data


def _column(data: Any, column: str) -> Iterator[Any]:
    for start in range(0, len(data), 1000):
        yield from data[start : start + 1000][column]


def _tables(files: Sequence[Path], column: str) -> Iterator[Any]:
    for file in files:
        yield from _lines(file, column) if file.suffix == ".jsonl" else _parquet(file, column)


def _lines(file: Path, column: str) -> Iterator[Any]:
    # Not splitlines(), which also cuts at characters that JSON may hold.
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise StagelineError(f"line {number:,} of {file} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise StagelineError(f"line {number:,} of {file} is a {type(row).__name__}; each line is a JSON object")
        check_column(f"line {number:,} of {file}", column, list(row))
        yield row[column]


def _parquet(file: Path, column: str) -> Iterable[Any]:
    parquet = needed("pyarrow.parquet", f"the data set {file}", "pyarrow")
    try:
        table = parquet.ParquetFile(file)
    except Exception as error:
        raise StagelineError(f"pyarrow cannot read {file}: {error}") from error
    with table:
        check_column(str(file), column, table.schema_arrow.names)
        for batch in table.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()
