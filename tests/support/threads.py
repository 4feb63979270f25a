"""Threads that are left when those that are about to end have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection


def left_over(before: Collection[threading.Thread] = (), allowed: int = 0) -> list[str]:
    """The names of threads that stay, beside those of before and this one, once there are as few as allowed."""
    known = {*before, threading.current_thread()}
    end = time.monotonic() + 60
    while True:
        remaining = [thread for thread in threading.enumerate() if thread not in known]
        if len(remaining) <= allowed or time.monotonic() > end:
            return [thread.name for thread in remaining]
        time.sleep(0.01)
