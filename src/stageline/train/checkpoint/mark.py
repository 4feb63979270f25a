"""Whether ranks share a folder: one leaves a mark in it, the others look for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from stageline.train.checkpoint.disk import make_folder, sync_folder, write_file

MARK = ".stageline-mark-"


def leave_mark(folder: str | Path) -> str:
    """Leave a mark in a folder, which is made if need be, and return what to tell the others.

    >>> nonce = leave_mark("shared")
    >>> sees_mark("shared", nonce), sees_mark("elsewhere", nonce, within=0)
    (True, False)
    >>> remove_mark("shared", nonce)
    """
    where, nonce = Path(folder), os.urandom(8).hex()
    make_folder(where)
    write_file(where / (MARK + nonce), b"")
    sync_folder(where)
    return nonce


def sees_mark(folder: str | Path, nonce: str, within: float = 5.0) -> bool:
    """Whether the mark is seen from here; file systems of a network may take seconds to show it."""
    end = time.monotonic() + within
    while True:
        try:
            # A list of the folder is asked of the server anew, where a single name may be remembered as absent.
            if MARK + nonce in os.listdir(folder):
                return True
        except OSError:
            pass
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def remove_mark(folder: str | Path, nonce: str) -> None:
    """Take the mark away; one that is gone is no error."""
    (Path(folder) / (MARK + nonce)).unlink(missing_ok=True)
