"""The end of a process whose job lost a rank: Python ends as always, with the exit code of the script.

Two things would get in its way. The destructor of a process group waits for its collectives, and one that waits for a
frozen rank may take half an hour. And up to Python 3.13 a thread that returns from native code while the interpreter
ends aborts the process. So the groups are never destroyed, and such threads never return.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

_lost: list[object] = []
"""Groups and stores that may have a collective on the way which never ends."""
_stuck: list[threading.Thread] = []
"""Threads that wait in native code for a rank which is lost."""
_closers: list[Callable[[], object]] = []
"""What ends the threads that can be ended."""


def keep_groups() -> None:
    """Keep the process groups of this moment for good, so that nothing waits for their collectives."""
    if dist.is_initialized():
        _lost.extend(group for group in dist.distributed_c10d._world.pg_map if group not in _lost)
        _lost.append(dist.distributed_c10d._get_default_store())


def leave_stuck(thread: threading.Thread) -> None:
    """Leave a thread alone that waits in native code for a rank which is lost."""
    _stuck.append(thread)


def close_at_exit(close: Callable[[], object]) -> None:
    """Call this before Python ends: it ends threads of a transport that lost a rank."""
    _closers.append(close)


@atexit.register
def _prepare() -> None:
    """Prepare the end of Python itself. Registered on import, so that what a script registers later runs before."""
    for close in _closers:
        close()
    for thread in _stuck:
        thread.join(0.2)
    waiting = [thread for thread in _stuck if thread.is_alive()]
    if not (_closers or _lost or waiting):
        return
    keep_groups()  # those of NCCL wait for a store that may be frozen, also where nothing is on the way
    gc.freeze()  # collecting what torch keeps takes a second of computing, and whoever restarts the job waits for it
    for thread in waiting:
        _park(thread)
    for kept in _lost:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    with suppress(AttributeError):  # glibc has on_exit; elsewhere C++ destroys its globals as in any process
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        # As the first thing that exit() does, given the exit code: C++ threads of the groups still run, and what they
        # use would be destroyed under them.
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _park(thread: threading.Thread) -> None:
    """Let a thread sleep inside a signal handler for the rest of this process's life."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    number = signal.SIGRTMAX - 1
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    if thread.ident is not None:
        with suppress(ProcessLookupError):
            signal.pthread_kill(thread.ident, number)
