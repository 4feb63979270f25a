"""The page of runs: rereads their folders while jobs write to them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from stageline.common.checked_json import Count, Range, from_json, number_or_none
from stageline.common.errors import StagelineError
from stageline.studio.arrays import structure_of, times_of
from stageline.studio.plans import RunProfile
from stageline.timeline.explain import Parts, explain
from stageline.train.events import RETURNS, Row, checkpoint_text, read_metrics, recovery_text, validation_text
from stageline.train.report.charts import Series
from stageline.train.report.comparison import config_differences
from stageline.train.report.page import key_figures, status_of
from stageline.train.report.run import Run, check_folder, is_run, read_run
from stageline.train.run_folder import METRICS, PROFILE

COLUMNS = ("loss", "tokens_per_s", "bubble", "planned_bubble", "memory", "grad_norm", "lr", "seconds")
"""The figures of steps that are charted."""
MAX_EVENTS = 300
"""The newest events that are listed."""
PATIENCE = 10.0
"""A file that took a second to read is read again after this many seconds."""


@dataclass(frozen=True)
class KnownRun:
    """What the page has of a run: the version of its answer, the generation of its events, and the number of steps."""

    version: str = ""
    generation: str = ""
    steps: Count = 0


@dataclass(frozen=True)
class RunsRequest:
    """What the page has of every run, by index."""

    known: tuple[KnownRun, ...] = ()


@dataclass(frozen=True)
class TimelineRequest:
    """The run whose timelines the page wants, and the step that it has."""

    run: Annotated[int, Range(0)]
    step: int | None = None


class LiveRun:
    """A run that may still be written to."""

    def __init__(self, folder: Path) -> None:
        """Read all of it once."""
        self.run = read_run(folder)
        self._version = self._stat()
        self._read_at, self._took = time.monotonic(), 0.0

    def _stat(self) -> str:
        try:
            stat = (self.run.folder / METRICS).stat()
        except OSError:
            return "none"
        return f"{stat.st_ino}.{stat.st_size}.{stat.st_mtime_ns}"

    def refresh(self) -> None:
        """Read the events again if they changed; rarely, if reading takes long."""
        version = self._stat()
        if version == self._version or time.monotonic() - self._read_at < PATIENCE * self._took:
            return
        started = time.monotonic()
        if self._version == "none":  # the job has begun: its other files are new too
            self.run = read_run(self.run.folder)
        elif version != "none":
            self.run = replace(self.run, history=read_metrics(self.run.folder / METRICS))
        self._version, self._read_at = version, time.monotonic()
        self._took = self._read_at - started

    def answer(self, known: KnownRun) -> dict[str, Any]:
        """Return what the page lacks; only the version if it has everything."""
        self.refresh()
        run = self.run
        generation = f"{self._version.split('.')[0]}.{sum(row['event'] in RETURNS for row in run.history.rows)}"
        # While a job runs, the page says how long ago the last event was.
        if known.version == self._version:
            return {"version": self._version}
        steps = run.history.of("step")
        since = known.steps if known.generation == generation and known.steps <= len(steps) else 0
        style, status = status_of(run)
        return {
            "version": self._version,
            "generation": generation,
            "from": since,
            "name": run.name,
            "folder": str(run.folder),
            "status": status,
            "style": style,
            "ended": run.end is not None,
            "figures": list(key_figures(run)),
            "notes": list(run.notes),
            "steps": columns(steps[since:]),
            "validation": _series(run, "validation", "loss"),
            "memory": memory_by_process(steps),
            "events": [event for row in run.history.rows for event in event_of(row)][-MAX_EVENTS:],
        }


def columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Return one array per figure; NaN where a step has no such number."""

    def value(row: Row, name: str) -> float:
        number = number_or_none(row.get(name))
        return math.nan if number is None else number

    arrays = {name: np.array([value(row, name) for row in rows], dtype=np.float64) for name in COLUMNS}
    return {"step": np.array([min(row["step"], 2**31 - 1) for row in rows], dtype=np.int32), **arrays}


def _series(run: Run, event: str, name: str) -> dict[str, Any]:
    series = Series.of(run.history.of(event), name)
    return {"step": series.steps.astype(np.int32), name: series.values}


def memory_by_process(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the memory of every process over the steps; empty if a run has only one process."""
    known = [(row["step"], row["memory_by_process"]) for row in rows if isinstance(row.get("memory_by_process"), list)]
    count = max((len(sizes) for _, sizes in known), default=0)
    processes = []
    for process in range(count):
        points = [(step, number_or_none(sizes[process])) for step, sizes in known if process < len(sizes)]
        valid = [(step, size) for step, size in points if size is not None]
        steps = np.array([step for step, _ in valid], dtype=np.int32)
        processes.append({"step": steps, "memory": np.array([size for _, size in valid], dtype=np.float64)})
    return processes


def event_of(row: Row) -> Iterator[dict[str, Any]]:
    """Yield an event that people want to see: its step, its kind and a sentence."""
    match row["event"]:
        case "start":
            text = "resumed" if row.get("resumed") else "started"
        case "validation":
            text = validation_text(row)
        case "checkpoint":
            text = f"saved{checkpoint_text(row)}"
        case "recovery":
            text = recovery_text(row)
        case "replan":
            text = str(row.get("said", ""))
        case "end":
            text = str(row.get("why") or "ended")
        case _:
            return
    event = {"step": row["step"], "kind": row["event"], "text": text[:400], "time": None}
    now = number_or_none(row.get("time"))
    yield event if now is None or not math.isfinite(now) else {**event, "time": now}


class LiveRuns:
    """The runs of a studio."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Each folder is one of a run, or contains some; raise `StagelineError` if it is neither."""
        self._folders = list(folders)
        self._runs: dict[Path, LiveRun] = {}
        for folder in self._folders:
            if not list(_runs_in(folder)):
                check_folder(folder)

    def all(self) -> list[LiveRun]:
        """Return all runs; those that appeared in a folder of runs come last."""
        for folder in self._folders:
            for path in _runs_in(folder):
                if path not in self._runs:
                    self._runs[path] = LiveRun(path)
        return list(self._runs.values())

    def profiles(self) -> list[RunProfile]:
        """Return the profiles of the runs that have one."""
        folders = [(live.run.name, live.run.folder) for live in self.all()]
        return [RunProfile(name, folder / PROFILE) for name, folder in folders if (folder / PROFILE).is_file()]

    def answer(self, data: object) -> dict[str, Any]:
        """Return the changes of all runs, and what differs between their configs."""
        known = from_json(RunsRequest, data, "request", prefix="").known
        runs = self.all()
        padded = [*known, *(KnownRun() for _ in runs)]
        differences = [row._asdict() for row in config_differences([live.run for live in runs])]
        answers = [run.answer(has) for run, has in zip(runs, padded, strict=False)]
        return {"runs": answers, "differences": differences}

    def timelines(self, data: object) -> dict[str, Any]:
        """Return the newest measured step of a run beside its plan; nothing if the page has it."""
        request = from_json(TimelineRequest, data, "request", prefix="")
        runs = self.all()
        if request.run >= len(runs):
            raise StagelineError(f"there is no run {request.run}; there are {len(runs)}, counted from 0")
        run = read_run(runs[request.run].run.folder)
        if run.measured is None:
            planned = [] if run.planned is None else [panel("planned", run.planned)]
            return {"step": None, "panels": planned, "parts": None}
        if run.measured_step == request.step:
            return {"step": run.measured_step}
        explanation = explain(run.planned, run.measured)
        names = ("planned" if run.planned is not None else "every action takes its typical time", "measured")
        panels = [panel(name, part) for name, part in zip(names, (explanation.planned, run.measured), strict=True)]
        rows = [list(parts) for parts in (*explanation.ranks, explanation.mean, explanation.planned_mean)]
        return {"step": run.measured_step, "panels": panels, "parts": {"names": list(Parts._fields), "rows": rows}}


def panel(name: str, timeline: Any) -> dict[str, Any]:
    """Return a chart of a timeline."""
    return {"name": name, "structure": structure_of(timeline), "times": times_of(timeline)}


def _runs_in(folder: Path) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif folder.is_dir():
        yield from sorted(child for child in folder.iterdir() if child.is_dir() and is_run(child))
