"""The page of a run: its sections, its configuration and its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from stageline.common.checked_json import number_or_none
from stageline.common.errors import StagelineError
from stageline.common.files import write_text
from stageline.common.units import format_duration, format_size
from stageline.train.config.config import Config
from stageline.train.report.charts import Chart, Line, Series, draw, step_axis
from stageline.train.report.header import header
from stageline.train.report.ranks import attribution, timelines
from stageline.train.report.run import Run, read_run
from stageline.train.run_folder import CONFIG, ENVIRONMENT, REPORT

TEMPLATE = Path(__file__).with_name("page.html")
MAX_CHECKPOINTS = 50
MAX_SAMPLE_LENGTH = 8000


def make_report(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run as one self-contained page, and return its path.

    The page is `report.html` in the run's folder, or `out`. The run may still be running, or may have been killed.

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
    target = run.folder / REPORT if out is None else Path(out)
    if target.is_dir():
        raise StagelineError(
            f"cannot write the report to {target}: it is a folder; name a file in it, like report.html"
        )
    text = html(run).encode("utf-8", "replace").decode()
    write_text(target, text)
    return target


def html(run: Run) -> str:
    """Return the page as HTML."""
    charts = [chart for chart in charts_of(run) if any(len(line.series) for line in chart.lines)]
    ranges = [line.series.steps[[0, -1]].tolist() for chart in charts for line in chart.lines if len(line.series)]
    steps = step_axis(min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=1))
    rendered = [draw(chart, steps, f"chart{number}") for number, chart in enumerate(charts)]
    data = {"low": steps.low, "high": steps.high, "charts": [points for _, points in rendered]}
    pictures = "".join(picture for picture, _ in rendered)
    charts_section = f'<section class="charts" aria-label="Over the steps">{pictures}</section>' if pictures else ""
    fields = {
        "title": escape(run.name),
        "body": "\n".join([header(run), charts_section, *_sections(run)]),
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
    both = timelines(run)
    if both:
        seconds = ", in seconds" if run.measured is not None and run.measured.costs is None else ""
        yield f"<section><h2>Timeline, planned and measured{seconds}</h2>{both}</section>"
    yield f"<section><h2>Checkpoints</h2>{_checkpoints(run)}</section>"
    if run.sample:
        yield f"<section><h2>Sample</h2><pre>{escape(run.sample[:MAX_SAMPLE_LENGTH])}</pre></section>"
    yield f"<section><h2>Configuration</h2>{configuration(run)}</section>"
    yield f"<section><h2>Environment</h2>{environment(run)}</section>"


def charts_of(run: Run) -> list[Chart]:
    """Return the charts over steps; charts without values are omitted later."""
    rows = run.history.of("step")

    def single(name: str) -> tuple[Line, ...]:
        return (Line(name, Series.of(rows, name), "strong"),)

    def with_smoothed(name: str, label: str, *others: Line) -> tuple[Line, ...]:
        series = Series.of(rows, name)
        return (Line(label, series, "thin"), Line("smoothed", series.smoothed(), "strong"), *others)

    validation = Line("validation", Series.of(run.history.of("validation"), "loss"), "points")
    planned = Line("planned", Series.of(rows, "planned_bubble"), "plan")
    return [
        Chart("Loss", "loss", with_smoothed("loss", "training", validation), skewed=True),
        Chart("Learning rate", "number", single("lr"), zero=True),
        Chart("Gradient norm", "number", single("grad_norm"), skewed=True),
        Chart("Tokens per second", "count", with_smoothed("tokens_per_s", "each step"), zero=True),
        Chart("Bubble of the makespan", "share", with_smoothed("bubble", "measured", planned), zero=True),
        Chart("Memory", "size", single("memory"), zero=True),
        Chart("Loss scale", "count", single("scale"), skewed=True),
    ]


def _checkpoints(run: Run) -> str:
    rows = run.history.of("checkpoint")
    if not rows:
        return '<p class="soft">None yet.</p>'

    def cell(value: float | None, format_value: object) -> str:
        return f"<td>{'' if value is None or not callable(format_value) else escape(format_value(value))}</td>"

    body = "".join(
        f'<tr><th scope="row">{row["step"]:,}</th>'
        + cell(number_or_none(row.get("bytes")), partial(format_size, fixed=True))
        + cell(number_or_none(row.get("seconds")), format_duration)
        + cell(number_or_none(row.get("blocked")), format_duration)
        + "</tr>"
        for row in rows[-MAX_CHECKPOINTS:]
    )
    num_omitted = len(rows) - MAX_CHECKPOINTS
    note = f'<p class="soft">and {num_omitted:,} earlier ones</p>' if num_omitted > 0 else ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("step", "size", "written in", "training waited"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


MAX_LENGTH = 2000


def non_defaults(settings: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Return the settings that differ from the default, by section and name, with their default.

    >>> non_defaults({"training": {"steps": 200, "seed": 7}, "activation_checkpoint": {"modules": []}})
    {('training', 'seed'): 0}
    """
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
    return text if len(text) <= MAX_LENGTH else text[:MAX_LENGTH] + "…"
