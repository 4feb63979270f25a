"""The messages between ranks: their order on each channel, and how far ahead receives must be posted.

A channel is an ordered pair of ranks, with separate channels for forward and backward traffic. Its messages arrive in
the order in which they were sent, and a send may block its rank until the matching receive is posted (a rendezvous, as
with NCCL and large gloo messages). A rank posts the receive of an entry no later than when it reaches that entry; with
a look-ahead of L it has also posted, on every channel, the L receives that follow.

    look-ahead 0    rank 0  F0 ─send─▶ F1 ─send─▶ blocked: rank 1 posts that receive after sending back B0
                    rank 1  F0    B0 ─send─▶ blocked: rank 0 posts that receive after F1        → deadlock
    look-ahead 1    rank 1 has posted the receive of F1 while it runs F0                        → both continue

A rank may use messages out of order. It still receives them in the order sent, and parks those that it uses later: to
use the third message, it has to post the receives of the first two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import ScheduleError
from stageline.schedules import action as kinds
from stageline.schedules.action import Action
from stageline.schedules.dependencies import Indices, Ints
from stageline.schedules.schedule import Program, Schedule


@dataclass(frozen=True)
class Channel:
    """The messages from one rank to another in one direction of traffic, each named by the action that sends it."""

    source: int
    target: int
    traffic: Literal["forward", "backward"]
    messages: Sequence[Action]
    """In the order sent."""
    taken: Sequence[Action]
    """In the order in which the receiver uses them."""
    is_reordered: bool
    """Whether these two orders differ."""

    def __str__(self) -> str:
        later = f", taken as {_first(self.taken)}" if self.is_reordered else ""
        return f"{self.source} → {self.target} {self.traffic}: {_first(self.messages)}{later}"


def _first(messages: Sequence[Action]) -> str:
    return " ".join(map(str, messages[:8])) + (" …" if len(messages) > 8 else "")


@dataclass(frozen=True, eq=False)
class Channels(Sequence[Channel]):
    """All channels of a schedule; the arrays hold the messages channel by channel, in the receiver's order."""

    schedule: Schedule
    senders: Indices
    receivers: Indices
    bounds: Ints
    """The messages of channel c are at bounds[c] to bounds[c + 1]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, key: int) -> Channel:  # type: ignore[override]
        index = range(len(self))[key]
        senders = self.senders[self.bounds[index] : self.bounds[index + 1]]
        receiver = int(self.receivers[self.bounds[index]])
        rank = self.schedule.graph.rank
        forward = self.schedule.action_kinds[senders[0]] == kinds.F
        messages, taken = self._actions(np.sort(senders)), self._actions(senders)
        ends = int(rank[senders[0]]), int(rank[receiver])
        return Channel(*ends, "forward" if forward else "backward", messages, taken, bool(self.reordered[index]))

    def _actions(self, index: Ints) -> Sequence[Action]:
        """Return a view that creates the actions on access."""
        schedule = self.schedule
        program = Program(schedule.action_kinds[index], schedule.stage_ids[index], schedule.microbatch_ids[index], None)
        return cast(Sequence[Action], program)

    def __iter__(self) -> Iterator[Channel]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def sizes(self) -> Ints:
        """The number of messages of each channel."""
        return np.diff(self.bounds)

    @cached_property
    def numbers(self) -> Indices:
        """For each message, its position on its channel in the receiver's order, counted from 0."""
        starts = np.repeat(self.bounds[:-1].astype(np.int32), self.sizes)
        return np.arange(len(self.senders), dtype=np.int32) - starts

    @cached_property
    def sent(self) -> Indices:
        """For each message, its position on its channel in the order sent, counted from 0."""
        channel = np.repeat(np.arange(len(self), dtype=np.int32), self.sizes)
        positions = np.empty(len(self.senders), dtype=np.int32)
        positions[np.lexsort((self.senders, channel))] = self.numbers
        return positions

    @cached_property
    def reordered(self) -> NDArray[np.bool_]:
        """For each channel, whether its messages are used out of order."""
        if not len(self):
            return np.zeros(0, dtype=bool)
        return np.logical_or.reduceat(self.sent != self.numbers, self.bounds[:-1])

    @cached_property
    def needed(self) -> Ints:
        """For each message, how many messages its channel must have delivered when it is used, counted across all
        channels: itself, and all that were sent or used before it."""
        start = np.repeat(self.bounds[:-1], self.sizes)
        return np.maximum.accumulate(start + self.sent) + 1

    def buffers(self, look_ahead: int) -> Ints:
        """For each channel, the maximum number of posted receives whose message has not been used yet."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        posted = np.minimum(self.needed + look_ahead, np.repeat(self.bounds[1:], self.sizes))
        return np.maximum.reduceat(posted - np.arange(len(posted)), self.bounds[:-1])

    def targets(self) -> NDArray[np.int32]:
        """The receiving rank of each channel."""
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
    """On every channel, messages are used in the order in which they are sent.

    The runtime does not require this, as it parks early messages. A certificate says whether it holds.
    """
    channels = schedule.channels
    overtakes = channels.senders[1:] <= channels.senders[:-1]
    overtakes &= channels.numbers[1:] > 0
    if not overtakes.any():
        return
    at = int(np.argmax(overtakes)) + 1
    earlier, later = schedule.action(int(channels.senders[at])), schedule.action(int(channels.senders[at - 1]))
    rank, position = schedule.where(int(channels.receivers[at - 1]))
    source, _ = schedule.where(int(channels.senders[at]))
    raise ScheduleError(
        f"rank {rank}, position {position}: takes the output of {later} before that of {earlier}, but rank "
        f"{source} sends {earlier} first, and a channel delivers in order: early messages have to be parked",
        rule="channels",
        rank=rank,
        position=position,
    )


def least_look_ahead(schedule: Schedule) -> int:
    """Return the number of receives to post ahead on every channel so that blocking sends cannot deadlock."""
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
    """Whether every rank reaches its end if a send blocks until its receive is posted.

    A rank arrives at an entry when all entries before it have run and sent their output; by then it has posted the
    receives that it needs up to here, and `look_ahead` more. So a send returns when the receiver has arrived at the
    first entry that needs the message `look_ahead` before it on the channel.
    """
    graph, channels = schedule.graph, schedule.channels
    gated = np.flatnonzero(channels.sent >= look_ahead)
    start = np.repeat(channels.bounds[:-1], channels.sizes)[gated]
    poster = np.zeros(len(graph.source), dtype=np.int32)
    first = np.searchsorted(channels.needed, start + channels.sent[gated] - look_ahead + 1)
    poster[channels.senders[gated]] = graph.place(channels.receivers[first])
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
