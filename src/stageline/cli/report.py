"""`stageline report`: a run as one page."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run: its job.dump_folder.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Where to. Default: report.html in the run's folder."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write the report of a training run as one page: losses, throughput, and where every rank's time went.

    The run may be going on, or have been killed. The page needs no network and no other file.

    \b
    stageline report outputs
    stageline report outputs -o report.html --open
    """
    from stageline.train.report import make_report

    page = make_report(run, out)
    print(f"wrote the report to {page}", file=sys.stderr)
    if open_it and not webbrowser.open(page.resolve().as_uri()):
        print("no browser could be started", file=sys.stderr)
