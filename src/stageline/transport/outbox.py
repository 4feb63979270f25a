"""What a process has sent and must keep until it is gone: let go as soon as it is, however long the step."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from stageline.transport.protocol import TransportError

Post = Callable[[], tuple[Any, object]]
"""Hands something to the process group: gives back its work, and what must be kept until that is done."""

UNDER_WAY = 4
"""How many sends may be under way before the oldest is waited for. Receivers take what comes whatever they compute, so
that wait is short; gloo does not tell whether a send is done in any other way."""


class Outbox:
    """Sends in order and keeps what is on its way, for the time of a step.

    A thread hands messages to the process group, so that the rank's own thread goes on computing: handing one over
    can take as long as writing it to the network. What must first come from a GPU is waited for by that thread too.
    Sends of NCCL are asked whether they are done whenever another message is sent: waiting for one would make a stream
    wait.
    """

    def __init__(self) -> None:
        """Start with nothing sent."""
        self._changed = threading.Condition()
        self._unfinished = 0
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object] | None, Post, int] | None] = queue.SimpleQueue()
        self._on_device: deque[tuple[Any, object]] = deque()
        self._thread: threading.Thread | None = None
        self._failure: tuple[int, BaseException] | None = None
        self._gone: set[int] = set()
        """Ranks that a message could not be sent to; the others still get theirs."""

    @property
    def failed(self) -> bool:
        """Whether something could not be sent."""
        return self._failure is not None

    @property
    def kept(self) -> int:
        """How many pieces are on their way."""
        return self._unfinished + len(self._on_device)

    def send(self, post: Post, target: int, ready: Callable[[], object] | None = None) -> None:
        """Hand over to the process group soon, in the order of the calls, each after its `ready` has returned."""
        if self._failure is not None and target in self._gone:
            raise TransportError(f"an earlier message could not be sent: {self._said()}") from self._failure[1]
        with self._changed:
            self._unfinished += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="stageline sender", daemon=True)
            self._thread.start()
        self._jobs.put((ready, post, target))

    def keep(self, sent: tuple[Any, object]) -> None:
        """Keep what NCCL is sending."""
        self._on_device.append(sent)
        self._drop_done()

    def flush(self, end: float) -> None:
        """Wait, at most until that moment of `time.monotonic`, until nothing is on its way; leave no thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(max(0.0, end - time.monotonic()))
        while self._on_device and self._failure is None and time.monotonic() < end:
            self._drop_done()
            time.sleep(0.0002)
        if self._failure is not None:
            raise TransportError(f"a message could not be sent: {self._said()}") from self._failure[1]
        if self.kept:
            raise TransportError(f"{self.kept} messages were not taken by their receivers")
        self._thread, self._jobs = None, queue.SimpleQueue()  # asked twice, it would end the next thread too

    @property
    def busy(self) -> bool:
        """Whether the thread that sends is at work, or waits for a receiver."""
        return self._thread is not None and self._thread.is_alive()

    def close(self, patience: float) -> None:
        """End the thread, unless it waits for a rank that is lost."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(patience)

    def _said(self) -> str:
        target, error = self._failure or (-1, None)
        return f"to rank {target}: {error}"

    def _drop_done(self) -> None:
        while self._on_device and self._on_device[0][0].is_completed():
            self._on_device.popleft()

    def _send_all(self) -> None:
        under_way: deque[tuple[Any, object, int]] = deque()
        while (job := self._jobs.get()) is not None:
            ready, post, target = job
            try:
                if ready is not None:
                    ready()
                if target not in self._gone:
                    under_way.append((*post(), target))
            except BaseException as error:
                self._fail(target, error)
            del job, ready, post
            if len(under_way) > UNDER_WAY:
                self._wait_for(under_way)
        while under_way:
            self._wait_for(under_way)

    def _wait_for(self, under_way: deque[tuple[Any, object, int]]) -> None:
        try:
            under_way[0][0].wait()
        except BaseException as error:
            self._fail(under_way[0][2], error)
        under_way.popleft()
        with self._changed:
            self._unfinished -= 1

    def _fail(self, target: int, error: BaseException) -> None:
        self._gone.add(target)
        self._failure = self._failure or (target, error)
