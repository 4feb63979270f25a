"""What a step's ranks found out, as numbers that are added up over all of them, and read again by each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stageline.distributed.rank_host import Floats
from stageline.runtime.batches.chunk_specs import merge
from stageline.runtime.executor import Executors, RankResult
from stageline.runtime.guards.non_finite import WIDTH, Event, FiniteWatch, read_events, write_events
from stageline.schedules.schedule import Schedule
from stageline.tensors.pytree import join_batch
from stageline.timeline.timeline import Timeline, Transfers
from stageline.transport.clock_alignment import Alignment


@dataclass(frozen=True)
class Outcome:
    """What all ranks know when a step is over."""

    losses: tuple[float, ...]
    """Each microbatch's part of the loss."""
    unsplit: float
    """The share of parameters whose gradients came with I."""
    described: bool
    """Whether there are metrics."""
    bad: tuple[int, ...]
    """The stages whose gradients are not finite."""
    events: tuple[Event, ...]
    """What was not finite on any rank."""
    penalties: Floats
    """The penalty of each parameter of the model; empty where there is no penalty."""
    times: Floats | None = None
    """Start, end and arrival of every action, where all ranks could tell them."""

    @property
    def penalty(self) -> float:
        """The whole penalty, added in the order of the model."""
        return float(sum(self.penalties.tolist()))

    @staticmethod
    def size(schedule: Schedule, penalties: int = 0, with_times: bool = False) -> int:
        """How many numbers it takes."""
        own = schedule.microbatches + 3 + schedule.stages + 2 * WIDTH * schedule.ranks
        return own + penalties + (3 * schedule.num_actions + 1 if with_times else 0)

    @classmethod
    def read(cls, totals: Floats, schedule: Schedule, penalties: int = 0) -> Outcome:
        """Read what `sums` wrote, and the times of all actions if every rank told them, added up over all ranks."""
        size, count = cls.size(schedule, penalties), schedule.microbatches
        total, unsplit, described = totals[count : count + 3].tolist()
        flags, events = np.split(totals[count + 3 : size - penalties], [schedule.stages])
        times = totals[size:-1] if len(totals) > size and totals[-1] == schedule.ranks else None
        return cls(
            losses=tuple(totals[:count].tolist()),
            unsplit=unsplit / total if total else 0.0,
            described=described > 0,
            bad=tuple(np.flatnonzero(flags).tolist()),
            events=tuple(read_events(events)),
            penalties=totals[size - penalties : size],
            times=times,
        )


def sums(schedule: Schedule, results: Sequence[RankResult]) -> Floats:
    """The numbers of the ranks that are here; penalties come after them."""
    found = np.zeros(Outcome.size(schedule))
    losses, counts, flags, events = np.split(
        found, np.cumsum([schedule.microbatches, 3, schedule.stages])
    )  # parts of one array
    for result in results:
        if result.losses:
            order = sorted(result.losses)
            # In one piece: on a GPU, every single number would be waited for.
            losses[order] = torch.stack([result.losses[each].reshape(()).double() for each in order]).cpu().numpy()
        counts[:2] += result.split
        counts[2] += any(result.metrics.values())
        if result.watch is not None:
            own = slice(2 * WIDTH * result.rank, 2 * WIDTH * (result.rank + 1))
            _tell_not_finite(result.watch, bool(np.isfinite(losses).all()), flags, events[own])
    return found


def _tell_not_finite(watch: FiniteWatch, good_losses: bool, flags: Floats, events: Floats) -> None:
    """Write down which gradients of a rank are not finite, and what it saw before that."""
    bad = watch.bad()
    flags[sorted(bad)] = 1.0
    if bad or watch.known or not good_losses:
        events[:] = write_events(watch.events())


def metrics_of(results: Sequence[RankResult], weights: Sequence[float]) -> dict[str, float]:
    """The metrics of the ranks that are here, weighed and added as the loss is."""
    found: dict[str, float] = {}
    for result in results:
        for microbatch in sorted(result.metrics):
            for name, value in result.metrics[microbatch].items():
                found[name] = found.get(name, 0.0) + float(value) * weights[microbatch]
    return found


def joined(results: Sequence[RankResult], spec: Any = None) -> Any:
    """The outputs of the whole batch, where the last stage is; None elsewhere."""
    found = {microbatch: output for result in results for microbatch, output in result.outputs.items()}
    return merge([found[microbatch] for microbatch in sorted(found)], spec, join_batch) if found else None


def times_of(crew: Executors, results: Sequence[RankResult], clocks: Alignment | None) -> Floats:
    """Start, end and arrival of every action of the ranks that are here, by the clock of the first rank; 0 for those of
    others."""
    schedule = crew.schedule
    times = np.zeros((3, schedule.num_actions))
    for executor, result in zip(crew.executors, results, strict=True):
        mine = slice(int(schedule.bounds[executor.rank]), int(schedule.bounds[executor.rank + 1]))
        offset = 0.0 if clocks is None else clocks.offsets[executor.rank]
        start, end = result.times()
        times[0, mine], times[1, mine] = start + offset, end + offset
        for index, moment in result.arrived.items():
            times[2, index] = moment + offset
    return times


def lengths_of(crew: Executors, results: Sequence[RankResult], times: Floats | None = None) -> Floats:
    """How long every action took, by the times of all of them, or by the clocks of the ranks, which are all here."""
    if times is not None:
        start, end, _ = times.reshape(3, -1)
        return end - start
    lengths = np.zeros(crew.schedule.num_actions)
    for executor, result in zip(crew.executors, results, strict=True):
        start, end = result.times()
        lengths[crew.schedule.bounds[executor.rank] : crew.schedule.bounds[executor.rank + 1]] = end - start
    return lengths


class Measured:
    """The timeline of a step, built when someone asks for it."""

    def __init__(self, schedule: Schedule, times: Callable[[], Floats], clocks: Alignment | None) -> None:
        """`times` gives those of all ranks, waiting for them if they are still on their way; `clocks` is what they were
        aligned by just now."""
        self._schedule, self._times = schedule, times
        self._uncertainty = None if clocks is None else clocks.uncertainty(time.perf_counter())
        self._timeline: Timeline | None = None

    def timeline(self) -> Timeline:
        """Build it, once."""
        if self._timeline is None:
            self._timeline = timeline_of(self._schedule, self._times().reshape(3, -1), self._uncertainty)
            self._times = lambda: np.zeros(0)  # let go of what they were read from
        return self._timeline


def timeline_of(schedule: Schedule, times: Floats, uncertainty: float | None) -> Timeline:
    """A measured timeline from starts, ends and arrivals, and how far the clocks of ranks may be apart."""
    start, end, came = times - times[0].min()
    pairs = schedule.pairs  # a pair is one entry: its halves have the same times
    start[pairs + 1] = start[pairs] = np.minimum(start[pairs], start[pairs + 1])
    end[pairs] = end[pairs + 1] = np.maximum(end[pairs], end[pairs + 1])
    graph = schedule.graph
    receivers = graph.receivers
    sent = end[graph.source[receivers]]
    arrived = np.maximum(np.minimum(came[receivers], start[receivers]), sent)
    moved = Transfers(receivers, sent, arrived)
    return Timeline(schedule=schedule, start=start, end=end, transfers=moved, uncertainty=uncertainty)
