"""How a job survives the loss of a rank: states in host memory, the newest one that all ranks have, and the return
to it."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.distributed.attempts import MEMORY, Attempt, announcements, number_of, own_seat, superseded
from stageline.distributed.launchers.replacements import SLOTS
from stageline.distributed.rank_host import RankHost, decide_together
from stageline.distributed.recovery import rejoin
from stageline.runtime.pipeline import Pipeline
from stageline.tensors.sharded import is_sharded
from stageline.train.config.config import Config
from stageline.train.config.ranks import count_gpus, find_degrees
from stageline.train.layout import JobLayout, batch_sizes, find_job_layout
from stageline.train.optimizers import Optimizer
from stageline.train.snapshots import Snapshots

SHARE = 0.02
"""The share of the time of a step that copies of the state may take, unless an interval is set."""
RECENT = 5
"""How many copies and steps are compared: the fastest of each, because a busy machine delays some of them."""


class RankReturns(StagelineError):
    """Raised by all ranks at the end of a step, to meet again with ranks that come back."""


def full_layout(config: Config) -> JobLayout:
    """The layout of the job while no rank is lost; a process may start when some are."""
    seats = len(os.environ.get(MEMORY, "").split(os.pathsep)) // SLOTS if number_of() else 0
    if seats in (0, int(os.environ.get("WORLD_SIZE", "1"))):
        return find_job_layout(config)
    ranks, replicas, shards, tensors = find_degrees(config.parallelism, seats, count_gpus())
    return JobLayout(ranks, replicas * shards, seats, own_seat(), torch.device("cpu"), shards, tensors)


def config_for(config: Config, layout: JobLayout, processes: int) -> Config:
    """The config of a job that has lost some of its processes: with the replicas that are left, or with fewer ranks.

    >>> layout = JobLayout(2, 3, 6, 0, torch.device("cpu"))
    >>> config_for(Config(), layout, 4).parallelism.data_parallel_replicate_degree
    2
    >>> config_for(Config(), JobLayout(4, 1, 4, 0, torch.device("cpu")), 3).parallelism.pipeline_parallel_degree
    3
    """
    if processes == layout.processes:
        return config
    replicas = processes // layout.ranks if layout.replicas > 1 else 1
    parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=processes // replicas,
        data_parallel_replicate_degree=replicas,
    )
    batch = batch_sizes(config, layout.replicas).per_step // layout.replicas * replicas
    training = replace(config.training, global_batch_size=batch if config.training.global_batch_size else 0)
    return replace(config, parallelism=parallelism, training=training)


class JobRecovery:
    """The part of one process in the recoveries of its job."""

    def __init__(self, memory_interval: int) -> None:
        """Find the attempt of this process, and its host memory, in the environment that the launcher set."""
        number = number_of() or 0
        self.attempt: Attempt | None = announcements().read(number) if number else None
        """The current attempt; None in the first."""
        self._snapshots = _snapshots_of(own_seat())
        self._fixed, self._interval = memory_interval, max(1, memory_interval)
        self._last: int | None = None
        self._copy_seconds: deque[float] = deque(maxlen=RECENT)
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._copies, self._moment = 0, 0.0

    def rejoin(self, error: Exception) -> None:
        """Join the next attempt if a rank was lost and is replaced; else raise the error."""
        self.attempt = rejoin(error)
        self._snapshots = None if self._snapshots is None else _snapshots_of(own_seat())
        self._last, self._moment, self._copies = None, 0.0, 0

    def begin(self, layout: JobLayout) -> None:
        """Tell the launcher that the job trains, and what it could do without: replicas, or some ranks."""
        number = number_of()
        if number is None or not layout.main:
            return
        plain = layout.shards == layout.tensors == 1
        announcements().describe(
            per_replica=layout.ranks if plain and layout.replicas > 1 else 0, replans=plain and layout.replicas == 1
        )
        announcements().complete(number)

    def has_place(self) -> bool:
        """Whether the launcher has announced another attempt, for a rank that comes back."""
        return number_of() is not None and superseded()

    # Copies of the state.

    def is_due(self, step: int) -> bool:
        """Whether the state after a step is copied."""
        return self._snapshots is not None and (self._last is None or step >= self._last + self._interval)

    def copy_state(self, step: int, pipe: Pipeline, optimizer: Optimizer, state: Any) -> None:
        """Copy the state after a step to host memory."""
        if self._snapshots is None:
            return
        began = time.perf_counter()
        tensors = state_tensors(pipe, optimizer)
        if any(map(is_sharded, tensors.values())):  # a rank that is replaced loads the newest checkpoint
            self._snapshots = None
            return
        self._snapshots.write(step, tensors, state)
        now = time.perf_counter()
        if self._copies >= SLOTS and self._last is not None:  # the first ones allocate the memory
            self._copy_seconds.append(now - began)
            self._step_seconds.append((began - self._moment) / (step - self._last))
        self._last, self._moment, self._copies = step, now, self._copies + 1

    @property
    def wanted_interval(self) -> float:
        """The interval that keeps the cost of copies on this rank below 2%."""
        if self._fixed or len(self._step_seconds) < RECENT:
            return float(max(1, self._fixed))
        return max(1.0, math.ceil(min(self._copy_seconds) / (SHARE * min(self._step_seconds))))

    def agree_on_interval(self, wanted: float) -> None:
        """Use the largest interval that any rank wants; all ranks call this with the same number."""
        self._interval = max(1, int(wanted))

    # The return to a state.

    def common_step(self, host: RankHost) -> int | None:
        """The newest step whose state all ranks that trained have in memory; None if there is none."""
        seats = () if self.attempt is None else self.attempt.before

        def choose() -> int | None:
            known = [set(() if own is None else own.steps()) for own in map(_snapshots_of, seats)]
            return max(set.intersection(*known), default=None) if known else None

        step: int | None = decide_together(host, choose)
        return step

    def restore(self, step: int, pipe: Pipeline, optimizer: Optimizer) -> Any:
        """Load the state of a step from host memory; return what was kept with it.

        A process that did not train at that step, or holds other stages now, finds the tensors in the memory of others.
        """
        assert self.attempt is not None
        own = _snapshots_of(own_seat())
        if own is not None and step in own.steps():
            tensors, state = own.read(step)
            if holds_all(tensors, pipe):
                load_tensors(tensors, pipe, optimizer)
                return state
        tensors = {}
        for seat in reversed(self.attempt.before):
            snapshots = _snapshots_of(seat)
            assert snapshots is not None
            others, state = snapshots.read(step)
            tensors |= others
        load_tensors(tensors, pipe, optimizer)
        return state


def _snapshots_of(seat: int) -> Snapshots | None:
    paths = os.environ.get(MEMORY, "").split(os.pathsep) if number_of() is not None else []
    own = paths[seat * SLOTS : (seat + 1) * SLOTS]
    return Snapshots(own) if len(own) == SLOTS else None


def holds_all(tensors: Mapping[str, Tensor], pipe: Pipeline) -> bool:
    """Whether a state has all parameters of this process."""
    return all(f"parameter {name}" in tensors for name, _ in pipe.named_parameters())


def state_tensors(pipe: Pipeline, optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters, buffers and optimizer state of this process, by name."""
    tensors = {f"parameter {name}": parameter.detach() for name, parameter in pipe.named_parameters()}
    tensors |= {f"buffer {name}": buffer for name, buffer in pipe.named_buffers()}
    for name, slots in optimizer.state().items():
        tensors |= {f"{slot} of {name}": value.detach() for slot, value in slots.items()}
    return tensors


def load_tensors(tensors: dict[str, Tensor], pipe: Pipeline, optimizer: Optimizer) -> None:
    """Load what `state_tensors` returned on a process with the same stages."""
    left = dict(tensors)
    with torch.no_grad():
        for kind, own in (("parameter", pipe.named_parameters()), ("buffer", pipe.named_buffers())):
            for name, tensor in own:
                value = left.pop(f"{kind} {name}", None)
                if value is None:
                    raise StagelineError(f"the state in host memory has no {kind} {name}: it is of another model")
                tensor.copy_(value)
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in left.items():
        slot, _, name = key.partition(" of ")
        states.setdefault(name, {})[slot] = value
    optimizer.load(states)
