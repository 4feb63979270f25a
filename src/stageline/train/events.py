"""The events of a job: JSON lines in its metrics file, lines on the screen, scalars for TensorBoard and wandb."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from stageline.common.checked_json import Range, convert, field, number_or_none, parse_json
from stageline.common.errors import JsonError, StagelineError, shorten
from stageline.common.files import write_text
from stageline.common.units import format_duration, format_loss, format_size
from stageline.train.config.config import Config
from stageline.train.run_folder import METRICS
from stageline.train.screen import Pace, Screen, open_screen, parts_of

if TYPE_CHECKING:
    from rich.console import Console


class Logs:
    """Logs the events of a job in its `main` process; in other processes, calls do nothing.

    The first event is the start, with the step that the job starts or resumes from: lines of later steps, from an
    earlier start, are removed from the file. See `docs/report.md` for the events.

    >>> from stageline.train.config.config import Config
    >>> with Logs(Config(), "outputs", main=True, total_steps=2) as logs:
    ...     logs.event("start", step=0, resumed=False, time=1.0)
    ...     logs.event("step", step=1, loss=2.5, tokens_per_s=15234.0, bubble=0.21, planned_bubble=0.18, time=6.0)
    ...     logs.event("step", step=2, loss=2.25, tokens_per_s=15310.0, bubble=0.2, planned_bubble=0.18, time=10.0)
    ...     logs.event("end", step=2, why="finished")
    started: 2 steps
    1/2  loss 2.5000  15.2k tok/s  bubble 21% (plan 18%)
    2/2  loss 2.2500  15.3k tok/s  bubble 20% (plan 18%)  took 0:09
    finished: 2 of 2 steps
    >>> Path("outputs/metrics.jsonl").read_text().count("\\n")
    4
    """

    def __init__(
        self, config: Config, folder: str | Path, *, main: bool, total_steps: int, console: Console | None = None
    ) -> None:
        """Nothing is written before the first event."""
        self.folder = Path(folder)
        self.total_steps = total_steps
        self._main = main
        self._every = max(1, config.metrics.log_freq)
        self._lock = threading.Lock()  # a checkpoint may report from its own thread
        self._file: MetricsFile | None = None
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        self.on_event: Callable[[Row], object] = lambda row: None
        """Called with each event after it is logged."""
        self._closed = False
        self._pace = Pace()
        self._started: float | None = None
        self._last: Row | None = None
        self._shown_step: int | None = None
        if not main:
            return
        self._screen: Screen = open_screen(console, colour=not config.metrics.disable_color_printing)
        if config.metrics.enable_tensorboard:
            self._trackers.append(TensorBoard(self.folder / config.metrics.save_tb_folder))
        if config.metrics.enable_wandb:
            self._trackers.append(WeightsAndBiases(config, self.folder))

    def event(self, event: str, **row: Any) -> None:
        """Log an event: its kind, its `step`, and its other values."""
        if not self._main:
            return
        full = checked({"event": event, **row, "time": row.get("time", time.time())})
        with self._lock:
            if self._closed:
                raise StagelineError(f"the logs of {self.folder} are closed; cannot log {shorten(full)}")
            if self._file is None or event == "recovery":
                if self._file is not None:
                    self._file.close()
                self._file = MetricsFile(self.folder / METRICS, full["step"] if event in RETURNS else None)
            try:
                self._file.write(full)
            finally:
                self._print(full)
            for tracker in self._trackers:
                tracker.write(full)
        self.on_event(full)

    def close(self) -> None:
        """Close the files and restore the terminal; a second call does nothing."""
        with self._lock:
            if self._closed or not self._main:
                return
            self._closed = True
            self._finish_steps()
            self._screen.close()
            if self._file is not None:
                self._file.close()
            for tracker in self._trackers:
                tracker.close()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, row: Row) -> None:
        """Print the events that people want to see."""
        match row["event"]:
            case "step":
                self._step(row)
            case "start":
                self._begin(row)
                step, total = row["step"], self.total_steps
                again = f"resumed from step {step}: {max(0, total - step)} of {_steps(total)} to go"
                self._screen.say(again if row.get("resumed") else f"started: {_steps(total)}", "bold")
            case "recovery":
                self._begin(row)
                self._screen.say(recovery_text(row), "yellow")
            case "validation":
                self._screen.say(f"validation at step {row['step']}: {validation_text(row)}", "magenta")
            case "checkpoint":
                self._screen.say(f"checkpoint of step {row['step']}{checkpoint_text(row)}", "blue")
            case "end":
                self._finish_steps()
                self._screen.close()  # the last progress line stays above the next one
                why = str(row.get("why") or "ended")
                style = "bold red" if why.startswith("failed") else "bold green" if why == "finished" else "bold yellow"
                where = f"{row['step']} of {_steps(self.total_steps)}"
                self._screen.say(f"finished: {where}" if why == "finished" else f"ended after {where}: {why}", style)

    def _begin(self, row: Row) -> None:
        self._started = number_or_none(row["time"]) if self._started is None else self._started

    def _step(self, row: Row) -> None:
        self._begin(row)
        self._pace.add(row)
        first, last = self._last is None, row["step"] >= self.total_steps
        self._last = row
        if self._screen.updates or first or last or row["step"] % self._every == 0:
            self._show(now=first or last)

    def _finish_steps(self) -> None:
        """Show the last step, if it is not shown yet."""
        if self._last is not None and self._shown_step != self._last["step"]:
            self._show(now=True)

    def _show(self, *, now: bool) -> None:
        assert self._last is not None
        row, total = self._last, self.total_steps
        time_of_step, taken = number_or_none(row["time"]), None
        if row["step"] >= total and time_of_step is not None and self._started is not None:
            taken = time_of_step - self._started
        left = self._pace.left(row["step"], total)
        self._screen.show(parts_of(row, total, left, taken), row["step"] / max(1, total), now=now)
        self._shown_step = row["step"]


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def recovery_text(row: Row) -> str:
    """A recovery as a sentence.

    >>> recovery_text({"step": 7, "lost": ["rank 2 was killed by SIGKILL"], "action": "restart", "seconds": 1.8,
    ...     "state": "memory"})
    'rank 2 was killed by SIGKILL: restart, back to step 7 from memory after 1.80 s'
    """
    lost, seconds = row.get("lost"), number_or_none(row.get("seconds"))
    names = ", ".join(map(str, lost)) if isinstance(lost, list) else "a rank was lost"
    text = f"{names}: {row.get('action')}, back to step {row['step']} from {row.get('state')}"
    return text if seconds is None else f"{text} after {format_duration(seconds)}"


def validation_text(row: Row) -> str:
    """The loss of a validation, and how long it took."""
    loss, samples, seconds = (number_or_none(row.get(name)) for name in ("loss", "samples", "seconds"))
    text = "no loss" if loss is None else f"loss {format_loss(loss)}"
    bits = number_or_none(row.get("bits_per_byte"))
    text += "" if bits is None else f", {bits:.3f} bits per byte,"
    text += "" if samples is None else f" on {samples:,.0f} sample{'s' * (samples != 1)}"
    return text if seconds is None else f"{text}, {format_duration(seconds)}"


def checkpoint_text(row: Row) -> str:
    """The size of a checkpoint, and how long it took; it starts with a colon."""
    size, seconds, blocked = (number_or_none(row.get(name)) for name in ("bytes", "seconds", "blocked"))
    parts = [] if size is None else [format_size(size, fixed=True)]
    parts += [] if seconds is None else [f"written in {format_duration(seconds)}"]
    parts += [] if blocked is None else [f"training waited {format_duration(blocked)}"]
    return f": {', '.join(parts)}" if parts else ""


EXCLUDED = ("step", "time")


def _scalars(row: Row) -> dict[str, float]:
    """Return the numbers of an event, with names such as train/loss."""
    if row["event"] in ("start", "end"):
        return {}
    name = "train" if row["event"] == "step" else row["event"]
    numbers = {f"{name}/{key}": number_or_none(value) for key, value in row.items() if key not in EXCLUDED}
    return {key: number for key, number in numbers.items() if number is not None}


class TensorBoard:
    """Writes every number of an event as a scalar: train/loss, train/bubble, validation/loss, checkpoint/seconds."""

    def __init__(self, folder: Path) -> None:
        """Import TensorBoard; files are created with the first event."""
        try:
            self._module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise StagelineError(
                f"metrics.enable_tensorboard needs tensorboard, which cannot be imported ({error}); run pip install "
                "'stageline[tensorboard]', or remove the option"
            ) from None
        self._folder = folder
        self._writer: Any = None

    def write(self, row: Row) -> None:
        """Write the numbers of an event; a resumed run removes those of later steps."""
        step = row["step"]
        if self._writer is None:
            again = step + 1 if row["event"] == "start" and step > 0 else None
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=again)
        now = number_or_none(row.get("time"))
        for key, number in _scalars(row).items():
            self._writer.add_scalar(key, number, step, walltime=now)

    def close(self) -> None:
        """Flush and close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """Sends every number of an event to wandb, under the same names as TensorBoard; a resumed run continues there."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Import wandb; the run begins there with the first event."""
        try:
            self._module = importlib.import_module("wandb")
        except ImportError as error:
            raise StagelineError(
                f"metrics.enable_wandb needs wandb, which cannot be imported ({error}); run pip install "
                "'stageline[wandb]', or remove the option"
            ) from None
        self._config, self._folder = config, folder
        self._run: Any = None

    def write(self, row: Row) -> None:
        """Send the numbers of an event."""
        if self._run is None:
            name = self._folder.absolute().name
            self._run = self._module.init(
                project=self._config.metrics.wandb_project,
                name=name,
                id=f"{name}-{hashlib.sha256(str(self._folder.absolute()).encode()).hexdigest()[:8]}",
                resume="allow",
                notes=self._config.job.description or None,
                config=self._config.to_dict(),
                dir=str(self._folder),
            )
        if numbers := _scalars(row):
            self._run.log(numbers, step=row["step"])

    def close(self) -> None:
        """End the run there."""
        if self._run is not None:
            self._run.finish()
            self._run = None


Row = dict[str, Any]

LARGEST_STEP = 10**12
# JSON cannot represent these. Python's float and JavaScript's Number both read the strings.
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
RETURNS = ("start", "recovery")
"""Events with a step to which the job returned: what was logged of later steps no longer counts."""
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
    """Return an event as one line of JSON, without a line break."""
    return json.dumps(_plain(row), allow_nan=False)


def decode(line: str) -> Row | None:
    """Parse a line; None if it is not an event."""
    try:
        row = convert(parse_json(line, allow_nan=True), dict[str, Any], "event")
        field(row, "event", str)
        field(row, "step", Annotated[int, Range(0, LARGEST_STEP)])
    except JsonError:
        return None
    return {key: WORDS.get(value, value) if isinstance(value, str) else value for key, value in row.items()}


def checked(row: Row) -> Row:
    """Return an event as it will be read from the file; raise if it is invalid."""
    read = decode(encode(row))
    if read is None:
        raise StagelineError(f"an event needs 'event', its kind, and 'step', an integer >= 0; got {shorten(row)}")
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
        if event in RETURNS:
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
    """A file that events are appended to; one that cannot be written leaves no part of its line.

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
            self._file = self.path.open("ab", buffering=0)  # what a full disk refused is not written again at the end
        except OSError as error:
            raise StagelineError(f"cannot write {self.path}: {error.strerror or error}") from None

    def write(self, row: Row) -> None:
        """Append an event, which has at least its kind (`event`) and its `step`."""
        line, size = f"{encode(checked(row))}\n".encode(), os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            raise StagelineError(f"cannot write {self.path}: {error.strerror or error}") from None

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
