"""The header of the page: the run, how it ended, and its key figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape

from stageline.common.checked_json import number_or_none
from stageline.common.units import format_clock, format_count, format_duration, format_loss, format_percent, format_size
from stageline.train.report.charts import Series
from stageline.train.report.run import Run
from stageline.train.run_folder import METRICS

WARM_UP = 2
"""First steps of a series that medians leave out."""
MAX_LENGTH = 2000
"""Maximum length of the description and of the reason for the end."""


def header(run: Run) -> str:
    """Return the run, how it ended, and its key figures."""
    description = run.setting("job", "description")
    paragraph = f"<p>{escape(description[:MAX_LENGTH])}</p>" if isinstance(description, str) and description else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in _key_figures(run)
    )
    style, status = _status(run)
    return (
        f"<header><h1>{escape(run.name)}</h1>{paragraph}"
        f'<p class="status {style}">{escape(status)}</p>'
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + (f'<dl class="tiles">{tiles}</dl>' if tiles else "")
        + "</header>"
    )


def _status(run: Run) -> tuple[str, str]:
    """Return the CSS class and a sentence that says how the run ended, or that its end is unknown."""
    rows = run.history.rows
    generated = f"This page was generated on {_moment(time.time())}."
    if not rows:
        return "open", f"No event is recorded yet: {METRICS} is empty or missing. {generated}"
    resumes = [str(row["step"]) for row in run.history.of("start") if row.get("resumed")]
    resumed = f" Resumed from step {', '.join(resumes[-8:])}." if resumes else ""
    end = run.end
    times = [seconds for row in rows[-20:] if (seconds := number_or_none(row.get("time"))) is not None]
    last_time = f" {_moment(times[-1])}" if times else ""
    if end is None:
        last_event = f"Last event{last_time or ' at an unknown time'}."
        return "open", f"Still running, or killed: no end is recorded. {last_event}{resumed} {generated}"
    reason = str(end.get("why") or "ended")
    style = "bad" if reason.startswith("failed") else "good" if reason == "finished" else "open"
    when = f",{last_time}" if last_time else ""
    return style, f"{reason[:1].upper()}{reason[1:MAX_LENGTH]}, at step {end['step']}{when}.{resumed}"


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def _key_figures(run: Run) -> Iterator[tuple[str, str, str]]:
    rows = run.history.of("step")
    if not rows:
        return
    total = run.setting("training", "steps")
    yield "Steps", f"{max(row['step'] for row in rows):,}", f"of {total:,}" if isinstance(total, int) else ""
    loss = Series.of(rows, "loss")
    smooth = loss.smoothed()
    if len(smooth):
        yield "Loss", format_loss(float(smooth.values[-1])), f"smoothed; from {format_loss(float(loss.finite[0]))}"
    validation = Series.of(run.history.of("validation"), "loss")
    if len(validation.finite):
        best = float(validation.finite.min())
        step = int(validation.steps[validation.values == best][0])
        yield "Best validation loss", format_loss(best), f"at step {step:,}"
    speed = Series.of(rows, "tokens_per_s").median(WARM_UP)
    if speed is not None:
        tokens = sum(Series.of(rows, "tokens").finite.tolist())
        yield "Tokens per second", format_count(speed), f"median; {format_count(tokens)} in all"
    bubble, planned = (Series.of(rows, name).median(WARM_UP) for name in ("bubble", "planned_bubble"))
    if bubble is not None:
        plan = "" if planned is None else f"; planned {format_percent(planned, 1)}"
        yield "Makespan bubble", format_percent(bubble, 1), f"median{plan}"
    memory = Series.of(rows, "memory").finite
    if len(memory):
        yield "Memory", format_size(float(memory.max()), fixed=True), "at most"
    duration = _training_time(run)
    if duration is not None:
        seconds = Series.of(rows, "seconds").median(WARM_UP)
        yield "Time", format_clock(duration), "" if seconds is None else f"{format_duration(seconds)} a step, median"


def _training_time(run: Run) -> float | None:
    """Return the time that the job ran, without the time between a stop and a resume."""
    duration, previous = 0.0, None
    for row in run.history.rows:
        now = number_or_none(row.get("time"))
        if now is None:
            continue
        if previous is not None and row["event"] != "start":
            duration += max(0.0, now - previous)
        previous = now
    return None if previous is None else duration
