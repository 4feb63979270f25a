"""The two ends of a channel: messages are read piece by piece, and sent in order without waiting for the receiver."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from stageline.common.errors import TransportError
from stageline.transport import wire
from stageline.transport.protocol import Traffic

ChannelKind: TypeAlias = Traffic | Literal["exchange"]
"""What a channel carries: the messages of a traffic, or numbers that ranks exchange."""

T = TypeVar("T")
Open: TypeAlias = Callable[[wire.Prefix, bytes], tuple[T, list[memoryview]]]
"""Called when the header of a message has arrived: returns the result for the whole message, and where the bytes of its
tensors go."""

_PIECES = 512
"""How many pieces of memory to pass to one system call; the limit is a little higher."""


class Guess(NamedTuple):
    """The message that will most likely arrive next: how it begins, what to return for it, and where its bytes go."""

    head: bytes
    opened: Any
    room: list[memoryview]


class Inbound:
    """The receiving end of one channel; reads messages piece by piece."""

    def __init__(self, source: int, kind: ChannelKind) -> None:
        """Not connected yet."""
        self.source = source
        self.kind = kind
        self.link: socket.socket | None = None
        self.left = 0
        """How many messages are still to come in this step."""
        self._ahead = b""
        """Bytes of the next message that were already read."""
        self._begin()

    def _begin(self) -> None:
        self._head = bytearray(wire.HEAD)
        self._prefix: wire.Prefix | None = None
        self._text = b""
        self._more = bytearray()
        self._opened: Any = None
        self._missing = [memoryview(self._head)]
        self._got = 0
        self._guess: Guess | None = None

    def take(
        self, open_it: Open[T], end: float, alarm: socket.socket | None = None, guess: Guess | None = None
    ) -> T | None:
        """Wait for the next message until a moment of `time.monotonic`, or until the alarm has something to read.

        If the guess is right, this costs one system call and a comparison.
        """
        if guess is not None and not self._got and not self._ahead and self._guess is None:
            self._guess = guess
            self._missing = [memoryview(self._head), *guess.room]
        while self.link is not None:
            opened = self._pull(open_it, self.link)
            if opened is not None:
                return opened
            if not self._wait(self.link, end - time.monotonic(), alarm):
                return None
        return None

    @staticmethod
    def _wait(link: socket.socket, timeout: float, alarm: socket.socket | None) -> bool:
        """Whether there is something to read in time, and no alarm."""
        poll = select.poll()
        poll.register(link, select.POLLIN)
        if alarm is not None:
            poll.register(alarm, select.POLLIN)
        events = poll.poll(max(0.0, 1e3 * timeout))
        return bool(events) and (alarm is None or alarm.fileno() not in [number for number, _ in events])

    def _pull(self, open_it: Open[T], link: socket.socket) -> T | None:
        """Read the available bytes; return a whole message, or None while a part of it is missing."""
        while True:
            while self._missing:
                got = self._receive(link)
                if got is None:
                    return None
                self._got += got
                self._missing = after(self._missing, got)
                if self._guess is not None and self._got >= wire.HEAD:
                    self._check_guess(self._guess)
            if self._opened is not None:
                opened: T = self._opened
                self._begin()
                return opened
            if self._prefix is None:
                self._prefix, self._text = wire.read_head(bytes(self._head))
                self._more = bytearray(self._prefix.text - len(self._text))
                self._missing = [memoryview(self._more)] if self._more else []
            if not self._missing:
                self._opened, self._missing = open_it(self._prefix, self._text + bytes(self._more))

    def _receive(self, link: socket.socket) -> int | None:
        """Fill the missing part with the available bytes; None if there are none."""
        if self._ahead:
            room, size = self._missing[0], min(len(self._missing[0]), len(self._ahead))
            room[:size] = self._ahead[:size]
            self._ahead = self._ahead[size:]
            return size
        try:
            got = link.recvmsg_into(self._missing[:_PIECES])[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransportError(f"the connection broke: {error}") from error
        if not got:
            raise TransportError("it closed the connection")
        return got

    def _check_guess(self, guess: Guess) -> None:
        """The head has arrived: continue if it is as guessed, else put back what was read beyond it."""
        self._guess = None
        if self._head == guess.head:
            self._opened = guess.opened
        else:
            self._ahead = b"".join(guess.room)[: self._got - wire.HEAD]
            self._missing = []


class Outbound:
    """The sending end of one channel."""

    def __init__(self, target: int, link: socket.socket) -> None:
        """Connected, and known to the other end."""
        self.target = target
        self.link = link

    def write(self, pieces: list[memoryview]) -> list[memoryview]:
        """Write what the socket accepts without waiting; return the rest."""
        while pieces:
            try:
                sent = self.link.sendmsg(pieces[:_PIECES])
            except BlockingIOError:
                return pieces
            pieces = after(pieces, sent)
        return []


def after(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of pieces of memory after this many bytes of them are done.

    >>> [bytes(piece) for piece in after([memoryview(b"ab"), memoryview(b"cde")], 3)]
    [b'de']
    """
    for index, piece in enumerate(pieces):
        if done < len(piece):
            return [piece[done:], *pieces[index + 1 :]]
        done -= len(piece)
    return []


Ready = Callable[[], object]
"""Waits until a GPU has written the memory of a message."""


class Outbox:
    """Sends messages in order.

    The rank's own thread writes what the network accepts at once, so a small message needs no other thread. A thread
    that ends with the step sends the rest, and what must first come from a GPU. It writes to any receiver that accepts
    data, so no receiver waits for another.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Outbound, deque[tuple[list[memoryview], Ready | None, object]]] = {}
        """For each receiver: what is left of a message, what it waits for, and the owner of its memory."""
        self._apart: deque[tuple[Any, object]] = deque()
        self._thread: threading.Thread | None = None
        self._wakers: tuple[socket.socket, socket.socket] | None = None
        """While there is a thread: the sockets that wake it, to write to and to read from."""
        self._ending = False
        self._failure: tuple[int, BaseException] | None = None
        self._gone: set[int] = set()
        """Ranks to which a message could not be sent; the others still get theirs."""

    @property
    def failed(self) -> bool:
        """Whether something could not be sent."""
        return self._failure is not None

    @property
    def kept(self) -> int:
        """How many messages are not sent yet."""
        with self._changed:
            return sum(map(len, self._waiting.values())) + len(self._apart)

    def send(self, link: Outbound, pieces: list[memoryview], ready: Ready | None = None, owner: object = None) -> None:
        """Send in the order of the calls, each message after its `ready` has returned.

        `owner` keeps the memory alive as long as it is needed.
        """
        if link.target in self._gone:
            raise TransportError(f"an earlier message could not be sent: {self._problem()}")
        with self._changed:
            idle = not self._waiting.get(link)
        if idle and ready is None:
            try:
                pieces = link.write(pieces)
            except OSError as error:
                self._fail(link.target, error)
                raise TransportError(f"a message could not be sent: {self._problem()}") from error
            if not pieces:
                return
        if ready is None:
            # The memory belongs to the model, which may change it, so queue a copy.
            pieces, owner = [memoryview(bytes(piece)) for piece in pieces], None
        with self._changed:
            self._waiting.setdefault(link, deque()).append((pieces, ready, owner))
            if self._thread is None or self._ending:
                self._end_late()
                self._ending, self._wakers = False, socket.socketpair()
                for waker in self._wakers:
                    waker.setblocking(False)
                self._thread = threading.Thread(
                    target=self._send_all, args=(self._wakers[1],), name="stageline sender", daemon=True
                )
                self._thread.start()
        self._wake()

    def keep(self, sent: tuple[Any, object]) -> None:
        """Keep a tensor that a process group is sending, until it is sent."""
        self._apart.append(sent)
        self._drop_done()

    def flush(self, end: float) -> None:
        """Wait until everything is sent, at most until a moment of `time.monotonic`; then end the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._waiting.values()), max(0.0, end - time.monotonic()))
            late = sum(map(len, self._waiting.values()))
        self._drop_done()
        while self._apart and self._failure is None and time.monotonic() < end:
            time.sleep(0.0001)
            self._drop_done()
        if self._failure is not None:
            raise TransportError(f"a message could not be sent: {self._problem()}") from self._failure[1]
        if late or self._apart:
            raise TransportError(f"{late + len(self._apart)} messages were not taken by their receivers")
        self.close(max(0.1, end - time.monotonic()))

    def close(self, patience: float) -> None:
        """End the thread."""
        if self._thread is not None:
            self._ending = True
            self._wake()
            self._thread.join(patience)
            if not self._thread.is_alive():
                self._thread = None
                for waker in self._wakers or ():
                    waker.close()
                self._wakers = None

    def _end_late(self) -> None:
        """Wait for a thread that is ending, before another one starts."""
        if self._thread is not None:
            self._wake()
            self._thread.join()
            self._thread = None
            for waker in self._wakers or ():
                waker.close()

    def _wake(self) -> None:
        if self._wakers is not None:
            with contextlib.suppress(OSError):
                self._wakers[0].send(b"!")

    def _problem(self) -> str:
        target, error = self._failure or (-1, None)
        return f"to rank {target}: {error}"

    def _drop_done(self) -> None:
        while self._apart and self._apart[0][0].is_completed():
            self._apart.popleft()

    def _send_all(self, waker: socket.socket) -> None:
        while not self._ending:
            with self._changed:
                links = {link.link.fileno(): link for link, jobs in self._waiting.items() if jobs}
            poll = select.poll()
            poll.register(waker, select.POLLIN)
            for number in links:
                poll.register(number, select.POLLOUT)
            for number, _ in poll.poll():
                if number in links:
                    self._send_some(links[number])
            with contextlib.suppress(BlockingIOError):
                while waker.recv(4096):
                    pass

    def _send_some(self, link: Outbound) -> None:
        """Write as much of a receiver's first queued message as it accepts."""
        jobs = self._waiting[link]
        pieces, ready, owner = jobs[0]
        try:
            if ready is not None:
                ready()
            pieces = link.write(pieces)
        except BaseException as error:
            self._fail(link.target, error)
            return
        with self._changed:
            if pieces:
                jobs[0] = (pieces, None, owner)
            else:
                jobs.popleft()
                self._changed.notify_all()

    def _fail(self, target: int, error: BaseException) -> None:
        with self._changed:
            self._gone.add(target)
            self._failure = self._failure or (target, error)
            for link, jobs in self._waiting.items():
                if link.target == target:
                    jobs.clear()
            self._changed.notify_all()
