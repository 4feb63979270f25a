"""The page of a run: header, sections, configuration and environment."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageline.common.checked_json import number_or_none
from stageline.common.errors import StagelineError
from stageline.common.files import write_text
from stageline.common.units import (
    format_clock,
    format_count,
    format_duration,
    format_loss,
    format_makespan,
    format_percent,
    format_size,
)
from stageline.timeline.draw.palette import OWN_UNIT
from stageline.train.config.config import Config
from stageline.train.report.charts import Chart, Line, Series, draw, step_axis
from stageline.train.report.ranks import attribution, timelines
from stageline.train.report.run import Run, read_run
from stageline.train.run_folder import CONFIG, ENVIRONMENT, METRICS, REPORT

if TYPE_CHECKING:
    from stageline.planning.plan import Plan

TEMPLATE = Path(__file__).with_name("page.html")
MAX_CHECKPOINTS = 50
MAX_SAMPLE_LENGTH = 8000
MAX_LENGTH = 2000
"""Maximum number of characters of a value."""


def make_report(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run as one self-contained page, and return its path.

    The page is `report.html` in the run's folder, or `out`. The run may still be running, or may have been killed. The
    page of a running job is in its folder, and loads itself again, because the job writes it now and then.

    >>> from stageline.train.config.config import Config
    >>> from stageline.train.events import Logs
    >>> with Logs(Config(), "outputs", main=True, total_steps=1) as logs:
    ...     logs.event("step", step=1, loss=2.5, time=1.0)
    1/1  loss 2.5000  took 0:00
    >>> page = make_report("outputs")
    >>> page.name, page.read_text().startswith("<!doctype html>")
    ('report.html', True)
    """
    run = read_run(run_folder)
    return write_page(html(run, reloads=out is None), run.folder / REPORT if out is None else Path(out))


def write_page(text: str, target: Path) -> Path:
    """Write a page; refuse a folder."""
    if target.is_dir():
        raise StagelineError(
            f"cannot write the report to {target}: it is a folder; name a file in it, like report.html"
        )
    write_text(target, text.encode("utf-8", "replace").decode())
    return target


def html(run: Run, *, reloads: bool = False) -> str:
    """Return the page as HTML; `reloads` if a page of a run without an end loads itself again."""
    times = [seconds for row in run.history.rows[-20:] if (seconds := number_or_none(row.get("time"))) is not None]
    last = times[-1] if reloads and run.end is None and times else None
    return assemble(run.name, header(run), charts_of(run), _sections(run), last)


def assemble(
    title: str, head: str, charts: Sequence[Chart], sections: Iterable[str], last_event: float | None = None
) -> str:
    """Return a page as HTML: a header, charts on one axis of steps, sections.

    With the time of its last event, the page loads itself again until that is long ago.
    """
    charts = [chart for chart in charts if any(len(line.series) for line in chart.lines)]
    ranges = [line.series.steps[[0, -1]].tolist() for chart in charts for line in chart.lines if len(line.series)]
    steps = step_axis(min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=1))
    rendered = [draw(chart, steps, f"chart{number}") for number, chart in enumerate(charts)]
    data = {"low": steps.low, "high": steps.high, "charts": [points for _, points in rendered], "lastEvent": last_event}
    pictures = "".join(picture for picture, _ in rendered)
    charts_section = f'<section class="charts" aria-label="Over the steps">{pictures}</section>' if pictures else ""
    fields = {
        "title": escape(title),
        "body": "\n".join([head, charts_section, *sections]),
        # Escape "<" so that no name can close the script element.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    # Substitute in one pass, so that text of the run is never taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], page)


def _sections(run: Run) -> Iterator[str]:
    """Yield the sections below the charts."""
    if run.measured is not None or run.history.rows:
        yield f"<section><h2>Where the time of each rank went</h2>{attribution(run)}</section>"
    if run.plan is not None:
        yield f"<section>{_plan_of(run.plan)}</section>"
    both = timelines(run)
    if both:
        seconds = "" if run.measured is None or run.measured.in_seconds else f", in {OWN_UNIT}"
        yield f"<section><h2>Timeline, planned and measured{seconds}</h2>{both}</section>"
    if run.history.of("recovery"):
        yield f"<section><h2>Recoveries</h2>{_recoveries(run)}</section>"
    yield f"<section><h2>Checkpoints</h2>{_checkpoints(run)}</section>"
    if run.sample:
        yield f"<section><h2>Sample</h2><pre>{escape(run.sample[:MAX_SAMPLE_LENGTH])}</pre></section>"
    yield f"<section><h2>Configuration</h2>{configuration(run)}</section>"
    yield f"<section><h2>Environment</h2>{environment(run)}</section>"


def _plan_of(plan: Plan) -> str:
    """Return the plan as on its own page, without its timeline, which stands beside the measured one."""
    from stageline.planning.page import sections, style, title  # imports torch

    return f"{style()}<h2>{escape(title(plan))}</h2>{sections(plan)}"


def charts_of(run: Run) -> list[Chart]:
    """Return the charts over steps; charts without values are omitted later."""
    rows = run.history.of("step")

    def single(name: str) -> tuple[Line, ...]:
        return (Line(name, Series.of(rows, name), "strong"),)

    def with_smoothed(name: str, label: str, *others: Line) -> tuple[Line, ...]:
        series = Series.of(rows, name)
        return (Line(label, series, "thin"), Line("smoothed", series.smoothed(), "strong"), *others)

    validation = Line("validation", Series.of(run.history.of("validation"), "loss"), "points")
    planned, planned_time = (
        Line("planned", Series.of(rows, name), "plan") for name in ("planned_bubble", "planned_makespan")
    )
    return [
        Chart("Loss", "loss", with_smoothed("loss", "training", validation), skewed=True),
        Chart("Learning rate", "number", single("lr"), zero=True),
        Chart("Gradient norm", "number", single("grad_norm"), skewed=True),
        Chart("Tokens per second", "count", with_smoothed("tokens_per_s", "each step"), zero=True),
        Chart("Makespan", "time", with_smoothed("makespan", "measured", planned_time), zero=True),
        Chart("Bubble of the makespan", "share", with_smoothed("bubble", "measured", planned), zero=True),
        Chart("Memory", "size", single("memory"), zero=True),
        Chart("Loss scale", "count", single("scale"), skewed=True),
    ]


def _recoveries(run: Run) -> str:
    """Return what was lost, what was done and how long it took; steps that were repeated because of it."""
    steps = run.history.of("step")
    body = ""
    for row in run.history.of("recovery")[-MAX_CHECKPOINTS:]:
        known = {name: row.get(name) for name in ("lost", "action", "seconds")}
        affected = [step["step"] for step in steps if step.get("recovery") == known]
        seconds, lost = number_or_none(row.get("seconds")), row.get("lost")
        cells = (
            ", ".join(map(str, lost)) if isinstance(lost, list) else "",
            str(row.get("action", "")),
            str(row.get("state", "")),
            "" if seconds is None else format_duration(seconds),
            f"{affected[0]:,} to {affected[-1]:,}" if affected else "",
        )
        body += f'<tr><th scope="row">{row["step"]:,}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
    names = ("back to step", "lost", "action", "state from", "took", "steps affected")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _checkpoints(run: Run) -> str:
    rows = run.history.of("checkpoint")
    if not rows:
        return '<p class="soft">None yet.</p>'

    def cell(value: object, format_value: Callable[[float], str]) -> str:
        number = number_or_none(value)
        return f"<td>{'' if number is None else escape(format_value(number))}</td>"

    body = "".join(
        f'<tr><th scope="row">{row["step"]:,}</th>'
        + cell(row.get("bytes"), partial(format_size, fixed=True))
        + cell(row.get("seconds"), format_duration)
        + cell(row.get("blocked"), format_duration)
        + "</tr>"
        for row in rows[-MAX_CHECKPOINTS:]
    )
    num_omitted = len(rows) - MAX_CHECKPOINTS
    note = f'<p class="soft">and {num_omitted:,} earlier ones</p>' if num_omitted > 0 else ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("step", "size", "written in", "training waited"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def non_defaults(settings: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Return the settings that differ from the default, by section and name, with their default."""
    differences = {}
    for section, defaults in asdict(Config()).items():
        for name, default in defaults.items():
            normalised = list(default) if isinstance(default, tuple) else default
            if settings.get(section, {}).get(name, normalised) != normalised:
                differences[section, name] = default
    return differences


def configuration(run: Run) -> str:
    """Return the text of the configuration, with non-default lines marked."""
    if not run.config:
        return f'<p class="soft">There is no {CONFIG}.</p>'
    differences = non_defaults(run.settings)
    section, lines = "", []
    for line in run.config.splitlines():
        section_match = re.fullmatch(r"\s*\[\s*([\w.-]+)\s*\]\s*(#.*)?", line)
        section = section_match[1] if section_match else section
        name = re.match(r"\s*([\w-]+)\s*=", line)
        markup = escape(line)
        if name and (section, name[1]) in differences:
            default = differences[section, name[1]]
            default_text = json.dumps(default)
            markup = f'<mark title="{escape(f"default: {default_text}")}">{markup}</mark>'
        lines.append(markup)
    verb = "setting differs" if len(differences) == 1 else "settings differ"
    summary = f"{CONFIG}: {len(differences) or 'no'} {verb} from the defaults"
    names = ", ".join(f"{section}.{name}" for section, name in differences)
    overview = f'<p class="soft">{escape(names)}</p>' if names else ""
    return f"{overview}<details><summary>{summary}</summary><pre>{chr(10).join(lines)}</pre></details>"


def environment(run: Run) -> str:
    """Return a table of the environment."""
    if not run.environment:
        return f'<p class="soft">There is no {ENVIRONMENT}.</p>'
    rows = "".join(
        f'<tr><th scope="row">{escape(str(name)[:MAX_LENGTH])}</th><td>{escape(_value(value))}</td></tr>'
        for name, value in run.environment.items()
    )
    return f'<table class="pairs">{rows}</table>'


def _value(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}" if abs(value) < 10**300 else "a very large number"
    else:
        text = ", ".join(map(_value, value)) if isinstance(value, list) else json.dumps(value, ensure_ascii=False)
    text = text or "none"
    return text if len(text) <= MAX_LENGTH else text[:MAX_LENGTH] + "…"


WARM_UP = 2
"""First steps of a series that medians leave out."""


def header(run: Run) -> str:
    """Return the run, how it ended, and its key figures."""
    description = run.setting("job", "description")
    paragraph = f"<p>{escape(description[:MAX_LENGTH])}</p>" if isinstance(description, str) and description else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in key_figures(run)
    )
    style, status = status_of(run)
    if style == "open":
        status = f"{status} This page was generated on {_moment(time.time())}."
    return (
        f"<header><h1>{escape(run.name)}</h1>{paragraph}"
        f'<p class="status {style}">{escape(status)}</p>'
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + (f'<dl class="tiles">{tiles}</dl>' if tiles else "")
        + "</header>"
    )


def status_of(run: Run) -> tuple[str, str]:
    """Return the CSS class and a sentence that says how the run ended, or that its end is unknown."""
    rows = run.history.rows
    if not rows:
        return "open", f"No event is recorded yet: {METRICS} is empty or missing."
    resumes = [str(row["step"]) for row in run.history.of("start") if row.get("resumed")]
    resumed = f" Resumed from step {', '.join(resumes[-8:])}." if resumes else ""
    end = run.end
    times = [seconds for row in rows[-20:] if (seconds := number_or_none(row.get("time"))) is not None]
    last_time = f" {_moment(times[-1])}" if times else ""
    if end is None:
        last_event = f"Last event{last_time or ' at an unknown time'}."
        return "open", f"Still running, or killed: no end is recorded. {last_event}{resumed}"
    reason = str(end.get("why") or "ended")
    style = "bad" if reason.startswith("failed") else "good" if reason == "finished" else "open"
    when = f",{last_time}" if last_time else ""
    return style, f"{reason[:1].upper()}{reason[1:MAX_LENGTH]}, at step {end['step']}{when}.{resumed}"


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def key_figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the value and a detail of each figure."""
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
    bits = Series.of(run.history.of("validation"), "bits_per_byte").finite
    if len(bits):
        yield "Bits per byte", f"{bits.min():.3f}", "of validation text, at best"
    speed = Series.of(rows, "tokens_per_s").median(WARM_UP)
    if speed is not None:
        tokens = sum(Series.of(rows, "tokens").finite.tolist())
        yield "Tokens per second", format_count(speed), f"median; {format_count(tokens)} in all"
    mfu = Series.of(rows, "mfu").median(WARM_UP)
    if mfu is not None:
        yield "MFU", format_percent(mfu, 1), "median; the model's FLOPs as a share of the peak"
    makespan = Series.of(rows, "makespan").median(WARM_UP)
    if makespan is not None:
        times = Series.of(rows, "planned_makespan").finite
        plan = f"; planned {format_makespan(float(times[-1]))}" if len(times) else ""
        yield "Makespan", format_makespan(makespan), f"median{plan}"
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
        alone = [number for row in run.history.of("start") if (number := number_or_none(row.get("alone")))]
        if alone and seconds is not None:
            detail = f"times as fast as one process on all cores, {format_duration(alone[-1])} a step"
            yield "Speed", f"{alone[-1] / seconds:.2f}", detail


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
