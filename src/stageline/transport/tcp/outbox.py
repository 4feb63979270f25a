"""The sending end of a channel, which keeps what may have to be sent again; and the queue of a rank's messages."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from stageline.common.errors import TransportError
from stageline.transport._torch_private import version_of
from stageline.transport.tcp.channels import ACKNOWLEDGE, ACKNOWLEDGE_BYTES, COUNT, PIECES, ChannelKind, after

COPIED = 1 << 15
"""Up to this many bytes, a copy of a message is kept; the tensors of a larger one are kept as they are."""

Ready = Callable[[], object]
"""Waits until a GPU has written the memory of a message."""


class Sent(NamedTuple):
    """A message that may have to be sent again."""

    pieces: list[memoryview]
    ready: Ready | None
    tensors: list[tuple[Tensor, int, int]]
    """The owners of the memory, with their versions and addresses when the message was sent."""
    size: int
    """How many bytes it has."""

    def copied(self) -> Sent:
        """The same in memory that nobody changes; raises TransportError if its tensors have changed."""
        if not self.tensors and self.ready is None:
            return self
        if self.ready is not None:
            self.ready()
        copies: list[memoryview] = []
        if self._is_intact():
            copies = [memoryview(bytes(piece)) for piece in self.pieces]
        if not self._is_intact():
            raise TransportError("a message cannot be resent because its tensor was changed in place after it was sent")
        return Sent(copies, None, [], self.size)

    def _is_intact(self) -> bool:
        return all(
            version_of(tensor) == version and tensor.data_ptr() == pointer and tensor.untyped_storage().nbytes()
            for tensor, version, pointer in self.tensors
        )


class Outbound:
    """The sending end of one channel; any thread may write.

    What was sent is kept until the receiver acknowledges it: tensors as they are, so that keeping them costs nothing.
    When the connection breaks, `repair` opens another one, and sends again what did not arrive.
    """

    def __init__(
        self, target: int, kind: ChannelKind, link: socket.socket, repair: Callable[[Outbound], None] | None = None
    ) -> None:
        """Connected, and known to the other end. `repair` is called when the connection broke, and must return soon."""
        self.target = target
        self.kind = kind
        self.link = link
        self.connections = 1
        """How many there have been, the broken one included: what was queued for an earlier one is kept here."""
        self.repairing = False
        """Whether there is no connection yet in place of one that broke."""
        self.failed = ""
        """Why the connection cannot be opened again."""
        self.lock = threading.RLock()
        self._since = time.monotonic()
        self._repair = repair
        self._kept: deque[Sent] = deque()
        self._first = self._size = 0
        """The number of the first message that is kept, and how many bytes are kept."""
        self._counts = b""

    def put(
        self, pieces: list[memoryview], ready: Ready | None, owner: Sequence[Tensor], *, write: bool
    ) -> tuple[list[memoryview] | None, int]:
        """Keep a message and write what the socket accepts; return the rest, or None while there is no connection.

        And the number of the connection.
        """
        with self.lock:
            if self.failed:
                raise ConnectionError(self.failed)
            sent = _keepable(pieces, ready, owner)
            if self.repairing:
                self._keep(sent.copied())
                return None, self.connections
            if len(self._kept) >= 2 * ACKNOWLEDGE or self._size >= 2 * ACKNOWLEDGE_BYTES:
                self.collect()
            self._kept.append(sent)
            self._size += sent.size
            rest = sent.pieces if not write or ready is not None else self.write(sent.pieces)
            return rest, self.connections

    def write(self, pieces: list[memoryview]) -> list[memoryview] | None:
        """Write what the socket accepts without waiting; return the rest, or None if the connection broke.

        The caller holds the lock.
        """
        try:
            while pieces:
                pieces = after(pieces, self.link.sendmsg(pieces[:PIECES]))
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(str(error))
            return None
        return pieces

    def collect(self) -> None:
        """Forget what the receiver has acknowledged; the caller holds the lock."""
        try:
            self._counts += self.link.recv(4096)
        except OSError:
            return  # there is nothing, or the next write notices an end
        whole = len(self._counts) - len(self._counts) % COUNT.size
        if whole:
            self.forget(COUNT.unpack_from(self._counts, whole - COUNT.size)[0])
            self._counts = self._counts[whole:]

    def forget(self, count: int) -> None:
        """Forget the messages before this number."""
        while self._kept and self._first < count:
            self._first += 1
            self._size -= self._kept.popleft().size

    def lose(self, why: str) -> None:
        """The connection broke."""
        with self.lock:
            if self.repairing or self.failed:
                return
            self.connections += 1
            if self._repair is None:
                self.failed = why
                return
            self.repairing = True
            try:
                if self._kept:  # the model may change what it has just sent
                    self._kept[-1] = self._kept[-1].copied()
            except TransportError as error:
                self.fail(str(error))
                return
        self._repair(self)

    def resume(self, link: socket.socket, count: int) -> None:
        """Use another connection, on which so many messages are known to have arrived."""
        with self.lock:
            self.link.close()
            self.link, self._counts, self._since = link, b"", time.monotonic()
            self.forget(count)

    def lost_message(self, number: int) -> Sent | None:
        """A message that must be sent again; None if there are no more, and the connection is as good as new."""
        with self.lock:
            if number < self._first + len(self._kept):
                kept = self._kept[number - self._first].copied()
                self._kept[number - self._first] = kept
                return kept
            self.repairing = False
            return None

    @property
    def age(self) -> float:
        """For how many seconds there has been this connection."""
        return time.monotonic() - self._since

    @property
    def first(self) -> int:
        """The number of the first message that is kept."""
        return self._first

    def fail(self, why: str) -> None:
        """Give the connection up."""
        with self.lock:
            self.failed, self.repairing = why, False
            self._kept.clear()

    def _keep(self, sent: Sent) -> None:
        self._kept.append(sent)
        self._size += sent.size


def _keepable(pieces: list[memoryview], ready: Ready | None, owner: Sequence[Tensor]) -> Sent:
    size = sum([len(piece) for piece in pieces])
    if ready is None and (size <= COPIED or any(tensor.is_inference() for tensor in owner)):
        return Sent([memoryview(b"".join(pieces))], None, [], size)
    return Sent(pieces, ready, [(tensor, version_of(tensor), tensor.data_ptr()) for tensor in owner], size)


class Outbox:
    """Sends messages in order.

    The rank's own thread writes what the network accepts at once, so a small message needs no other thread. A thread
    that ends with the step sends the rest, and what must first come from a GPU. It writes to any receiver that accepts
    data, so no receiver waits for another.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Outbound, deque[_Queued]] = {}
        self._repaired: set[Outbound] = set()
        """The receivers whose connections broke while there was something to send."""
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

    def send(
        self, link: Outbound, pieces: list[memoryview], ready: Ready | None = None, owner: Sequence[Tensor] = ()
    ) -> None:
        """Send in the order of the calls, each message after its `ready` has returned.

        `owner` keeps the memory alive as long as it is needed.
        """
        if link.target in self._gone:
            raise TransportError(f"an earlier message could not be sent: {self._problem()}")
        with self._changed:
            idle = not self._waiting.get(link)
        try:
            rest, connection = link.put(pieces, ready, owner, write=idle)
        except OSError as error:
            self._fail(link.target, error)
            raise TransportError(f"a message could not be sent: {self._problem()}") from error
        if rest is None:
            self._repaired.add(link)
            return
        if not rest:
            return
        if ready is None and owner:
            # The memory belongs to the model, which may change it, so queue a copy.
            rest, owner = [memoryview(bytes(piece)) for piece in rest], ()
        with self._changed:
            self._waiting.setdefault(link, deque()).append(_Queued(rest, ready, owner, connection))
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
        for link in list(self._repaired):
            if link.failed:
                self._fail(link.target, ConnectionError(link.failed))
            if link.repairing:
                late += 1
            else:
                self._repaired.discard(link)
        self._drop_done()
        while self._apart and self._failure is None and time.monotonic() < end:
            time.sleep(0.0001)
            self._drop_done()
        if self._failure is not None:
            raise TransportError(f"a message could not be sent: {self._problem()}") from self._failure[1]
        if late or self._apart:
            raise TransportError(f"{late + len(self._apart)} messages were not received")
        self.close(max(0.1, end - time.monotonic()))

    def close(self, patience: float) -> None:
        """End the thread."""
        with self._changed:  # not while another thread starts it
            thread = self._thread
        if thread is not None:
            self._ending = True
            self._wake()
            if thread.is_alive():
                thread.join(patience)
            if not thread.is_alive():
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
                for link, jobs in self._waiting.items():
                    while jobs and jobs[0].connection != link.connections:
                        self._repaired.add(link)
                        jobs.popleft()  # its connection broke, and it is sent again on the next one
                self._changed.notify_all()
                links = {link.link.fileno(): link for link, jobs in self._waiting.items() if jobs}
            poll = select.poll()
            poll.register(waker, select.POLLIN)
            for number in links:
                if number >= 0:
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
        queued = jobs[0]
        try:
            if queued.ready is not None:
                queued.ready()
            with link.lock:
                rest = link.write(queued.pieces) if queued.connection == link.connections else None
        except BaseException as error:
            self._fail(link.target, error)
            return
        with self._changed:
            if rest:
                jobs[0] = queued._replace(pieces=rest, ready=None)
            elif rest is not None:
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


class _Queued(NamedTuple):
    """What is left of a message, what it waits for, the owner of its memory, and the connection it was queued for."""

    pieces: list[memoryview]
    ready: Ready | None
    owner: Sequence[Tensor]
    connection: int
