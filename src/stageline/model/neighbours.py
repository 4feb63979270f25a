"""Neighbours at work: ranks compute at the same time, so a layer is also measured while others compute.

They share the memory and the caches of the machine; as threads, also Python's interpreter lock.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, Protocol

import torch

Launcher = Literal["processes", "threads"]
ENDED = 2
"""The state of a neighbour that has ended, as by an error of its job; 1 if it computes, 0 if it pauses."""
WAIT = 5.0
"""Seconds to wait for neighbours to start or to pause."""


class Neighbours(Protocol):
    """Others that compute, or pause."""

    def work(self) -> bool:
        """Make them compute; return whether all of them do."""

    def pause(self) -> None:
        """Wait until none of them computes."""


class _Threads:
    """Neighbours that are threads of this process."""

    def __init__(self, jobs: list[Callable[[], object]]) -> None:
        self._go, self._stop = threading.Event(), False
        self._idle = [threading.Event() for _ in jobs]
        self._threads = [
            threading.Thread(target=self._run, args=(job, idle), name="stageline neighbour", daemon=True)
            for job, idle in zip(jobs, self._idle, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, job: Callable[[], object], idle: threading.Event) -> None:
        while not self._stop:
            idle.set()
            self._go.wait()
            idle.clear()
            with suppress(Exception):  # the measurement itself reports what fails
                job()

    def work(self) -> bool:
        self._go.set()
        until = time.monotonic() + WAIT
        while any(idle.is_set() for idle in self._idle) and time.monotonic() < until:
            time.sleep(1e-4)
        return True

    def pause(self) -> None:
        self._go.clear()
        for idle in self._idle:
            idle.wait(WAIT)

    def close(self) -> None:
        self._stop = True
        self._go.set()
        for thread in self._threads:
            thread.join(WAIT)


class _Processes:
    """Neighbours that are forks of this process: they have its model, and an interpreter of their own."""

    def __init__(self, job: Callable[[], object], count: int) -> None:
        self._state = mmap.mmap(-1, 1 + count)  # whether to work; for each neighbour, whether it does
        self._children: list[int] = []
        self._failed = False
        parent = os.getpid()
        for number in range(count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about other threads, which the child does not have
                child = os.fork()
            if child == 0:
                self._run(job, 1 + number, parent)
            self._children.append(child)

    def _run(self, job: Callable[[], object], place: int, parent: int) -> None:
        try:
            torch.set_num_threads(1)  # the threads of this process's pool were not forked
            while os.getppid() == parent:
                working = bool(self._state[0])
                self._state[place] = working
                if working:
                    job()
                else:
                    time.sleep(1e-3)
        finally:
            self._state[place] = ENDED
            os._exit(0)

    def work(self) -> bool:
        self._state[0] = True
        return self._reached(True)

    def pause(self) -> None:
        self._state[0] = False
        self._reached(False)

    def _reached(self, working: bool) -> bool:
        """Wait until all of them work, or none; not again once one of them has ended or did not answer."""
        until = time.monotonic() + WAIT
        while not self._failed:
            states = self._state[1:]
            if all(state == working for state in states):
                return True
            self._failed = ENDED in states or time.monotonic() > until
            time.sleep(1e-3)
        return False

    def close(self) -> None:
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@contextmanager
def neighbours_of(
    make_job: Callable[[], Callable[[], object]], count: int, launcher: Launcher
) -> Iterator[Neighbours | None]:
    """Yield neighbours that each do a job again and again, paused at first; None if there are none.

    `make_job` returns a job; as threads, every neighbour gets its own.

    >>> with neighbours_of(lambda: lambda: time.sleep(0.001), 1, "threads") as neighbours:
    ...     neighbours.work()
    True
    """
    if not count:
        yield None
        return
    as_threads = launcher == "threads"
    group = _Threads([make_job() for _ in range(count)]) if as_threads else _Processes(make_job(), count)
    try:
        yield group
    finally:
        group.close()
