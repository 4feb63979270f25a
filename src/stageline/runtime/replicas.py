"""What the replicas of a pipeline agree on and tell each other, step by step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stageline.common.errors import PipelineError
from stageline.distributed.collectives import Column
from stageline.distributed.rank_host import Floats, World
from stageline.runtime._torch_private import buffer_named
from stageline.runtime.grad_reduce import Reducer
from stageline.runtime.microbatches import NAMES, SCALE, Given, digest, disagreement
from stageline.runtime.shared_parameters import Placed
from stageline.runtime.step_report import Outcome
from stageline.schedules import action as kinds
from stageline.schedules.runs import PAIRED
from stageline.schedules.schedule import Schedule
from stageline.tensors.buffers import Taken

MODE, COUNT, ELEMENTS, REFUSED = range(len(NAMES), len(NAMES) + 4)
"""Columns of what a process tells at the start of a step, after those of its batch."""
COMMON = {MODE: "whether they train, evaluate or predict, and in sync=", COUNT: "count=", SCALE: "scale="}


def replica_seed(seed: int, replica: int) -> int:
    """What a replica draws random numbers from: the first as a pipeline that is alone, every other differently.

    >>> replica_seed(7, 0), replica_seed(7, 1) == replica_seed(7, 2)
    (7, False)
    """
    if replica == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/replica {replica}".encode(), digest_size=8).digest(), "big") >> 1


def finishing_order(schedule: Schedule, rank: int) -> list[int]:
    """The stages of a rank, in the order in which their gradients are complete.

    >>> import stageline as sl
    >>> finishing_order(sl.schedule("zb-v", ranks=2, microbatches=4), 0)
    [3, 0]
    """
    mine = list(schedule.slices())[rank]
    last: dict[int, int] = {}
    for index in range(mine.start, mine.stop):
        if schedule.kinds[index] % PAIRED != kinds.F:
            last[int(schedule.stage_ids[index])] = index
    return sorted(last, key=lambda stage: last[stage])


class Replicas:
    """This process's part in what all replicas do."""

    def __init__(
        self,
        world: World,
        column: Column,
        schedule: Schedule,
        parts: Sequence[nn.Sequential],
        placed: Placed,
        names: Mapping[int, str],
        *,
        bucket_mb: float,
        dtype: torch.dtype | None,
    ) -> None:
        """`names` are those of all parameters in the whole model, by their id."""
        self.world, self.column = world, column
        self.overlap = True
        """Whether gradients are added up while the pipeline drains; else after all ranks have come to its end."""
        self.pending = False
        """Whether gradients were accumulated in this replica that the others do not have."""
        self._bucket_mb, self._dtype = bucket_mb, dtype
        (rank,) = world.here
        order = finishing_order(schedule, rank)
        self._stages = {
            stage: [each for each in parts[stage].named_parameters() if each[1] not in placed.uses] for stage in order
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
        """Add up in the order in which stages finish from now on."""
        (rank,) = self.world.here
        self._stages = {stage: self._stages[stage] for stage in finishing_order(schedule, rank)}
        self._reducer = None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that are added up."""
        for named in (*self._stages.values(), *self._shared):
            yield from named

    def reducer(self) -> Reducer:
        """What adds up the gradients of a step; made anew when other parameters want a gradient than before."""
        key = tuple(parameter.requires_grad for _, parameter in self.parameters())
        if self._reducer is None or self._reducer[0] != key:
            made = Reducer(self._stages, self._shared, self.column, bucket_mb=self._bucket_mb, dtype=self._dtype)
            self._reducer = (key, made)
        return self._reducer[1]

    # The start.

    def compare_weights(self) -> None:
        """Refuse parameters and buffers that are not the same in all replicas; all processes learn of the first."""
        mine = [
            (name, digest(tensor))
            for part in self._parts
            for name, tensor in (*part.named_parameters(), *part.named_buffers())
        ]
        known = self.column.gather(np.array([0.0, *(float(number) for _, number in mine)]))[:, 1:]
        apart = np.argwhere((known != known[0]).any(axis=0)).reshape(-1)
        told = self.world.announce(np.array([float(len(apart) > 0)]))()[..., 0]
        if not told.any():
            return
        layout, (_, rank) = self.world.layout, np.argwhere(told)[0]
        said = ""
        if len(apart) and rank == self.world.here[0]:
            first, column = int(apart[0]), layout.column(int(rank))
            other = int(np.argmax(known[:, first] != known[0, first]))
            said = (
                f"the replicas begin with different weights: {mine[first][0]} of {layout.name(column[other])} is not "
                f"that of {layout.name(column[0])}; call torch.manual_seed with one number before the model is built, "
                "or load one checkpoint in all of them"
            )
        raise PipelineError(self.world.tell_all(said, layout.rows[0][int(rank)]))

    # A step.

    def row(self, given: Given, mode: int, count: float | None, elements: int, refused: bool) -> Floats:
        """What this process tells at the start."""
        return np.concatenate([given.row, [float(mode), float(count or 0), float(elements), float(refused)]])

    def agree(
        self, known: Floats, columns: Iterable[int], needs: Mapping[int, set[int]], refused: Exception | None
    ) -> list[int]:
        """The samples of every replica; where something does not fit, all processes raise, and say the same."""
        layout = self.world.layout
        if known[..., REFUSED].any():
            replica, rank = np.argwhere(known[..., REFUSED])[0]
            culprit = layout.rows[int(replica)][int(rank)]
            said = self.world.tell_all(f"{type(refused).__name__}: {refused}", culprit)
            raise refused or PipelineError(f"{layout.name(culprit)} cannot run this batch: {said}")
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
                f"replicas 0 and {replica} want gradients of different parameters on rank {rank}: "
                f"{sizes[0, rank]:.0f} and {sizes[replica, rank]:.0f} elements; freeze the same in all (requires_grad)"
            )
        return [int(rows[:, 0].max()) for rows in known]

    def start(self) -> None:
        """Begin to train: what the gradients held before counts once, in the first replica."""
        if self.world.replica and not self.pending:
            for _, parameter in self.parameters():
                parameter.grad = None

    def losses(self, outcome: Outcome, before: Taken, good: bool) -> tuple[list[float], bool, Floats, list[bool]]:
        """The loss of each replica, whether any has metrics, the sizes of buffers, above 0 where they changed, and in
        which replicas the loss and the gradients are finite."""
        sizes = (size for _, size in self._sizes(before))
        told = self.column.gather(np.array([sum(outcome.losses), float(outcome.described), float(good), *sizes]))
        return told[:, 0].tolist(), bool(told[:, 1].any()), told[:, 3:], (told[:, 2] > 0).tolist()

    def _sizes(self, before: Taken) -> Iterator[tuple[tuple[nn.Module, str], float]]:
        """Bytes of each buffer of this rank's stages, and -1 less where it is as before: by value, as some kernels tell
        no new version."""
        for owner, name, _, copy in before:
            if owner in self._owners:
                now = buffer_named(owner, name)
                size = 0 if now is None else now.nbytes
                same = now is not None and now.shape == copy.shape and torch.equal(now, copy)
                yield (owner, name), float(-1 - size if same else 1 + size)

    def finish(self, reducer: Reducer | None, changed: Floats, before: Taken) -> None:
        """When all ranks have trained, and what several of them use is added up in every replica: make all the same."""
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
                        f"the buffer {name} has not one size in all replicas, and cannot be made the same"
                    )
                buffer = buffer_named(owner, name)
                if buffer is not None:
                    self.column.spread(buffer.data)

    def metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Add up those of all replicas, in their order."""
        total: dict[str, float] = {}
        for replica in range(self.world.layout.replicas):
            for name, value in json.loads(self.column.tell(json.dumps(own), replica)).items():
                total[name] = total.get(name, 0.0) + value
        return total
