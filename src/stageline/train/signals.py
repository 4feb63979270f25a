"""Stop signals: SIGTERM and Ctrl-C finish the current step; a second Ctrl-C ends the process at once."""

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
    """Records the first stop signal inside the block.

    In the `stageline` command, Ctrl-C ends the process at once until `begin` is called: there is nothing to save yet.

    >>> with StopSignals() as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     stop.name
    'SIGTERM'
    """

    def __init__(self) -> None:
        self.number = 0
        """The number of the signal; 0 before one is received."""
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The name of the signal; empty before one is received."""
        return signal.Signals(self.number).name if self.number else ""

    def __enter__(self) -> StopSignals:
        self._install(signal.SIGTERM)
        if not interrupts.active():
            self._install(signal.SIGINT)
        return self

    def begin(self) -> None:
        """Record Ctrl-C, too: from now on there is something to save."""
        self._install(signal.SIGINT)

    def _install(self, number: int) -> None:
        if number not in self._before and threading.current_thread() is threading.main_thread():
            self._before[number] = signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, _: FrameType | None) -> None:
        again = self.number == signal.SIGINT == number
        self.number = self.number or number
        if again:
            show = "\x1b[?25h" if _is_terminal(1) else ""  # the progress line hides the cursor
            _write(1, show)
            _write(2, "\nended at once; the last published checkpoint is intact\n")
            os._exit(128 + number)
        elif number == signal.SIGINT and _is_terminal(2):
            _write(2, "\nstopping once this step is finished and saved; Ctrl-C again ends at once, without saving\n")


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process at once, while there is nothing to save and native code waits for other ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_terminal(handle: int) -> bool:
    with suppress(OSError):
        return os.isatty(handle)
    return False


def _write(handle: int, text: str) -> None:
    """Write without Python's buffers, which the signal may have interrupted."""
    with suppress(OSError):
        os.write(handle, text.encode())
