"""`stageline report`: a run as one page."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def command(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of the run (job.dump_folder).", show_default=False)],
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The page. Default: report.html in the run's folder.")
    ] = None,
    open_it: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write the report of a training run as one HTML page: losses, throughput, and where each rank's time went.

    The run may still be in progress, or may have been killed. The page needs no network and no other file.

    Examples:
      stageline report outputs
      stageline report outputs -o report.html --open
    """
    from stageline.train.report import make_report

    page = make_report(run, out)
    print(f"wrote the report to {page}", file=sys.stderr)
    if open_it and not webbrowser.open(page.resolve().as_uri()):
        print("no browser could be started", file=sys.stderr)
