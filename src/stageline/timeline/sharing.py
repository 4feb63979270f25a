"""Simulation of ranks that share cores or a GPU, and of transfers that share a link: they slow each other down.

    two ranks on two cores     four ranks on two cores
    0 ▕███▏▕███▏               0 ▕██████▏▕██████▏        an action that is never alone takes twice as long
    1    ▕███▏▕███▏            1    ▕██████▏▕██████▏
                               2      ▕██████▏ …

Every start and every end changes the speed of the others, so the walk goes from event to event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from stageline.common.errors import CostError
from stageline.schedules.dependencies import Graph
from stageline.timeline.costs import Costs, Floats, Share, SharedLink


@dataclass(frozen=True)
class Shared:
    """What can slow ranks and transfers down."""

    shares: Sequence[Share] = ()
    links: Sequence[SharedLink] = ()

    @classmethod
    def of(cls, costs: Costs, ranks: int) -> Shared:
        """Return the shares and links that can matter; refuse those of ranks that do not exist."""
        named = [("shares", rank) for share in costs.shares for rank in share.ranks]
        named += [("links", rank) for link in costs.links for rank in (*link.sources, *link.targets)]
        for name, rank in named:
            if rank >= ranks:
                raise CostError(f"{name} contain rank {rank}, but the schedule has {ranks} ranks, counted from 0")
        slow = [share for share in costs.shares if any(share.speed(n + 1) < 1 for n in range(len(share.ranks)))]
        return cls(slow, costs.links)

    def __bool__(self) -> bool:
        return bool(self.shares or self.links)


@dataclass
class _Transfer:
    """A message on shared links."""

    kind: int
    """0, or 1 for the backward of an overlapped pair."""
    entry: int
    """The entry that receives it."""
    begin: float
    """When its latency is over."""
    left: float
    """The time that its bytes still take at full speed."""
    links: tuple[int, ...]


@dataclass(frozen=True)
class _Messages:
    """The transfer times of the inputs of all entries, by kind: a pair receives two of them."""

    fixed: list[list[float]]
    """Latency, or all of the time if no link is shared."""
    shared: list[list[float]]
    """The time at full speed that shared links take."""
    links: list[list[tuple[int, ...]]]
    """The shared links of each."""
    receivers: dict[int, list[tuple[int, int]]]
    """For the entry of a sender, the kind and entry of its receivers."""


def run_shared(
    graph: Graph, duration: Floats, hop: Floats, shared_hop: Floats, shared: Shared
) -> tuple[Floats, Floats, Floats]:
    """Return the start and end of every action, and the arrival of its input, 0 if it has none.

    `duration` is the time of an action at full speed, `hop` that of the transfer of its input, and `shared_hop` the
    part of it that shared links can slow down.
    """
    messages = _messages(graph, hop, shared_hop, shared.links)
    work = np.maximum.reduce(graph.by_entry(duration)).tolist()
    at, ends = graph.first[:-1].tolist(), graph.first[1:].tolist()
    ranks = range(len(at))
    start, end = np.zeros(graph.entries), np.zeros(graph.entries)
    arrived = [np.where(source >= 0, inf, 0.0) for source in graph.sources]
    left: list[float | None] = [None] * len(at)  # work of the running entry of each rank
    moving: list[_Transfer] = []
    now = 0.0

    def send(entry: int) -> None:
        for kind, receiver in messages.receivers.get(entry, ()):
            fixed, rest = messages.fixed[kind][receiver], messages.shared[kind][receiver]
            links = messages.links[kind][receiver]
            if links and rest > 0:
                moving.append(_Transfer(kind, receiver, now + fixed, rest, links))
            else:
                arrived[kind][receiver] = now + fixed + rest

    while any(at[rank] < ends[rank] for rank in ranks):
        arrivals = [inf] * len(at)
        for rank in ranks:
            if left[rank] is None and at[rank] < ends[rank]:
                arrivals[rank] = max(float(times[at[rank]]) for times in arrived)
                if arrivals[rank] <= now:
                    start[at[rank]], left[rank] = now, work[at[rank]]
        speeds = _speeds(left, shared.shares)
        finish = [inf if rest is None else now + rest / speed for rest, speed in zip(left, speeds, strict=True)]
        rates = _rates(moving, now, shared.links)
        arrival = [now + one.left / rate if rate else one.begin for one, rate in zip(moving, rates, strict=True)]
        following = min(*finish, *(time for time in arrivals if time > now), *arrival, inf)
        passed, before = following - now, moving
        now, moving = following, []
        for one, rate, time in zip(before, rates, arrival, strict=True):
            if rate and time <= now:
                arrived[one.kind][one.entry] = now
            else:
                one.left -= passed * rate
                moving.append(one)
        for rank in ranks:
            rest = left[rank]
            if rest is None:
                continue
            if finish[rank] <= now:
                end[at[rank]], left[rank] = now, None
                send(at[rank])
                at[rank] += 1
            else:
                left[rank] = rest - passed * speeds[rank]
    return graph.by_action(start), graph.by_action(end), _by_action(graph, arrived)


def _messages(graph: Graph, hop: Floats, shared_hop: Floats, links: Sequence[SharedLink]) -> _Messages:
    crossing = (graph.source >= 0) & (graph.rank != graph.rank[graph.source])
    sources = np.where(crossing, graph.rank[graph.source], -1)
    rank_of = np.repeat(np.arange(len(graph.first) - 1), np.diff(graph.first)).tolist()
    members = [(frozenset(link.sources), frozenset(link.targets)) for link in links]

    def links_of(source: int, target: int) -> tuple[int, ...]:
        return tuple(at for at, (senders, targets) in enumerate(members) if source in senders and target in targets)

    receivers: dict[int, list[tuple[int, int]]] = {}
    fixed, shared, on_links = [], [], []
    by_kind = zip(graph.sources, graph.by_entry(hop), graph.by_entry(shared_hop), graph.by_entry(sources), strict=True)
    for kind, (source, all_time, shared_time, source_rank) in enumerate(by_kind):
        for entry in np.flatnonzero(source >= 0).tolist():
            receivers.setdefault(int(source[entry]), []).append((kind, entry))
        fixed.append((all_time - shared_time).tolist())
        shared.append(shared_time.tolist())
        pairs = zip(source_rank.tolist(), rank_of, all_time.tolist(), strict=True)
        on_links.append([links_of(one, other) if time and one >= 0 else () for one, other, time in pairs])
    return _Messages(fixed, shared, on_links, receivers)


def _by_action(graph: Graph, arrived: Sequence[Floats]) -> Floats:
    """Return the arrival of the input of every action."""
    if graph.pairs is None:
        return graph.by_action(arrived[0])
    forwards, backwards = graph.actions_of_entries()
    by_action = np.zeros(len(graph.source))
    for actions, times in ((forwards, arrived[0]), (backwards, arrived[1])):
        by_action[actions[actions >= 0]] = times[actions >= 0]
    return by_action


def _speeds(left: Sequence[float | None], shares: Sequence[Share]) -> list[float]:
    """Return the speed of each rank, as a fraction of full speed."""
    speeds = [1.0] * len(left)
    for share in shares:
        running = sum(left[rank] is not None for rank in share.ranks)
        for rank in share.ranks if running else ():
            speeds[rank] = min(speeds[rank], share.speed(running))
    return speeds


def _rates(moving: Sequence[_Transfer], now: float, links: Sequence[SharedLink]) -> list[float]:
    """Return the speed of each transfer, as a fraction of full speed; 0 during its latency."""
    running = [0] * len(links)
    for one in moving:
        for link in one.links if one.begin <= now else ():
            running[link] += 1
    return [
        min(min(1.0, links[link].capacity / running[link]) for link in one.links) if one.begin <= now else 0.0
        for one in moving
    ]
