"""Timelines: when every action and transfer of a step runs. Simulated and measured steps have the same type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stageline.common.errors import ScheduleError
from stageline.schedules.action import Action, ShardAction
from stageline.schedules.dependencies import Ints
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs, Floats
from stageline.timeline.idle import Idle, idle_of, waits_of
from stageline.timeline.memory import memory_of, peaks_of


@dataclass(frozen=True, eq=False)
class Transfers:
    """The messages between ranks: the action that receives each, when it was sent and when it arrived."""

    receivers: Ints
    """In ascending order."""
    sent: Floats
    arrived: Floats

    def of_actions(self, part: slice) -> Transfers:
        """Return the messages that a range of actions receives."""
        low, high = np.searchsorted(self.receivers, [part.start, part.stop])
        return Transfers(self.receivers[low:high], self.sent[low:high], self.arrived[low:high])


@dataclass(frozen=True, eq=False)
class ComputedTransfers:
    """The messages of a simulated step, computed when they are first read: there may be hundreds of millions."""

    of_actions: Callable[[slice], Transfers]
    """Returns the messages that a range of actions receives."""
    actions: int
    """The number of actions."""

    @cached_property
    def _all(self) -> Transfers:
        return self.of_actions(slice(0, self.actions))

    @property
    def receivers(self) -> Ints:
        """As in `Transfers`."""
        return self._all.receivers

    @property
    def sent(self) -> Floats:
        """As in `Transfers`."""
        return self._all.sent

    @property
    def arrived(self) -> Floats:
        """As in `Transfers`."""
        return self._all.arrived


@dataclass(frozen=True, eq=False)
class ShardTimes:
    """When every shard action of the schedule began and ended; a gather ends when its parameters can be used."""

    start: Floats
    end: Floats


class TimedShardAction(NamedTuple):
    """A shard action with its rank and its times."""

    rank: int
    action: ShardAction
    start: float
    end: float


class TimedAction(NamedTuple):
    """An action with its rank and its times."""

    rank: int
    action: Action
    start: float
    end: float


class TimedTransfer(NamedTuple):
    """A message with its sender, its receiver, their ranks, and its times."""

    source_rank: int
    target_rank: int
    sender: Action
    receiver: Action
    start: float
    end: float


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Start and end of every action and transfer of one step.

    `start` and `end` are arrays over the actions of the schedule, counted across all ranks.

    >>> import stageline as sl
    >>> t = sl.simulate(sl.schedule("gpipe", ranks=2, microbatches=2))
    >>> t.makespan, t.bubble, t.peak_memory
    (9.0, 0.3333333333333333, (2.0, 2.0))
    >>> for timed in t.actions(rank=1):
    ...     print(timed.action, timed.start, timed.end)
    1F0 1.0 2.0
    1F1 2.0 3.0
    1B0 3.0 5.0
    1B1 5.0 7.0
    """

    schedule: Schedule
    start: Floats
    end: Floats
    transfers: Transfers | ComputedTransfers
    costs: Costs | None = None
    """The costs of the simulation; None for a measured step."""
    uncertainty: float | None = 0.0
    """How far the clocks of different ranks may disagree, in the unit of the times: 0 if there is one clock or the step
    was simulated; None if the clocks were not aligned, so that only times of one rank can be compared."""
    shards: ShardTimes | None = None
    """The times of shard actions, which run beside the actions; None if no stage is sharded."""
    hosts: tuple[str, ...] = ()
    """The machine of each rank of a measured step; empty if they are not known."""

    @property
    def in_seconds(self) -> bool:
        """Whether times are in seconds: those of a measured step, or of a plan from a profile."""
        return self.costs is None or self.costs.in_seconds

    @property
    def is_aligned(self) -> bool:
        """Whether times of different ranks can be compared; if not, there is no makespan, bubble or idle time."""
        return self.uncertainty is not None

    def require_one_clock(self, what: str) -> None:
        """Raise `ScheduleError` if the clocks of the ranks were not aligned; `what` is what needs them."""
        if self.uncertainty is None:
            raise ScheduleError(
                f"the clocks of the ranks of this step were not aligned, so it has no {what}: only times of one rank "
                "can be compared (busy, ideal, span); measure it again with Pipeline, whose ranks align their clocks"
            )

    @property
    def first_start(self) -> float:
        """The start of the first action, or of the first gather."""
        return float(self.start.min() if self.shards is None else min(self.start.min(), self.shards.start.min()))

    @property
    def last_end(self) -> float:
        """The end of the last action, or of the last reduction."""
        return float(self.end.max() if self.shards is None else max(self.end.max(), self.shards.end.max()))

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end over all ranks: the cost of a step if every rank waits for all.

        Raises `ScheduleError` if the clocks of the ranks were not aligned.
        """
        self.require_one_clock("makespan")
        return self.last_end - self.first_start

    @property
    def span(self) -> float:
        """The maximum over the ranks of the time from the first start to the last end of that rank.

        This is the cost of a step if the next one may start on a rank before the last rank has finished.
        """
        spans = []
        for rank, part in enumerate(self.schedule.slices()):
            starts, ends = self.start[part], self.end[part]
            if self.shards is not None and self.schedule.sharding is not None:
                own = self.schedule.sharding.of_rank(rank)
                starts = np.append(starts, self.shards.start[own.start : own.stop])
                ends = np.append(ends, self.shards.end[own.start : own.stop])
            if len(starts):
                spans.append(float(ends.max() - starts.min()))
        return max(spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The compute time of each rank; an overlapped pair counts once."""
        busy = []
        for part in self.schedule.slices():
            taken = self.end[part] - self.start[part]
            taken[np.flatnonzero(self.schedule.pair_starts[part]) + 1] = 0.0
            busy.append(float(taken.sum()))
        return tuple(busy)

    @property
    def ideal(self) -> float:
        """The largest busy time of any rank; no order of the same actions takes less."""
        return max(self.busy)

    @property
    def bubble(self) -> float | None:
        """The share of the makespan above the ideal: (makespan − ideal) / makespan; None if clocks were not aligned."""
        return share_above(self.makespan, self.ideal) if self.is_aligned else None

    @property
    def bubble_uncertainty(self) -> float | None:
        """The uncertainty of the bubble that is due to the clocks; None if there is no bubble."""
        if self.uncertainty is None:
            return None
        return min(1.0, self.uncertainty / self.makespan) if self.uncertainty and self.makespan > 0 else 0.0

    @property
    def utilisation(self) -> float | None:
        """The busy time of all ranks over ranks × makespan; None if clocks were not aligned.

        The bubble is the idle share of the busiest rank. The utilisation also counts the idle time of the other ranks.

        >>> import stageline as sl
        >>> t = sl.simulate(sl.schedule("1f1b", ranks=2, microbatches=8), sl.Costs(forward=[9, 1], backward=[18, 2]))
        >>> round(t.bubble, 3), round(t.utilisation, 3), round(t.imbalance, 3)
        (0.0, 0.556, 0.444)
        """
        if not self.is_aligned:
            return None
        return min(1.0, sum(self.busy) / (self.schedule.ranks * self.makespan)) if self.makespan > 0 else 1.0

    @property
    def imbalance(self) -> float | None:
        """The share of ranks × makespan that is idle because the busiest rank has more work; None if not aligned.

        Bubble, imbalance and utilisation add up to 1.
        """
        utilisation, bubble = self.utilisation, self.bubble
        return None if utilisation is None or bubble is None else max(0.0, 1.0 - bubble - utilisation)

    @property
    def span_bubble(self) -> float:
        """The share of the span above the ideal: (span − ideal) / span."""
        return share_above(self.span, self.ideal)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The idle time of each rank by cause: warm-up, transfers, peers, host, drain."""
        self.require_one_clock("idle time")
        return idle_of(self)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The peak memory of each rank, in the unit of the costs."""
        return peaks_of(self.schedule, self.costs or Costs())

    @property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """The ranks on each machine, if there are several machines; else empty.

        >>> import stageline as sl
        >>> from dataclasses import replace
        >>> t = sl.simulate(sl.schedule("gpipe", ranks=3, microbatches=2))
        >>> t.ranks_by_host, replace(t, hosts=("a", "b", "b")).ranks_by_host
        ({}, {'a': [0], 'b': [1, 2]})
        """
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(rank)
        return ranks if len(ranks) > 1 else {}

    @cached_property
    def transfer_times(self) -> dict[tuple[int, int], float]:
        """The median time of a message for each pair of ranks (source, target) for which it is known.

        It is known if the receiver was waiting before the message was sent, and if the clocks were aligned.

        >>> import stageline as sl
        >>> s = sl.schedule("1f1b", ranks=2, microbatches=2)
        >>> sl.simulate(s, sl.Costs(transfer=[[0, 0.5], [0.25, 0]])).transfer_times
        {(0, 1): 0.5, (1, 0): 0.25}
        """
        graph, moved = self.schedule.graph, self.transfers
        if not self.is_aligned:
            return {}
        entry = moved.receivers if graph.pairs is None else graph.pairs.entry_of[moved.receivers]
        waited = waits_of(self).free[entry] <= moved.sent
        took, receivers = (moved.arrived - moved.sent)[waited], moved.receivers[waited]
        pairs = np.stack([graph.rank[graph.source[receivers]], graph.rank[receivers]], axis=1)
        return {
            (int(source), int(target)): float(np.median(took[(pairs == (source, target)).all(axis=1)]))
            for source, target in np.unique(pairs, axis=0)
        }

    def memory(self, rank: int) -> tuple[Floats, Floats]:
        """Return the times at which the memory of a rank changes, and the level from each of them on."""
        if not 0 <= rank < self.schedule.ranks:
            raise ScheduleError(f"rank {rank} does not exist; there are {self.schedule.ranks}, counted from 0")
        return memory_of(self.schedule, self.costs or Costs(), self.start, self.end, rank)

    def actions(self, rank: int | None = None) -> Iterator[TimedAction]:
        """Yield the actions of one rank, or of all ranks, with their times, in program order."""
        bounds = self.schedule.bounds.tolist()
        for owner in range(self.schedule.ranks) if rank is None else (rank,):
            for index in range(bounds[owner], bounds[owner + 1]):
                action = self.schedule.action(index)
                yield TimedAction(owner, action, float(self.start[index]), float(self.end[index]))

    def shard_actions(self, rank: int | None = None) -> Iterator[TimedShardAction]:
        """Yield the shard actions of one rank, or of all ranks, with their times."""
        sharding, shards = self.schedule.sharding, self.shards
        if sharding is None or shards is None:
            return
        for owner in range(self.schedule.ranks) if rank is None else (rank,):
            for index in sharding.of_rank(owner):
                times = float(shards.start[index]), float(shards.end[index])
                yield TimedShardAction(owner, sharding.action(index), *times)

    def messages(self) -> Iterator[TimedTransfer]:
        """Yield the transfers with their times."""
        graph, schedule, moved = self.schedule.graph, self.schedule, self.transfers
        columns = (column.tolist() for column in (moved.receivers, moved.sent, moved.arrived))
        for receiver, sent, arrived in zip(*columns, strict=True):
            sender = int(graph.source[receiver])
            ranks = int(graph.rank[sender]), int(graph.rank[receiver])
            yield TimedTransfer(*ranks, schedule.action(sender), schedule.action(receiver), sent, arrived)

    @cached_property
    def critical_path(self) -> tuple[TimedAction, ...]:
        """The chain of actions that determines the makespan: each starts when the one before allows it."""
        from stageline.timeline.idle import critical_path

        self.require_one_clock("critical path")
        return critical_path(self)

    def write(self, path: str | Path) -> None:
        """Write it as JSON, for `stageline.read_timeline` and `stageline trace`."""
        from stageline.timeline.io import write_timeline

        write_timeline(self, path)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the figures, and every action and transfer."""
        actions = [
            [{"action": str(timed.action), "start": timed.start, "end": timed.end} for timed in self.actions(rank)]
            for rank in range(self.schedule.ranks)
        ]
        transfers = [
            {
                "source": moved.source_rank,
                "target": moved.target_rank,
                "sender": str(moved.sender),
                "receiver": str(moved.receiver),
                "start": moved.start,
                "end": moved.end,
            }
            for moved in self.messages()
        ]
        shards = [
            {"rank": timed.rank, "action": str(timed.action), "start": timed.start, "end": timed.end}
            for timed in self.shard_actions()
        ]
        beside = {"shards": shards} if shards else {}
        return {**self.figures(), "actions": actions, "transfers": transfers, **beside}

    def figures(self) -> dict[str, Any]:
        """Return the figures, as plain data."""
        return {
            "schedule": self.schedule.name,
            "ranks": self.schedule.ranks,
            "stages": self.schedule.stages,
            "microbatches": self.schedule.microbatches,
            "makespan": self.makespan if self.is_aligned else None,
            "span": self.span,
            "ideal": self.ideal,
            "bubble": self.bubble,
            "span_bubble": self.span_bubble,
            "utilisation": self.utilisation,
            "imbalance": self.imbalance,
            "uncertainty": self.uncertainty,
            **self._host_figures(),
            "peak_memory": list(self.peak_memory),
            "busy": list(self.busy),
            "idle": [idle._asdict() for idle in self.idle] if self.is_aligned else None,
        }

    def _host_figures(self) -> dict[str, Any]:
        """Return the machines of the ranks, and the times of messages between ranks, if there are several machines."""
        times = [{"source": pair[0], "target": pair[1], "time": time} for pair, time in self.transfer_times.items()]
        return {"hosts": list(self.hosts), "transfer_times": times} if self.ranks_by_host else {}

    def __repr__(self) -> str:
        if not self.is_aligned:
            return f"<Timeline of {self.schedule.name}: {NOT_ALIGNED}, span {self.span:g}>"
        return (
            f"<Timeline of {self.schedule.name}: makespan {self.makespan:g} (bubble {shown_bubble(self)}), "
            f"span {self.span:g} (bubble {self.span_bubble:.1%})>"
        )


NOT_ALIGNED = "clocks of its ranks not aligned, no makespan and no bubble"
"""The description of a timeline whose ranks have clocks that were not aligned."""


def shown_bubble(timeline: Timeline) -> str:
    """Return the bubble of the makespan as text, with its uncertainty.

    >>> import stageline as sl
    >>> from dataclasses import replace
    >>> t = sl.simulate(sl.schedule("gpipe", ranks=2, microbatches=2))
    >>> shown_bubble(t), shown_bubble(replace(t, uncertainty=0.09)), shown_bubble(replace(t, uncertainty=None))
    ('33.3%', '33.3% ± 1.0%', 'unknown: clocks not aligned')
    """
    if timeline.bubble is None:
        return "unknown: clocks not aligned"
    return f"{timeline.bubble:.1%}" + (f" ± {timeline.bubble_uncertainty:.1%}" if timeline.uncertainty else "")


def share_above(cost: float, ideal: float) -> float:
    """Return the share of a cost that is above the ideal; never negative.

    >>> share_above(4.0, 3.0), share_above(0.3, 0.1 + 0.2), share_above(0.0, 0.0)
    (0.25, 0.0, 0.0)
    """
    return max(0.0, (cost - ideal) / cost) if cost > 0 else 0.0
