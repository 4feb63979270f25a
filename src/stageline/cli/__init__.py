"""The `stageline` command: one file per verb.

A verb declares its options with typer, calls the library and prints. No logic of the library belongs here, and nothing
else imports this package. Read `app` (the list of verbs, and errors), then any verb. `options`, `models`, `numbers`
and `output` hold what verbs share.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command."""
    try:
        from stageline.common import interrupts

        interrupts.install()
    except KeyboardInterrupt:  # in the milliseconds before our handler is installed
        os.write(2, b"stageline: interrupted\n")
        os._exit(130)
    from stageline.cli.app import run

    sys.exit(run())
