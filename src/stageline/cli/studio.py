"""`stageline studio`: a local web page for schedules, runs and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def command(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN…",
            help="Folders of runs (job.dump_folder), or folders with runs in them.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None, Option(help="Port of the page. Default: 8765, or any free port.", min=0, max=65535)
    ] = None,
    no_browser: Annotated[bool, Option("--no-browser", help="Only print the address; do not open a browser.")] = False,
) -> None:
    """Open a local web page: explore schedules and their costs, watch runs, and change the split of a profiled model.

    The page is served on 127.0.0.1 until Ctrl-C. Its address contains a secret token, and it loads nothing
    from the network. It requires the studio extra: pip install 'stageline\\[studio]'.

    Examples:
      stageline studio
      stageline studio outputs --port 8080 --no-browser
    """
    from stageline.common import interrupts
    from stageline.studio import serve

    def tell(address: str) -> None:
        typer.echo(f"studio at {address}\npress Ctrl-C to stop", err=False)

    with interrupts.raised():
        serve(runs or [], port=port, browser=not no_browser, on_start=tell)
    typer.echo("studio ended", err=True)
