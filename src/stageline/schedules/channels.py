"""The messages between ranks: their order on each channel, and how far ahead receives must be posted.

A channel is an ordered pair of ranks, with forward and backward traffic apart. Its messages arrive in the order
in which they were sent, and a send may block its rank until the matching receive is posted (a rendezvous, as
NCCL and large gloo messages behave). A rank posts the receive of an entry at the latest when it comes to that
entry; with a look-ahead of L it has also posted, on every channel, the L receives that follow.

    look-ahead 0    rank 0  F0 ─send─▶ F1 ─send─▶ blocked: rank 1 posts that receive after sending back B0
                    rank 1  F0    B0 ─send─▶ blocked: rank 0 posts that receive after F1        → deadlock
    look-ahead 1    rank 1 has posted the receive of F1 while it runs F0                        → both go on

A rank may take messages in another order than they were sent. It still receives them in the order sent, and parks those
that it takes later: to take the third message, it has to post the receives of the first two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import ScheduleError
from stageline.schedules import action as kinds
from stageline.schedules.action import Action
from stageline.schedules.dependencies import Indices, Ints
from stageline.schedules.schedule import Schedule

Traffic = Literal["forward", "backward"]


@dataclass(frozen=True)
class Channel:
    """The messages from one rank to another in one kind of traffic: which action makes each of them."""

    source: int
    target: int
    traffic: Traffic
    messages: Sequence[Action]
    """In the order in which they are sent."""
    taken: Sequence[Action]
    """In the order in which the receiver takes them."""
    is_reordered: bool
    """Whether these two orders differ."""

    def __str__(self) -> str:
        """Show the ends and the first messages."""
        later = f", taken as {_first(self.taken)}" if self.is_reordered else ""
        return f"{self.source} → {self.target} {self.traffic}: {_first(self.messages)}{later}"


def _first(messages: Sequence[Action]) -> str:
    return " ".join(map(str, messages[:8])) + (" …" if len(messages) > 8 else "")


@dataclass(frozen=True, eq=False)
class _Messages(Sequence[Action]):
    """The senders' actions, made into objects when touched."""

    schedule: Schedule
    senders: Ints

    def __len__(self) -> int:
        return len(self.senders)

    def __getitem__(self, key: int | slice) -> Action | list[Action]:  # type: ignore[override]
        if isinstance(key, slice):
            return [self.schedule.action(int(index)) for index in self.senders[key]]
        return self.schedule.action(int(self.senders[key]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Channels(Sequence[Channel]):
    """All channels of a schedule; the messages lie in arrays, channel by channel, in the receiver's order."""

    schedule: Schedule
    senders: Indices
    receivers: Indices
    bounds: Ints
    """The messages of channel c are at bounds[c] to bounds[c + 1]."""

    def __len__(self) -> int:
        """Count the channels."""
        return len(self.bounds) - 1

    def __getitem__(self, key: int) -> Channel:  # type: ignore[override]
        """Make one channel."""
        index = range(len(self))[key]
        senders = self.senders[self.bounds[index] : self.bounds[index + 1]]
        receiver = int(self.receivers[self.bounds[index]])
        rank = self.schedule.graph.rank
        forward = self.schedule.action_kinds[senders[0]] == kinds.F
        traffic: Traffic = "forward" if forward else "backward"
        sent, taken = _Messages(self.schedule, np.sort(senders)), _Messages(self.schedule, senders)
        ends = int(rank[senders[0]]), int(rank[receiver])
        return Channel(*ends, traffic, sent, taken, bool(self.reordered[index]))

    def __iter__(self) -> Iterator[Channel]:
        """Make all channels."""
        return (self[index] for index in range(len(self)))

    @cached_property
    def sizes(self) -> Ints:
        """How many messages each channel carries."""
        return np.diff(self.bounds)

    @cached_property
    def numbers(self) -> Indices:
        """For each message, which one it is on its channel, counted from 0."""
        starts = np.repeat(self.bounds[:-1].astype(np.int32), self.sizes)
        return np.arange(len(self.senders), dtype=np.int32) - starts

    @cached_property
    def sent(self) -> Indices:
        """For each message, which one it is on its channel in the order sent, counted from 0."""
        channel = np.repeat(np.arange(len(self), dtype=np.int32), self.sizes)
        found = np.empty(len(self.senders), dtype=np.int32)
        found[np.lexsort((self.senders, channel))] = self.numbers
        return found

    @cached_property
    def reordered(self) -> NDArray[np.bool_]:
        """For each channel, whether its messages are taken in another order than they were sent."""
        if not len(self):
            return np.zeros(0, dtype=bool)
        return np.logical_or.reduceat(self.sent != self.numbers, self.bounds[:-1])

    @cached_property
    def needed(self) -> Ints:
        """For each message, how many its channel must have delivered when it is taken, counted through all channels:
        itself, and all that were sent before it or taken before it."""
        start = np.repeat(self.bounds[:-1], self.sizes)
        return np.maximum.accumulate(start + self.sent) + 1

    def buffers(self, look_ahead: int) -> Ints:
        """For each channel, the most receives that are posted at once and whose message is not taken yet."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        posted = np.minimum(self.needed + look_ahead, np.repeat(self.bounds[1:], self.sizes))
        return np.maximum.reduceat(posted - np.arange(len(posted)), self.bounds[:-1])

    def targets(self) -> NDArray[np.int32]:
        """Which rank each channel leads to."""
        return self.schedule.graph.rank[self.receivers[self.bounds[:-1]]]


def channels_of(schedule: Schedule) -> Channels:
    """Sort the messages of a complete schedule into channels, receiver by receiver."""
    graph = schedule.graph
    senders, receivers, sizes = [], [], []
    for target, mine in enumerate(schedule.slices()):
        source = graph.source[mine]
        taken = np.flatnonzero(source >= 0)
        source = source[taken]
        source_rank = graph.rank[source]
        number = source_rank * 2 + (schedule.action_kinds[mine][taken] != kinds.F)
        number[source_rank == target] = -1
        order = np.argsort(number, kind="stable")[np.count_nonzero(number < 0) :]
        senders.append(source[order])
        receivers.append((taken[order] + mine.start).astype(np.int32))
        sizes.append(np.unique(number[order], return_counts=True)[1])
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)])
    return Channels(schedule, np.concatenate(senders), np.concatenate(receivers), bounds)


def check_channels(schedule: Schedule) -> None:
    """On every channel, messages are taken in the order in which they are sent.

    The runtime does not ask for that: it parks what comes early. A certificate says whether it is so.
    """
    found = schedule.channels
    overtakes = found.senders[1:] <= found.senders[:-1]
    overtakes &= found.numbers[1:] > 0
    if not overtakes.any():
        return
    at = int(np.argmax(overtakes)) + 1
    earlier, later = schedule.action(int(found.senders[at])), schedule.action(int(found.senders[at - 1]))
    rank, position = schedule.where(int(found.receivers[at - 1]))
    source, _ = schedule.where(int(found.senders[at]))
    raise ScheduleError(
        f"rank {rank}, position {position}: takes the output of {later} before that of {earlier}, but rank "
        f"{source} sends {earlier} first, and a channel delivers in order: what comes early has to be parked",
        rule="channels",
        rank=rank,
        position=position,
    )


def least_look_ahead(schedule: Schedule) -> int:
    """Find how many receives must be posted ahead on every channel so that blocking sends cannot deadlock."""
    if is_safe(schedule, 0):
        return 0
    safe = 1
    while not is_safe(schedule, safe):
        safe *= 2
    unsafe = safe // 2
    while safe - unsafe > 1:
        middle = (safe + unsafe) // 2
        safe, unsafe = (middle, unsafe) if is_safe(schedule, middle) else (safe, middle)
    return safe


def is_safe(schedule: Schedule, look_ahead: int) -> bool:
    """Say whether every rank gets to its end when a send blocks until its receive is posted.

    A rank arrives at an entry when all before it is run and sent; it has then posted the receives that it needs up to
    here and `look_ahead` more. So a send lets its rank go on when the receiver has arrived at the first entry that
    needs the message `look_ahead` before it on the channel.
    """
    graph, found = schedule.graph, schedule.channels
    gated = np.flatnonzero(found.sent >= look_ahead)
    start = np.repeat(found.bounds[:-1], found.sizes)[gated]
    poster = np.zeros(len(graph.source), dtype=np.int32)
    first = np.searchsorted(found.needed, start + found.sent[gated] - look_ahead + 1)
    poster[found.senders[gated]] = graph.place(found.receivers[first])
    gates = graph.by_place(poster)

    done, arrived = (np.zeros(graph.places, dtype=bool) for _ in range(2))
    at = graph.fences[:-1] + 1
    has_run = np.zeros(schedule.ranks, dtype=bool)
    done[0] = arrived[0] = arrived[at] = True
    while True:
        ready = ~has_run
        for source in graph.sources:
            ready &= done.take(source.take(at))
        has_run |= ready
        done[at] = has_run
        moves = has_run.copy()
        for gate in gates:
            moves &= arrived.take(gate.take(at))
        if not (moves.any() or ready.any()):
            return bool((at == graph.fences[1:]).all())
        has_run ^= moves
        at += moves
        arrived[at] = True
