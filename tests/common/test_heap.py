"""Host memory that is freed and allocated again: a process that keeps it does not pay for its pages twice."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PAGES = 2560
"""In what one round takes."""

CHILD = """
import ctypes, resource
from stageline.common.heap import keep_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
print(keep_memory())
for number in range(21):
    if number == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [libc.malloc(1 << 20) for _ in range(10)]
    for each in taken:
        libc.memset(each, 1, 1 << 20)
    for each in taken:
        libc.free(each)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def in_child(**environment: str) -> tuple[bool, int]:
    """Whether a process keeps memory, and how many pages it paid for in twenty rounds after a first one."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    process = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=300, env=plain | environment
    )
    kept, faults = process.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have ways of their own")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise() -> None:
    kept, faults = in_child()
    assert kept
    assert faults < PAGES
    kept, faults = in_child(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
    assert faults > 10 * PAGES
