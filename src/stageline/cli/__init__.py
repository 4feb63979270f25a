"""The `stageline` command: one file per verb.

A verb parses, calls the library and prints. Nothing else imports this package.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command; what a user got wrong is one line on stderr and exit code 2, never a traceback."""
    try:
        from stageline.common import interrupts

        interrupts.install()
    except KeyboardInterrupt:  # in the milliseconds until Ctrl-C is ours
        os.write(2, b"stageline: interrupted\n")
        os._exit(130)
    from stageline.cli.app import run

    sys.exit(run())
