"""The executors of the ranks of this process: one set for every number of microbatches, made once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from stageline.common.heap import keep_memory
from stageline.distributed.rank_host import RankExecutors, RankHost
from stageline.model.stage_module.stage_module import StagePart
from stageline.runtime.executor import Executor
from stageline.runtime.guards.foreign_reads import ForeignReads, LossReads, NamedTensors, holders_of, is_torch_function
from stageline.runtime.setup.model_stages import ModelStages
from stageline.runtime.stage import Stage, StageOptions
from stageline.runtime.step_report import ContinuousRecordLayout, StepRecordLayout
from stageline.schedules.schedule import Schedule, forwards_of, only_microbatches

if TYPE_CHECKING:
    from stageline.planning.plan import Plan
    from stageline.timeline.costs import Costs

MOST_TIMES = 1 << 16
"""How many action times all ranks together may send with the rest of the summary at the end of a step."""


@dataclass(frozen=True)
class ExecutorSet(RankExecutors[Executor]):
    """The executors of this process's ranks for one schedule."""

    record_layout: StepRecordLayout
    """The layout of a step's summary; it includes action times if they are few and other processes need them."""
    continuous_layout: ContinuousRecordLayout
    """The layout of a rank's record of a continuous step."""
    devices: frozenset[int]
    """The GPUs that they run on."""

    def check_random_layers(self) -> None:
        """In the next step, check again which layers draw random numbers."""
        for executor in self.executors:
            for stage in executor.stages.values():
                stage.watch_again()

    def finish_compiling(self) -> None:
        """Let ranks run at the same time: after a step, everything is compiled."""
        for executor in self.executors:
            executor.compile_lock = nullcontext()


class ExecutorCache:
    """Makes executors, and keeps them."""

    def __init__(
        self,
        host: RankHost,
        stages: ModelStages,
        options: StageOptions,
        watched: NamedTensors,
        penalties: int,
        planned: Plan | Costs | None = None,
        cuda_graphs: bool = False,
        lowered: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    ) -> None:
        """`watched` are the tensors that loss_fn may not read, except those of the last stage."""
        self.lowered = lowered
        """Adds the shard actions to a schedule."""
        self._cuda_graphs = cuda_graphs
        self._host, self._stages, self._options, self._planned = host, stages, options, planned
        self._watched, self._penalties = watched, penalties
        self.sets: dict[tuple[int, bool], ExecutorSet] = {}
        """By the number of microbatches, and whether they train."""

    def find(self, schedule: Schedule, microbatches: int, *, training: bool) -> ExecutorSet:
        """The executors for this many microbatches of the schedule."""
        key = (microbatches, training)
        if key not in self.sets:
            order = self.order(schedule, microbatches, training=training)
            placed = self._stages.placed.modules
            stages = {
                rank: {stage: self._stage(stage, module, schedule) for stage, module in placed[rank].items()}
                for rank in self._host.here
            }
            self.sets[key] = self._make(order, stages)
        return self.sets[key]

    def order(self, schedule: Schedule, microbatches: int, *, training: bool) -> Schedule:
        """The order of the first microbatches of a schedule, with its shard actions."""
        return self.lowered(only_microbatches(schedule if training else forwards_of(schedule), microbatches))

    def reorder(self, schedule: Schedule) -> None:
        """Use a new order from the next step on; the stages keep everything they have recorded."""
        for (microbatches, training), executors in list(self.sets.items()):
            if training:
                stages = {executor.rank: executor.stages for executor in executors.executors}
                order = self.order(schedule, microbatches, training=True)
                self.sets[(microbatches, training)] = self._make(order, stages)

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline of all executors."""
        for executors in self.sets.values():
            for executor in executors.executors:
                executor.deadline = seconds

    def _make(self, schedule: Schedule, stages: Mapping[int, Mapping[int, Stage]]) -> ExecutorSet:
        host = self._host
        executors = [
            Executor(
                schedule,
                rank,
                stages[rank],
                host.transport(rank),
                processes=host.layout.rows[host.replica],
                alone=len(host.here) == 1,
                cuda_graphs=self._cuda_graphs,
                progress=host.progress(rank),
                flight=host.flight(rank),
                deadline=host.deadline,
                mesh=self._stages.mesh,
            )
            for rank in host.here
        ]
        for executor in executors:
            executor.planned = self._planned
            if self._stages.sharded:
                executor.shard()
        devices = frozenset(executor.device for executor in executors if executor.device is not None)
        if self._cuda_graphs and not devices:
            warnings.warn("cuda_graphs=True has no effect: no stage is on a GPU", stacklevel=2)
        if any(executor.device is None for executor in executors):
            keep_memory()
        if self._stages.compiled and len(executors) > 1:
            lock = threading.Lock()  # only one rank may compile at a time
            for executor in executors:
                executor.compile_lock = lock
        with_times = not host.single_process and 3 * schedule.num_actions * schedule.ranks <= MOST_TIMES
        record_layout = StepRecordLayout(schedule, penalties=self._penalties, with_times=with_times)
        parameters = len(list(self._stages.model.parameters()))
        continuous_layout = ContinuousRecordLayout(schedule, parameters, self._penalties)
        return ExecutorSet(schedule, executors, record_layout, continuous_layout, devices)

    def _stage(self, stage: int, module: nn.Sequential, schedule: Schedule) -> Stage:
        stages = self._stages
        copies = module.copies() if isinstance(module, StagePart) else {}
        twins: dict[int, Any] = {**stages.placed.twins.get(module, {}), **copies}
        watches_loss = stage == schedule.stages - 1 and not is_torch_function(self._options.loss_fn)
        return Stage(
            stage,
            module,
            self._options,
            unpack_inputs=stages.exact,
            loss_reads=self._loss_reads(module, schedule) if watches_loss else None,
            state_watch=stages.shared_state.watch(stage, twins),
            foreign_reads=self._foreign_reads(stage, module) if stage in stages.readers else None,
        )

    def _loss_reads(self, module: nn.Module, schedule: Schedule) -> LossReads:
        """What calls loss_fn on the last stage; it may read the tensors that this stage alone uses."""
        uses = self._stages.placed.uses
        shared = {id(parameter) for parameter in uses} | {id(use.own) for by_stage in uses.values() for use in by_stage}
        own = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in shared]
        alone = self._host.single_process and schedule.placement.directions == 1
        return LossReads(self._options.loss_fn, self._watched, own, alone=alone)

    def _foreign_reads(self, stage: int, module: nn.Module) -> ForeignReads:
        """What calls the layers of a stage that can reach parameters of other stages."""
        stages = self._stages
        twins = stages.placed.twins.get(module, {})
        alone = self._host.single_process
        return ForeignReads(stage, module, holders_of(stages.parts), twins, alone=alone, functions=not stages.compiled)
