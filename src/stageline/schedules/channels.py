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
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import ScheduleError
from stageline.schedules import action as kinds
from stageline.schedules import schedule as schedules
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
    def overtakes(self) -> NDArray[np.bool_]:
        """For each message, whether it was sent before the one that the receiver uses before it on the channel."""
        overtakes = np.zeros(len(self.senders), dtype=bool)
        np.less(self.senders[1:], self.senders[:-1], out=overtakes[1:])
        overtakes[self.bounds[:-1]] = False
        return overtakes

    @cached_property
    def reordered(self) -> NDArray[np.bool_]:
        """For each channel, whether its messages are used out of order."""
        if not len(self):
            return np.zeros(0, dtype=bool)
        return np.logical_or.reduceat(self.overtakes, self.bounds[:-1])

    @cached_property
    def sent(self) -> Indices:
        """For each message, its position on its channel in the order sent, counted from 0."""
        positions = [deliveries.sent for deliveries in self.deliveries()]
        return np.concatenate(positions) if positions else np.zeros(0, dtype=np.int32)

    def deliveries(self) -> Iterator[Deliveries]:
        """Go through the messages in windows of whole channels."""
        low = 0
        while low < len(self):
            last = int(np.searchsorted(self.bounds, self.bounds[low] + schedules.WINDOW, side="right")) - 1
            high = max(last, low + 1)
            yield self._deliveries(slice(low, high))
            low = high

    def _deliveries(self, channels: slice) -> Deliveries:
        sizes, begin = self.sizes[channels], int(self.bounds[channels.start])
        starts = np.repeat(self.bounds[channels].astype(np.int32), sizes)
        part = slice(begin, begin + len(starts))
        sent = np.arange(part.start, part.stop, dtype=np.int32) - starts
        if self.reordered[channels].any():
            order = np.lexsort((self.senders[part], starts))
            sent[order] = sent.copy()
        return Deliveries(channels, part, starts, sent, np.maximum.accumulate(starts + sent) + np.int32(1))

    def buffers(self, look_ahead: int) -> Ints:
        """For each channel, the maximum number of posted receives whose message has not been used yet."""
        buffers = np.zeros(len(self), dtype=np.int64)
        for window in self.deliveries():
            ends = np.repeat(self.bounds[1:][window.channels], self.sizes[window.channels])
            posted = np.minimum(window.needed + look_ahead, ends)
            posted -= np.arange(window.messages.start, window.messages.stop)
            first = self.bounds[window.channels] - window.messages.start
            buffers[window.channels] = np.maximum.reduceat(posted, first)
        return buffers

    def targets(self) -> NDArray[np.int32]:
        """The receiving rank of each channel."""
        return self.schedule.graph.rank[self.receivers[self.bounds[:-1]]]


class Deliveries(NamedTuple):
    """The messages of some channels, in the receiver's order."""

    channels: slice
    messages: slice
    starts: Indices
    """For each message, the first message of its channel."""
    sent: Indices
    """For each message, its position on its channel in the order sent, counted from 0."""
    needed: Indices
    """For each message, how many messages its channel must have delivered when it is used, counted across all channels:
    itself, and all that were sent or used before it."""


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
        counts = np.bincount(number[order])
        sizes.append(counts[counts > 0])
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)])
    return Channels(schedule, np.concatenate(senders), np.concatenate(receivers), bounds)


def check_channels(schedule: Schedule) -> None:
    """On every channel, messages are used in the order in which they are sent.

    The runtime does not require this, as it parks early messages. A certificate says whether it holds.
    """
    channels = schedule.channels
    if not channels.overtakes.any():
        return
    at = int(np.argmax(channels.overtakes))
    earlier, later = schedule.action(int(channels.senders[at])), schedule.action(int(channels.senders[at - 1]))
    rank, position = schedule.where(int(channels.receivers[at - 1]))
    source, _ = schedule.where(int(channels.senders[at]))
    raise ScheduleError(
        f"rank {rank}, position {position}: takes the output of {later} before that of {earlier}, but rank "
        f"{source} sends {earlier} first, and a channel delivers in order: early messages must be buffered",
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
    graph = schedule.graph
    gates = graph.by_entry(_posters(schedule, look_ahead))
    done, arrived = (np.zeros(graph.entries + 1, dtype=bool) for _ in range(2))
    at, ends = graph.first[:-1].copy(), graph.first[1:]
    has_run = np.zeros(schedule.ranks, dtype=bool)
    done[-1] = True
    arrived[at[at < ends]] = True
    while True:
        ready = ~has_run & (at < ends)
        for source in graph.sources:
            ready &= done.take(source.take(at, mode="clip"))
        has_run |= ready
        done[at[ready]] = True
        moves = has_run.copy()
        for gate in gates:
            poster = gate.take(at, mode="clip")
            moves &= (poster == 0) | arrived.take(poster - 1)
        if not (moves.any() or ready.any()):
            return bool((at == ends).all())
        has_run ^= moves
        at += moves
        arrived[at[moves & (at < ends)]] = True


def _posters(schedule: Schedule, look_ahead: int) -> Indices:
    """For each action, 1 + the entry at whose start the receive of its output has been posted, or 0 for any."""
    graph, channels = schedule.graph, schedule.channels
    posters = np.zeros(schedule.num_actions, dtype=np.int32)
    for window in channels.deliveries():
        gated = np.flatnonzero(window.sent >= look_ahead)
        count = window.starts[gated] + window.sent[gated] - np.int32(look_ahead - 1)
        first = np.searchsorted(window.needed, count) + window.messages.start
        posters[channels.senders[window.messages][gated]] = graph.entries_of(channels.receivers[first]) + 1
    return posters
