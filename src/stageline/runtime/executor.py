"""Running one rank's program: ONE loop for every schedule. It knows no family by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stageline.common.errors import PeerFailed, StagelineError
from stageline.distributed.failures import Change
from stageline.distributed.rank_host import RankExecutors
from stageline.faults.flight_recorder import Flight, worth_writing
from stageline.faults.monitor.verdict import Verdict, describe
from stageline.faults.progress import Notes, Progress
from stageline.runtime.batches.block_mask import is_mask
from stageline.runtime.clock import Clock, DeviceClock, HostClock
from stageline.runtime.guards.changed_outputs import Outputs
from stageline.runtime.guards.non_finite import FiniteWatch
from stageline.runtime.stage import Stage
from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.tensors.aliases import noted, read_pairs, sharing
from stageline.tensors.pytree import Leaf, flatten, refuse_layout, unflatten
from stageline.tensors.subclasses import data_of, detached
from stageline.transport.protocol import Header, Message, Traffic, Transport


@dataclass(frozen=True)
class StepRequest:
    """One step as every rank runs it: the microbatches, and the weight of each in the loss."""

    step: int
    samples: int
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: Sequence[float]
    keywords: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """For single stages: keyword inputs, microbatch by microbatch."""
    training: bool = True
    keep_outputs: bool = False
    scale: float = 1.0
    """What all gradients are multiplied by, and the loss that is told is not."""
    inputs_want: Sequence[bool] = ()
    """For each tensor of the inputs, whether it requires a gradient; empty if none does."""
    input_roots: Sequence[tuple[Tensor, Tensor]] = ()
    """Inputs that come from a graph, and the leaves that were cut into microbatches in their place."""
    check_finite: bool = False
    """Whether values that are not finite are looked for."""
    check_gradients: bool = True
    """Whether gradients that are not finite count; a loss scale of float16 deals with them itself."""
    began: Mapping[int, tuple[Any, float]] = field(default_factory=dict)
    """For every GPU in use: an event in the caller's stream, after which the step may begin, and its moment."""


@dataclass
class RankResult:
    """What one rank's part of a step gave: times of its actions and of what it received, losses, outputs."""

    clock: Clock
    rank: int = 0
    arrived: dict[int, float] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    input_gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)
    """For each microbatch, the gradients of the batch's own inputs, where they are wanted."""
    split: tuple[int, int] = (0, 0)
    """Of the elements of parameters that got a gradient by I and W: all, and those that came with I."""
    watch: FiniteWatch | None = None
    """What it saw that is not finite; None where nobody asked."""
    over: Any = None
    """An event in this rank's stream, after which its part of the step is over; None without a GPU."""


@dataclass(frozen=True)
class _Task:
    """One action with everything that can be found out before the step."""

    index: int
    kind: int
    stage: int
    microbatch: int
    source: int | None
    """The rank its input comes from; None where it comes from nowhere or from this rank."""
    target: int | None
    """The rank its output goes to; None where it goes nowhere or stays on this rank."""
    neighbour: int | None
    """The stage on this rank that takes its output directly."""
    place: tuple[str, int, int]
    """What it is called: its letter, stage and microbatch."""


class Executor:
    """Runs the program of one rank of a verified schedule, on any transport."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        *,
        names: Sequence[int] | None = None,
        own_stream: bool = False,
        progress: Progress | None = None,
        flight: Flight | None = None,
        deadline: float = 60.0,
    ) -> None:
        """`stages` are those that this rank holds; on a GPU, they run in a stream of the rank's own if asked for.

        `names` are what the transport calls the ranks of the schedule: their processes, where there are replicas.
        `progress` is where the rank says what it is doing, `flight` where it notes what it did.
        """
        self.schedule = schedule
        self.rank = rank
        self.deadline = deadline
        self.names = list(range(schedule.ranks)) if names is None else list(names)
        self.name = self.names[rank]
        self.stages = stages
        self.transport = transport
        mine = list(schedule.slices())[rank]
        self._first = mine.start
        self._tasks = [self._task(index) for index in range(mine.start, mine.stop)]
        last = {task.stage: position for position, task in enumerate(self._tasks) if task.kind != kinds.F}
        self._complete = {position: stage for stage, position in last.items()}
        """After which of its tasks the gradients of which stage are complete."""
        self._local: dict[tuple[Traffic, int, int], Message] = {}
        self._early = self._find_early()
        """For tasks that take a message in another order than it was sent: the tasks whose messages come before it and
        are parked, or None where its own is parked by then."""
        self._parked: dict[int, Message] = {}
        self.awaited: tuple[Header, float] | None = None
        """The message that this rank waits for, and since when."""
        self.turns: AbstractContextManager[Any] = nullcontext()
        """What an action takes and gives back: a lock of all ranks while torch compiles, which wants to be alone."""
        self.stopped: PeerFailed | None = None
        """Another rank's failure, told from another thread: no action is begun after it."""
        self.progress: Progress = Notes() if progress is None else progress
        self.flight = Flight(self.name, schedule.ranks) if flight is None else flight
        sizes = {"ranks": schedule.ranks, "stages": schedule.stages, "microbatches": schedule.microbatches}
        self.flight.schedule = {"name": schedule.name, **sizes}
        self.step = 0
        """The step that it runs or ran last."""
        self.outputs = Outputs()
        self.device = device_of(stages.values())
        self._stream: Any = torch.cuda.Stream(self.device) if self.device is not None and own_stream else None  # type: ignore[no-untyped-call]

    def _task(self, index: int) -> _Task:
        schedule, rank_of = self.schedule, self.schedule.placement.rank_of
        kind = int(schedule.action_kinds[index])
        stage, microbatch = int(schedule.stage_ids[index]), int(schedule.microbatch_ids[index])
        before, after = schedule.input_stage(index), schedule.output_stage(index)
        source = None if before is None else rank_of(before, microbatch)
        target = None if after is None else rank_of(after, microbatch)
        return _Task(
            index,
            kind,
            stage,
            microbatch,
            None if source is None or source == self.rank else self.names[source],
            None if target is None or target == self.rank else self.names[target],
            after if target == self.rank else None,
            ("FBIW"[kind], stage, microbatch),
        )

    def _find_early(self) -> dict[int, list[_Task] | None]:
        """Go through what this rank takes from each channel that it reads in another order than was sent."""
        channels = self.schedule.channels
        found: dict[int, list[_Task] | None] = {}
        mine = channels.targets() == self.rank
        for channel in np.flatnonzero(channels.reordered & mine).tolist():
            here = slice(int(channels.bounds[channel]), int(channels.bounds[channel + 1]))
            receivers, numbers = channels.receivers[here].tolist(), channels.sent[here].tolist()
            by_number = dict(zip(numbers, receivers, strict=True))
            delivered = 0
            for index, number in zip(receivers, numbers, strict=True):
                early = [self._tasks[by_number[other] - self._first] for other in range(delivered, number)]
                found[index] = early if number >= delivered else None
                delivered = max(delivered, number + 1)
        return found

    def run(self, work: StepRequest, ready: Callable[[int], None] | None = None) -> RankResult:
        """Run the whole program once; `ready` is called with every stage whose gradients are complete."""
        if self.device is None:
            return self._run(work, HostClock(len(self._tasks)), ready)
        event, moment = work.began[self.device]
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            stream = torch.cuda.current_stream()
            stream.wait_event(event)
            result = self._run(work, DeviceClock(len(self._tasks), stream, event, moment), ready)
            result.over = stream.record_event()
        return result

    def _run(self, work: StepRequest, clock: Clock, ready: Callable[[int], None] | None) -> RankResult:
        progress, flown = self.progress, self.flight.actions
        self.step = work.step
        result = RankResult(clock, self.rank)
        watch = result.watch = self._watch(work)
        self._local.clear()
        self._parked.clear()
        for position, task in enumerate(self._tasks):
            if self.stopped is not None:
                raise self.stopped
            progress.doing = task.place
            arrived = self._input(task, work, result)
            began = clock.start(position)
            with self.turns:
                message = self._compute(task, arrived, work, result)
            flown.append((*task.place, work.step, began, clock.end(position)))
            if watch is not None:
                watch.action(task.kind, task.stage, task.microbatch, None if message is None else message.leaves)
            if message is not None:
                self._pass_on(task, message)
            progress.done += 1
            if ready is not None and position in self._complete:
                ready(self._complete[position])
        progress.doing = "after its last action"
        if watch is not None:
            watch.end()
        counts = [stage.take_counts() for stage in self.stages.values()]
        result.split = (sum(total for total, _ in counts), sum(unsplit for _, unsplit in counts))
        return result

    def _watch(self, work: StepRequest) -> FiniteWatch | None:
        if not (work.training and work.check_finite):
            return None
        parts = {index: stage.part for index, stage in self.stages.items()}
        gradients = work.check_gradients and work.scale <= 1.0
        return FiniteWatch(self.schedule.stages, parts, gradients=gradients, on_gpu=self.device is not None)

    def _header(self, task: _Task, work: StepRequest, source: int, target: int, stage: int) -> Header:
        traffic: Traffic = "forward" if task.kind == kinds.F else "backward"
        return Header(source, target, traffic, stage, task.microbatch, work.step)

    def _input(self, task: _Task, work: StepRequest, result: RankResult) -> Message | None:
        """Wait for what the action takes from another stage."""
        if task.kind == kinds.W:
            return None
        step = 1 if task.kind == kinds.F else -1
        before = task.stage - step
        if not 0 <= before < self.schedule.stages:
            return None
        traffic: Traffic = "forward" if task.kind == kinds.F else "backward"
        if task.source is None:
            return self._local.pop((traffic, task.stage, task.microbatch))
        if task.index in self._early:
            early = self._early[task.index]
            if early is None:
                return self._parked.pop(task.index)
            for other in early:
                self._parked[other.index] = self._receive(other, work, result)
        return self._receive(task, work, result)

    def _receive(self, task: _Task, work: StepRequest, result: RankResult) -> Message:
        """Wait for the next message of a channel, which is the input of this task."""
        assert task.source is not None
        before = task.stage - (1 if task.kind == kinds.F else -1)
        header = self._header(task, work, task.source, self.name, before)
        self.awaited = (header, time.perf_counter())
        self.progress.waits = task.source
        message = self.transport.receive(header, self.deadline)
        self.progress.waits = None
        self.awaited = None
        came = result.arrived[task.index] = self.transport.arrived
        self.flight.received.append((task.source, header.traffic, before, task.microbatch, work.step, came, 0))
        return message

    def _compute(self, task: _Task, arrived: Message | None, work: StepRequest, result: RankResult) -> Message | None:
        stage = self.stages[task.stage]
        if task.kind == kinds.F:
            return self._forward(stage, task, arrived, work, result)
        if task.kind == kinds.W:
            stage.backward_weight(task.microbatch)
            return None
        grads = None if arrived is None else list(arrived.leaves)
        changed = () if arrived is None else arrived.wants_gradient
        run = stage.backward if task.kind == kinds.B else stage.backward_input
        gradients = run(task.microbatch, grads, changed)  # type: ignore[arg-type]
        if task.stage > 0:
            return self._message(task, work, gradients, "", stage.changed)
        if work.inputs_want:
            result.input_gradients[task.microbatch] = gradients
        return None

    def _forward(
        self, stage: Stage, task: _Task, arrived: Message | None, work: StepRequest, result: RankResult
    ) -> Message | None:
        if arrived is None:
            leaves, tree = flatten(self._here(work.inputs[task.microbatch]), "the batch")
            # Through .data: microbatches are parts of one tensor, and a change of one in place is no change of another.
            leaves = [data_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            own = iter(work.inputs_want or [False] * len(leaves))
            wants = [isinstance(leaf, Tensor) and next(own) for leaf in leaves]
            shared = sharing(leaves, {})
        else:
            leaves, wants = list(arrived.leaves), list(arrived.wants_gradient)
            tree, shared = read_pairs(arrived.tree)
        given = work.keywords.get(task.stage)
        outputs, shape = stage.forward(
            task.microbatch,
            work.step,
            leaves,
            tree,
            wants,
            work.training,
            self._here(given[task.microbatch]) if given else {},
            shared,
        )
        if task.stage < self.schedule.stages - 1:
            return self._message(task, work, outputs, shape)
        stage.take_joined()
        value = unflatten(outputs, shape)
        if work.targets:
            result.losses[task.microbatch], result.metrics[task.microbatch] = stage.loss(
                task.microbatch,
                work.step,
                value,
                self._here(work.targets[task.microbatch]),
                work.weights[task.microbatch],
                work.training,
                work.scale,
            )
        if work.keep_outputs:
            result.outputs[task.microbatch] = unflatten(
                [detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in outputs], shape
            )
        return None

    def _here(self, tree: Any) -> Any:
        """Bring a part of the batch to this rank's GPU, if it has one."""
        if self.device is None:
            return tree
        to = torch.device("cuda", self.device)

        def moved(leaf: Any) -> Any:
            if is_mask(leaf):
                return leaf.to(to)
            return leaf.to(to, non_blocking=True) if isinstance(leaf, Tensor) and leaf.device != to else leaf

        return pytree.tree_map(moved, tree, is_leaf=is_mask)

    def _message(
        self, task: _Task, work: StepRequest, leaves: Sequence[Leaf], tree: str, changed: Sequence[bool] = ()
    ) -> Message:
        """With an output, tell which tensors want a gradient; with gradients, which of them a hook changed."""
        target = self.name if task.target is None else task.target
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
                refuse_layout(leaf, task.stage, task.microbatch, forward=task.kind == kinds.F)
        wants = list(changed) or [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        if task.kind == kinds.F:
            tree = noted(tree, sharing(leaves, self.stages[task.stage].take_joined()))
        bare = [detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        message = Message(self._header(task, work, self.name, target, task.stage), bare, tree, wants)
        self.outputs.note(message)
        return message

    def _pass_on(self, task: _Task, message: Message) -> None:
        if task.neighbour is not None:
            self._local[(message.header.traffic, task.neighbour, task.microbatch)] = message
        elif task.target is not None:
            self.transport.send(message)
            head = message.header
            size = sum(leaf.nbytes for leaf in message.leaves if isinstance(leaf, Tensor))
            moment = time.perf_counter()
            self.flight.sent.append((task.target, head.traffic, head.stage, head.microbatch, head.step, moment, size))

    @property
    def changes(self) -> Sequence[Change]:
        """Outputs of its stages that changed their form."""
        return self.outputs.changes

    @property
    def doing(self) -> str:
        """What this rank is in, in words."""
        return describe(self.progress.doing)

    def record(self, verdict: Verdict | None, lost: str | None = None) -> Path | None:
        """Write the flight record of this rank; None where that cannot be done, or the failure needs none."""
        if not worth_writing(verdict):
            return None
        awaited = self.awaited
        try:
            return self.flight.write(
                verdict=verdict,
                doing=self.progress.doing,
                waits=self.progress.waits,
                awaited="" if awaited is None else str(awaited[0]),
                since=None if awaited is None else awaited[1],
                lost=lost,
            )
        except OSError:
            return None

    def forget(self) -> None:
        """Drop what a failed step left."""
        self._local.clear()
        self._parked.clear()
        for stage in self.stages.values():
            stage.forget()


Executors: TypeAlias = RankExecutors[Executor]
"""A schedule, and the executors of the ranks of this process."""


def device_of(stages: Iterable[Stage]) -> int | None:
    """The GPU that a rank's stages are on; None where they are on the host, or have nothing to be anywhere with."""
    devices = {tensor.device for stage in stages for tensor in (*stage.part.parameters(), *stage.part.buffers())}
    found = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    if len(found) > 1:
        raise StagelineError(
            f"the stages of one rank are on GPUs {', '.join(map(str, found))}; put all stages of a rank on one GPU"
        )
    return found[0] if found else None
