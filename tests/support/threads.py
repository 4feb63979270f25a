"""Waiting for threads to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection


def left_over(before: Collection[threading.Thread] = (), allowed: int = 0) -> list[str]:
    """Wait until at most `allowed` new threads are left; return the names of those left after a minute at most."""
    known = {*before, threading.current_thread()}
    end = time.monotonic() + 60
    while True:
        remaining = [thread for thread in threading.enumerate() if thread not in known]
        if len(remaining) <= allowed or time.monotonic() > end:
            return [thread.name for thread in remaining]
        time.sleep(0.01)
