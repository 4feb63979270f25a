"""The heap of the C library, from which tensors on the CPU come."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache

KEPT = 512 * 2**20
"""How many unused bytes a heap may keep."""
LARGE = 32 * 2**20
"""Allocations of at least this many bytes come directly from the system; glibc's own dynamic limit."""
RESERVED = 256 * 2**20
"""How far a heap grows at once, so that huge pages can back it."""
TOP_PAD = 128 * 2**10
"""How far a heap grows beyond what is needed; glibc's default."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MADV_HUGEPAGE = 14
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@cache
def keep_memory() -> bool:
    """Let glibc keep freed memory, for the whole process, unless the environment configures that.

    A split backward repeatedly holds what W needs and frees it later. By default glibc gives freed memory at the top of
    its heap back to the system at once, and the next action pays for every page of it again. Returns whether it keeps
    it; other C libraries are left alone. The kernel may then back the heap with huge pages, too: a step touches every
    page of its tensors, so small pages cost several percent of its time in page faults and address translation.

    >>> keep_memory() in (True, False)
    True
    """
    configured = any(name in os.environ for name in _OWN) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    keeps = not configured and bool(set_option(_MMAP_THRESHOLD, LARGE)) and bool(set_option(_TRIM_THRESHOLD, KEPT))
    if keeps and sys.platform == "linux":
        _allow_huge_pages()
    return keeps


def _allow_huge_pages() -> None:
    """Grow the heap of the main thread, and let the kernel back it with huge pages.

    Address space alone costs no memory. Without the growth, every later extension of the heap would have small pages.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(_TOP_PAD, RESERVED)
    libc.free(libc.malloc(LARGE - 2**12))
    libc.mallopt(_TOP_PAD, TOP_PAD)
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                libc.madvise(start, end - start, _MADV_HUGEPAGE)  # fails where the kernel has no huge pages: no harm
