"""The report of a step: what each rank returns, what the ranks add up, and the figures and timeline that follow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.distributed.rank_host import Floats
from stageline.runtime.batches.chunk_specs import merge
from stageline.runtime.guards.non_finite import WIDTH, Event, FiniteWatch, read_events, write_events
from stageline.schedules.schedule import Schedule
from stageline.tensors.pytree import join_batch
from stageline.timeline.timeline import ShardTimes, Timeline, Transfers
from stageline.transport.clock_alignment import Alignment

TEXT, BYTES = 255, 6
"""How many numbers encode a text, and how many bytes of it each number holds."""


def add_up(values: Iterable[float]) -> float:
    """The sum, added one by one as a loop over microbatches adds: from Python 3.12 on, `sum` rounds in another way.

    >>> add_up([1e16, 1.0, -1e16])
    0.0
    """
    return reduce(add, values, 0.0)


class GpuClock:
    """Puts an event into a stream before and after every action; they are read when the times are needed."""

    def __init__(self, stream: Any, base: Any, moment: float, spare: list[Any]) -> None:
        """Count from `base`, an event that was put into a stream at a moment of the host's clock.

        `spare` are events that earlier clocks do not need any more; using them is faster than creating new ones.
        """
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._stream, self._base, self._moment, self._spare = stream, base, moment, spare
        self._known: list[tuple[float, float]] = []
        self._halves: set[int] = set()

    def start(self, *, after_message: bool) -> None:
        """The next action begins: after a message that it waited for, or when the action before it ended."""
        self._starts.append(self.event() if after_message or not self._ends else self._ends[-1])

    def end(self) -> None:
        """The action has ended."""
        self._ends.append(self.event())

    def halve(self) -> None:
        """The last action was two that ran as one: each took half of its time."""
        self._halves.add(len(self._ends))
        self._starts.append(self._starts[-1])
        self._ends.append(self._ends[-1])

    def event(self, stream: Any = None) -> Any:
        """An event in the rank's stream, or in another."""
        new_event: Any = torch.cuda.Event
        event = self._spare.pop() if self._spare else new_event(enable_timing=True)
        event.record(self._stream if stream is None else stream)
        return event

    def read(self) -> tuple[Floats, Floats]:
        """Wait for the last event; return starts and ends in seconds, on the scale of `time.perf_counter`."""
        self.follow(len(self._ends))
        self._spare += dict.fromkeys([*self._starts, *self._ends])
        self._starts, self._ends = [], []
        starts, ends = np.array(self._known).reshape(-1, 2).T
        return starts, ends

    def follow(self, actions: int | None = None) -> None:
        """Wait until this many actions have ended, or all but the last, and read their times."""
        until = len(self._ends) - 1 if actions is None else actions
        for position in range(len(self._known), until):
            self._ends[position].synchronize()
            start, end = self._read(self._starts[position]), self._read(self._ends[position])
            if position in self._halves:
                middle = (start + end) / 2
                self._known[-1], start = (start, middle), middle
            self._known.append((start, end))

    def moment(self, event: Any) -> float:
        """Wait for an event; return its time in seconds, on the scale of `time.perf_counter`."""
        event.synchronize()
        return self._read(event)

    def _read(self, event: Any) -> float:
        return self._moment + float(self._base.elapsed_time(event)) / 1e3


class ShardClock:
    """When each shard action of a rank began and ended, by `time.perf_counter`; on a GPU, by events in its stream."""

    def __init__(self, gpu: GpuClock | None = None) -> None:
        self._gpu = gpu
        self.starts: dict[int, Any] = {}
        self.ends: dict[int, Any] = {}

    def start(self, number: int) -> None:
        """A shard action begins."""
        self.starts[number] = time.perf_counter() if self._gpu is None else self._gpu.event()

    def end(self, number: int, stream: Any = None) -> None:
        """It has ended, or will when the work of a stream is done; a gather ends when its parameters are used."""
        self.ends[number] = time.perf_counter() if self._gpu is None else self._gpu.event(stream)

    def read(self) -> tuple[dict[int, float], dict[int, float]]:
        """The times in seconds, on the scale of `time.perf_counter`; waits for a GPU."""
        if self._gpu is None:
            return self.starts, self.ends
        moment = self._gpu.moment
        both = ({number: moment(event) for number, event in times.items()} for times in (self.starts, self.ends))
        starts, ends = both
        return starts, ends


@dataclass
class RankResult:
    """What one rank's part of a step produced: times of its actions and of what it received, losses, outputs."""

    rank: int = 0
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """When each action of the rank began and ended, by `time.perf_counter` of the host."""
    gpu_clock: GpuClock | None = None
    """The same by the clock of the rank's GPU, which runs behind its host; None without a GPU."""
    shard_clock: ShardClock = field(default_factory=ShardClock)
    arrived: dict[int, float] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    input_gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)
    """For each microbatch, the gradients of the batch's own inputs, if requested."""
    split: tuple[int, int] = (0, 0)
    """Of the elements of parameters that got a gradient by I and W: all, and those that got it by I."""
    watch: FiniteWatch | None = None
    """The values that are not finite; None if they are not checked."""
    finished_event: Any = None
    """An event in this rank's stream, after which its part of the step is finished; None without a GPU."""

    def halve(self) -> tuple[float, float]:
        """The last action was two that ran as one, each for half of its time; return start and end of the second."""
        if self.gpu_clock is not None:
            self.gpu_clock.halve()
        end = self.ends[-1]
        self.ends[-1] = (self.starts[-1] + end) / 2
        return self.ends[-1], end

    def times(self) -> tuple[Floats, Floats]:
        """Start and end of each action in seconds, on the scale of `time.perf_counter`; waits for a GPU."""
        if self.gpu_clock is not None:
            return self.gpu_clock.read()
        return np.array(self.starts), np.array(self.ends)


@dataclass(frozen=True)
class Outcome:
    """What all ranks know after a step."""

    losses: tuple[float, ...]
    """Each microbatch's part of the loss."""
    unsplit: float
    """The share of parameters whose gradients were computed in I."""
    has_metrics: bool
    bad: tuple[int, ...]
    """The stages whose gradients are not finite."""
    events: tuple[Event, ...]
    """The values on all ranks that were not finite."""
    penalties: Floats
    """The penalty of each parameter of the model; empty if there is no penalty."""
    penalty: float
    """The sum of all penalties, in the order of the model."""
    times: Floats | None = None
    """Start, end and arrival of every action, where all ranks reported them."""


class StepRecordLayout:
    """Where each number stands in a rank's step record, computed once for a schedule.

    losses of microbatches │ counts │ bad stages │ events of ranks │ penalties │ times of actions, and whether known
    """

    def __init__(self, schedule: Schedule, *, penalties: int = 0, with_times: bool = False) -> None:
        self.microbatches, self.ranks, self.actions = schedule.microbatches, schedule.ranks, schedule.num_actions
        self.bounds: list[int] = schedule.bounds.tolist()
        self._shard_actions = 0 if schedule.sharding is None else len(schedule.sharding)
        self.with_times = with_times
        self._ends = np.cumsum([self.microbatches, 3, schedule.stages, 2 * WIDTH * self.ranks, penalties]).tolist()
        self.size: int = self._ends[-1] + (3 * (self.actions + self._shard_actions) + 1 if with_times else 0)

    def write(self, results: Sequence[RankResult]) -> Floats:
        """The numbers of the ranks of this process, without penalties and times."""
        row = np.zeros(self._ends[3])
        losses, counts, bad, events, _ = np.split(row, self._ends[:4])  # views of one array
        for result in results:
            if result.losses:
                order = sorted(result.losses)
                # In one piece: reading each number separately would stall a GPU.
                values = torch.stack([result.losses[microbatch].reshape(()).double() for microbatch in order])
                losses[order] = values.cpu().numpy()
            counts[:2] += result.split
            counts[2] += any(result.metrics.values())
            if result.watch is not None:
                own = slice(2 * WIDTH * result.rank, 2 * WIDTH * (result.rank + 1))
                _write_not_finite(result.watch, bool(np.isfinite(losses).all()), bad, events[own])
        return row

    def read(self, totals: Floats) -> Outcome:
        """What the step records of all ranks say, added up."""
        losses, counts, bad, events, penalties, times = np.split(totals, self._ends)
        elements, unsplit, metrics = counts.tolist()
        return Outcome(
            losses=tuple(losses.tolist()),
            unsplit=unsplit / elements if elements else 0.0,
            has_metrics=metrics > 0,
            bad=tuple(np.flatnonzero(bad).tolist()),
            events=tuple(read_events(events)) if events.any() else (),
            penalties=penalties,
            penalty=add_up(penalties.tolist()),
            times=times[:-1] if len(times) and times[-1] == self.ranks else None,
        )

    def times(self, results: Sequence[RankResult], clocks: Alignment | None) -> Floats:
        """Start, end and arrival of every action of the ranks of this process, on the clock of the first rank, and then
        start and end of their shard actions; 0 for those of others."""
        times = np.zeros((3, self.actions + self._shard_actions))
        for result in results:
            own = slice(self.bounds[result.rank], self.bounds[result.rank + 1])
            offset = 0.0 if clocks is None else clocks.offsets[result.rank]
            start, end = result.times()
            times[0, own], times[1, own] = start + offset, end + offset
            if result.arrived:
                times[2, list(result.arrived)] = np.array(list(result.arrived.values())) + offset
            for row, shard_times in enumerate(result.shard_clock.read()):
                for number, moment in shard_times.items():
                    times[row, self.actions + number] = moment + offset
        return times.reshape(-1)


def _write_not_finite(watch: FiniteWatch, finite_losses: bool, flags: Floats, events: Floats) -> None:
    """Write which gradients of a rank are not finite, and the events that it saw before that."""
    bad = watch.bad()
    flags[sorted(bad)] = 1.0
    if bad or watch.known or not finite_losses:
        events[:] = write_events(watch.events())


def text_to_row(text: str) -> Floats:
    """A text as numbers that adding zeros does not change.

    >>> row_to_text(text_to_row("über") + text_to_row(""))
    'über'
    """
    data = text.encode()
    if len(data) > TEXT * BYTES:
        raise StagelineError(
            f"the metrics of a microbatch take {len(data)} bytes as JSON, but a run has room for only "
            f"{TEXT * BYTES}; return fewer metrics, or use pipe.step"
        )
    row = np.zeros(TEXT)
    for place in range(0, len(data), BYTES):
        row[place // BYTES] = int.from_bytes(data[place : place + BYTES].ljust(BYTES, b"\0"), "big")
    return row


def row_to_text(row: Floats) -> str:
    """The text of a row."""
    return b"".join(int(number).to_bytes(BYTES, "big") for number in row.tolist()).rstrip(b"\0").decode()


@dataclass(frozen=True)
class StepTotals:
    """The step records of all ranks, added up."""

    failed: Floats
    """For each rank: when it failed by itself, and when because of another rank; 0 if it did not."""
    outcome: Outcome
    norms: Floats
    """The norm of the gradient of each parameter of the model."""
    metrics: dict[str, float]

    @property
    def culprit(self) -> int | None:
        """The rank that failed first; causes come before their effects."""
        for times in self.failed.T:
            if times.any():
                return int(np.argmin(np.where(times > 0, times, np.inf)))
        return None


class ContinuousRecordLayout:
    """The layout of a record of a continuous step: failures, step record, metrics, norms.

    >>> import stageline as sl
    >>> layout = ContinuousRecordLayout(sl.schedule("1f1b", ranks=2, microbatches=2), 3)
    >>> first = layout.write(0, norms=np.array([1.0, 2.0, 0.0]))
    >>> step_record = np.zeros(layout.step_record.size)
    >>> step_record[:5] = 0.5, 0.25, 0.0, 0.0, 1.0
    >>> second = layout.write(1, outcome=step_record, metrics={"right": 3})
    >>> totals = layout.read(first + second)
    >>> totals.culprit, totals.outcome.losses, totals.norms.tolist(), totals.metrics
    (None, (0.5, 0.25), [1.0, 2.0, 0.0], {'right': 3})
    >>> layout.read(layout.write(0, failed=(0.0, 7.0)) + layout.write(1, failed=(8.0, 0.0))).culprit
    1
    """

    def __init__(self, schedule: Schedule, parameters: int, penalties: int = 0) -> None:
        """`parameters` is how many the model has, `penalties` the same number if there is a penalty, else 0."""
        self.step_record = StepRecordLayout(schedule, penalties=penalties)
        self._ranks, self._parameters = schedule.ranks, parameters
        self._ends = np.cumsum([2 * schedule.ranks, self.step_record.size, TEXT]).tolist()

    def write(
        self,
        rank: int,
        *,
        failed: tuple[float, float] = (0.0, 0.0),
        outcome: Floats | None = None,
        norms: Floats | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Floats:
        """The record of a rank."""
        flags = np.zeros((self._ranks, 2))
        flags[rank] = failed
        parts = [
            flags.reshape(-1),
            np.zeros(self.step_record.size) if outcome is None else outcome,
            text_to_row(json.dumps(metrics) if metrics else ""),
            np.zeros(self._parameters) if norms is None else norms,
        ]
        return np.concatenate(parts)

    def read(self, row: Floats) -> StepTotals:
        """The records of all ranks, added up."""
        failed, outcome, text, norms = np.split(row, self._ends)
        metrics = row_to_text(text)
        return StepTotals(
            failed.reshape(-1, 2), self.step_record.read(outcome), norms, json.loads(metrics) if metrics else {}
        )


def scalars_to_row(names: Sequence[str], scalars: Mapping[str, Tensor]) -> Floats:
    """Tensors of one element by name, as a row in the order of `names`; 0 for the other names."""
    row = np.zeros(len(names))
    numbers = {name: index for index, name in enumerate(names)}
    for device in {value.device for value in scalars.values()}:  # one transfer per device: each one stalls a GPU
        here = [name for name, value in scalars.items() if value.device == device]
        stacked = torch.stack([scalars[name].detach().reshape(()).double() for name in here])
        row[[numbers[name] for name in here]] = stacked.cpu().numpy()
    return row


def metrics_of(results: Sequence[RankResult], weights: Sequence[float]) -> dict[str, float]:
    """The metrics of the ranks of this process, weighted and added up as the loss is."""
    return sum_metrics(
        {name: float(value) * weights[microbatch] for name, value in result.metrics[microbatch].items()}
        for result in results
        for microbatch in sorted(result.metrics)
    )


def sum_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up metrics by name, in the order of the parts."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def joined(results: Sequence[RankResult], spec: Any = None) -> Any:
    """The outputs of the whole batch, where the last stage is; None elsewhere."""
    outputs = {microbatch: output for result in results for microbatch, output in result.outputs.items()}
    return merge([outputs[microbatch] for microbatch in sorted(outputs)], spec, join_batch) if outputs else None


def lengths_of(schedule: Schedule, times: Floats) -> Floats:
    """The length of every action, by the times of all of them."""
    start, end, _ = times.reshape(3, -1)[:, : len(schedule.kinds)]
    return np.asarray(end - start)


class Measured:
    """The timeline of a step, built on first use."""

    def __init__(self, schedule: Schedule, times: Callable[[], Floats], clocks: Alignment | None) -> None:
        """`times` returns those of all ranks, and waits for them if needed; `clocks` is what they were aligned by."""
        self._schedule, self._times, self._clocks = schedule, times, clocks
        self._moment = time.perf_counter()
        self._timeline: Timeline | None = None

    def timeline(self) -> Timeline:
        """The timeline."""
        if self._timeline is None:
            clocks = self._clocks
            uncertainty, hosts = (None, ()) if clocks is None else (clocks.uncertainty(self._moment), clocks.hosts)
            self._timeline = timeline_of(self._schedule, self._times().reshape(3, -1), uncertainty, hosts)
            self._times = lambda: np.zeros(0)  # release what they were read from
        return self._timeline


def timeline_of(schedule: Schedule, times: Floats, uncertainty: float | None, hosts: tuple[str, ...] = ()) -> Timeline:
    """A measured timeline from starts, ends and arrivals of actions and shard actions; and the clocks' uncertainty."""
    times = times - times[0].min()
    (start, end, came), shards = times[:, : schedule.num_actions], times[:2, schedule.num_actions :]
    pairs = schedule.pairs  # a pair is one entry: both halves have the same times
    start[pairs + 1] = start[pairs] = np.minimum(start[pairs], start[pairs + 1])
    end[pairs] = end[pairs + 1] = np.maximum(end[pairs], end[pairs + 1])
    graph = schedule.graph
    receivers = graph.receivers
    sent = end[graph.source[receivers]]
    arrived = np.maximum(np.minimum(came[receivers], start[receivers]), sent)
    moved = Transfers(receivers, sent, arrived)
    shard_times = None if schedule.sharding is None else ShardTimes(shards[0], np.maximum(shards[1], shards[0]))
    return Timeline(
        schedule=schedule,
        start=start,
        end=end,
        transfers=moved,
        uncertainty=uncertainty,
        shards=shard_times,
        hosts=hosts,
    )


@dataclass(frozen=True)
class StepStats:
    """The figures of one step."""

    loss: float
    """The loss of the step: the sum over microbatches of loss × weight, in their order; then over replicas; and the
    penalty, where there is one."""
    losses: tuple[float, ...]
    """Each microbatch's part of it, in this replica."""
    metrics: dict[str, float]
    """The metrics that `loss_fn` returned with the loss, weighted and summed in the same way."""
    seconds: float
    """How long the step took; in a run, the time since the end of the previous step."""
    samples: int
    """How many samples it trained on, in all replicas."""
    microbatches: int
    """How many microbatches ran in this replica; fewer than requested if the batch has fewer samples."""
    unsplit: float
    """The share of the parameters' elements whose gradients could not be split off and were computed in I, not in W."""
    measured: Callable[[], Timeline] = field(repr=False, compare=False)
    """Returns the measured timeline of the step."""
    penalty: float = 0.0
    """The sum of `penalty=` over all parameters."""
    norm: float | None = None
    """In a run: the norm of all gradients before they were clipped; None if it was not needed."""

    @cached_property
    def bubble(self) -> float | None:
        """The share of the step's makespan that its busiest rank did not compute, measured.

        None if the clocks of the ranks were not aligned.
        """
        return self.measured().bubble


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a batch."""

    loss: float | None
    losses: tuple[float, ...]
    metrics: dict[str, float]
    outputs: Any
    seconds: float
