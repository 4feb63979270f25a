"""Replicas: what data-parallel copies of a pipeline agree on and exchange in every step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stageline.common.errors import PipelineError
from stageline.distributed.collectives import ReplicaGroup
from stageline.distributed.rank_host import Floats, RankHost
from stageline.runtime._torch_private import buffer_named
from stageline.runtime.batches.comparison import NAMES, SCALE, BatchRow, disagreement
from stageline.runtime.grad_reduce import Reducer
from stageline.runtime.guards.initial_weights import compare_weights, held_by_several
from stageline.runtime.setup.options import PipelineOptions
from stageline.runtime.shared_parameters import Placed
from stageline.runtime.step_report import Outcome
from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.tensors.buffers import BufferCopies
from stageline.tensors.random_numbers import seed_of

MODE, COUNT, ELEMENTS, REFUSED = range(len(NAMES), len(NAMES) + 4)
"""Columns of the row that a process sends at the start of a step, after the columns of its batch."""
COMMON = {MODE: "whether they train, evaluate or predict, and in sync=", COUNT: "count=", SCALE: "scale="}


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
        host: RankHost,
        group: ReplicaGroup,
        schedule: Schedule,
        parts: Sequence[nn.Sequential],
        placed: Placed,
        names: Mapping[int, str],
        *,
        bucket_mb: float,
        dtype: torch.dtype | None,
    ) -> None:
        """`names` maps the id of every parameter to its name in the whole model."""
        self.host, self.group = host, group
        self.overlap = True
        """Whether gradients are reduced while the pipeline drains, or only after all ranks have finished."""
        self.pending = False
        """Whether this replica has accumulated gradients that are not reduced yet."""
        self._bucket_mb, self._dtype = bucket_mb, dtype
        (rank,) = host.here
        order = finishing_order(schedule, rank)
        self._stages = {
            stage: [(name, value) for name, value in parts[stage].named_parameters() if value not in placed.uses]
            for stage in order
        }
        users: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
        for parameter, uses in placed.uses.items():
            if any(use.own is not None for use in uses):
                key = tuple(sorted({use.rank for use in uses}))
                users.setdefault(key, []).append((names[id(parameter)], parameter))
        self._shared = list(users.values())
        self._parts = [parts[stage] for stage in order]
        self._owners = {module for part in self._parts for module in part.modules()}
        self._reducer: tuple[Any, Reducer] | None = None

    def follow(self, schedule: Schedule) -> None:
        """Reduce in the order in which the stages of another schedule finish."""
        (rank,) = self.host.here
        self._stages = {stage: self._stages[stage] for stage in finishing_order(schedule, rank)}
        self._reducer = None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters whose gradients are reduced."""
        for named in (*self._stages.values(), *self._shared):
            yield from named

    def reducer(self) -> Reducer:
        """The reducer of a step; replaced when the set of trainable parameters changes."""
        key = tuple(parameter.requires_grad for _, parameter in self.parameters())
        if self._reducer is None or self._reducer[0] != key:
            reducer = Reducer(self._stages, self._shared, self.group, bucket_mb=self._bucket_mb, dtype=self._dtype)
            self._reducer = (key, reducer)
        return self._reducer[1]

    def row(self, batch: BatchRow, mode: int, count: float | None, elements: int, refused: bool) -> Floats:
        """The row that this process sends at the start of a step."""
        return np.concatenate([batch.row, [float(mode), float(count or 0), float(elements), float(refused)]])

    def agree(
        self, known: Floats, columns: Iterable[int], needs: Mapping[int, set[int]], refused: Exception | None
    ) -> list[int]:
        """Return the samples of every replica; if the rows do not fit together, all processes raise the same error."""
        layout = self.host.layout
        if known[..., REFUSED].any():
            replica, rank = np.argwhere(known[..., REFUSED])[0]
            culprit = layout.rows[int(replica)][int(rank)]
            reason = self.host.broadcast_to_all(f"{type(refused).__name__}: {refused}", culprit)
            raise refused or PipelineError(f"{layout.name(culprit)} cannot run this batch: {reason}")
        for replica, rows in enumerate(known):
            wanted = [column for column in columns if column < len(NAMES)]
            apart = disagreement(rows, wanted, needs, layout.rows[replica])
            if apart:
                raise PipelineError(f"replica {replica}: {apart}")
        for column, what in COMMON.items():
            flat = known[..., column].reshape(-1)
            if (flat != flat[0]).any():
                odd = int(np.argmax(flat != flat[0]))
                names = [layout.name(process) for row in layout.rows for process in row]
                raise PipelineError(f"{names[odd]} and {names[0]} differ in {what}")
        sizes = known[..., ELEMENTS]
        if (sizes != sizes[0]).any():
            replica, rank = np.argwhere(sizes != sizes[0])[0]
            raise PipelineError(
                f"replicas 0 and {replica} train different parameters on rank {rank}: "
                f"{sizes[0, rank]:.0f} and {sizes[replica, rank]:.0f} elements; freeze the same in all (requires_grad)"
            )
        return [int(rows[:, 0].max()) for rows in known]

    def start(self) -> None:
        """Start a training step: gradients accumulated before it count once, in the first replica."""
        if self.host.replica and not self.pending:
            for _, parameter in self.parameters():
                parameter.grad = None

    def losses(
        self, outcome: Outcome, before: BufferCopies, good: bool
    ) -> tuple[list[float], bool, Floats, list[bool]]:
        """Exchange the results of a step.

        Returns the loss of each replica, whether any has metrics, the sizes of buffers (positive where one changed),
        and for each replica whether its loss and gradients are finite.
        """
        sizes = (size for _, size in self._sizes(before))
        rows = self.group.all_gather(np.array([sum(outcome.losses), float(outcome.has_metrics), float(good), *sizes]))
        return rows[:, 0].tolist(), bool(rows[:, 1].any()), rows[:, 3:], (rows[:, 2] > 0).tolist()

    def _sizes(self, before: BufferCopies) -> Iterator[tuple[tuple[nn.Module, str], float]]:
        """The bytes of each buffer of this rank's stages, negative if it is unchanged.

        Values are compared, because some kernels change a buffer without a new version.
        """
        for owner, name, _, copy in before:
            if owner in self._owners:
                now = buffer_named(owner, name)
                size = 0 if now is None else now.nbytes
                same = now is not None and now.shape == copy.shape and torch.equal(now, copy)
                yield (owner, name), float(-1 - size if same else 1 + size)

    def finish(self, reducer: Reducer | None, changed: Floats, before: BufferCopies) -> None:
        """Make all replicas equal after all ranks have trained and shared parameters are summed in every replica."""
        if reducer is not None:
            if not self.overlap:
                reducer.begin()
                reducer.finish()
            reducer.finish_shared()
        self.pending = reducer is None
        for number, ((owner, name), _) in enumerate(self._sizes(before)):
            if (changed[:, number] > 0).any():
                if len(set(np.abs(changed[:, number]).tolist())) > 1:
                    raise PipelineError(
                        f"the buffer {name} has different sizes in the replicas, so they cannot be made equal"
                    )
                buffer = buffer_named(owner, name)
                if buffer is not None:
                    self.group.broadcast_tensor(buffer.data)

    def metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Add the metrics of all replicas, in their order."""
        total: dict[str, float] = {}
        for replica in range(self.host.layout.replicas):
            for name, value in json.loads(self.group.broadcast(json.dumps(own), replica)).items():
                total[name] = total.get(name, 0.0) + value
        return total


def join_replicas(
    host: RankHost,
    schedule: Schedule,
    parts: Sequence[nn.Sequential],
    placed: Placed,
    model: nn.Module,
    options: PipelineOptions,
) -> Replicas | None:
    """Join this process to the other replicas, which must begin with the same weights; None if there is only one."""
    if host.replica_group is None:
        return None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    replicas = Replicas(
        host,
        host.replica_group,
        schedule,
        parts,
        placed,
        names,
        bucket_mb=options.bucket_mb,
        dtype=options.reduce_dtype,
    )
    if options.compare_weights:
        compare_weights(host, held_by_several(model, parts, schedule.placement, host.layout.replicas))
    return replicas
