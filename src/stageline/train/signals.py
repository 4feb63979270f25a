"""Ending on request: SIGTERM and Ctrl-C let the step be finished, and a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """Notes a request to stop while it is entered; training goes on until somebody asks.

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
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, _: FrameType | None) -> None:
        again = self.number == signal.SIGINT == number
        self.number = self.number or number
        if again:
            sys.stderr.write("\nended at once; the last published checkpoint is whole\n")
            sys.stderr.flush()
            os._exit(128 + number)
