"""Several runs on one page: their figures, overlaid charts, and the options that differ between their configs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import NamedTuple

from stageline.common.errors import StagelineError
from stageline.train.config.config import Config
from stageline.train.report.charts import Chart, Line, Series
from stageline.train.report.page import assemble, key_figures, status_of, write_page
from stageline.train.report.run import Run, read_run

NUM_COLOURS = 6
"""Colours of runs on a page; further runs repeat them."""


def make_comparison(run_folders: Sequence[str | Path], out: str | Path = "comparison.html") -> Path:
    """Write a comparison of runs as one self-contained page, and return its path.

    >>> from stageline.train.config.config import Config
    >>> from stageline.train.events import Logs
    >>> for name, loss in (("a", 2.5), ("b", 2.0)):
    ...     with Logs(Config(), name, main=True, total_steps=1) as logs:
    ...         logs.event("step", step=1, loss=loss, time=1.0)
    1/1  loss 2.5000  took 0:00
    1/1  loss 2.0000  took 0:00
    >>> make_comparison(["a", "b"]).name
    'comparison.html'
    """
    if len(run_folders) < 2:
        raise StagelineError(f"a comparison needs two runs or more, got {len(run_folders)}")
    runs = [read_run(folder) for folder in run_folders]
    names = _names(runs)
    title = f"{', '.join(names[:-1])} and {names[-1]}"
    page = assemble(title, _header(title, names, runs), charts_of(names, runs), _sections(names, runs))
    return write_page(page, Path(out))


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs; their folders if two have one name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def charts_of(names: Sequence[str], runs: Sequence[Run]) -> list[Chart]:
    """Return the charts, with one line or two for each run."""

    def lines(figure: str, event: str = "step", suffix: str = "", style: str = "", smooth: bool = True) -> list[Line]:
        series = [Series.of(run.history.of(event), figure) for run in runs]
        return [
            Line(name + suffix, part.smoothed() if smooth else part, f"run{index % NUM_COLOURS}{style}")
            for index, (name, part) in enumerate(zip(names, series, strict=True))
        ]

    validation = lines("loss", "validation", ", validation", " dashed", smooth=False)
    return [
        Chart("Loss, smoothed", "loss", (*lines("loss"), *validation), skewed=True),
        Chart("Tokens per second, smoothed", "count", tuple(lines("tokens_per_s")), zero=True),
        Chart("Bubble of the makespan, smoothed", "share", tuple(lines("bubble")), zero=True),
        Chart("Memory", "size", tuple(lines("memory", smooth=False)), zero=True),
        Chart("Gradient norm, smoothed", "number", tuple(lines("grad_norm")), skewed=True),
        Chart("Learning rate", "number", tuple(lines("lr", smooth=False)), zero=True),
    ]


def _header(title: str, names: Sequence[str], runs: Sequence[Run]) -> str:
    figures = [{name: (value, detail) for name, value, detail in key_figures(run)} for run in runs]
    terms = dict.fromkeys(name for known in figures for name in known)
    rows = [["", *names]]
    rows += [[term, *(_figure(*known.get(term, ("", ""))) for known in figures)] for term in terms]
    statuses = "".join(
        f'<li><b>{escape(name)}</b>: <span class="{style}">{escape(text)}</span>'
        f"{''.join(f' {escape(note)}' for note in run.notes)}</li>"
        for name, run, (style, text) in zip(names, runs, map(status_of, runs), strict=True)
    )
    return f"<header><h1>{escape(title)}</h1><ul>{statuses}</ul>{_table(rows)}</header>"


def _figure(value: str, detail: str) -> str:
    return f"{value} ({detail})" if detail else value


def _sections(names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    rows = [["", *names], *([row.option, *row.values] for row in config_differences(runs))]
    body = _table(rows) if len(rows) > 1 else '<p class="soft">Nothing.</p>'
    yield f"<section><h2>What differs in their configs</h2>{body}</section>"
    rows = [["", *names]]
    for name in dict.fromkeys(name for run in runs for name in run.environment):
        values = [str(run.environment.get(name, "")) for run in runs]
        if any(value != values[0] for value in values) and name not in ("started", "command"):
            rows.append([name, *values])
    if len(rows) > 1:
        yield f"<section><h2>What differs in their environments</h2>{_table(rows)}</section>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell[:300])}</td>" for cell in cells)}</tr>'
        for first, *cells in rows[1:]
    )
    return f'<div class="wide"><table class="pairs"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class ConfigDifference(NamedTuple):
    """An option that differs, and its value in each run."""

    option: str
    values: list[str]


def _option(value: object) -> str:
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else str(value).lower()


def config_differences(runs: Sequence[Run]) -> list[ConfigDifference]:
    """Return the options that differ between runs; unset ones have their default.

    The options of a config that cannot be read are unknown.

    >>> from stageline.train.events import History
    >>> a, b = (Run(Path(), History([], 0), settings={"training": {"steps": steps}}) for steps in (1, 2))
    >>> config_differences([a, b])
    [ConfigDifference(option='training.steps', values=['1', '2'])]
    """
    rows = []
    for section, defaults in asdict(Config()).items():
        for name, default in defaults.items():
            plain = list(default) if isinstance(default, tuple) else default
            values = [
                None if run.config and not run.settings else run.settings.get(section, {}).get(name, plain)
                for run in runs
            ]
            known = [value for value in values if value is not None]
            if any(value != known[0] for value in known) and (section, name) != ("job", "dump_folder"):
                shown = [_option(value) for value in values]
                rows.append(ConfigDifference(f"{section}.{name}", [text[:100] for text in shown]))
    return rows
