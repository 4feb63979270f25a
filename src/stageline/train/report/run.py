"""A run's folder, read: whatever is there, and what could not be read."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stageline.errors import StagelineError, shorten
from stageline.timeline.files import read_timeline
from stageline.timeline.timeline import NOT_ALIGNED, Timeline
from stageline.train.logs.logs import FILE
from stageline.train.logs.metrics import History, Row, read_metrics

CONFIG, ENVIRONMENT, SAMPLE = "config.toml", "environment.json", "sample.txt"
TIMELINES, PLANNED = "timeline", "planned.json"
LONGEST = 100_000
"""Letters of a text file that are shown; a page is no place for more."""


@dataclass(frozen=True)
class Run:
    """What a run's folder says."""

    folder: Path
    history: History
    config: str = ""
    """The text of its configuration."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same as values, by section."""
    environment: dict[str, Any] = field(default_factory=dict)
    planned: Timeline | None = None
    measured: Timeline | None = None
    """The last timeline that was kept."""
    measured_step: int | None = None
    sample: str = ""
    notes: tuple[str, ...] = ()
    """What could not be read, in sentences."""

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name or str(self.folder)

    @property
    def end(self) -> Row | None:
        """How it ended; None while it runs, and where a kill left no time to say."""
        last = [row for row in self.history.rows if row["event"] in ("start", "end", "step")][-1:]
        return last[0] if last and last[0]["event"] == "end" else None

    def setting(self, section: str, name: str) -> Any:
        """A value of the configuration, or None."""
        return self.settings.get(section, {}).get(name)


def read_run(folder: str | Path) -> Run:
    """Read a run's folder, of a job that runs, has ended or was killed; what is missing is left out.

    >>> from stageline.train.config import Config
    >>> from stageline.train.logs import Logs
    >>> with Logs(Config(), "outputs", main=True, total_steps=1) as logs:
    ...     logs.event("step", step=1, loss=2.5, time=1.0)
    1/1  loss 2.5000  took 0:00
    >>> run = read_run("outputs")
    >>> run.name, run.end, run.history.rows[0]["loss"]
    ('outputs', None, 2.5)
    """
    path = Path(folder)
    _check(path)
    notes: list[str] = []
    history = _history(path / FILE, notes)
    config, settings = _config(path / CONFIG, notes)
    planned = _timeline(path / TIMELINES / PLANNED, notes)
    measured_step, measured = _last_timeline(path / TIMELINES, history, notes)
    if planned is not None and measured is not None and planned.schedule != measured.schedule:
        notes.append(f"{PLANNED} is of {planned.schedule!r}, and the step that was measured of {measured.schedule!r}.")
        planned = None
    return Run(
        path,
        history,
        config,
        settings,
        _environment(path / ENVIRONMENT, notes),
        planned,
        measured,
        measured_step,
        _text(path / SAMPLE, notes),
        tuple(notes),
    )


def _check(folder: Path) -> None:
    """Refuse what is no run, and say where one may be."""
    expected = f"expected the folder that job.dump_folder named, with its {FILE} and {CONFIG}"
    if not folder.exists():
        raise StagelineError(f"cannot read {folder}: no such folder; {expected}")
    if not folder.is_dir():
        raise StagelineError(f"{folder} is a file; {expected}")
    if _is_run(folder):
        return
    inside = sorted(each.name for each in folder.iterdir() if each.is_dir() and _is_run(each))
    hint = f"; it has the runs {', '.join(inside[:8])}" if inside else ""
    raise StagelineError(f"{folder} is not a run's folder: it has neither {FILE} nor {CONFIG}; {expected}{hint}")


def _is_run(folder: Path) -> bool:
    return (folder / FILE).is_file() or (folder / CONFIG).is_file()


def _history(path: Path, notes: list[str]) -> History:
    if not path.exists():
        notes.append(f"There is no {FILE}.")
        return History([], 0)
    history = read_metrics(path)
    if history.broken:
        lines = "A line" if history.broken == 1 else f"{history.broken} lines"
        notes.append(f"{lines} of {FILE} could not be read.")
    return history


def _text(path: Path, notes: list[str]) -> str:
    if not path.is_file():
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        notes.append(f"{path.name} could not be read: {error.strerror or error}.")
        return ""
    if len(text) > LONGEST:
        notes.append(f"{path.name} is longer than {LONGEST:,} letters; the rest is left out.")
    return text[:LONGEST]


def _config(path: Path, notes: list[str]) -> tuple[str, dict[str, dict[str, Any]]]:
    text = _text(path, notes)
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        notes.append(f"{CONFIG} is no TOML: {shorten(str(error), 100)}.")
        return text, {}
    return text, {name: section for name, section in found.items() if isinstance(section, dict)}


def _environment(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _text(path, notes)
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"{ENVIRONMENT} is no JSON: {shorten(str(error), 100)}.")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{ENVIRONMENT} holds no table.")
        return {}
    return found


def _timeline(path: Path, notes: list[str]) -> Timeline | None:
    if not path.is_file():
        return None
    try:
        return read_timeline(path)
    except StagelineError as error:
        notes.append(f"A timeline could not be read: {shorten(str(error), 200)}.")
        return None


def _last_timeline(folder: Path, history: History, notes: list[str]) -> tuple[int | None, Timeline | None]:
    """The newest that can be read; files of an earlier life, beyond the step that it was resumed from, come last."""
    told = {row["step"] for row in history.of("timeline")}
    found = []
    for path in folder.glob("step-*.json"):
        number = re.fullmatch(r"step-([0-9]{1,18})\.json", path.name)
        if number:
            step = int(number[1])
            found.append((step in told, step, path))
    for _, step, path in sorted(found, reverse=True):
        timeline = _timeline(path, notes)
        if timeline is not None and not timeline.is_aligned:
            notes.append(f"The timeline of step {step} is not shown: {NOT_ALIGNED}.")
        elif timeline is not None:
            return step, timeline
    return None, None
