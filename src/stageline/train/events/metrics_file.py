"""The metrics file of a run: one JSON object per line, complete up to the last line even after a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stageline.common.errors import StagelineError, shorten
from stageline.common.files import write_text

Row = dict[str, Any]

LARGEST_STEP = 10**12
# JSON cannot represent these. Python's float and JavaScript's Number both read the strings.
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
REPEATED = ("step", "validation", "checkpoint", "timeline")
"""Events that occur once per step: of two in a file, the later one counts."""


class History(NamedTuple):
    """The contents of a metrics file."""

    rows: list[Row]
    """The valid events, in order."""
    broken: int
    """The number of unreadable lines, without a last line that was cut off by a kill."""

    def of(self, event: str) -> list[Row]:
        """Return all events of one kind."""
        return [row for row in self.rows if row["event"] == event]


def encode(row: Row) -> str:
    """Return an event as one line of JSON, without a line break.

    >>> encode({"event": "step", "step": 3, "loss": float("nan")})
    '{"event": "step", "step": 3, "loss": "NaN"}'
    """
    return json.dumps(_plain(row), allow_nan=False)


def decode(line: str) -> Row | None:
    """Parse a line; None if it is not an event.

    >>> decode('{"event": "step", "step": 3, "loss": "NaN"}')
    {'event': 'step', 'step': 3, 'loss': nan}
    >>> decode('{"event": "st')
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("event"), str):
        return None
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST_STEP:
        return None
    return {key: WORDS.get(value, value) if isinstance(value, str) else value for key, value in row.items()}


def checked(row: Row) -> Row:
    """Return an event as it will be read from the file; raise if it is invalid."""
    read = decode(encode(row))
    if read is None:
        raise StagelineError(f"an event needs its kind as 'event' and its 'step', an integer >= 0; got {shorten(row)}")
    return read


def read_metrics(path: str | Path) -> History:
    """Read a metrics file, also while the job writes it.

    Events after the step of a resume are dropped. An incomplete last line is skipped.

    >>> file = MetricsFile("metrics.jsonl")
    >>> file.write({"event": "step", "step": 1, "loss": 2.5})
    >>> file.write({"event": "step", "step": 2, "loss": 2.25})
    >>> file.write({"event": "start", "step": 1, "resumed": True})
    >>> file.write({"event": "step", "step": 2, "loss": 2.0})
    >>> file.close()
    >>> [row["loss"] for row in read_metrics("metrics.jsonl").of("step")]
    [2.5, 2.0]
    """
    rows: dict[tuple[str, int, int], Row] = {}
    broken, last = 0, ""
    for number, line in enumerate(_lines(Path(path))):
        last = line
        row = decode(line)
        if row is None:
            broken += bool(line.strip())
            continue
        event, step = row["event"], row["step"]
        if event == "start":
            rows = {key: earlier for key, earlier in rows.items() if earlier["step"] <= step}
        key = (event, step, 0) if event in REPEATED else (event, step, number + 1)
        rows.pop(key, None)  # the later one is also later in the order
        rows[key] = row
    torn = bool(last) and not last.endswith("\n") and decode(last) is None
    return History(list(rows.values()), broken - torn)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            yield from file
    except OSError as error:
        raise StagelineError(f"cannot read {path}: {error.strerror or error}") from None


class MetricsFile:
    """A file that events are appended to, and flushed.

    With `resume_step`, lines of later steps are removed first, atomically. Without it, only an incomplete last line is.

    >>> with MetricsFile("metrics.jsonl") as file:
    ...     file.write({"event": "step", "step": 1, "loss": 2.5})
    ...     file.write({"event": "step", "step": 2, "loss": 2.25})
    >>> MetricsFile("metrics.jsonl", resume_step=1).close()
    >>> Path("metrics.jsonl").read_text()
    '{"event": "step", "step": 1, "loss": 2.5}\\n'
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        """Remove later lines, and open the file to append."""
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                _cut(self.path, LARGEST_STEP if resume_step is None else resume_step)
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise StagelineError(f"cannot write {self.path}: {error.strerror or error}") from None

    def write(self, row: Row) -> None:
        """Append an event, which has at least its kind (`event`) and its `step`."""
        self._file.write(encode(checked(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(path: Path, step: int) -> None:
    """Remove the lines of later steps; do not write the file if there are none."""
    kept, whole = [], True
    for line in _lines(path):
        row, ended = decode(line), line.endswith("\n")
        stays = ended if row is None else row["step"] <= step
        if stays:
            kept.append(line if ended else line + "\n")
        whole = whole and stays and ended
    if not whole:
        write_text(path, kept)


def _plain(value: Any) -> Any:
    """Convert numbers of numpy and torch to Python's, non-finite ones to words, and other objects to text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return _word(float(value))
    if hasattr(value, "item"):
        try:
            return _plain(value.item())
        except (TypeError, ValueError, RuntimeError):
            return str(value)
    return str(value)


def _word(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
