"""The training step: batches through the pipeline, then the optimizer; one step at a time, or continuous steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stageline.common.errors import StagelineError
from stageline.runtime.continuous.run import ContinuousRun
from stageline.runtime.optimizer_step import GradientRules, not_finite_text, step_optimizer
from stageline.runtime.pipeline import Pipeline
from stageline.runtime.step_report import StepStats
from stageline.train.optimizers import Optimizer
from stageline.train.precision import LossScale, autocast
from stageline.train.task import Task, count_targets, evaluating

Batch = tuple[Any, Any]


@dataclass(frozen=True)
class StepResult:
    """The figures of an optimizer step."""

    loss: float
    grad_norm: float
    skipped: bool
    """Whether the gradients were not finite, so that nothing changed."""
    scale: float
    """The factor that the loss was multiplied by."""
    stats: StepStats
    """Of the last pipeline step."""


class TrainingStep:
    """Trains a pipeline in any precision; every process of the job makes the same calls."""

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
        """`total` adds up a number over all replicas."""
        self.pipe, self.task, self.optimizer, self.scale = pipe, task, optimizer, scale
        self._device, self._mixed, self._total = device, mixed, total
        self._rules = GradientRules(max_norm or None, not scale.enabled, scale.enabled)
        self._loss = task.loss

    def train(self, batches: Sequence[Batch], rate: float) -> StepResult:
        """Train on batches, whose gradients are added up, with this fraction of the learning rate."""
        count = self._count(batches)
        share = 1.0 if count is not None else 1.0 / len(batches)
        scale = self.scale.value
        loss = 0.0
        for number, batch in enumerate(batches):
            inputs, targets = self.task.batch(*batch)
            with autocast(self._device, self._mixed):
                # Replicas add up the gradients of all batches once.
                is_last = number == len(batches) - 1
                stats = self.pipe.step(inputs, targets, count=count, scale=scale * share, sync=is_last)
            loss += stats.loss * share
        gradients = self.optimizer.gradients()
        norm = self.pipe.grad_norm(gradients=gradients).double() / scale
        decision = self._rules.decide(norm, scale)
        if decision.failed:
            raise StagelineError(
                f"{not_finite_text(self.pipe.steps, norm.item(), loss)}; no parameter was changed: lower optimizer.lr, "
                "or check the data"
            )
        self.scale.update(not decision.skipped)
        self.optimizer.set_rate(rate)
        step_optimizer(decision, gradients.values(), self.optimizer.step)
        self.optimizer.zero_grad()
        return StepResult(loss, norm.item(), decision.skipped, scale, stats)

    def train_continuously(self, batches: Iterable[Batch], rate: Callable[[int], float]) -> Iterator[StepResult]:
        """Train on one batch per step, without waiting between steps; `rate` maps the pipeline's step to a fraction.

        The results have the same bits as those of `train`. Use the pipeline for nothing else before the iterator ends.
        """
        optimizer = self.optimizer.single
        assert optimizer is not None, "the configuration is validated"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # steps that cannot overlap are run one after the other
            rules = replace(self._rules, factor_dtype=torch.float64)  # as in `train`
            run = ContinuousRun(self.pipe, map(self._arguments, batches), optimizer, rules, rate)
        while True:
            with autocast(self._device, self._mixed):
                stats = next(run, None)
            if stats is None:
                return
            yield StepResult(stats.loss, stats.norm or 0.0, False, 1.0, stats)

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        inputs, targets = self.task.batch(*batch)
        return {"inputs": inputs, "targets": targets, "count": self._count([batch])}

    def evaluate(self, inputs: Any, targets: Any) -> tuple[float, float | None]:
        """Return the loss on a batch without training, and the total weight of its targets; None for a mean loss.

        A batch in which no target counts has loss and weight 0.
        """
        count = count_targets(self._loss, targets)
        count = None if count is None else self._total(count)
        if count == 0:
            return 0.0, 0.0
        inputs, targets = self.task.batch(inputs, targets)
        with evaluating(self.pipe.model), autocast(self._device, self._mixed):
            return self.pipe.evaluate(inputs, targets, count=count).loss or 0.0, count

    def _count(self, batches: Sequence[Batch]) -> float | None:
        """Return the total weight of the targets of all batches and replicas; None for a mean loss."""
        counts = [count_targets(self._loss, targets) for _, targets in batches]
        if None in counts:
            return None
        total = self._total(sum(count for count in counts if count is not None))
        if not total > 0:
            raise StagelineError("no target of the batch counts: all are ignored, or have weight 0")
        return total
