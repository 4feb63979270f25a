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


class Outbox:
    """Sends in order and keeps what is on its way, for the time of a step.

    gloo does not tell whether a send is done unless it is waited for, so a thread waits for one after the other and
    drops it. What must first come from a GPU is handed over by a second thread, when its event has come. Sends of NCCL
    are asked whether they are done whenever another message is sent: waiting for one would make a stream wait.
    """

    def __init__(self) -> None:
        """Start with nothing sent."""
        self._changed = threading.Condition()
        self._unposted = self._unfinished = 0
        self._late: queue.SimpleQueue[tuple[Callable[[], object], Post, int] | None] = queue.SimpleQueue()
        self._posted: queue.SimpleQueue[tuple[Any, object, int] | None] = queue.SimpleQueue()
        self._on_device: deque[tuple[Any, object]] = deque()
        self._threads: dict[str, threading.Thread] = {}
        self._failure: TransportError | None = None

    @property
    def failed(self) -> bool:
        """Whether something could not be sent."""
        return self._failure is not None

    @property
    def kept(self) -> int:
        """How many pieces are on their way."""
        with self._changed:
            return self._unposted + self._unfinished + len(self._on_device)

    def send(self, post: Post, target: int, ready: Callable[[], object] | None = None) -> None:
        """Hand over to the process group at once, or, in the order of the calls, after `ready` has returned."""
        with self._changed:
            if self._failure is not None:
                raise TransportError(f"an earlier {self._failure}") from self._failure
            late = ready is not None or self._unposted > 0
            self._unposted += late
        if late:
            self._start("poster", self._post_late)
            self._late.put((ready or (lambda: None), post, target))
        else:
            self._finish_later(post(), target)

    def keep(self, sent: tuple[Any, object]) -> None:
        """Keep what NCCL is sending."""
        self._on_device.append(sent)
        self._drop_done()

    def flush(self, end: float) -> None:
        """Wait, at most until that moment of `time.monotonic`, until nothing is on its way; leave no thread."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or not (self._unposted or self._unfinished),
                max(0.0, end - time.monotonic()),
            )
        while self._on_device and self._failure is None and time.monotonic() < end:
            self._drop_done()
            time.sleep(0.0002)
        failed, kept = self._failure, self.kept
        if failed is not None:
            raise TransportError(f"a {failed}") from failed
        if kept:
            raise TransportError(f"{kept} messages were not taken by their receivers")
        for name, channel in (("poster", self._late), ("reaper", self._posted)):
            if name in self._threads:
                channel.put(None)
                self._threads.pop(name).join()

    def _start(self, name: str, target: Callable[[], None]) -> None:
        if name not in self._threads:
            self._threads[name] = threading.Thread(target=target, name=f"stageline {name}", daemon=True)
            self._threads[name].start()

    def _drop_done(self) -> None:
        while self._on_device and self._on_device[0][0].is_completed():
            self._on_device.popleft()

    def _finish_later(self, sent: tuple[Any, object], target: int) -> None:
        with self._changed:
            self._unfinished += 1
        self._start("reaper", self._reap)
        self._posted.put((*sent, target))

    def _post_late(self) -> None:
        while (item := self._late.get()) is not None:
            ready, post, target = item
            try:
                ready()
                self._finish_later(post(), target)
            except BaseException as error:
                self._fail(error, target)
                return
            del item, ready, post
            with self._changed:
                self._unposted -= 1
                self._changed.notify_all()

    def _reap(self) -> None:
        while (sent := self._posted.get()) is not None:
            try:
                sent[0].wait()
            except BaseException as error:
                self._fail(error, sent[2])
                return
            del sent
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _fail(self, error: BaseException, target: int) -> None:
        failure = TransportError(f"message to rank {target} could not be sent: {error}")
        failure.__cause__ = error
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
