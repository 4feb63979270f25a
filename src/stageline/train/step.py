"""Training steps: batches through the pipeline, the optimizer, autocast and the loss scale."""

from __future__ import annotations

import faulthandler
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from stageline.common.errors import StagelineError
from stageline.runtime.continuous.run import ContinuousRun
from stageline.runtime.optimizer_step import GradientRules, not_finite_text, step_optimizer
from stageline.runtime.pipeline import Pipeline
from stageline.runtime.step_report import StepStats
from stageline.train.data import Batch
from stageline.train.optimizers import Optimizer
from stageline.train.task import Task, count_targets, evaluating

if TYPE_CHECKING:
    from stageline.train.validation import MetricsOfValidation


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
                f"{not_finite_text(self.pipe.steps, norm.item(), loss)}; no parameter was changed; lower "
                "optimizer.lr, or check the data"
            )
        self.scale.update(not decision.skipped)
        self.optimizer.set_rate(rate)
        step_optimizer(decision, gradients.values(), self.optimizer.step)
        self.pipe.broadcast_parameters()  # master weights are copied after torch's optimizers have stepped
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

    def evaluate(
        self, inputs: Any, targets: Any, metrics: MetricsOfValidation | None = None
    ) -> tuple[float, float | None]:
        """Return the loss on a batch without training, and the total weight of its targets; None for a mean loss.

        A batch in which no target counts has loss and weight 0. `metrics` collects the outputs.
        """
        count = count_targets(self._loss, targets)
        count = None if count is None else self._total(count)
        if count == 0:
            return 0.0, 0.0
        inputs, targets = self.task.batch(inputs, targets)
        with evaluating(self.pipe.model), autocast(self._device, self._mixed):
            evaluation = self.pipe.evaluate(inputs, targets, count=count, outputs=metrics is not None)
        if metrics is not None:
            metrics.add(evaluation.outputs, targets)
        return evaluation.loss or 0.0, count

    def _count(self, batches: Sequence[Batch]) -> float | None:
        """Return the total weight of the targets of all batches and replicas; None for a mean loss."""
        counts = [count_targets(self._loss, targets) for _, targets in batches]
        if None in counts:
            return None
        total = self._total(sum(count for count in counts if count is not None))
        if not total > 0:
            raise StagelineError("the batch has no target that counts: all are ignored or have weight 0")
        return total


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Return the autocast context of a step."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))


def disable_broken_bfloat16(device: torch.device, *dtypes: str) -> str:
    """Disable bfloat16 kernels that crash on this machine; return a note if so, else an empty string.

    A processor may report bfloat16 instructions that its operating system does not allow; the first matrix product then
    kills the process. A child process tries one, and if it crashes, torch's other kernels are used.
    """
    if device.type != "cpu" or "bfloat16" not in dtypes or not torch.backends.mkldnn.enabled or _bfloat16_works():
        return ""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    return "oneDNN's kernels for bfloat16 crash on this machine; using torch's own kernels"


@cache
def _bfloat16_works() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other threads, which the child does not have
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            signal.alarm(20)
            torch.set_num_threads(1)
            for size in (8, 16, 24, 32, 64):
                layer = torch.nn.Linear(size, 3 * size).bfloat16()
                layer(torch.ones(2, 16, size, dtype=torch.bfloat16)).sum().backward()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


class LossScale:
    """The factor by which a float16 loss is multiplied, so that small gradients do not underflow.

    It doubles after `interval` finite steps, and halves when gradients are not finite; that step is skipped. All ranks
    see the same gradient norm, so they all make the same decision.

    >>> scale = LossScale(enabled=True, value=8.0, interval=2)
    >>> [scale.update(finite) for finite in (True, True, False)], scale.value
    ([True, True, False], 8.0)
    """

    def __init__(self, enabled: bool, value: float = 2.0**16, interval: int = 2000) -> None:
        """If not enabled, the scale is always 1."""
        self.enabled = enabled
        self.value = value if enabled else 1.0
        self.interval = interval
        self._finite_steps = 0
        self._skipped = 0

    def update(self, finite: bool) -> bool:
        """Update the scale; return whether to take the step."""
        if not self.enabled:
            return True
        if finite:
            self._finite_steps += 1
            self._skipped = 0
            if self._finite_steps >= self.interval:
                self.value, self._finite_steps = min(self.value * 2.0, 2.0**24), 0
            return True
        self._finite_steps, self._skipped = 0, self._skipped + 1
        self.value /= 2.0
        if self.value < 2.0**-14:
            raise StagelineError(
                f"{self._skipped} consecutive steps had non-finite gradients, even at smaller and smaller loss "
                "scales; float16 is not the cause: check the data, lower optimizer.lr, or use bfloat16"
            )
        return False

    def state(self) -> dict[str, float]:
        """Return the state to resume from."""
        return {"value": self.value, "good": self._finite_steps, "skipped": self._skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """Load a state."""
        if self.enabled:
            self.value, self._finite_steps = float(state["value"]), int(state["good"])
            self._skipped = int(state.get("skipped", 0))
