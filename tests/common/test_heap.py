"""Host memory that is freed and allocated again: a process that keeps it does not pay for its pages twice."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

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

HEAP = """
from stageline.common.heap import RESERVED, keep_memory
keep_memory()
heap, huge = False, 0
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        heap = line.rstrip().endswith("[heap]")
    elif heap and line.startswith("Size:"):
        size = 1024 * int(line.split()[1])
    elif heap and line.startswith("VmFlags:") and "hg" in line.split():
        huge += size
print(huge >= RESERVED)
"""


def run_in_child(script: str, **environment: str) -> list[str]:
    """Run a script with no settings of the heap but these; return the words that it prints."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300, env=plain | environment
    )
    return process.stdout.split()


def in_child(**environment: str) -> tuple[bool, int]:
    """Whether a process keeps memory, and how many pages it paid for in twenty rounds after a first one."""
    kept, faults = run_in_child(CHILD, **environment)
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have ways of their own")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise() -> None:
    kept, faults = in_child()
    assert kept
    assert faults < PAGES
    kept, faults = in_child(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
    assert faults > 10 * PAGES


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have ways of their own")
def test_the_heap_may_have_huge_pages_unless_the_environment_says_otherwise() -> None:
    assert run_in_child(HEAP) == ["True"]
    assert run_in_child(HEAP, MALLOC_TRIM_THRESHOLD_="131072") == ["False"]
