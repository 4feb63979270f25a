"""Validation: the loss on validation samples, and metrics that the user computes of all outputs (`compute_metrics`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import StagelineError, shorten
from stageline.distributed.rank_host import Collectives
from stageline.train.data import BytePairs, Bytes, Data, Loader, Tokens
from stageline.train.task import Task, logits_of

if TYPE_CHECKING:
    from stageline.train.setup import Setup
    from stageline.train.step import TrainingStep

TAKEN = ("event", "step", "loss", "samples", "seconds", "time", "bits_per_byte")
"""Names in the event of a validation that metrics cannot have."""


def validation_batches(available: int | None, wanted: int, local: int, replicas: int) -> list[tuple[int, int]]:
    """Return the first sample and the size of each batch, of which every replica takes up to `local` samples.

    `available` is None for a stream of unknown length. A last batch with fewer samples than replicas is left out.
    """
    samples, size = wanted if available is None else min(available, wanted), local * replicas
    batches = [(first, min(size, samples - first)) for first in range(0, samples, size)]
    return [(first, count) for first, count in batches if count >= replicas]


class Validation:
    """Evaluates on the same samples every time; all processes make the same calls."""

    @classmethod
    def of(cls, setup: Setup) -> Validation | None:
        """Return the validation of a job; None if it has none."""
        options, batches, layout = setup.config.validation, setup.batches, setup.layout
        if setup.data.validation is None or not options.enable:
            return None
        return cls(
            Loader(setup.data.validation, batch=batches.per_step, shuffle=False),
            wanted=options.steps * batches.per_step,
            local=batches.local,
            replica=layout.replica,
            replicas=layout.replicas,
        )

    def __init__(self, loader: Loader, *, wanted: int, local: int, replica: int, replicas: int) -> None:
        """Evaluate on `wanted` samples, or on all if there are fewer."""
        self._loader, self._replica, self._replicas = loader, replica, replicas
        available = loader.source.length
        self._batches = validation_batches(available, wanted, local, replicas)
        self.samples = sum(count for _, count in self._batches)
        """The number of samples, over all replicas."""
        self.metrics: dict[str, float] = {}
        """The user's metrics of the last evaluation."""
        if not self.samples:
            raise StagelineError(
                f"{loader.source.name} has {available} for validation, but each of {replicas} replicas needs at "
                "least one; increase validation.fraction, set validation.dataset_path, or set validation.enable to "
                "false"
            )

    def bytes_per_target(self, data: Data, task: Task) -> float | None:
        """Return the mean bytes of a target; None unless all targets count, as tokens that stand for bytes."""
        tokenizer, by_tokens = data.tokenizer, task.loss_name == "cross_entropy" and task.user_loss is None
        if not by_tokens or not isinstance(data.validation, Tokens) or not isinstance(tokenizer, Bytes | BytePairs):
            return None
        total = count = 0
        for first, samples in self._batches:
            _, targets = self._loader.samples(first, samples)
            if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or bool((targets < 0).any()):
                return None
            total, count = total + tokenizer.num_bytes(targets.numpy()), count + targets.numel()
        return total / count if total else None

    def loss(
        self,
        step: TrainingStep,
        interrupted: Callable[[], bool] = lambda: False,
        metrics: MetricsOfValidation | None = None,
    ) -> float | None:
        """Return the loss over all samples, weighted by their targets where some do not count; and set `metrics`.

        `interrupted` is called before every batch, and returns the same value on all processes: True ends the
        evaluation, which then returns None.
        """
        total = weight = 0.0
        for first, count in self._batches:
            if interrupted():
                return None
            start, stop = (count * replica // self._replicas for replica in (self._replica, self._replica + 1))
            loss, batch_weight = step.evaluate(*self._loader.samples(first + start, stop - start), metrics)
            batch_weight = float(count) if batch_weight is None else batch_weight
            total, weight = total + loss * batch_weight, weight + batch_weight
        if not weight > 0:
            raise StagelineError(
                f"none of the {self.samples} validation samples has a target that counts: all are ignored or have "
                "weight 0"
            )
        self.metrics = {} if metrics is None else metrics.result()
        return total / weight


class EvalPrediction(NamedTuple):
    """The outputs of a model on all validation samples, and their targets."""

    predictions: NDArray[Any]
    label_ids: Any


ComputeMetrics = Callable[[EvalPrediction], Mapping[str, float]]


class MetricsOfValidation:
    """Collects the outputs of a validation where the last stage is, and computes metrics of them."""

    def __init__(self, compute: ComputeMetrics, host: Collectives, owner: int, rank: int) -> None:
        """`owner` is the process with the outputs, and `rank` is this one."""
        self._compute, self._host, self._owner, self._rank = compute, host, owner, rank
        self._outputs: list[NDArray[Any]] = []
        self._targets: list[Any] = []

    def add(self, outputs: Any, targets: Any) -> None:
        """Add a batch; processes without the last stage have no outputs."""
        if outputs is not None:
            self._outputs.append(_array(logits_of(outputs)))
            self._targets.append(_array(targets) if isinstance(targets, Tensor) else targets)

    def result(self) -> dict[str, float]:
        """Return the metrics on all processes, and start again with no batch; an error is raised on all of them."""
        text, failure = "", None
        if self._rank == self._owner:
            try:
                text = json.dumps({"metrics": self._checked()})
            except Exception as error:
                failure = error
                text = json.dumps({"error": f"compute_metrics failed: {type(error).__name__}: {error}"})
        self._outputs, self._targets = [], []
        answer = json.loads(self._host.broadcast(text, self._owner))
        if failure is not None:
            raise failure
        if "error" in answer:
            raise StagelineError(answer["error"])
        return {str(name): float(value) for name, value in answer["metrics"].items()}

    def _checked(self) -> dict[str, float]:
        targets = np.concatenate(self._targets) if isinstance(self._targets[0], np.ndarray) else self._targets
        metrics = self._compute(EvalPrediction(np.concatenate(self._outputs), targets))
        if not isinstance(metrics, Mapping):
            raise StagelineError(f"compute_metrics returned {shorten(metrics)}; it must return a dict of numbers")
        for name, value in metrics.items():
            if name in TAKEN or not isinstance(value, int | float | np.number):
                what = "a name that validation itself uses" if name in TAKEN else f"{shorten(value)}, not a number"
                raise StagelineError(f"compute_metrics returned {name!r}, which is {what}")
        return {str(name): float(value) for name, value in metrics.items()}


def _array(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()
