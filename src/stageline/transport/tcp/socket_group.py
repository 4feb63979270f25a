"""Collectives of some ranks over their own connections: they need no port beside the one on which a rank listens.

For rows of numbers, texts and now and then a tensor, at start-up and between steps; gradients of replicas are summed
over gloo or NCCL. The ranks form the tree of `exchange`. A thread runs the collectives in the order in which they were
started, so a rank that computes meanwhile keeps no other one waiting.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import TransportError
from stageline.transport.tcp.channels import ChannelKind
from stageline.transport.tcp.exchange import CHECK_EVERY, Exchange
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.outbox import Outbox

Array = NDArray[Any]
LINGER = 0.2
"""Seconds after which the thread ends if nothing is to be done."""


class SocketWork:
    """A collective that was started; as torch's `Work`."""

    def __init__(self, run: Callable[[], Array]) -> None:
        self._run = run
        self._done = threading.Event()
        self._error: TransportError | None = None
        self._value: Array | None = None

    def run(self) -> None:
        """Run it, on the thread of the group."""
        try:
            self._value = self._run()
        except TransportError as error:
            self._error = error
        finally:
            self._done.set()

    def is_completed(self) -> bool:
        """Whether it has ended, or failed."""
        return self._done.is_set()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait for its end; raise RuntimeError if it failed, or if that takes longer."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the collective takes longer")
        if self._error is not None:
            raise self._error

    @property
    def value(self) -> Array:
        """The result."""
        assert self._value is not None
        return self._value


class SocketGroup:
    """One rank's end. All ranks start the same collectives in the same order.

    >>> links = Links(0, 1)
    >>> group = SocketGroup(links, [0], "collective")
    >>> work = group.all_gather(np.array([2.0, 3.0]))
    >>> work.wait()
    >>> work.value
    array([[2., 3.]])
    >>> group.close()
    >>> links.close()
    """

    def __init__(self, links: Links, ranks: Sequence[int], kind: ChannelKind) -> None:
        """Between these ranks, of which this is one, on connections of this kind, which nothing else uses."""
        self._outbox = Outbox()
        self._exchange = Exchange(links, self._outbox, ranks, kind=kind)
        self._ranks = list(ranks)
        self._works: deque[SocketWork] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def all_gather(self, row: Array) -> SocketWork:
        """Start collecting the rows of all ranks; they must have the same size."""
        own = np.array(row)
        return self._start(lambda: self._exchange.gather(own, self._check))

    def all_reduce(self, values: Array) -> SocketWork:
        """Start adding up arrays of one shape. All ranks get the same bits."""
        own = np.array(values)
        return self._start(lambda: self._exchange.reduce(own, self._check))

    def broadcast(self, data: bytes | None, source: int) -> SocketWork:
        """Start copying the bytes of one rank, of which the others need not know the number, to all."""
        place = self._ranks.index(source)
        own = None if data is None else np.frombuffer(data, dtype=np.uint8)
        return self._start(lambda: self._exchange.broadcast(own, place, self._check))

    def close(self) -> None:
        """End the thread; collectives that have not ended fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise TransportError("the connections of this job were given up")

    def _run(self, run: Callable[[], Array]) -> Array:
        value = run()
        while True:  # until the network has taken everything
            try:
                self._outbox.flush(time.monotonic() + CHECK_EVERY)
                return value
            except TransportError:
                if self._outbox.failed:
                    raise
                self._check()

    def _start(self, run: Callable[[], Array]) -> SocketWork:
        work = SocketWork(lambda: self._run(run))
        with self._changed:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="stageline collectives", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._works) or self._closed, LINGER)
                if not self._works:
                    self._thread = None
                    return
                work = self._works.popleft()
            work.run()
