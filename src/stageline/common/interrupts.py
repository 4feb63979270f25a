"""Signal handling: Ctrl-C on the command line, stopping a training job, and SIGTERM in a rank that waits for others.

A command exits at once, with one line and exit code 130, never with a traceback. Python raises KeyboardInterrupt at
whatever statement runs, and the first seconds of a command are mostly imports: an exception there leaves half-imported
modules behind, or is swallowed by native code. So the command installs a handler that raises nothing before it imports
anything else. Once there is something to save, `StopSignals` takes over. A program that uses the library keeps Python's
own handling. In every rank of a job, `Wakeup` passes SIGTERM on to the thread that talks to the failure monitor.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

EXIT_CODE = 130
GRACE = 0.5
"""Seconds that the main thread has to handle a signal before the watching thread ends the process instead."""

_cleanups: list[Callable[[], None]] = []
_speaking = threading.Lock()
_owner = 0
"""The process that called `install`; a forked child exits silently."""
_launched: int | None = None
"""The rank of this process, if the command started it for a job; the command says that it was interrupted."""


def install(launched: int | None = None) -> None:
    """Make SIGINT end this process at once; `launched` is its rank, if the command started it."""
    global _owner, _launched
    signal.signal(signal.SIGINT, end)
    _launched = launched
    if not _owner:
        _owner = os.getpid()
        _watch()


def active() -> bool:
    """Whether SIGINT ends the process at once: it is the command, and no other handler has taken over.

    >>> active()    # not a command
    False
    """
    return signal.getsignal(signal.SIGINT) is end


@contextmanager
def raised() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in this block, for a search that can return its best result so far.

    >>> before = signal.signal(signal.SIGINT, end)
    >>> with raised():
    ...     signal.getsignal(signal.SIGINT) is signal.default_int_handler
    True
    >>> _ = signal.signal(signal.SIGINT, before)
    """
    was_active = active()
    if was_active:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if was_active:
            signal.signal(signal.SIGINT, end)


def at_end(cleanup: Callable[[], None]) -> Callable[[], None]:
    """Register a function to call before an interrupt ends the process; return a function that unregisters it.

    >>> forget = at_end(lambda: None)
    >>> forget()
    """
    _cleanups.append(cleanup)

    def forget() -> None:
        with suppress(ValueError):
            _cleanups.remove(cleanup)

    return forget


def end_line() -> None:
    """End an unfinished line of stdout; registered with `at_end` while text is streamed.

    If stdout and stderr are both a terminal, the message itself starts a new line.
    """
    if not (_is_terminal(1) and _is_terminal(2)):
        _write(1, "\n")


def end(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    """Clean up, print one line, and end this process."""
    if os.getpid() == _owner:
        _clean_up()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the signal may have come in the middle of a write
                stream.flush()
        _speak()
    os._exit(EXIT_CODE)


@contextmanager
def cleaned_up_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process at once in this block, after what `at_end` registered."""

    def clean_up(number: int, frame: FrameType | None) -> None:
        _clean_up()
        os._exit(128 + number)

    before = signal.signal(signal.SIGTERM, clean_up)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _clean_up() -> None:
    for cleanup in list(_cleanups):
        with suppress(Exception):
            cleanup()


def _speak() -> None:
    """Write the message once, without Python's buffers."""
    if _speaking.acquire(blocking=False) and _launched is None:
        say_interrupted()


def say_interrupted() -> None:
    """Print that the command was interrupted."""
    _show_cursor()
    _write(2, "\nstageline: interrupted\n" if _is_terminal(2) else "stageline: interrupted\n")


def _watch() -> None:
    """End the process even while the main thread is in native code, where Python runs no handlers."""
    import socket

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    if (previous := signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(previous)
        return

    def listen() -> None:
        assert writer  # keeps it open
        while signals := reader.recv(4096):
            if signal.SIGINT in signals and active():
                time.sleep(GRACE)  # usually, the main thread is faster and can flush its output
                if active():
                    _clean_up()
                    _speak()
                    os._exit(EXIT_CODE)

    os.register_at_fork(after_in_child=_forget_wakeup)
    threading.Thread(target=listen, name="stageline interrupts", daemon=True).start()


def _forget_wakeup() -> None:
    """Keep a forked child from writing its signals to the thread of its parent."""
    with suppress(ValueError):  # only the main thread may do this
        signal.set_wakeup_fd(-1)


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
        self._restore: dict[int, Callable[[], object]] = {}

    @property
    def name(self) -> str:
        """The name of the signal; empty before one is received."""
        return signal.Signals(self.number).name if self.number else ""

    def __enter__(self) -> StopSignals:
        self._install(signal.SIGTERM)
        if not active():
            self._install(signal.SIGINT)
        return self

    def begin(self) -> None:
        """Record Ctrl-C, too: from now on there is something to save."""
        self._install(signal.SIGINT)

    def _install(self, number: int) -> None:
        if number not in self._restore and threading.current_thread() is threading.main_thread():
            self._restore[number] = partial(signal.signal, number, signal.signal(number, self._receive))

    def __exit__(self, *_: object) -> None:
        for restore in self._restore.values():
            restore()
        self._restore.clear()

    def _receive(self, number: int, _: FrameType | None) -> None:
        again = self.number == signal.SIGINT == number
        self.number = self.number or number
        if again:
            if not _launched:
                _show_cursor()
                _write(2, "\nstopped immediately; the last published checkpoint is intact\n")
            os._exit(128 + number)
        elif number == signal.SIGINT and _is_terminal(2) and not _launched:
            _write(
                2,
                "\nstopping after this step is finished and saved; press Ctrl-C again to stop immediately, "
                "without saving\n",
            )


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


def _show_cursor() -> None:
    """Show the cursor, which a progress line hides."""
    if _is_terminal(1):
        _write(1, "\x1b[?25h")


def _is_terminal(handle: int) -> bool:
    with suppress(OSError):
        return os.isatty(handle)
    return False


def _write(handle: int, text: str) -> None:
    """Write without Python's buffers, which the signal may have interrupted."""
    with suppress(OSError):
        os.write(handle, text.encode())


class Wakeup:
    """A socket pair that wakes a waiting thread, also by SIGTERM; `close` restores the signal handler.

    A rank that a launcher ends by SIGTERM reports whom it blames before it ends. Python runs signal handlers in the
    main thread alone, between two of its own instructions, so a rank that waits inside a collective never runs its
    handler. Therefore the C-level handler only writes to a wakeup file descriptor, whatever the main thread is doing,
    and the thread that waits for that descriptor does the rest.

    >>> wakeup = Wakeup()
    >>> wakeup.wake()
    >>> wakeup.read()
    b'.'
    >>> wakeup.close()
    """

    def __init__(self) -> None:
        import socket

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
        with suppress(OSError):
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
    import ctypes

    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)
