"""Waiting for threads to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

JOB = frozenset({"stageline control", "stageline keeper"})
"""Threads that live as long as the connections of a job."""


def left_over(before: Collection[threading.Thread] = (), allowed: Collection[str] = ()) -> list[str]:
    """Wait until no new threads are left, beside the allowed ones; return the names of those left after a minute."""
    known = {*before, threading.current_thread()}
    end = time.monotonic() + 60
    while True:
        threads = [thread.name for thread in threading.enumerate() if thread not in known]
        remaining = [name for name in threads if name not in allowed]
        if not remaining or time.monotonic() > end:
            return remaining
        time.sleep(0.01)
