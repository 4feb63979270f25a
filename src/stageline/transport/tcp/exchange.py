"""Collectives of some ranks over their own connections: they need no port besides the one on which a rank listens.

For rows of numbers, texts and now and then a tensor, at start-up, between steps and at the end of a step; gradients of
replicas are summed over gloo or NCCL. An exchange runs where it is called; a group runs its collectives on a thread, in
the order in which they were started, so a rank that computes meanwhile keeps no other one waiting.
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
from stageline.transport import wire
from stageline.transport.clock_alignment import TRIPS, Alignment, Reading, aligned, clock_number, offset_of
from stageline.transport.tcp.channels import ChannelKind, Inbound
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.outbox import Outbound, Outbox

Array = NDArray[Any]
TURNS = 1 << 20
"""The turn of step n of transport k is k + n * TURNS."""

CHECK_EVERY = 0.05
"""Seconds after which a rank that waits for another checks whether that one is alive."""

FAN = 16
"""Maximum number of ranks that send to one. A few messages in a row cost less than another level of the tree."""

LINGER = 0.2
"""Seconds after which the thread of a group ends if nothing is to be done."""


class Exchange:
    """One rank's end. The ranks form a tree; rows go up to its root, and all of them from there down to every rank:

                 0                rows go up as soon as they are known, so those of early ranks are there when the
         ╭────┬──┴─┬────╮         last one is ready; from then on it takes two messages, up and down, for every level
         1    2    …    16        of the tree
       ╭─┴─╮
       17  …

    >>> from stageline.transport.tcp.links import Links
    >>> links = Links(0, 1)
    >>> Exchange(links, Outbox(), [0]).gather(np.array([2.0, 3.0]), check=lambda: None)
    array([[2., 3.]])
    >>> links.close()
    """

    def __init__(
        self,
        links: Links,
        outbox: Outbox,
        ranks: Sequence[int],
        number: int = 0,
        kind: ChannelKind = "exchange",
    ) -> None:
        """Between these ranks, of which this is one; `number` identifies the pipeline on shared connections."""
        self._links, self._outbox, self._kind = links, outbox, kind
        self._ranks = list(ranks)
        size = len(self._ranks)
        self._place = place = self._ranks.index(links.rank)
        self._above = None if place == 0 else self._ranks[(place - 1) // FAN]
        below = range(FAN * place + 1, min(FAN * place + FAN, size - 1) + 1)
        self._below = [(self._ranks[child], len(_subtree(child, size))) for child in below]
        """The ranks right below this one, and how many rows each sends."""
        self._inbound: dict[int, Inbound] = {}
        self._outbound: dict[int, Outbound] = {}
        self._order = np.argsort(_subtree(0, size)) if place == 0 else None
        self._rounds = number

    def gather(self, row: NDArray[np.float64], check: Callable[[], None]) -> NDArray[np.float64]:
        """The rows of all ranks, in order; `check` is called now and then while this waits, and may raise."""
        self._rounds += TURNS
        known = np.ascontiguousarray(row, dtype=np.float64)[None]
        width = known.shape[1]
        for child, ranks in self._below:
            known = np.concatenate([known, self._receive(child, ranks * width, check).reshape(ranks, width)])
        if self._above is not None:
            self._send(self._above, known)
            known = self._receive(self._above, len(self._ranks) * width, check).reshape(-1, width)
        else:
            known = known[self._order]
        for child, _ in self._below:
            self._send(child, known)
        return known

    def reduce(self, values: NDArray[np.float64], check: Callable[[], None]) -> NDArray[np.float64]:
        """The sum of the arrays of all ranks, with the same bits on all of them; `check` is as in `gather`."""
        self._rounds += TURNS
        total = np.array(values, dtype=np.float64).reshape(-1)
        for child, _ in self._below:
            total = total + self._receive(child, total.size, check)
        if self._above is not None:
            self._send(self._above, total)
            total = self._receive(self._above, total.size, check)
        for child, _ in self._below:
            self._send(child, total)
        return total.reshape(np.shape(values))

    def broadcast(self, data: NDArray[np.uint8] | None, source: int, check: Callable[[], None]) -> NDArray[np.uint8]:
        """The bytes of the rank at a place of the tree: they go up to its root, and from there down to all others."""
        self._rounds += TURNS
        path = [source]
        while path[-1]:
            path.append((path[-1] - 1) // FAN)
        if self._place not in path:
            assert self._above is not None
            data = self._receive_bytes(self._above, check)
        elif self._place != source:
            data = self._receive_bytes(self._ranks[path[path.index(self._place) - 1]], check)
        assert data is not None
        if self._above is not None and self._place in path:
            self._send(self._above, data)
        for child, _ in self._below:
            if self._ranks.index(child) not in path:
                self._send(child, data)
        return data

    def align(self, check: Callable[[], None]) -> Alignment:
        """Measure the offsets between the clocks of all ranks, which all call this; `check` is as in `gather`."""
        self._rounds += TURNS
        mine = Reading(0.0, 0.0)
        if self._above is not None:
            mine = self._ask(self._above, check)
        for child, _ in self._below:
            for _ in range(TRIPS):
                self._receive(child, 1, check)
                received = time.perf_counter()
                self._send(child, np.array([*mine, received, time.perf_counter()]))
        row = np.array([*mine, clock_number()])
        hosts = tuple(self._links.host_of(rank) for rank in self._ranks)
        return aligned(self.gather(row, check), time.perf_counter(), hosts)

    def _ask(self, above: int, check: Callable[[], None]) -> Reading:
        """The offset to the clock of the first rank, through the rank above."""
        readings = []
        for _ in range(TRIPS):
            sent = time.perf_counter()
            self._send(above, np.array([sent]))
            offset, uncertainty, received, answered = self._receive(above, 4, check).tolist()
            step = offset_of(sent, received, answered, time.perf_counter())
            readings.append(Reading(offset + step.offset, uncertainty + step.uncertainty))
        return min(readings, key=lambda reading: reading.uncertainty)

    def _send(self, target: int, data: Array) -> None:
        head = wire.write_head(self._rounds, b"-", data.nbytes)
        # Rows belong to the caller, which may change them; bytes do not change.
        piece = memoryview(data if data.dtype == np.uint8 else data.tobytes())  # type: ignore[arg-type]
        pieces = [memoryview(head), *([piece] if data.nbytes else [])]
        if target not in self._outbound:
            self._outbound[target] = self._links.outbound(target, self._kind)
        self._outbox.send(self._outbound[target], pieces)

    def _receive(self, source: int, count: int, check: Callable[[], None]) -> NDArray[np.float64]:
        data = self._receive_bytes(source, check)
        if len(data) != 8 * count:
            raise TransportError(
                f"rank {source} sent {len(data) / 8:g} numbers at the end of a step, but rank {self._links.rank} "
                f"expects {count}: one of them evaluates while the other trains, or they run different schedules"
            )
        return data.view(np.float64)

    def _receive_bytes(self, source: int, check: Callable[[], None]) -> NDArray[np.uint8]:
        if source not in self._inbound:
            self._inbound[source] = self._links.inbound(source, self._kind)
        inbound = self._inbound[source]

        def open_it(prefix: wire.Prefix, text: bytes) -> tuple[NDArray[np.uint8], list[memoryview]]:
            if prefix.turn != self._rounds:
                raise TransportError(f"rank {source}: {other_turn(prefix.turn, self._rounds)}")
            room = np.empty(prefix.payload, dtype=np.uint8)
            return room, [memoryview(room)] if len(room) else []  # type: ignore[arg-type]

        while (data := inbound.take(open_it, time.monotonic() + CHECK_EVERY)) is None:
            if not inbound.connected:
                self._links.connect(inbound, CHECK_EVERY, wakeful=False)
            check()
        return data


def _subtree(place: int, size: int) -> list[int]:
    """A place of the tree and all below it, in the order in which their rows are sent.

    >>> _subtree(1, 19)
    [1, 17, 18]
    """
    below = range(FAN * place + 1, min(FAN * place + FAN, size - 1) + 1)
    return [place, *(lower for child in below for lower in _subtree(child, size))]


def other_turn(came: int, expected: int) -> str:
    """Say what is wrong with a message of another step or pipeline.

    >>> other_turn(3 * TURNS + 1, 2 * TURNS + 1)
    'a message of step 3 arrived in step 2'
    """
    if came % TURNS != expected % TURNS:
        return (
            f"a message of pipeline {came % TURNS} arrived at pipeline {expected % TURNS}: the ranks run their "
            "pipelines in different orders"
        )
    return f"a message of step {came // TURNS} arrived in step {expected // TURNS}"


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
            raise TransportError("the connections of this job were closed")

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
