"""The exit of a process whose job lost a rank: Python exits as usual, with the exit code of the script.

Two things would prevent that. The destructor of a process group waits for its collectives, and one that waits for a
frozen rank may take half an hour. And up to Python 3.13 a thread that returns from native code while the interpreter
exits aborts the process. So the groups are never destroyed, and such threads never return.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from stageline.distributed._torch_private import default_store, known_groups

SHUTDOWN = 10.0
"""Seconds in which everything is shut down at exit."""

_lost: list[object] = []
"""Groups and stores that may have a collective that never ends."""
_stuck: list[threading.Thread] = []
"""Threads that wait in native code for a lost rank."""
_closers: list[Callable[[], object]] = []
"""Functions that end the threads that can be ended."""
_shutdowns: list[Callable[[], object]] = []
"""Functions that shut down what a job that lost no rank has opened."""
_is_child_of_rank = False
"""Whether this process was forked by a rank: what the rank has opened stays as it is."""


def keep_groups() -> None:
    """Keep the current process groups permanently, so that nothing waits for their collectives."""
    if dist.is_initialized():
        _lost.extend(group for group in known_groups() if group not in _lost)
        _lost.append(default_store())


def leave_stuck(thread: threading.Thread) -> None:
    """Never wait for a thread that waits in native code for a lost rank."""
    _stuck.append(thread)


def close_at_exit(close: Callable[[], object]) -> None:
    """Call a function before Python exits; it ends the threads of a transport that lost a rank."""
    _closers.append(close)


def shut_down_at_exit(close: Callable[[], object]) -> None:
    """Call a function before Python exits, the last one first, unless the job lost a rank."""
    _shutdowns.append(close)


def destroy_at_exit(group: Any = None) -> None:
    """Destroy a process group before Python exits, or all of them; torch warns of NCCL groups that are left."""
    reference = weakref.ref(dist.group.WORLD if group is None else group)

    def destroy() -> None:
        alive = reference()
        if dist.is_initialized() and alive in known_groups():
            dist.destroy_process_group(alive)

    shut_down_at_exit(destroy)


def _leave_to_parent() -> None:
    """Leave connections, GPUs and threads to the parent: a forked child would wait for locks and for its threads."""
    global _is_child_of_rank
    _is_child_of_rank = bool(_closers or _shutdowns or _stuck or _lost)
    _closers.clear()
    _shutdowns.clear()
    _stuck.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _prepare() -> None:
    """Prepare the exit of Python. Registered on import, so that functions that a script registers later run first."""
    for close in _closers:
        close()
    for thread in _stuck:
        thread.join(0.2)
    waiting = [thread for thread in _stuck if thread.is_alive()]
    if not (_closers or _lost or waiting or _is_child_of_rank):
        _shut_down()
        return
    keep_groups()  # those of NCCL wait for a store that may be frozen, even if no collective is pending
    gc.freeze()  # collecting torch's objects takes a second, and the restart of the job waits for it
    for thread in waiting:
        _park(thread)
    for kept in _lost:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    with suppress(AttributeError):  # only glibc has on_exit; elsewhere C++ destroys its globals as usual
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        # The first thing that exit() calls, with the exit code: C++ threads of the groups still run, and their globals
        # would be destroyed under them.
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _shut_down() -> None:
    """Shut down on a thread: if it takes too long, it is left behind."""
    functions, _shutdowns[:] = list(_shutdowns), []
    if not functions:
        return

    def run() -> None:
        for function in reversed(functions):
            with suppress(Exception):
                function()

    thread = threading.Thread(target=run, name="stageline shutdown", daemon=True)
    thread.start()
    thread.join(SHUTDOWN)
    if thread.is_alive():
        _stuck.append(thread)
    if any(other.is_alive() for other in _stuck):
        _prepare()


def _park(thread: threading.Thread) -> None:
    """Let a thread sleep in a signal handler for the rest of the process."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    number = signal.SIGRTMAX - 1
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    if thread.ident is not None:
        with suppress(ProcessLookupError):
            signal.pthread_kill(thread.ident, number)
