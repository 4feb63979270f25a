"""Replicas: what data-parallel copies of a pipeline exchange in every step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import PipelineError, StagelineError
from stageline.distributed.collectives import ProcessCollectives, ReplicaGroup
from stageline.distributed.rank_host import Floats, RankHost
from stageline.runtime._torch_private import ShardGroups, buffer_named
from stageline.runtime.grad_reduce import Reducer, Reducers
from stageline.runtime.optimizer_shards import OptimizerShards
from stageline.runtime.setup.handshake import compare_weights
from stageline.runtime.setup.model_stages import ModelStages
from stageline.runtime.setup.options import PipelineOptions
from stageline.runtime.step_report import Outcome, add_up, sum_metrics
from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.tensors.buffers import BufferCopies
from stageline.tensors.random_numbers import seed_of
from stageline.tensors.sharded import local, processes_of

Stages: TypeAlias = dict[int, list[tuple[str, nn.Parameter]]]
"""The parameters of each stage, by name."""


def replica_seed(seed: int, replica: int) -> int:
    """The random seed of a replica; the first replica draws the same numbers as a pipeline without replicas.

    >>> replica_seed(7, 0), replica_seed(7, 1) == replica_seed(7, 2)
    (7, False)
    """
    if replica == 0:
        return seed
    return seed_of(f"{seed}/replica {replica}")


def finishing_order(schedule: Schedule, rank: int) -> list[int]:
    """The stages of a rank, in the order in which their gradients are complete.

    >>> import stageline as sl
    >>> finishing_order(sl.schedule("zb-v", ranks=2, microbatches=4), 0)
    [3, 0]
    """
    mine = list(schedule.slices())[rank]
    last: dict[int, int] = {}
    for index in range(mine.start, mine.stop):
        if schedule.action_kinds[index] != kinds.F:
            last[int(schedule.stage_ids[index])] = index
    return sorted(last, key=lambda stage: last[stage])


class Replicas:
    """The part of this process in the work of all replicas."""

    def __init__(
        self,
        host: ProcessCollectives,
        group: ReplicaGroup,
        schedule: Schedule,
        stages: ModelStages,
        options: PipelineOptions,
    ) -> None:
        parts, placed = stages.parts, stages.placed
        self.host, self.group = host, group
        self.overlap = True
        """Whether gradients are reduced while the pipeline drains, or only after all ranks have finished."""
        self.pending = False
        """Whether this replica has accumulated gradients that are not reduced yet."""
        self._bucket_mb, self._dtype = options.bucket_mb, options.reduce_dtype
        (rank,) = host.here
        order = finishing_order(schedule, rank)
        self._stages: Stages = {
            stage: [(name, value) for name, value in parts[stage].named_parameters() if value not in placed.uses]
            for stage in order
        }
        users: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
        for parameter, uses in placed.uses.items():
            if any(use.own is not None for use in uses):
                key = tuple(sorted({use.rank for use in uses}))
                users.setdefault(key, []).append((stages.name_of(parameter), parameter))
        self._shared = list(users.values())
        self._parts = [parts[stage] for stage in order]
        self._owners = {module for part in self._parts for module in part.modules()}
        self._reducer: tuple[Any, Reducers] | None = None
        own = any("dp_replicate" not in self._summed_over(parameter) for _, parameter in self.parameters())
        spanned = stages.sharded and host.layout.data_rows > host.layout.shards
        self.spanned = spanned and bool(host.all_gather(np.array([float(own)])).any())
        """Whether a parameter of some process is sharded over replicas, so that one replica does not have all of it."""
        self.shards = self._make_shards(stages) if options.shard_optimizer else None
        """Which replica steps which parameters; None if every replica steps all."""

    def _make_shards(self, stages: ModelStages) -> OptimizerShards | None:
        layout = self.host.layout
        replicas = layout.data_rows // layout.shards
        if replicas == 1:
            return None
        named = list(stages.named_parameters())
        for name, parameter in named:
            if "dp_replicate" not in self._summed_over(parameter):
                raise StagelineError(
                    f"shard_optimizer=True, but FSDP2 already reduces the gradient of {name} over dp_replicate; pass "
                    "fully_shard only the dp_shard mesh, or leave out shard_optimizer"
                )
        group = self._group_of(frozenset(["dp_replicate"]))
        return OptimizerShards(named, group, replicas, self._bucket_mb)

    def follow(self, schedule: Schedule) -> None:
        """Reduce in the order in which the stages of another schedule finish."""
        (rank,) = self.host.here
        self._stages = {stage: self._stages[stage] for stage in finishing_order(schedule, rank)}
        self._reducer = None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters whose gradients are reduced."""
        for named in (*self._stages.values(), *self._shared):
            yield from named

    def reducer(self) -> Reducers:
        """The reducer of a step; replaced when the set of trainable parameters changes."""
        key = tuple(parameter.requires_grad for _, parameter in self.parameters())
        if self._reducer is None or self._reducer[0] != key:
            self._reducer = (key, self._make_reducer())
        return self._reducer[1]

    def _make_reducer(self) -> Reducers:
        def make(group: ReplicaGroup, stages: Stages, shared: list[list[tuple[str, nn.Parameter]]]) -> Reducer:
            keeps = (lambda parameter: True) if self.shards is None else self.shards.keeps
            return Reducer(stages, shared, group, bucket_mb=self._bucket_mb, dtype=self._dtype, keeps=keeps)

        def only(named: list[tuple[str, nn.Parameter]], chosen: frozenset[str]) -> list[tuple[str, nn.Parameter]]:
            return [(name, parameter) for name, parameter in named if self._summed_over(parameter) == chosen]

        choices = {self._summed_over(parameter) for _, parameter in self.parameters()} - {frozenset()}
        trained = (parameter.numel() for _, parameter in self.parameters() if parameter.requires_grad)
        return Reducers(
            sum(trained),
            [
                make(
                    self._group_of(chosen),
                    {stage: only(named, chosen) for stage, named in self._stages.items()},
                    [only(named, chosen) for named in self._shared],
                )
                for chosen in sorted(choices, key=sorted)
            ],
        )

    def _summed_over(self, parameter: Tensor) -> frozenset[str]:
        """The dimensions over which a gradient is summed here: those over which the parameter is not cut."""
        layout = self.host.layout
        numbers = map(layout.in_layout, processes_of(parameter))
        places = [layout.coordinates(number) for number in numbers if number is not None]
        return frozenset(name for name in layout.data_dimensions if len({place[name] for place in places}) < 2)

    def _group_of(self, dimensions: frozenset[str]) -> ReplicaGroup:
        return self.host.data_group(dimensions) if self.host.layout.in_mesh else self.group

    def start(self) -> None:
        """Start a training step: gradients accumulated before it count once, in the first process that sums them."""
        if self.shards is not None and not self.pending:
            self.shards.return_gradients()
        if self.host.replica and not self.pending:
            for _, parameter in self.parameters():
                if self._counts_elsewhere(parameter):
                    parameter.grad = None

    def _counts_elsewhere(self, parameter: nn.Parameter) -> bool:
        place = self.host.layout.coordinates(self.host.process)
        return any(place[name] for name in self._summed_over(parameter))

    def losses(
        self, outcome: Outcome, before: BufferCopies, good: bool
    ) -> tuple[list[float], bool, Floats, list[bool]]:
        """Exchange the results of a step.

        Returns the loss of each replica, whether any has metrics, the sizes of buffers (positive where one changed),
        and for each replica whether its loss and gradients are finite.
        """
        sizes = (size for _, size in self._sizes(before))
        groups = [group for part in self._parts if (group := ShardGroups.of(part)) is not None]
        orders = [float(group.order) for group in groups]
        sharded = [(group, parameter) for group in groups for parameter in group.parameters()]
        # A tied one is in several stages: a gradient of any of them counts.
        used = {parameter for group, parameter in sharded if parameter not in group.unused}
        unused = [float(parameter not in used) for _, parameter in sharded]
        rows = self.group.all_gather(
            np.array([add_up(outcome.losses), float(outcome.has_metrics), float(good), *orders, *unused, *sizes])
        )
        ends = np.cumsum([3, len(orders), len(unused)])
        self._refuse_other_orders(rows[:, 3 : ends[1]], [parameter for _, parameter in sharded])
        for number, (_, parameter) in enumerate(sharded):
            if (rows[:, ends[1] + number] > 0).all():  # no process has used it
                parameter.grad = None
        losses = rows[:: self.host.layout.tensors, 0]  # rows that differ only in tp have the same loss
        return losses.tolist(), bool(rows[:, 1].any()), rows[:, ends[2] :], (rows[:, 2] > 0).tolist()

    def _refuse_other_orders(self, orders: Floats, sharded: Sequence[nn.Parameter]) -> None:
        """Refuse a step in which processes gathered different blocks: each got something else than the parameters."""
        layout, (rank,) = self.host.layout, self.host.here
        alone = all("dp_replicate" in self._summed_over(parameter) for parameter in sharded)
        size = layout.shards * layout.tensors if alone else layout.replicas
        for row, own in enumerate(orders):
            first = row - row % size  # the first of those that gather together
            if (own != orders[first]).any():
                names = [layout.name(layout.rows[at][rank]) for at in (first, row)]
                raise PipelineError(
                    f"{names[0]} and {names[1]} ran different blocks of their stage, or in a different order, and "
                    'reshard_after_forward="always" gathers every block when it runs, so they gathered wrong values; '
                    'no parameter was changed; use "default", or apply fully_shard to modules that run for all samples'
                )

    def _sizes(self, before: BufferCopies) -> Iterator[tuple[tuple[nn.Module, str], float]]:
        """The bytes of each buffer of this rank's stages, negative if it is unchanged.

        Values are compared, because some kernels change a buffer without a new version.
        """
        for owner, name, _, copy in before:
            if owner in self._owners:
                now = buffer_named(owner, name)
                now = None if now is None else local(now)
                size = 0 if now is None else now.nbytes
                same = now is not None and now.shape == copy.shape and torch.equal(now, copy)
                yield (owner, name), float(-1 - size if same else 1 + size)

    def finish(self, reducer: Reducers | None, changed: Floats, before: BufferCopies) -> None:
        """Make all replicas equal after all ranks have trained and shared parameters are summed in every replica."""
        if reducer is not None:
            if not self.overlap:
                reducer.begin()
                reducer.finish()
            reducer.finish_shared()
            if self.shards is not None:
                self.shards.reduced()
        self.pending = reducer is None
        for number, ((owner, name), _) in enumerate(self._sizes(before)):
            if (changed[:, number] > 0).any():
                if len(set(np.abs(changed[:, number]).tolist())) > 1:
                    raise PipelineError(
                        f"the buffer {name} has different sizes in the replicas, so it cannot be synchronized"
                    )
                buffer = buffer_named(owner, name)
                dimensions = frozenset[str]() if buffer is None else self._summed_over(buffer)
                if buffer is not None and dimensions:  # where processes hold the same part of it
                    self._group_of(dimensions).broadcast_tensor(local(buffer).data)

    def metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Add the metrics of all replicas, in their order."""
        layout = self.host.layout
        text, replicas = json.dumps(own), range(0, layout.replicas, layout.tensors)
        return sum_metrics(json.loads(self.group.broadcast(text, replica)) for replica in replicas)


def join_replicas(host: RankHost, schedule: Schedule, stages: ModelStages, options: PipelineOptions) -> Replicas | None:
    """Join this process to the other replicas, which must begin with the same weights; None if there is only one."""
    if host.replica_group is None:
        return None
    assert isinstance(host, ProcessCollectives)
    if options.compare_weights:
        compare_weights(host, stages, schedule.placement)
    return Replicas(host, host.replica_group, schedule, stages, options)
