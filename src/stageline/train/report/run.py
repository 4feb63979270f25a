"""Read the folder of a run: everything that exists, and notes about what could not be read."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageline.common.checked_json import convert, parse_json
from stageline.common.errors import JsonError, StagelineError, shorten
from stageline.timeline.io import PLANNED, read_timeline
from stageline.timeline.timeline import NOT_ALIGNED, Timeline
from stageline.train.events import History, Row, read_metrics
from stageline.train.run_folder import CONFIG, ENVIRONMENT, METRICS, PLAN, SAMPLE, TIMELINES, timeline_step

if TYPE_CHECKING:
    from stageline.planning.plan import Plan

MAX_TEXT_LENGTH = 100_000
"""Maximum number of characters of a text file to show."""


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder."""

    folder: Path
    history: History
    config: str = ""
    """The text of its configuration."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The configuration as values, by section."""
    environment: dict[str, Any] = field(default_factory=dict)
    planned: Timeline | None = None
    measured: Timeline | None = None
    """The last recorded timeline."""
    measured_step: int | None = None
    sample: str = ""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be read."""
    plan: Plan | None = None
    """The plan of the job, if it made one."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name or str(self.folder)

    @property
    def end(self) -> Row | None:
        """The end event; None while the job runs or if it was killed."""
        last = [row for row in self.history.rows if row["event"] in ("start", "end", "step")][-1:]
        return last[0] if last and last[0]["event"] == "end" else None

    def setting(self, section: str, name: str) -> Any:
        """Return a value of the configuration, or None."""
        return self.settings.get(section, {}).get(name)


def read_run(folder: str | Path) -> Run:
    """Read the folder of a run that is running, has ended or was killed; missing files are left out."""
    path = Path(folder)
    check_folder(path)
    notes: list[str] = []
    history = _history(path / METRICS, notes)
    config, settings = _config(path / CONFIG, notes)
    planned = _timeline(path / TIMELINES / PLANNED, notes)
    measured_step, measured = _last_timeline(path / TIMELINES, history, notes)
    if planned is not None and measured is not None and planned.schedule != measured.schedule:
        notes.append(f"{PLANNED} is for {planned.schedule!r}, but the measured step is for {measured.schedule!r}.")
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
        _plan(path / PLAN),
    )


def check_folder(folder: Path) -> None:
    """Raise `StagelineError` if the folder is not one of a run; suggest runs inside it."""
    expected = f"expected the folder that job.dump_folder names, with its {METRICS} and {CONFIG}"
    if not folder.exists():
        raise StagelineError(f"cannot read {folder}: no such folder; {expected}")
    if not folder.is_dir():
        raise StagelineError(f"{folder} is a file; {expected}")
    if is_run(folder):
        return
    inside = sorted(child.name for child in folder.iterdir() if child.is_dir() and is_run(child))
    hint = f"; it contains the runs {', '.join(inside[:8])}" if inside else ""
    raise StagelineError(f"{folder} is not a run's folder: it has neither {METRICS} nor {CONFIG}; {expected}{hint}")


def is_run(folder: Path) -> bool:
    """Whether a folder is one of a run."""
    return (folder / METRICS).is_file() or (folder / CONFIG).is_file()


def _history(path: Path, notes: list[str]) -> History:
    if not path.exists():
        notes.append(f"There is no {METRICS}.")
        return History([], 0)
    history = read_metrics(path)
    if history.broken:
        lines = "A line" if history.broken == 1 else f"{history.broken} lines"
        notes.append(f"{lines} of {METRICS} could not be read.")
    return history


def _text(path: Path, notes: list[str]) -> str:
    if not path.is_file():
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_TEXT_LENGTH + 1)
    except OSError as error:
        notes.append(f"{path.name} could not be read: {error.strerror or error}.")
        return ""
    if len(text) > MAX_TEXT_LENGTH:
        notes.append(f"{path.name} is longer than {MAX_TEXT_LENGTH:,} characters; the rest is omitted.")
    return text[:MAX_TEXT_LENGTH]


def _config(path: Path, notes: list[str]) -> tuple[str, dict[str, dict[str, Any]]]:
    text = _text(path, notes)
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        notes.append(f"{CONFIG} is not valid TOML: {shorten(str(error), 100)}.")
        return text, {}
    return text, {name: section for name, section in values.items() if isinstance(section, dict)}


def _environment(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _text(path, notes)
    if not text:
        return {}
    try:
        return convert(parse_json(text, allow_nan=True), dict[str, Any], ENVIRONMENT)
    except JsonError as error:
        notes.append(f"{ENVIRONMENT} is not a JSON object: {error}.")
        return {}


def _timeline(path: Path, notes: list[str]) -> Timeline | None:
    if not path.is_file():
        return None
    try:
        return read_timeline(path)
    except StagelineError as error:
        notes.append(f"A timeline could not be read: {shorten(str(error), 200)}.")
        return None


def _plan(path: Path) -> Plan | None:
    """Return the plan; None if there is none, or an older version wrote it."""
    if not path.is_file():
        return None
    from stageline.planning.plan import read_plan  # imports torch

    try:
        return read_plan(path)
    except StagelineError:
        return None


def _last_timeline(folder: Path, history: History, notes: list[str]) -> tuple[int | None, Timeline | None]:
    """Return the newest readable timeline; files from before a resume, beyond its step, come last."""
    recorded = {row["step"] for row in history.of("timeline")}
    candidates = []
    for path in folder.glob("step-*.json"):
        step = timeline_step(path)
        if step is not None:
            candidates.append((step in recorded, step, path))
    for _, step, path in sorted(candidates, reverse=True):
        timeline = _timeline(path, notes)
        if timeline is not None and not timeline.is_aligned:
            notes.append(f"The timeline of step {step} is not shown: {NOT_ALIGNED}.")
        elif timeline is not None:
            return step, timeline
    return None, None
