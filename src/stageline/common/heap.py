"""The heap of the C library, from which tensors on the CPU come."""

from __future__ import annotations

import ctypes
import os
from functools import cache

KEPT = 512 * 2**20
"""How many unused bytes a heap may keep."""
LARGE = 32 * 2**20
"""Allocations of at least this many bytes come directly from the system; glibc's own dynamic limit."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@cache
def keep_memory() -> bool:
    """Let glibc keep freed memory, for the whole process, unless the environment configures that.

    A split backward repeatedly holds what W needs and frees it later. By default glibc gives freed memory at the top of
    its heap back to the system at once, and the next action pays for every page of it again. Returns whether it keeps
    it; other C libraries are left alone.

    >>> keep_memory() in (True, False)
    True
    """
    configured = any(name in os.environ for name in _OWN) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return not configured and bool(set_option(_MMAP_THRESHOLD, LARGE)) and bool(set_option(_TRIM_THRESHOLD, KEPT))
