"""`stageline doctor`: what happened, from the flight records of a step that failed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from stageline.cli.options import Json
from stageline.cli.output import add_ranks, console, print_json, printable, table
from stageline.train.run_folder import FLIGHT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stageline.faults.diagnosis import Diagnosis, Row, UndeliveredMessages


def command(
    files: Annotated[
        list[Path],
        Argument(
            metavar="FILE|FOLDER...", help="Flight records, folders of them, or folders of runs.", show_default=False
        ),
    ],
    json: Json = False,
) -> None:
    """Report which rank failed first, what each rank was doing, which rank waited for which, and what to do next.

    When a step fails, every rank that still can writes a flight record to STAGELINE_FLIGHT_DIR, by default the folder
    stageline-flight; a training job writes them to the flight folder of its run. If there are records of several jobs,
    only those of the newest job are read.

    Examples:
      stageline doctor outputs
      stageline doctor stageline-flight
      stageline doctor stageline-flight-1a2b3c4d-rank0.json --json
    """
    from stageline.faults.diagnosis import diagnose
    from stageline.faults.flight_recorder import find_flights, merge, read_flight

    folders = [path / FLIGHT if (path / FLIGHT).is_dir() else path for path in files]
    records, left_out = merge(map(read_flight, find_flights(folders)))
    diagnosis = diagnose(records)
    if json:
        print_json({**diagnosis.to_json(), "other_jobs": left_out})
        return
    _print(console(), diagnosis, left_out)


def _print(out: Console, diagnosis: Diagnosis, left_out: list[str]) -> None:
    schedule, verdict = diagnosis.schedule, diagnosis.verdict
    sizes = [f"{schedule[key]} {key}" for key in ("stages", "microbatches") if key in schedule]
    name = [str(schedule["name"])] if "name" in schedule else []
    _line(out, f"job {diagnosis.job}: " + ", ".join([*name, f"{diagnosis.ranks} ranks", *sizes]))
    _line(out, str(verdict) if verdict else "no record states which rank failed", style="bold")
    for other in diagnosis.others:
        _line(out, f"but some ranks received a different verdict: {other}")
    for note in diagnosis.notes:
        _line(out, note)
    if left_out:
        _line(out, f"left out: records of {len(left_out)} earlier jobs: {', '.join(left_out[:8])}")
    out.print()
    out.print(_rank_table(diagnosis.rows))
    sections = {
        "which rank waits for which": diagnosis.chains,
        "messages sent but not received": tuple(map(_underway, diagnosis.underway)),
        f"traceback of rank {verdict.culprit}" if verdict else "": (
            tuple(verdict.traceback.rstrip().splitlines()) if verdict else ()
        ),
        "what to do next": diagnosis.advice,
    }
    for title, lines in sections.items():
        if lines:
            out.print()
            _line(out, title, style="bold")
            for line in lines:
                _line(out, f"  {line}")


def _line(out: Console, text: str, style: str = "") -> None:
    out.print(printable(text), style=style, markup=False)


def _rank_table(rows: tuple[Row, ...]) -> Table:
    texts = ("state", "last finished", "was in", "waited for")
    grid = table("rank", *texts, "for", "heard", left=texts)
    add_ranks(grid, [_cells(row) for row in rows])
    return grid


def _cells(row: Row) -> tuple[str, ...]:
    from stageline.faults.monitor import EVERYONE

    waits = "" if row.waits is None else ("all ranks" if row.waits == EVERYONE else f"rank {row.waits}")
    state = "alive" if row.state == "here" else row.state
    return (
        str(row.rank),
        state if row.wrote else f"{state}, no record",
        row.last + ("" if row.last_end is None else f" ({row.last_end:.1f} s before the end)"),
        row.doing,
        waits + (f": {row.awaited}" if row.awaited and waits else ""),
        "" if row.waited is None else f"{row.waited:.1f} s",
        "" if row.silence is None else f"{row.silence:.1f} s ago",
    )


def _underway(channel: UndeliveredMessages) -> str:
    what = ", ".join(channel.messages) + (" and others" if channel.count > len(channel.messages) else "")
    size = f"{channel.count} message{'s' if channel.count > 1 else ''}, {channel.bytes:,} bytes"
    sure = "" if channel.known else " (the last sent; the receiver wrote no record, so it may have arrived)"
    return f"rank {channel.source} → rank {channel.target}, {channel.traffic}: {what} ({size}){sure}"
