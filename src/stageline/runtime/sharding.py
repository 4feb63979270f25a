"""Sharded stages: what the executor does for the shard actions of its program.

FSDP2 cuts the parameters and moves them; the schedule says when (see `schedules.sharding`).
`_torch_private.ShardGroups` calls FSDP2, and gathers block by block inside an action. While an executor runs, FSDP2's
own hooks only convert dtypes. Between I and W, the parameters of a stage may be freed: what I keeps of them for W, such
as the weight of a norm, is copied once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from stageline.autograd.graph_plan import FreedMemory
from stageline.common.errors import PipelineError, StagelineError
from stageline.distributed.rank_host import RankHost
from stageline.runtime._torch_private import ShardGroups, collectives_of
from stageline.runtime.guards.backward import is_fully_sharded
from stageline.runtime.setup.parallelize import groups_of
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import ReshardAfterForward, lower_sharding
from stageline.tensors.sharded import is_sharded, settle_gradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedStage:
    """The shards of one stage: of FSDP2, or of tensor parallel alone, whose parameters are never gathered."""

    def __init__(self, part: nn.Module) -> None:
        self._groups = ShardGroups(part)
        self._sharded = [parameter for parameter in part.parameters() if is_sharded(parameter)]
        # The weights of the losses already divide by the samples of all processes.
        self._groups.sum_gradients()
        self._pending = self._used = self._reducing = False
        self._known: frozenset[int] = frozenset()
        self._memory: FreedMemory | None = None

    def begin(self) -> None:
        """The program begins: from now on, FSDP2's hooks leave its work to the shard actions."""
        self._groups.begin()  # before any forward: it registers hooks, and those may be hooks on a graph

    @property
    def memory(self) -> FreedMemory | None:
        """The memory of the gathered parameters, which W must not read; None if there are none."""
        known = self._groups.storages()
        if known != self._known or self._memory is None:
            self._known, self._memory = known, FreedMemory(known)
        return self._memory if known else None

    def gather(self, *, by_block: bool, backward: bool) -> None:
        """UNSHARD: start to gather the parameters; for a single action, block by block."""
        self._groups.gather(by_block=by_block, backward=backward)
        self._pending = self._used = True

    def wait(self) -> bool:
        """Wait for the parameters before an action that needs them; return whether they were awaited."""
        if not self._pending:
            return False
        self._pending = False
        self._groups.wait()
        return True

    def free(self) -> None:
        """RESHARD: free the gathered parameters."""
        self._groups.free()

    def add_up(self) -> None:
        """A microbatch has added its gradients."""
        self._groups.add_up()

    def reduce(self) -> Any:
        """REDUCE_GRAD: start to reduce the gradients; return the stream in which that ends, or None."""
        if self._memory is not None:
            self._memory.forget()
        self._reducing = True
        return self._groups.reduce()

    def settle(self) -> None:
        """The gradients are complete: bring those of tensor parallel into the form of their parameters."""
        for parameter in self._sharded:
            settle_gradient(parameter)

    def finish(self) -> None:
        """The reduced gradients are about to be used: let the current stream wait for them."""
        if self._reducing:
            self._groups.finish()
            self._reducing = False

    def end(self) -> None:
        """The program has ended, and FSDP2's hooks work again."""
        self._groups.managed = False

    def forget(self) -> None:
        """Drop what a failed step left: gathered parameters, and gradients that are not reduced."""
        if self._used:
            self._groups.forget()
        self._pending = False
        if self._memory is not None:
            self._memory.forget()
        self.end()


def refuse_apart(host: RankHost, mesh: DeviceMesh | None, parts: Iterable[nn.Module], when: str = "") -> None:
    """After a step that failed, refuse another if processes stopped at different collectives of their layers.

    So too before the first step of a new pipeline, since another one may have failed in the same mesh. The next
    collective of one would meet an earlier one of another. All processes call this together.
    """
    when = when or "a step failed while processes were"
    layout, meshes = host.layout, [] if mesh is None else [mesh]
    axes = [(name, inner.get_group(name)) for inner in meshes for name in inner.mesh_dim_names or ()]
    others = [group for group in groups_of(parts, None) if all(group is not own for _, own in axes)]
    started = [*(collectives_of(group) for _, group in axes), sum(map(collectives_of, others))]
    known = host.all_gather(np.array(started, dtype=float))
    dimensions = [["dp_replicate" if name == "dp" else name] for name, _ in axes]
    for column, along in enumerate([*dimensions, ["dp_replicate", "dp_shard", "tp"]]):
        for process in (process for row in layout.rows for process in row):
            first = layout.neighbours(process, along)[0]
            counts = [int(known[(*layout.place(member), column)]) for member in (first, process)]
            if counts[0] != counts[1]:
                raise PipelineError(
                    f"{when} at different collectives of their layers "
                    f"({layout.name(first)} has started {counts[0]}, and {layout.name(process)} {counts[1]}), so the "
                    "next collectives would not match; restart the job from its last checkpoint"
                )


def refuse_other_actions(
    order: Callable[[int], Schedule], samples: Collection[int], microbatches: int, rank: int
) -> None:
    """Refuse numbers of samples with which processes would gather or reduce in different orders.

    `order` returns the schedule of a number of microbatches: fewer samples are as many microbatches.
    """
    by_count: dict[int, list[str]] = {}
    for count in sorted({min(number, microbatches) for number in samples}):
        sharding = order(count).sharding
        own = [] if sharding is None else [sharding.action(index) for index in sharding.of_rank(rank)]
        by_count[count] = [str(action) for action in own if action.kind != "RESHARD"]
    if any(actions != by_count[count] for actions in by_count.values()):
        raise StagelineError(
            f"some processes have {min(samples)} samples, fewer than the {microbatches} microbatches, and others "
            f"have {max(samples)}, so they would gather and reduce parameters in different orders; pass at least "
            f'{microbatches} samples to each process, the same number to all, or use reshard_after_forward="default"'
        )


def sharded_stages(host: RankHost, parts: Mapping[int, nn.Module], stages: int) -> tuple[int, ...]:
    """The stages that FSDP2 shards, of all processes; `parts` are those of this process."""
    own = np.zeros(stages)
    for stage, part in parts.items():
        own[stage] = float(is_sharded_by_fsdp(part))
    return tuple(np.flatnonzero(host.all_gather(own).reshape(-1, stages).any(axis=0)).tolist())


def is_sharded_by_fsdp(part: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module of a stage that has parameters."""
    modules: Any = [module for module in part.modules() if is_fully_sharded(module)]
    return any(True for module in modules for _ in module.parameters())


def lower(schedule: Schedule, stages: Collection[int], reshard_after_forward: ReshardAfterForward) -> Schedule:
    """The schedule with shard actions for these stages: its own, if it has some and nothing else was chosen."""
    if schedule.sharding is None or not stages or reshard_after_forward != "default":
        return lower_sharding(schedule, stages, reshard_after_forward=reshard_after_forward)
    if set(schedule.sharding.stages) != set(stages):
        raise StagelineError(
            f"the schedule {schedule.name} has shard actions for stages {list(schedule.sharding.stages)}, but stages "
            f"{sorted(stages)} are sharded; leave out the shard actions, or use schedules.sharding.lower_sharding "
            "for these stages"
        )
    return schedule
