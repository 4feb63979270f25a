"""Running one rank's program: one loop for every schedule. It knows no family by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from stageline.autograd import engine
from stageline.common.errors import PeerFailed, StagelineError
from stageline.distributed.failures import Change
from stageline.distributed.rank_host import RankProgress
from stageline.faults.flight_recorder import FlightRecorder, worth_writing
from stageline.faults.monitor.verdict import Verdict, describe
from stageline.runtime._torch_private import profiler_is_on, pytree
from stageline.runtime.action_ranges import Mark, range_marker
from stageline.runtime.batches.chunk_specs import is_mask
from stageline.runtime.cuda_graphs import ActionGraphs, CudaRecorder
from stageline.runtime.guards.changed_outputs import OutputForms
from stageline.runtime.guards.cut_layers import name_cut_layers
from stageline.runtime.guards.non_finite import FiniteWatch
from stageline.runtime.guards.uneven_parts import UnevenParts
from stageline.runtime.out_of_memory import MemoryContext, out_of_memory
from stageline.runtime.sharding import ShardedStage
from stageline.runtime.stage import LossInputs, Stage, run_forward
from stageline.runtime.step_report import GpuClock, RankResult, ShardClock
from stageline.schedules import action as kinds
from stageline.schedules.action import ShardAction
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import single_use
from stageline.tensors.copies import cloned, data_of, detached, is_plain_tensor, noted, read_pairs, sharing
from stageline.tensors.pytree import TENSOR, Leaf, flatten, refuse_layout, unflatten
from stageline.tensors.sharded import arrived as arrived_tensor
from stageline.tensors.sharded import is_sharded, receive_parts, send_parts, whole
from stageline.transport.protocol import Header, Message, Traffic, Transport, kinds_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stageline.planning.plan import Plan
    from stageline.timeline.costs import Costs

FORMS = 4096
"""How many forms of messages a rank remembers."""


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
    """What all gradients are multiplied by, but not the reported loss."""
    inputs_require_grad: Sequence[bool] = ()
    """For each tensor of the inputs, whether it requires a gradient; empty if none does."""
    input_roots: Sequence[tuple[Tensor, Tensor]] = ()
    """Inputs that come from a graph, and the leaves that were cut into microbatches in their place."""
    check_finite: bool = False
    """Whether to check for values that are not finite."""
    check_gradients: bool = True
    """Whether gradients that are not finite count; a loss scale of float16 deals with them itself."""
    start_events: Mapping[int, tuple[Any, float]] = field(default_factory=dict)
    """For every GPU in use: an event in the caller's stream, after which the step may begin, and its moment."""


class _Task(NamedTuple):
    """One action, with everything that is known before the step."""

    number: int
    """Its number in the schedule."""
    kind: int
    stage: int
    microbatch: int
    traffic: Traffic
    feeder: int | None
    """The stage whose message is its input; None if it needs none."""
    source: int | None
    """The rank its input comes from; None if it comes from this rank, or from none."""
    target: int | None
    """The rank its output goes to; None if it stays on this rank, or there is none."""
    neighbour: int | None
    """The stage on this rank that takes its output directly."""
    label: tuple[str, int, int]
    """What it is called: its letter, stage and microbatch."""
    name: str
    """The same as profilers show it."""
    joined: bool = False
    """Whether it is an I that its own W follows at once while no other rank waits for its output, or that W: I then
    runs the whole backward, which costs less than two halves, and W does nothing."""


class _MessageForm(NamedTuple):
    """What follows from the types and shapes of a message's leaves; learned from the first such message."""

    kinds: tuple[str, ...]
    wants_gradient: list[bool]
    plain: bool
    """Whether all tensors are of torch's own classes."""


class Executor:
    """Runs the program of one rank of a verified schedule, on any transport."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        *,
        processes: Sequence[int],
        alone: bool,
        cuda_graphs: bool = False,
        progress: RankProgress,
        flight: FlightRecorder,
        deadline: float,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`stages` are those that this rank holds.

        Unless it is `alone` in its process, they run in a CUDA stream of its own. With `cuda_graphs`, too, and then
        they capture their actions as CUDA graphs.
        `processes` are those of the ranks of the schedule, by which the transport addresses them.
        `progress` is where the rank says what it is doing, `flight` where it records what it did.
        `mesh` is that of the processes that hold the same stages, on which sharded tensors arrive.
        """
        self._mesh = mesh
        self._dimensions: tuple[str, ...] = () if mesh is None else mesh.mesh_dim_names or ()
        self._uneven = UnevenParts() if "tp" in self._dimensions else None
        """What watches forwards in which tensor parallel cuts activations."""
        self.schedule, self.rank, self.stages = schedule, rank, stages
        self.transport, self.progress, self.flight, self.deadline = transport, progress, flight, deadline
        self.processes, self.process = list(processes), processes[rank]
        own = list(schedule.slices())[rank]
        self._first = own.start
        self._last_stage = schedule.stages - 1
        self._tasks = _join_halves([self._task(index) for index in range(own.start, own.stop)])
        last = {task.stage: position for position, task in enumerate(self._tasks) if task.kind != kinds.F}
        self._complete = {position: stage for stage, position in last.items()}
        """After which of its tasks the gradients of which stage are complete."""
        self._shards: dict[int, ShardedStage] = {}
        """Its stages that are sharded."""
        self._shard_actions: dict[int, list[tuple[int, ShardAction]]] = {}
        """The shard actions before each task, with their numbers in the schedule."""
        self._reduced: set[int] = set()
        """The stages whose gradients a shard action reduces."""
        self._single_uses: dict[int, int | None] = {}
        """By the number of a gather, the kind of the only task that needs it; None if there are several."""
        self._gathers: dict[int, int] = {}
        """By stage, the number of the gather that runs."""
        for number, stage in stages.items():
            own_tasks = (task for task in self._tasks if task.stage == number and not task.joined)
            stage.splits_backward = any(task.kind == kinds.I for task in own_tasks)
        self._local: dict[tuple[Traffic, int, int], Message] = {}
        self._parked_before = self._find_parked_before()
        """For tasks that take a message out of order: the tasks whose messages arrive before it and must be parked.
        None if the task's own message is already parked."""
        self._parked: dict[int, Message] = {}
        self._forms: dict[Any, _MessageForm] = {}
        self._passed: dict[int, _MessageForm] = {}
        """By stage, the form of the last output."""
        self.awaited: tuple[Header, float] | None = None
        """The message that this rank waits for, and since when."""
        self.compile_lock: AbstractContextManager[Any] = nullcontext()
        """What an action holds while it runs: a lock of all ranks while torch compiles, which must not run twice."""
        self.stopped: PeerFailed | None = None
        """Another rank's failure, set from another thread: no action begins after it."""
        sizes = {"ranks": schedule.ranks, "stages": schedule.stages, "microbatches": schedule.microbatches}
        self.flight.schedule = {"name": schedule.name, **sizes}
        self.step = 0
        """The current step, or the last one."""
        self._mark: Mark = nullcontext
        """Marks ranges for profilers; decided anew in every step."""
        self.planned: Plan | Costs | None = None
        """What the pipeline was planned with, for the error of a rank that runs out of memory."""
        self.outputs = OutputForms()
        self.device = device_of(stage.part for stage in stages.values())
        self._alone = alone
        if self.device is not None and schedule.training and not alone:
            engine.start_thread(self.device)
        self._spare_events: list[Any] = []
        captures = cuda_graphs and self.device is not None
        own_stream = captures or (self.device is not None and not alone)
        self._stream: Any = torch.cuda.Stream(self.device) if own_stream else None  # type: ignore[no-untyped-call]
        self.graphs = ActionGraphs(stages.values(), CudaRecorder()) if captures else None
        """What captures and replays the actions of training steps."""

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
            "forward" if kind == kinds.F else "backward",
            before,
            None if source is None or source == self.rank else self.processes[source],
            None if target is None or target == self.rank else self.processes[target],
            after if target == self.rank else None,
            ("FBIW"[kind], stage, microbatch),
            f"{'FBIW'[kind]} s{stage} m{microbatch}",
        )

    def _find_parked_before(self) -> dict[int, list[_Task] | None]:
        """For channels read out of order, find which messages to park before each task."""
        channels = self.schedule.channels
        parked_before: dict[int, list[_Task] | None] = {}
        own = channels.targets() == self.rank
        for channel in np.flatnonzero(channels.reordered & own).tolist():
            here = slice(int(channels.bounds[channel]), int(channels.bounds[channel + 1]))
            receivers, numbers = channels.receivers[here].tolist(), channels.sent[here].tolist()
            by_number = dict(zip(numbers, receivers, strict=True))
            delivered = 0
            for index, number in zip(receivers, numbers, strict=True):
                earlier = [self._tasks[by_number[other] - self._first] for other in range(delivered, number)]
                parked_before[index] = earlier if number >= delivered else None
                delivered = max(delivered, number + 1)
        return parked_before

    def run(self, request: StepRequest, ready: Callable[[int], None] | None = None) -> RankResult:
        """Run the whole program once; `ready` is called with every stage whose gradients are complete."""
        try:
            return self._run_on_device(request, ready)
        except torch.OutOfMemoryError as error:
            context = MemoryContext(self.schedule, self.rank, self.stages, self.device, self.planned)
            raise out_of_memory(context, self.progress.doing, error, request) from error

    def _run_on_device(self, request: StepRequest, ready: Callable[[int], None] | None) -> RankResult:
        if self.device is None:
            return self._run(request, None, ready)
        event, moment = request.start_events[self.device]
        # Threads that all launch backwards slow each other down.
        own_thread = engine.in_this_thread() if self._alone else nullcontext()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), own_thread:
            stream = torch.cuda.current_stream()
            stream.wait_event(event)
            clock = GpuClock(stream, event, moment, self._spare_events)
            result = self._run(request, clock, ready)
            result.finished_event = stream.record_event()
        return result

    def _run(self, request: StepRequest, clock: GpuClock | None, ready: Callable[[int], None] | None) -> RankResult:
        progress, record = self.progress, self.flight.actions
        self.step = request.step
        plain = clock is None and not profiler_is_on()
        mark = self._mark = nullcontext if plain else range_marker(clock is not None)
        result = RankResult(self.rank, gpu_clock=clock, shard_clock=ShardClock(clock))
        watch = result.watch = self._finite_watch(request)
        self._local.clear()
        self._parked.clear()
        if self.graphs is not None and request.training:
            self.graphs.begin()
        for shards in self._shards.values():
            shards.begin()
        for position, task in enumerate(self._tasks):
            if self.stopped is not None:
                raise self.stopped
            if position in self._shard_actions:
                self._run_shard_actions(position, result, ready)
            progress.doing = task.label
            arrived = None if task.feeder is None else self._input(task, request, result)
            if clock is not None and not (task.joined and task.kind == kinds.W):
                clock.start(after_message=task.source is not None)
            if task.stage in self._shards and task.kind != kinds.W:
                self._wait_for_shards(task.stage, result)
            began = perf_counter()
            with self.compile_lock, mark(task.name):
                message = self._compute(task, arrived, request, result)
            ended = perf_counter()
            if task.joined and task.kind == kinds.W:
                began, ended = result.halve()
            elif clock is not None:
                clock.end()
            result.starts.append(began)
            result.ends.append(ended)
            record.append((*task.label, request.step, began, ended))
            if message is not None:
                self._pass_on(task, message)
            if task.stage in self._shards and task.kind != kinds.F:
                self._shards[task.stage].add_up()
                if position in self._complete:
                    self._shards[task.stage].settle()
            if watch is not None:  # another rank may wait for the message, and nobody for this
                watch.action(task.kind, task.stage, task.microbatch, None if message is None else message.leaves)
            progress.done += 1
            if ready is not None and position in self._complete and task.stage not in self._reduced:
                ready(task.stage)
        self._run_shard_actions(len(self._tasks), result, ready)
        for shards in self._shards.values():
            shards.finish()
            shards.end()
        progress.doing = "after its last action"
        if watch is not None:
            watch.end()
        return result

    # Shards.

    def _run_shard_actions(self, position: int, result: RankResult, ready: Callable[[int], None] | None) -> None:
        """Gather, free and reduce what the program says before a task."""
        for number, action in self._shard_actions.get(position, ()):
            shards, clock = self._shards[action.stage], result.shard_clock
            self.progress.doing = f"{action.kind} of stage {action.stage}"
            stream = None
            clock.start(number)
            with self._mark(f"{action.kind} s{action.stage}"):
                if action.kind == "UNSHARD":
                    use = self._single_uses[number]
                    shards.gather(by_block=use is not None, backward=use not in (None, kinds.F))
                    self._gathers[action.stage] = number  # it ends when an action waits for it
                    continue
                if action.kind == "RESHARD":
                    shards.free()
                else:
                    for other in self._shards.values():
                        other.finish()  # stages with a tied weight add to one gradient
                    stream = shards.reduce()
            clock.end(number, stream)
            if action.kind == "REDUCE_GRAD" and ready is not None:
                shards.finish()
                ready(action.stage)

    def _wait_for_shards(self, stage: int, result: RankResult) -> None:
        """Wait for the parameters of a stage, if they are still being gathered."""
        if self._shards[stage].wait():
            result.shard_clock.end(self._gathers.pop(stage))

    def _finite_watch(self, request: StepRequest) -> FiniteWatch | None:
        if not (request.training and request.check_finite):
            return None
        parts = {index: stage.part for index, stage in self.stages.items()}
        gradients = request.check_gradients and request.scale <= 1.0
        return FiniteWatch(self._last_stage + 1, parts, gradients=gradients, on_gpu=self.device is not None)

    # Receiving.

    def _input(self, task: _Task, request: StepRequest, result: RankResult) -> Message:
        """Wait for what the action takes from another stage."""
        if task.source is None:
            return self._local.pop((task.traffic, task.stage, task.microbatch))
        if task.number in self._parked_before:
            earlier = self._parked_before[task.number]
            if earlier is None:
                return self._parked.pop(task.number)
            for other in earlier:
                self._parked[other.number] = self._receive(other, request, result)
        return self._receive(task, request, result)

    def _receive(self, task: _Task, request: StepRequest, result: RankResult) -> Message:
        """Wait for the next message of a channel, which is the input of this task."""
        assert task.source is not None
        assert task.feeder is not None
        header = Header(task.source, self.process, task.traffic, task.feeder, task.microbatch, request.step)
        self.awaited = (header, perf_counter())
        self.progress.waits = task.source
        with self._mark(f"receive {task.name}"):
            message = self.transport.receive(header, self.deadline)
        self.progress.waits = None
        self.awaited = None
        moment = result.arrived[task.number] = self.transport.arrived
        size = sum([leaf.nbytes for leaf in message.leaves if isinstance(leaf, Tensor)])
        self.flight.received.append(
            (task.source, task.traffic, task.feeder, task.microbatch, request.step, moment, size)
        )
        return message

    # Computing.

    def _compute(
        self, task: _Task, arrived: Message | None, request: StepRequest, result: RankResult
    ) -> Message | None:
        stage = self.stages[task.stage]
        if task.kind == kinds.F:
            return self._forward(stage, task, arrived, request, result)
        if task.kind == kinds.W:
            if task.joined:
                return None
            graphs = self.graphs
            microbatch = task.microbatch
            total, unsplit = (
                stage.backward_weight(microbatch) if graphs is None else graphs.backward_weight(stage, microbatch)
            )
            result.split = (result.split[0] + total, result.split[1] + unsplit)
            return None
        grads = None if arrived is None else self._parts(arrived)[0]
        changed = () if arrived is None else arrived.wants_gradient
        whole = task.kind == kinds.B or task.joined
        run: Any = stage.backward if whole else stage.backward_input
        if self.graphs is None:
            gradients, changed = run(task.microbatch, grads, changed)
        else:
            name = "B" if whole else "I"
            gradients, changed = self.graphs.backward(name, run, stage, task.microbatch, grads, changed)
        if self._shards:
            gradients = [None if gradient is None else arrived_tensor(gradient) for gradient in gradients]
        if task.stage > 0:
            return self._message(task, request, gradients, "", changed=changed)
        if request.inputs_require_grad:
            result.input_gradients[task.microbatch] = gradients
        return None

    def _forward(
        self, stage: Stage, task: _Task, arrived: Message | None, request: StepRequest, result: RankResult
    ) -> Message | None:
        if arrived is None:
            leaves, tree, wants = self._batch_part(request, task.microbatch)
            shared = sharing(leaves, {}) if len(leaves) > 1 else ()
        else:
            leaves, tree = self._parts(arrived)
            wants = list(arrived.wants_gradient)
            tree, shared = read_pairs(tree)
        keywords = request.keywords.get(task.stage)
        own_keywords = self._on_device(keywords[task.microbatch]) if keywords else {}
        loss_inputs = None
        if task.stage == self._last_stage and request.targets:
            target, weight = self._on_device(request.targets[task.microbatch]), request.weights[task.microbatch]
            loss_inputs = LossInputs(target, weight, request.scale)
        inputs = (task.microbatch, request.step, leaves, tree, wants)
        if self.graphs is not None and request.training:
            output, loss, metrics = self.graphs.forward(
                stage, *inputs, own_keywords, shared, loss_inputs, request.keep_outputs
            )
        else:
            with self._watch_cuts(stage.part):
                output, loss, metrics = run_forward(stage, *inputs, request.training, own_keywords, shared, loss_inputs)
        if task.stage < self._last_stage:
            if self._uneven is not None:
                self._uneven.check_outputs(task.stage, output.leaves)
            tree = output.tree
            if len(output.leaves) > 1:
                tree = noted(tree, sharing(output.leaves, output.joined))
            return self._message(task, request, output.leaves, tree)
        if loss is not None:
            result.losses[task.microbatch], result.metrics[task.microbatch] = loss, metrics or {}
        if request.keep_outputs:
            copy = cloned if self.graphs is not None else detached
            bare = [whole(copy(leaf).detach()) if isinstance(leaf, Tensor) else leaf for leaf in output.leaves]
            result.outputs[task.microbatch] = unflatten(bare, output.tree)
        return None

    @contextmanager
    def _watch_cuts(self, part: nn.Module) -> Iterator[None]:
        """Watch a forward whose layers tensor parallel may cut."""
        if self._uneven is None:
            yield
            return
        with name_cut_layers(part), self._uneven.watch():
            yield

    def _batch_part(self, request: StepRequest, microbatch: int) -> tuple[list[Leaf], str, list[bool]]:
        """The leaves of a microbatch of the batch, their tree, and which of them require a gradient."""
        part = self._on_device(request.inputs[microbatch])
        # Through .data: microbatches are parts of one tensor, and a change of one in place is no change of another.
        if type(part) is Tensor and not part.is_nested:
            return [part.data], TENSOR, list(request.inputs_require_grad) or [False]
        leaves, tree = flatten(part, "the batch")
        leaves = [data_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensor_wants = iter(request.inputs_require_grad or [False] * len(leaves))
        return leaves, tree, [isinstance(leaf, Tensor) and next(tensor_wants) for leaf in leaves]

    def _on_device(self, tree: Any) -> Any:
        """Bring a part of the batch to this rank's GPU, if it has one."""
        if self.device is None:
            return tree
        device = torch.device("cuda", self.device)

        def moved(leaf: Any) -> Any:
            if is_mask(leaf):
                return leaf.to(device)
            return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) and leaf.device != device else leaf

        return pytree.tree_map(moved, tree, is_leaf=is_mask)

    def _parts(self, arrived: Message) -> tuple[list[Leaf], str]:
        """The leaves and the tree of a message; in a mesh, its tensors may be parts of larger ones."""
        if self._mesh is None:
            return list(arrived.leaves), arrived.tree
        return receive_parts(arrived.leaves, arrived.tree, self._mesh)

    # Sending.

    def _message(
        self, task: _Task, request: StepRequest, leaves: Sequence[Leaf], tree: str, changed: Sequence[bool] = ()
    ) -> Message:
        """A stage's output, with which tensors want a gradient; or gradients, with which of them a hook changed."""
        if any(type(leaf) is not Tensor and is_sharded(leaf) for leaf in leaves):
            leaves, tree = send_parts(leaves, tree, self._dimensions, lambda: f"stage {task.stage}")
        key = (
            tree,
            *[
                (type(leaf), leaf.dtype, leaf.shape, leaf.layout, leaf.requires_grad)
                if isinstance(leaf, Tensor)
                else type(leaf)
                for leaf in leaves
            ],
        )
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._learn_form(task, leaves)
        if form.plain:
            bare = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        else:
            bare = [detached(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        target = self.process if task.target is None else task.target
        header = Header(self.process, target, task.traffic, task.stage, task.microbatch, request.step)
        message = Message(header, bare, tree, list(changed) or form.wants_gradient, form.kinds)
        if task.kind == kinds.F and self._passed.get(task.stage) is not form:
            self._passed[task.stage] = form
            self.outputs.note(message)
        return message

    def _learn_form(self, task: _Task, leaves: Sequence[Leaf]) -> _MessageForm:
        if len(self._forms) >= FORMS:
            self._forms.clear()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                refuse_layout(tensor, task.stage, task.microbatch, forward=task.kind == kinds.F)
        return _MessageForm(
            kinds_of(leaves),
            [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves],
            all(map(is_plain_tensor, tensors)),
        )

    def _pass_on(self, task: _Task, message: Message) -> None:
        if task.neighbour is not None:
            self._local[(task.traffic, task.neighbour, task.microbatch)] = message
        elif task.target is not None:
            with self._mark(f"send {task.name}"):
                self.transport.send(message)
            size = sum([leaf.nbytes for leaf in message.leaves if isinstance(leaf, Tensor)])
            self.flight.sent.append(
                (task.target, task.traffic, task.stage, task.microbatch, self.step, perf_counter(), size)
            )

    # When a step fails.

    @property
    def doing(self) -> str:
        """What this rank is doing, as text."""
        return describe(self.progress.doing)

    @property
    def changes(self) -> Sequence[Change]:
        """Outputs of its stages that changed their form."""
        return self.outputs.changes

    def record(self, verdict: Verdict | None, lost: str | None = None) -> Path | None:
        """Write the flight record of this rank; None if that is impossible, or the failure needs none."""
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
        for shards in self._shards.values():
            shards.forget()

    def shard(self) -> None:
        """Its stages are sharded: gather their parameters and reduce their gradients where the program says."""
        self._tasks = [task._replace(joined=False) for task in self._tasks]  # W may run without the parameters
        for index, stage in self.stages.items():
            self._shards[index] = stage.shards = stage.shards or ShardedStage(stage.part)
            stage.splits_backward = any(task.kind == kinds.I for task in self._tasks if task.stage == index)
        sharding = self.schedule.sharding
        for number in () if sharding is None else sharding.of_rank(self.rank):
            assert sharding is not None
            position, action = int(sharding.places[number]) - self._first, sharding.action(number)
            self._shard_actions.setdefault(position, []).append((number, action))
            if action.kind == "REDUCE_GRAD":
                self._reduced.add(action.stage)
            elif action.kind == "UNSHARD":
                use = single_use(self.schedule, self.rank, number)
                self._single_uses[number] = None if use is None else int(self.schedule.action_kinds[use])


def _join_halves(tasks: list[_Task]) -> list[_Task]:
    """Mark every I and W that can run as one backward."""
    for position, (first, second) in enumerate(pairwise(tasks)):
        halves = (first.kind, second.kind) == (kinds.I, kinds.W) and first.label[1:] == second.label[1:]
        if halves and first.target is None:
            tasks[position], tasks[position + 1] = first._replace(joined=True), second._replace(joined=True)
    return tasks


def device_of(parts: Iterable[nn.Module]) -> int | None:
    """The GPU that a rank's stages are on; None if they are on the host, or have no tensors."""
    devices = {tensor.device for part in parts for tensor in (*part.parameters(), *part.buffers())}
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    if len(gpus) > 1:
        raise StagelineError(
            f"the stages of one rank are on GPUs {', '.join(map(str, gpus))}; put all stages of a rank on one GPU"
        )
    return gpus[0] if gpus else None
