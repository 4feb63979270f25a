"""How a job survives the loss of a rank: states in host memory, the newest one that all ranks have, and the return
to it."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.common.trust import job_secret
from stageline.distributed.attempts import MEMORY, SLOT, Attempt, announcements, number_of, own_seat, superseded
from stageline.distributed.rank_host import RankHost, decide_together
from stageline.distributed.recovery import rejoin
from stageline.distributed.state_memory import (
    SLOTS,
    StateCopies,
    StateMemory,
    fetch_state,
    forget_states,
    list_states,
)
from stageline.runtime.pipeline import Pipeline
from stageline.tensors.sharded import is_sharded, local, with_part
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
    seats = _memory().seats if number_of() else 0
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
        self._snapshots: Snapshots | None = None
        self._sources: dict[int, int] = {}
        """The host that has the state of each seat, of the step to which the job returns."""
        self._enter()
        self._fixed, self._interval = memory_interval, max(1, memory_interval)
        self._last: int | None = None
        self._wait = False
        self._copy_seconds: deque[float] = deque(maxlen=RECENT)
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._copies, self._moment = 0, 0.0

    def rejoin(self, error: Exception) -> None:
        """Join the next attempt if a rank was lost and is replaced; else raise the error."""
        if self._copies_elsewhere is not None:
            self._copies_elsewhere.close()
        self.attempt, without = rejoin(error), self._snapshots is None
        self._enter()
        self._snapshots = None if without else self._snapshots
        self._last, self._moment, self._copies, self._wait = None, 0.0, 0, False

    def _enter(self) -> None:
        """Find the host memory of this process, and the hosts that keep copies of its states."""
        self._memory, seat = _memory(), own_seat()
        self._snapshots = Snapshots(self._memory.files(seat)) if self._memory.seats > seat else None
        self._copies_elsewhere: StateCopies | None = None
        self._others: dict[int, tuple[str, int]] = {}
        self._here = 0
        if self._snapshots is not None and SLOT in os.environ:  # of a job on several hosts
            attempt = announcements().read(number_of() or 0)
            here, hosts = attempt.places[seat][0], attempt.hosts
            self._here = here
            self._others = {host: address for host, address in hosts.items() if host != here}
            following = sorted(self._others, key=lambda host: (host < here, host))
            self._copies_elsewhere = StateCopies([hosts[host] for host in following], job_secret(), seat)

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
        if self._snapshots is None:
            return False
        return self._last is None or (not self._wait and step >= self._last + self._interval)

    @property
    def pending(self) -> bool:
        """Whether the last state of this rank is not on another host yet."""
        return self._copies_elsewhere is not None and self._copies_elsewhere.pending

    def copy_state(self, step: int, pipe: Pipeline, optimizer: Optimizer, state: Any) -> None:
        """Copy the state after a step to host memory."""
        if self._snapshots is None:
            return
        began = time.perf_counter()
        if not is_cut_as_its_parameters(optimizer):  # a rank that is replaced loads the newest checkpoint
            self._snapshots = None
            return
        self._snapshots.write(step, state_tensors(pipe, optimizer), state)
        if self._copies_elsewhere is not None:
            self._copies_elsewhere.send(self._memory.find(own_seat(), step) or "", step)
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

    def agree_on_interval(self, wanted: float, *, pending: bool) -> None:
        """Use the largest interval that any rank wants; all ranks call this with the same values.

        While the last state of any rank is not on another host, no rank replaces the one before: so if a host is lost,
        there is a state of all ranks.
        """
        self._interval, self._wait = max(1, int(wanted)), pending

    # The return to a state.

    def common_step(self, host: RankHost) -> int | None:
        """The newest step whose state all ranks that trained have in memory, on any host; None if there is none."""
        seats = () if self.attempt is None else self.attempt.before

        def choose() -> tuple[int | None, dict[int, int]]:
            known = {-1: self._memory.steps()} | {other: self._list(other) for other in self._others}
            steps = [{step for states in known.values() for step in states.get(seat, ())} for seat in seats]
            step = max(set.intersection(*steps), default=None) if steps else None
            if step is None:
                return None, {}
            self._forget_after(step)
            holders = {seat: [other for other in known if step in known[other].get(seat, ())] for seat in seats}
            return step, {seat: self._here if -1 in hosts else hosts[0] for seat, hosts in holders.items()}

        step, sources = decide_together(host, choose)
        self._sources = {int(seat): int(source) for seat, source in sources.items()}
        return None if step is None else int(step)

    def _list(self, other: int) -> dict[int, list[int]]:
        try:
            return list_states(self._others[other], job_secret())
        except (OSError, StagelineError):  # its copies do not count
            return {}

    def _forget_after(self, step: int) -> None:
        """Remove later states everywhere: the job may continue differently, with other ranks or replicas."""
        self._memory.forget_after(step)
        for address in self._others.values():
            with suppress(OSError, StagelineError):
                forget_states(address, job_secret(), step)

    def restore(self, step: int, pipe: Pipeline, optimizer: Optimizer) -> Any:
        """Load the state of a step from host memory; return what was kept with it.

        A process that did not train at that step, or holds other stages now, finds the tensors in the memory of others.
        """
        assert self.attempt is not None
        if own_seat() in self._sources:
            tensors, state = self._read(own_seat(), step)
            if holds_all(tensors, pipe):
                load_tensors(tensors, pipe, optimizer)
                return state
        tensors = {}
        for seat in reversed(self.attempt.before):
            others, state = self._read(seat, step)
            tensors |= others
        load_tensors(tensors, pipe, optimizer)
        return state

    def _read(self, seat: int, step: int) -> tuple[dict[str, Tensor], Any]:
        """The state of a seat, which may be in the memory of another host."""
        if self._memory.find(seat, step) is None:
            fetch_state(self._others[self._sources[seat]], job_secret(), seat, step, self._memory)
        return Snapshots(self._memory.files(seat)).read(step)


def _memory() -> StateMemory:
    """The states in the memory of this host; of none, where the launcher keeps no states."""
    paths = os.environ.get(MEMORY, "") if number_of() is not None else ""
    return StateMemory(paths.split(os.pathsep) if paths else [])


def holds_all(tensors: Mapping[str, Tensor], pipe: Pipeline) -> bool:
    """Whether a state has all parameters of this process."""
    return all(f"parameter {name}" in tensors for name, _ in pipe.named_parameters())


def is_cut_as_its_parameters(optimizer: Optimizer) -> bool:
    """Whether every sharded tensor of an optimizer is cut as its parameter; then its part is enough to rebuild it."""
    return all(
        _cut_of(value) == _cut_of(optimizer.parameters[name])
        for name, slots in optimizer.state().items()
        for value in slots.values()
        if value.dim() and (is_sharded(value) or is_sharded(optimizer.parameters[name]))
    )


def _cut_of(tensor: Any) -> object:
    return (tensor.shape, tensor.placements) if is_sharded(tensor) else None


def state_tensors(pipe: Pipeline, optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters, buffers and optimizer state of this process, by name; of sharded tensors, its part."""
    tensors = {f"parameter {name}": local(parameter.detach()) for name, parameter in pipe.named_parameters()}
    tensors |= {f"buffer {name}": local(buffer) for name, buffer in pipe.named_buffers()}
    for name, slots in optimizer.state().items():
        tensors |= {f"{slot} of {name}": local(value.detach()) for slot, value in slots.items()}
    return tensors


def load_tensors(tensors: dict[str, Tensor], pipe: Pipeline, optimizer: Optimizer) -> None:
    """Load what `state_tensors` returned on a process with the same stages."""
    left = dict(tensors)
    with torch.no_grad():
        for kind, own in (("parameter", pipe.named_parameters()), ("buffer", pipe.named_buffers())):
            for name, tensor in own:
                value = left.pop(f"{kind} {name}", None)
                if value is None:
                    raise StagelineError(f"the state in host memory has no {kind} {name}; it belongs to another model")
                local(tensor).copy_(value)
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in left.items():
        slot, _, name = key.partition(" of ")
        parameter = optimizer.parameters.get(name)
        if parameter is not None and value.dim() and value.shape == local(parameter).shape:
            value = with_part(value, parameter)
        states.setdefault(name, {})[slot] = value
    optimizer.load(states)
