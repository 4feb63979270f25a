"""Waking the monitor client's thread, also by SIGTERM.

A rank that a launcher ends by SIGTERM reports whom it blames before it ends. Python runs signal handlers in the main
thread alone, between two of its own instructions, so a rank that waits inside a collective never runs its handler.
Therefore the C-level handler only writes to a wakeup file descriptor, whatever the main thread is doing, and the
client's thread, which waits for that descriptor, does the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from types import FrameType


class Wakeup:
    """A socket pair that wakes a waiting thread; `close` restores the signal handler.

    >>> wakeup = Wakeup()
    >>> wakeup.wake()
    >>> wakeup.read()
    b'.'
    >>> wakeup.close()
    """

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd: int | None = None
        self._installed = False
        self.signalled = False
        """Whether SIGTERM has arrived."""
        self.attended = True
        """Whether a thread still reads; if not, the handler ends the process itself."""

    def install(self) -> bool:
        """Handle SIGTERM, unless the script does or this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return False
        signal.signal(signal.SIGTERM, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if self._previous_fd != -1:
            # The user's event loop needs it; the handler still wakes the thread once the main thread runs it.
            signal.set_wakeup_fd(self._previous_fd)
            self._previous_fd = None
        self._installed = True
        return True

    def read_sigterm(self) -> bool:
        """Read what was written; return whether SIGTERM arrived and the script has set no handler of its own since."""
        arrived = signal.SIGTERM in self.read()
        return arrived and self._installed and signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.attended:
            self.signalled = True
            self.wake(bytes([number]))
        else:
            end_by(number)

    def wake(self, data: bytes = b".") -> None:
        """Wake the thread that waits for `reader`."""
        with contextlib.suppress(OSError):
            self._writer.send(data)

    def read(self) -> bytes:
        """Return everything written since the last read."""
        try:
            return self.reader.recv(4096)
        except OSError:
            return b""

    def close(self) -> None:
        """Restore the default handler of SIGTERM, and close the sockets."""
        self.attended = False
        if self._installed and threading.current_thread() is threading.main_thread():
            if self._previous_fd is not None:
                wakeup_fd = signal.set_wakeup_fd(-1)
                if wakeup_fd not in (-1, self._writer.fileno()):
                    signal.set_wakeup_fd(wakeup_fd)
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False
        if not self._installed:  # otherwise the main thread's signals still write to them
            self.reader.close()
            self._writer.close()


def end_by(number: int) -> None:
    """End this process by a signal's default action, from any thread; Python sets handlers in the main thread only."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)
