"""Ranks as threads of one process: messages are handed over in memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stageline.common.errors import PeerFailed, TransportError
from stageline.tensors.pytree import Leaf
from stageline.transport.protocol import Header, Message, Traffic, check_message

Arrive = Callable[[], None]
"""What to call when a message is taken, on the thread that takes it."""

Failed = tuple[int, str, BaseException]
"""The rank that failed, where it failed, and its error."""

ANY = -1
"""Before every step."""

_Waiting = tuple[Message | TransportError, Arrive, float]
"""A message, what to call when it is taken, and when it arrived."""


def _nothing() -> None:
    """Nothing to do: the message is already in memory."""


class ThreadHub:
    """What the ranks of one process share: a queue per channel, and the first failure.

    >>> hub = ThreadHub(ranks=2)
    >>> header = Header(source=0, target=1, traffic="forward", stage=0, microbatch=0, step=0)
    >>> hub.end(0).send(Message(header, [7], "*", [False]))
    >>> hub.end(1).receive(header, deadline=1.0).leaves
    [7]
    """

    def __init__(self, ranks: int) -> None:
        """Start with empty channels."""
        self.ranks = ranks
        # A condition for each receiver: a message wakes the rank that it is for, and no other.
        self._changed = [threading.Condition() for _ in range(ranks)]
        self._waiting: dict[tuple[int, int, Traffic], deque[_Waiting]] = {}
        self.failure: Failed | None = None
        """The first failure, if there was one."""
        self._failed_step = ANY
        self.patience: Callable[[int], bool] = lambda rank: False
        """Called when a deadline has passed: whether to keep waiting for that rank."""

    def end(self, rank: int) -> ThreadTransport:
        """One rank's end."""
        return ThreadTransport(self, rank)

    def reset(self) -> None:
        """Forget messages and failures, before a new step after a failed one."""
        self._waiting = {}
        self.failure = None
        self._failed_step = ANY

    def put(
        self, channel: tuple[int, int, Traffic], message: Message | TransportError, arrive: Arrive = _nothing
    ) -> None:
        """Append a message, or why it cannot be read, to the channel it came through, whatever its header says."""
        came = time.perf_counter()
        changed = self._changed[channel[1]]
        with changed:
            self._waiting.setdefault(channel, deque()).append((message, arrive, came))
            changed.notify_all()

    def take(self, header: Header, deadline: float) -> tuple[Message, float]:
        """Take the first message of a channel, and when it arrived."""
        message, arrive, came = self._wait(header, deadline)
        if isinstance(message, TransportError):
            raise TransportError(f"rank {header.target} expected {header}: {message}") from message
        arrive()
        check_message(message, header)
        return message, came

    def _wait(self, header: Header, deadline: float) -> _Waiting:
        key = (header.source, header.target, header.traffic)
        changed = self._changed[header.target]
        while True:
            with changed:
                changed.wait_for(lambda: self._waiting.get(key) or self._failed(header.step), deadline)
                if self._waiting.get(key):
                    return self._waiting[key].popleft()
                failure = self._failed(header.step)
            if failure is not None:
                raise stopped_waiting(header, failure)
            if not self.patience(header.source):
                raise receive_timeout(header, deadline)

    def _failed(self, step: int) -> Failed | None:
        """The failure of this step or of one before it."""
        return self.failure if step >= self._failed_step else None

    def set_failure(self, rank: int, error: BaseException, where: str, step: int = ANY) -> None:
        """Keep the first failure and wake all ranks; steps before the failed one continue."""
        if self.failure is None or step < self._failed_step:
            self.failure, self._failed_step = (rank, where, error), step
        for changed in self._changed:
            with changed:
                changed.notify_all()


class ThreadTransport:
    """One rank's end of a `ThreadHub`."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        """Create the end of this rank."""
        self.hub = hub
        self.rank = rank
        self.ranks = hub.ranks
        self.arrived = 0.0

    def send(self, message: Message) -> None:
        """Hand the message over; a GPU that reads it waits for the GPU that still writes it."""
        channel = (self.rank, message.header.target, message.header.traffic)
        event = written(message.leaves)
        if event is None:
            self.hub.put(channel, message)
            return
        leaves = list(message.leaves)

        def arrive() -> None:
            leaves[:] = read(leaves, event)

        self.hub.put(channel, replace(message, leaves=leaves), arrive)

    def receive(self, header: Header, deadline: float) -> Message:
        """Wait for the next message of the channel."""
        message, self.arrived = self.hub.take(header, deadline)
        return message

    def fail(self, error: BaseException, where: str) -> None:
        """Tell all ranks."""
        self.hub.set_failure(self.rank, error, where)

    def close(self) -> None:
        """No-op."""


def stopped_waiting(header: Header, failure: Failed) -> PeerFailed:
    """The error of a rank that waits for a message when another one fails."""
    origin, where, error = failure
    text = f"rank {header.target} stopped waiting for {header}: {where}: {type(error).__name__}: {error}"
    stopped = PeerFailed(text, origin)
    stopped.__cause__ = error
    return stopped


def receive_timeout(header: Header, deadline: float) -> TransportError:
    """The error of a rank that waited for too long."""
    return TransportError(f"rank {header.target} waited {deadline:g} s for {header}, but it did not arrive")


def written(leaves: Sequence[Leaf]) -> Any:
    """An event after which this rank's stream has written the leaves; None if there is nothing to wait for."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(leaf.device))
            return event
    return None


def read(leaves: Sequence[Leaf], event: Any) -> list[Leaf]:
    """Let this rank's stream wait for the event, and bring the leaves to its GPU."""
    if event is None:
        return list(leaves)
    here = torch.cuda.current_device()
    mine = torch.cuda.current_stream(here)
    mine.wait_event(event)
    here_leaves: list[Leaf] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            theirs = torch.cuda.current_stream(leaf.device)
            if leaf.device.index != here:  # a copy between GPUs runs in both their streams
                theirs.wait_event(event)
            leaf.record_stream(theirs)  # its memory is not reused before this rank has read it
            here_leaves.append(leaf if leaf.device.index == here else leaf.to(f"cuda:{here}", non_blocking=True))
        else:
            here_leaves.append(leaf)
    return here_leaves
