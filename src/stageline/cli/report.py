"""`stageline report`: a run, or a comparison of several, as one page."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def command(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN…", help="Folder of a run (job.dump_folder); several to compare.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            "--out",
            metavar="FILE",
            help="File to write. Default: report.html in the run's folder; for several runs, comparison.html here.",
        ),
    ] = None,
    open_it: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write the report of a training run as one HTML page: losses, throughput, and where each rank's time went.

    For several runs, the page compares their results and charts, and lists the options that differ. A run may still
    be in progress or may have been killed. The page is self-contained: it needs no network and no other file.

    Examples:
      stageline report outputs
      stageline report outputs -o report.html --open
      stageline report baseline larger-lr
    """
    from stageline.train.report import make_comparison, make_report

    page = make_report(runs[0], out) if len(runs) == 1 else make_comparison(runs, out or "comparison.html")
    print(f"wrote the {'report' if len(runs) == 1 else 'comparison'} to {page}", file=sys.stderr)
    if open_it and not webbrowser.open(page.resolve().as_uri()):
        print("could not start a browser", file=sys.stderr)
