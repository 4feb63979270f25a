"""The page: what there is to say about a run, put together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from stageline.errors import StagelineError
from stageline.schedules.files import write_aside
from stageline.train.logs import figures
from stageline.train.logs.figures import number_of
from stageline.train.report.axis import step_axis
from stageline.train.report.charts import Chart, Line, draw
from stageline.train.report.header import header
from stageline.train.report.ranks import attribution, timelines
from stageline.train.report.run import Run, read_run
from stageline.train.report.series import Series
from stageline.train.report.settings import configuration, environment

TEMPLATE = Path(__file__).with_name("page.html")
MOST_CHECKPOINTS = 50
LONGEST_SAMPLE = 8000


def make_report(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run as one page that needs nothing else; gives the page's path.

    It is `report.html` in the run's folder, or where `out` says. The run may still be going on, or have been killed.

    >>> from stageline.train.config import Config
    >>> from stageline.train.logs import Logs
    >>> with Logs(Config(), "outputs", main=True, total_steps=1) as logs:
    ...     logs.event("step", step=1, loss=2.5, time=1.0)
    1/1  loss 2.5000  took 0:00
    >>> page = make_report("outputs")
    >>> page.name, page.read_text().startswith("<!doctype html>")
    ('report.html', True)
    """
    run = read_run(run_folder)
    target = run.folder / "report.html" if out is None else Path(out)
    if target.is_dir():
        raise StagelineError(
            f"cannot write the report to {target}: it is a folder; name a file in it, like report.html"
        )
    text = html(run).encode("utf-8", "replace").decode()
    write_aside(target, iter([text]))
    return target


def html(run: Run) -> str:
    """Draw the page."""
    charts = [chart for chart in charts_of(run) if any(len(line.series) for line in chart.lines)]
    found = [line.series.steps[[0, -1]].tolist() for chart in charts for line in chart.lines if len(line.series)]
    steps = step_axis(min((low for low, _ in found), default=0), max((high for _, high in found), default=1))
    drawn = [draw(chart, steps, f"chart{number}") for number, chart in enumerate(charts)]
    data = {"low": steps.low, "high": steps.high, "charts": [points for _, points in drawn]}
    pictures = "".join(picture for picture, _ in drawn)
    shown = f'<section class="charts" aria-label="Over the steps">{pictures}</section>' if pictures else ""
    filled = {
        "title": escape(run.name),
        "body": "\n".join([header(run), shown, *_sections(run)]),
        # No "<" inside the script element, so that no name can end it early.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    # In one pass, so that nothing in a run can stand for a part of the page.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], page)


def _sections(run: Run) -> Iterator[str]:
    """What stands below the charts."""
    if run.measured is not None or run.history.rows:
        yield f"<section><h2>Where the time of each rank went</h2>{attribution(run)}</section>"
    both = timelines(run)
    if both:
        seconds = ", in seconds" if run.measured is not None and run.measured.costs is None else ""
        yield f"<section><h2>Timeline, planned and measured{seconds}</h2>{both}</section>"
    yield f"<section><h2>Checkpoints</h2>{_checkpoints(run)}</section>"
    if run.sample:
        yield f"<section><h2>Sample</h2><pre>{escape(run.sample[:LONGEST_SAMPLE])}</pre></section>"
    yield f"<section><h2>Configuration</h2>{configuration(run)}</section>"
    yield f"<section><h2>Environment</h2>{environment(run)}</section>"


def charts_of(run: Run) -> list[Chart]:
    """What is drawn over the steps; a chart without values is left out."""
    rows = run.history.of("step")

    def one(name: str) -> tuple[Line, ...]:
        return (Line(name, Series.of(rows, name), "strong"),)

    def noisy(name: str, words: str, *more: Line) -> tuple[Line, ...]:
        series = Series.of(rows, name)
        return (Line(words, series, "thin"), Line("smoothed", series.smoothed(), "strong"), *more)

    validation = Line("validation", Series.of(run.history.of("validation"), "loss"), "points")
    planned = Line("planned", Series.of(rows, "planned_bubble"), "plan")
    return [
        Chart("Loss", "loss", noisy("loss", "training", validation), skewed=True),
        Chart("Learning rate", "number", one("lr"), zero=True),
        Chart("Gradient norm", "number", one("grad_norm"), skewed=True),
        Chart("Tokens per second", "count", noisy("tokens_per_s", "each step"), zero=True),
        Chart("Bubble of the makespan", "share", noisy("bubble", "measured", planned), zero=True),
        Chart("Memory", "size", one("memory"), zero=True),
        Chart("Loss scale", "count", one("scale"), skewed=True),
    ]


def _checkpoints(run: Run) -> str:
    rows = run.history.of("checkpoint")
    if not rows:
        return '<p class="soft">None yet.</p>'

    def cell(value: float | None, write: object) -> str:
        return f"<td>{'' if value is None or not callable(write) else escape(write(value))}</td>"

    body = "".join(
        f'<tr><th scope="row">{row["step"]:,}</th>'
        + cell(number_of(row.get("bytes")), figures.size)
        + cell(number_of(row.get("seconds")), figures.moment)
        + cell(number_of(row.get("blocked")), figures.moment)
        + "</tr>"
        for row in rows[-MOST_CHECKPOINTS:]
    )
    left = len(rows) - MOST_CHECKPOINTS
    more = f'<p class="soft">and {left:,} earlier ones</p>' if left > 0 else ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("step", "size", "written in", "training waited"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"
