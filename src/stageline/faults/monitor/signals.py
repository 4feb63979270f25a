"""Last words: a rank that a launcher ends by SIGTERM says first whom it blames.

Python runs a signal's handler in the main thread alone, and only between two of its own instructions: a rank that waits
inside a collective would never run it. So the bare handler does nothing but wake the control thread, through the
file descriptor that Python's C code writes to whatever the main thread does, and that thread says the last words.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from types import FrameType


class Bell:
    """Wakes the control thread, also when a SIGTERM arrives; everything is put back by `close`.

    >>> bell = Bell()
    >>> bell.ring()
    >>> bell.answer()
    b'.'
    >>> bell.close()
    """

    def __init__(self) -> None:
        """A pair of sockets, one of which can be waited for."""
        self.ear, self._rope = socket.socketpair()
        self.ear.setblocking(False)
        self._rope.setblocking(False)
        self._previous_fd: int | None = None
        self.listens = self.rung = False
        self.attended = True
        """Whether a thread still answers; if not, the handler ends the process by itself."""

    def listen(self) -> bool:
        """Take SIGTERM over, if nobody else has and this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return False
        signal.signal(signal.SIGTERM, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._rope.fileno(), warn_on_full_buffer=False)
        if self._previous_fd != -1:
            # An event loop of the user's needs it; the handler still rings when the main thread comes to run it.
            signal.set_wakeup_fd(self._previous_fd)
            self._previous_fd = None
        self.listens = True
        return True

    @property
    def ours(self) -> bool:
        """Whether SIGTERM still is ours: a script may have set its own handler since."""
        return self.listens and signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.attended:
            self.rung = True
            self.ring(bytes([number]))
        else:
            end_by(number)

    def ring(self, what: bytes = b".") -> None:
        """Wake the control thread."""
        with contextlib.suppress(OSError):
            self._rope.send(what)

    def answer(self) -> bytes:
        """What was rung since the last time."""
        try:
            return self.ear.recv(4096)
        except OSError:
            return b""

    def close(self) -> None:
        """Give the signal back."""
        self.attended = False
        if self.listens and threading.current_thread() is threading.main_thread():
            if self._previous_fd is not None:
                found = signal.set_wakeup_fd(-1)
                if found not in (-1, self._rope.fileno()):
                    signal.set_wakeup_fd(found)
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.listens = False
        if not self.listens:  # else the main thread's signals still write to it
            self.ear.close()
            self._rope.close()


def end_by(number: int) -> None:
    """End this process by a signal's default, from any thread; Python lets only the main thread set a handler."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)
