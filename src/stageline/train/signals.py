"""Ending on request: SIGTERM and Ctrl-C let the step be finished, and a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from stageline.common import interrupts


class StopSignals:
    """Notes a request to stop while it is entered; training goes on until somebody asks.

    In the `stageline` command, Ctrl-C ends the process at once until `begin` is called: there is nothing to save yet.

    >>> with StopSignals() as asked:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     asked.name
    'SIGTERM'
    """

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.number = 0
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The signal that asked to stop; empty as long as none did."""
        return signal.Signals(self.number).name if self.number else ""

    def __enter__(self) -> StopSignals:
        """Take the signals over; only the main thread can."""
        self._take(signal.SIGTERM)
        if not interrupts.active():
            self._take(signal.SIGINT)
        return self

    def begin(self) -> None:
        """From now on there is something to save: note Ctrl-C too."""
        self._take(signal.SIGINT)

    def _take(self, number: int) -> None:
        if number not in self._before and threading.current_thread() is threading.main_thread():
            self._before[number] = signal.signal(number, self._hear)

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, _: FrameType | None) -> None:
        again = self.number == signal.SIGINT == number
        self.number = self.number or number
        if again:
            show = "\x1b[?25h" if _shows(1) else ""  # a line that updates hides the cursor
            _write(1, show)
            _write(2, "\nended at once; the last published checkpoint is whole\n")
            os._exit(128 + number)
        elif number == signal.SIGINT and _shows(2):
            _write(2, "\nstopping once this step is finished and saved; Ctrl-C again ends at once, without saving\n")


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process at once, where there is nothing to save and native code waits for other ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _shows(handle: int) -> bool:
    with suppress(OSError):
        return os.isatty(handle)
    return False


def _write(handle: int, text: str) -> None:
    """Write past Python's buffers, which the signal may have come in the middle of."""
    with suppress(OSError):
        os.write(handle, text.encode())
