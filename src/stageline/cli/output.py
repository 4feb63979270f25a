"""What verbs print: coloured lines on a terminal, plain ones into a pipe, tables, JSON, files, progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from stageline.common.errors import StagelineError
from stageline.common.units import format_sizes
from stageline.timeline.draw.palette import LOOKS
from stageline.timeline.draw.terminal import Segment, chart, figures, legend

if TYPE_CHECKING:
    from rich.table import Table

    from stageline.schedules.schedule import Schedule
    from stageline.timeline.timeline import Timeline

MAX_RANKS = 64
"""Tables of more ranks leave out those in the middle."""


def console(width: int | None = None) -> Console:
    """Return a console for stdout with this width; by default the terminal's, or 100 columns in a pipe."""
    out = Console(highlight=False, soft_wrap=True, width=width)
    if width is None and not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = 100
    return out


def print_segments(out: Console, lines: Iterable[list[Segment]]) -> None:
    """Print the lines of a chart in the colours of their action kinds."""
    for line in lines:
        text = Text()
        for segment in line:
            look = LOOKS.get(segment.letter)
            style = ""
            if look is not None:
                style = f"#000000 on {look.pale}" if segment.pale else f"{look.ink} on {look.fill}"
            text.append(segment.text, style=style)
        out.print(text)


def schedule_title(schedule: Schedule) -> str:
    """Return the name and the sizes of a schedule."""
    return f"{schedule.name}: {format_sizes(schedule.ranks, schedule.stages, schedule.microbatches)}"


def print_chart(out: Console, timeline: Timeline, *, title: bool = True) -> None:
    """Print the Gantt chart of a timeline and its legend."""
    if title:
        out.print(schedule_title(timeline.schedule))
    print_segments(out, chart(timeline, out.width))
    out.print()
    print_segments(out, legend([timeline], out.width))


def print_charts(out: Console, timelines: Sequence[Timeline], names: Sequence[str]) -> None:
    """Print the Gantt charts of several timelines on one time axis, and one legend."""
    until = max(timeline.makespan for timeline in timelines)
    for timeline, name in zip(timelines, names, strict=True):
        out.print(name)
        print_segments(out, chart(timeline, out.width, most_ranks=16, until=until))
    print_segments(out, legend(timelines, out.width))


def print_figures(out: Console, timeline: Timeline) -> None:
    """Print makespan, bubble and memory."""
    for line in figures(timeline):
        out.print(line)


def print_json(data: Any) -> None:
    """Print plain data as JSON."""
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def table(*columns: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """Return a table without lines; all columns but those in `left` are aligned to the right."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for column in columns:
        grid.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return grid


def add_ranks(grid: Table, rows: Collection[Iterable[str]]) -> None:
    """Add a row for each rank; of many, leave out those in the middle."""
    for rank, cells in enumerate(rows):
        if len(rows) <= MAX_RANKS or not MAX_RANKS // 2 <= rank < len(rows) - MAX_RANKS // 2:
            grid.add_row(*(Text(printable(cell)) for cell in cells))
        elif rank == MAX_RANKS // 2:
            grid.add_row("…")


def printable(text: str) -> str:
    """Replace control characters, so that text from a file cannot control the terminal.

    >>> printable("a\\x1b[2Jb")
    'a�[2Jb'
    """
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def save(path: Path | None, text: Callable[[], str], what: str) -> None:
    """Write a file if it was requested, and say so on stderr."""
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise StagelineError(f"cannot write {what} to {path}: {error.strerror or error}") from None
    print(f"wrote {what} to {path}", file=sys.stderr)


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None] | None]:
    """Show a status line on a terminal and yield the function that updates it; yield None elsewhere."""
    out = Console(stderr=True, highlight=False)
    if not out.is_terminal:
        yield None
        return
    with out.status(first) as status:
        yield status.update
