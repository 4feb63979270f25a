"""The receiving end of a channel, which reads messages piece by piece."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from stageline.transport import wire
from stageline.transport.protocol import Traffic

ChannelKind: TypeAlias = Traffic | Literal["exchange", "collective", "replica"]
"""What a channel carries: the messages of a traffic, numbers that ranks exchange, or collectives of all ranks or of
those of one replica."""

T = TypeVar("T")
Open: TypeAlias = Callable[[wire.Prefix, bytes], tuple[T, list[memoryview]]]
"""Called when the header of a message has arrived: returns the result for the whole message, and where the bytes of its
tensors go."""

ACKNOWLEDGE, ACKNOWLEDGE_BYTES = 32, 1 << 20
"""A receiver acknowledges messages after so many, or after so many bytes."""
NOTICE = 0.1
"""Seconds in which a sender notices that a connection broke, until its receiver calls it."""
COUNT = struct.Struct("<q")
"""An acknowledgement: how many messages have arrived since the first connection."""
PIECES = 512
"""How many pieces of memory to pass to one system call; the limit is a little higher."""


class Guess(NamedTuple):
    """The message that will most likely arrive next: how it begins, what to return for it, and where its bytes go."""

    head: bytes
    opened: Any
    room: list[memoryview]


class ConnectionLost(Exception):
    """A connection ended in the middle of what it had to carry."""


class Inbound:
    """The receiving end of one channel; reads messages piece by piece.

    One thread reads. If the connection breaks, what it held of an unfinished message is forgotten: the sender opens
    another one, learns from the first acknowledgement on it how many messages have arrived, and sends the others again.
    """

    def __init__(self, source: int, kind: ChannelKind) -> None:
        """Not connected yet."""
        self.source = source
        self.kind = kind
        self.link: socket.socket | None = None
        self.offered: socket.socket | None = None
        """A new connection of the sender, for the thread that reads."""
        self.left = 0
        """How many messages are still to come in this step."""
        self.broken = ""
        """Why the connection broke, until the sender has opened another one."""
        self.call_after = 0.0
        """When to ask the sender for another one, unless it has noticed that by itself."""
        self._reading, self._handing_over = threading.Lock(), threading.Lock()
        self._count = self._unacknowledged = self._size = 0
        """How many messages have arrived, how many of them the sender does not know of, and their bytes."""
        self._begin()

    @property
    def connected(self) -> bool:
        """Whether there is a connection to read from."""
        return self.link is not None or self.offered is not None

    def _begin(self) -> None:
        self._ahead = b""
        """Bytes of the next message that were already read."""
        self._start()

    def _start(self) -> None:
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

        If the guess is right, this costs one system call and a comparison. Without a connection, this does not wait.
        """
        with self._reading:
            opened = self._take(open_it, end, alarm, guess)
        if self.offered is not None:
            self.adopt()
        return opened

    def _take(self, open_it: Open[T], end: float, alarm: socket.socket | None, guess: Guess | None) -> T | None:
        while True:
            if self.offered is not None:
                self._adopt()
            if self.link is None:
                return None
            try:
                if guess is not None and not self._got and not self._ahead and self._guess is None:
                    self._guess = guess
                    self._missing = [memoryview(self._head), *guess.room]
                opened = self._pull(open_it, self.link)
            except ConnectionLost as error:
                self._drop(str(error))
                continue
            if opened is not None:
                if self._unacknowledged >= ACKNOWLEDGE or self._size >= ACKNOWLEDGE_BYTES:
                    self._acknowledge()
                return opened
            if not self._wait(self.link, end - time.monotonic(), alarm):
                return None

    def offer(self, link: socket.socket) -> None:
        """Give it another connection of the sender, from any thread."""
        with self._handing_over:
            before, self.offered = self.offered, link
        if before is not None:
            before.close()
        old = self.link
        if not self.adopt() and old is not None:  # wakes the thread that reads from it
            with contextlib.suppress(OSError):
                old.shutdown(socket.SHUT_RDWR)

    def adopt(self) -> bool:
        """Use the offered connection, unless another thread is reading, which will.

        The sender learns at once what has arrived, although this rank may not read from the channel for a while.
        """
        if not self._reading.acquire(blocking=False):
            return False
        try:
            if self.offered is not None:
                self._adopt()
        finally:
            self._reading.release()
        return True

    def _adopt(self) -> None:
        """Read from the connection that the sender opened, and say how many messages have arrived."""
        old = self.link
        with self._handing_over:
            self.link, self.offered, self.broken = self.offered, None, ""
        if old is not None:
            old.close()
        self._begin()
        self._acknowledge()

    def _drop(self, why: str) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None
        self.broken, self.call_after = why, time.monotonic() + NOTICE

    def _acknowledge(self) -> None:
        """Let the sender forget what has arrived."""
        self._unacknowledged = self._size = 0
        with contextlib.suppress(OSError):  # the next read notices it
            assert self.link is not None
            self.link.send(COUNT.pack(self._count))

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
                self._count += 1
                self._unacknowledged += 1
                self._size += self._got
                self._start()
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
            got = link.recvmsg_into(self._missing[:PIECES])[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error
        if not got:
            raise ConnectionLost("it closed the connection")
        return got

    def _check_guess(self, guess: Guess) -> None:
        """The head has arrived: continue if it is as guessed, else put back what was read beyond it."""
        self._guess = None
        if self._head == guess.head:
            self._opened = guess.opened
        else:
            self._ahead = b"".join(guess.room)[: self._got - wire.HEAD]
            self._missing = []


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
