"""How a job survives the loss of a rank: states in host memory, the newest one that all ranks have, and the return
to it."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.distributed.attempts import MEMORY, Attempt, announcements, number_of
from stageline.distributed.launchers.replacements import SLOTS
from stageline.distributed.rank_host import RankHost
from stageline.distributed.recovery import rejoin
from stageline.runtime.pipeline import Pipeline
from stageline.tensors.sharded import is_sharded
from stageline.train.optimizers import Optimizer
from stageline.train.snapshots import Snapshots

SHARE = 0.02
"""The share of the time of a step that copies of the state may take, unless an interval is set."""
SMOOTH = 0.2
"""The weight of the last step in the average cost of a copy."""


class JobRecovery:
    """The part of one process in the recoveries of its job."""

    def __init__(self, memory_interval: int) -> None:
        """Find the attempt of this process, and its host memory, in the environment that the launcher set."""
        number = number_of() or 0
        self.attempt: Attempt | None = announcements().read(number) if number else None
        """The current attempt; None in the first."""
        self._snapshots = _own_snapshots()
        self._fixed, self._interval = memory_interval, max(1, memory_interval)
        self._last: int | None = None
        self._cost = self._step_seconds = 0.0
        self._copies, self._moment = 0, 0.0

    def rejoin(self, error: Exception) -> None:
        """Join the next attempt if a rank was lost and is replaced; else raise the error."""
        self.attempt = rejoin(error)
        self._last, self._moment, self._copies = None, 0.0, 0

    def complete(self) -> None:
        """Tell the launcher that the job trains again."""
        if self.attempt is not None:
            announcements().complete(self.attempt.number)

    # Copies of the state.

    def is_due(self, step: int) -> bool:
        """Whether the state after a step is copied."""
        return self._snapshots is not None and (self._last is None or step >= self._last + self._interval)

    def copy_state(self, step: int, pipe: Pipeline, optimizer: Optimizer, state: Any) -> None:
        """Copy the state after a step to host memory."""
        if self._snapshots is None:
            return
        tensors = state_tensors(pipe, optimizer)
        if any(map(is_sharded, tensors.values())):  # a rank that is replaced loads the newest checkpoint
            self._snapshots = None
            return
        began = time.perf_counter()
        self._snapshots.write(step, tensors, state)
        now = time.perf_counter()
        if self._copies >= SLOTS and self._last is not None:  # the first ones allocate the memory
            first = self._copies == SLOTS
            self._cost = _average(self._cost, now - began, first)
            self._step_seconds = _average(self._step_seconds, (began - self._moment) / (step - self._last), first)
        self._last, self._moment, self._copies = step, now, self._copies + 1

    @property
    def wanted_interval(self) -> float:
        """The interval that keeps the cost of copies on this rank below 2%."""
        if self._fixed or self._step_seconds <= 0:
            return float(max(1, self._fixed))
        return float(max(1, math.ceil(self._cost / (SHARE * self._step_seconds))))

    def agree_on_interval(self, wanted: float) -> None:
        """Use the largest interval that any rank wants; all ranks call this with the same number."""
        self._interval = max(1, int(wanted))

    # The return to a state.

    def common_step(self, host: RankHost, processes: int) -> int | None:
        """The newest step whose state every rank has in memory; None if there is none."""
        row = np.full(SLOTS, -1.0)
        steps = [] if self._snapshots is None else self._snapshots.steps()
        row[: len(steps)] = steps
        rows = host.all_gather(row).reshape(processes, SLOTS)
        common = set.intersection(*(set(row.tolist()) for row in rows)) - {-1.0}
        return int(max(common)) if common else None

    def restore(self, step: int, pipe: Pipeline, optimizer: Optimizer) -> Any:
        """Load the state of a step from host memory; return what was kept with it."""
        assert self._snapshots is not None
        tensors, state = self._snapshots.read(step)
        load_tensors(tensors, pipe, optimizer)
        return state


def _average(before: float, now: float, first: bool) -> float:
    return now if first else (1 - SMOOTH) * before + SMOOTH * now


def _own_snapshots() -> Snapshots | None:
    paths = os.environ.get(MEMORY, "").split(os.pathsep) if number_of() is not None else []
    rank = int(os.environ.get("RANK", "0"))
    own = paths[rank * SLOTS : (rank + 1) * SLOTS]
    return Snapshots(own) if len(own) == SLOTS else None


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
