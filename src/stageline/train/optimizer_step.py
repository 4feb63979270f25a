"""One step of the optimizer: microbatches through the pipeline, the norm, the clip, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stageline.common.errors import StagelineError
from stageline.runtime.pipeline import Pipeline
from stageline.runtime.step_stats import StepStats
from stageline.train.optimizers import Optimizer
from stageline.train.precision import LossScale, autocast
from stageline.train.task import Task, count_targets, evaluating

Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Stepped:
    """What a step of the optimizer gave."""

    loss: float
    grad_norm: float
    skipped: bool
    """Whether the gradients were not finite, so that nothing was changed."""
    scale: float
    """What the loss was scaled by."""
    stats: StepStats
    """Of the last step of the pipeline."""


class Stepper:
    """Trains a pipeline, whatever its precision; every process of the job calls it alike."""

    def __init__(
        self,
        pipe: Pipeline,
        task: Task,
        optimizer: Optimizer,
        scale: LossScale,
        *,
        device: torch.device,
        mixed: str = "float32",
        max_norm: float = 0.0,
        total: Callable[[float], float] = lambda value: value,
    ) -> None:
        """`total` adds a number of each replica over all of them."""
        self.pipe, self.task, self.optimizer, self.scale = pipe, task, optimizer, scale
        self._device, self._mixed, self._max_norm, self._total = device, mixed, max_norm, total
        self._loss = task.loss

    def _count(self, batches: Sequence[Batch]) -> float | None:
        """How much the targets of all batches and replicas weigh."""
        counts = [count_targets(self._loss, targets) for _, targets in batches]
        if None in counts:
            return None
        whole = self._total(sum(count for count in counts if count is not None))
        if not whole > 0:
            raise StagelineError("the batch has no target that counts: all of them are ignored, or weigh nothing")
        return whole

    def train(self, batches: Sequence[Batch], rate: float) -> Stepped:
        """Train on batches, whose gradients are added up, with this share of the learning rate."""
        count = self._count(batches)
        share = 1.0 if count is not None else 1.0 / len(batches)
        scale = self.scale.value
        loss = 0.0
        for number, (inputs, targets) in enumerate(batches):
            given, wanted = self.task.batch(inputs, targets)
            with autocast(self._device, self._mixed):
                # Replicas add up what all batches gave, once.
                last = number == len(batches) - 1
                stats = self.pipe.step(given, wanted, count=count, scale=scale * share, sync=last)
            loss += stats.loss * share
        gradients = self.optimizer.gradients()
        norm = float(self.pipe.grad_norm(gradients=gradients)) / scale
        if not self.scale.enabled and not math.isfinite(norm):
            raise StagelineError(
                f"the gradients of step {self.pipe.steps} are not finite (their norm is {norm}) though the loss is "
                f"{loss:.4f}; no parameter was changed: lower optimizer.lr, or look at the data"
            )
        if stepping := self.scale.update(math.isfinite(norm)):
            factor = 1.0 / scale
            if self._max_norm > 0:
                factor *= min(1.0, self._max_norm / (norm + 1e-6))
            if factor != 1.0:
                torch._foreach_mul_(list(gradients.values()), factor)
            self.optimizer.set_rate(rate)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return Stepped(loss, norm, not stepping, scale, stats)

    def evaluate(self, inputs: Any, targets: Any) -> tuple[float, float | None]:
        """The loss on a batch, without training on it, and how much its targets weigh; None for a loss that is a mean.

        A batch without a target that counts has no loss, and weighs nothing.
        """
        count = count_targets(self._loss, targets)
        count = None if count is None else self._total(count)
        if count == 0:
            return 0.0, 0.0
        given, wanted = self.task.batch(inputs, targets)
        with evaluating(self.pipe.model), autocast(self._device, self._mixed):
            return self.pipe.evaluate(given, wanted, count=count).loss or 0.0, count
