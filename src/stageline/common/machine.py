"""The cores of this machine that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where Linux keeps the processor time of a container: microseconds, or "max", in every so many microseconds."""


def cores() -> int:
    """Return the number of cores for this process: those that it may run on, within the quota of its container.

    >>> cores() >= 1
    True
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # not Linux, or no quota
        return available
    return max(1, min(available, -(-time // period)))
