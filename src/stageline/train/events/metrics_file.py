"""The file of a run's events: one JSON object a line, whole up to the last line even after a kill."""

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
# JSON has no words for these. Python's float and JavaScript's Number both read the strings.
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
REPEATED = ("step", "validation", "checkpoint", "timeline")
"""What happens once a step: where a file has it twice, the later one counts."""


class History(NamedTuple):
    """What a file of events says."""

    rows: list[Row]
    """The events that count, in order."""
    broken: int
    """How many whole lines could not be read; a last line that a kill tore is not one of them."""

    def of(self, event: str) -> list[Row]:
        """All events of one kind."""
        return [row for row in self.rows if row["event"] == event]


def encode(row: Row) -> str:
    """Write an event as one line of JSON, without a line break at its end.

    >>> encode({"event": "step", "step": 3, "loss": float("nan")})
    '{"event": "step", "step": 3, "loss": "NaN"}'
    """
    return json.dumps(_plain(row), allow_nan=False)


def decode(line: str) -> Row | None:
    """Read one line; None if it is no event.

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
    """Give an event as those see it who read it from the file."""
    read = decode(encode(row))
    if read is None:
        raise StagelineError(
            f"an event needs its kind as 'event' and its 'step', a whole number from 0; got {shorten(row)}"
        )
    return read


def read_metrics(path: str | Path) -> History:
    """Read a file of events, also while the job writes it.

    After a resume, what the earlier life did beyond that step no longer counts. A torn last line is passed over.

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
            rows = {key: each for key, each in rows.items() if each["step"] <= step}
        key = (event, step, 0) if event in REPEATED else (event, step, number + 1)
        rows.pop(key, None)  # the later one takes its place in the order, too
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
    """A file that events are added to, each on disk before the call returns.

    With `resume_step`, lines of later steps are cut off first, so that they are not there twice; the old file stays
    until the new one is whole. Without it, only a torn last line goes.

    >>> with MetricsFile("metrics.jsonl") as file:
    ...     file.write({"event": "step", "step": 1, "loss": 2.5})
    ...     file.write({"event": "step", "step": 2, "loss": 2.25})
    >>> MetricsFile("metrics.jsonl", resume_step=1).close()
    >>> Path("metrics.jsonl").read_text()
    '{"event": "step", "step": 1, "loss": 2.5}\\n'
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        """Cut the file back, and open it to add to it."""
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                _cut(self.path, LARGEST_STEP if resume_step is None else resume_step)
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise StagelineError(f"cannot write {self.path}: {error.strerror or error}") from None

    def write(self, row: Row) -> None:
        """Add one event, which has at least its kind (`event`) and its `step`."""
        self._file.write(encode(checked(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close it; a second time does nothing."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        """Give itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _cut(path: Path, step: int) -> None:
    """Keep the lines up to a step, and leave the file alone where that is all of them."""
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
    """Numbers of numpy and torch as Python's, what JSON has no word for in words, all else as text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
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
