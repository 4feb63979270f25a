"""`stageline doctor`: what happened, from the records that the ranks wrote when a step failed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stageline.cli.options import Json
from stageline.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stageline.faults.diagnosis import Diagnosis, Row, Underway

MOST_RANKS = 64


def command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE|FOLDER...", help="Flight records, or folders of them.", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Say which rank failed first, what each was doing, who waited for whom, and what to do next.

    When a step fails, every rank that still can writes a flight record into STAGELINE_FLIGHT_DIR, or into the folder
    stageline-flight; those of a training job are in the folder flight of its own. Of several jobs, the newest is read.

    \b
    stageline doctor outputs/flight
    stageline doctor stageline-flight-1a2b3c4d-rank0.json --json
    """
    from stageline.faults.diagnosis import diagnose
    from stageline.faults.flight_recorder import find_flights, merge, read_flight

    records, left_out = merge(map(read_flight, find_flights(files)))
    found = diagnose(records)
    if json:
        print_json({**found.to_json(), "other_jobs": left_out})
        return
    _print(console(), found, left_out)


def _print(out: Console, found: Diagnosis, left_out: list[str]) -> None:
    sizes = [f"{found.schedule[key]} {key}" for key in ("stages", "microbatches") if key in found.schedule]
    name = [str(found.schedule["name"])] if "name" in found.schedule else []
    _line(out, f"job {found.job}: " + ", ".join([*name, f"{found.ranks} ranks", *sizes]))
    _line(out, str(found.verdict) if found.verdict else "no record says which rank failed", style="bold")
    for other in found.others:
        _line(out, f"but some ranks were told: {other}")
    for note in found.notes:
        _line(out, note)
    if left_out:
        _line(out, f"left out: records of {len(left_out)} earlier jobs: {', '.join(left_out[:8])}")
    out.print()
    out.print(_table(found.rows))
    sections = {
        "who waits for whom": found.chains,
        "messages sent and not received": tuple(map(_underway, found.underway)),
        f"traceback of rank {found.verdict.culprit}" if found.verdict else "": (
            tuple(found.verdict.traceback.rstrip().splitlines()) if found.verdict else ()
        ),
        "what to do next": found.advice,
    }
    for title, lines in sections.items():
        if lines:
            out.print()
            _line(out, title, style="bold")
            for line in lines:
                _line(out, f"  {line}")


def _line(out: Console, text: str, style: str = "") -> None:
    out.print(_plain(text), style=style, markup=False)


def _plain(text: str) -> str:
    """What came from a file must not steer a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _table(rows: tuple[Row, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from stageline.faults.monitor import EVERYONE

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("rank", "state", "last finished", "was in", "waited for", "for", "heard"):
        table.add_column(column, justify="right" if column in ("rank", "for", "heard") else "left", overflow="fold")
    for row in rows:
        if MOST_RANKS // 2 <= row.rank < len(rows) - MOST_RANKS // 2:
            if row.rank == MOST_RANKS // 2:
                table.add_row("…")
            continue
        waits = "" if row.waits is None else ("all ranks" if row.waits == EVERYONE else f"rank {row.waits}")
        last = row.last + ("" if row.last_end is None else f" ({row.last_end:.1f} s before the end)")
        cells = (
            str(row.rank),
            row.state if row.wrote else f"{row.state}, no record",
            last,
            row.doing,
            waits + (f": {row.awaited}" if row.awaited and waits else ""),
            "" if row.waited is None else f"{row.waited:.1f} s",
            "" if row.silence is None else f"{row.silence:.1f} s ago",
        )
        table.add_row(*(Text(_plain(cell)) for cell in cells))
    return table


def _underway(channel: Underway) -> str:
    what = ", ".join(channel.messages) + (" and others" if channel.count > len(channel.messages) else "")
    size = f"{channel.count} message{'s' if channel.count > 1 else ''}, {channel.bytes:,} bytes"
    sure = (
        "" if channel.known else " (the last sent: whether it arrived is not known, for the receiver wrote no record)"
    )
    return f"rank {channel.source} → rank {channel.target}, {channel.traffic}: {what} ({size}){sure}"
