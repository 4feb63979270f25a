"""Metrics of a validation that the user computes: `compute_metrics`, as in Hugging Face's Trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import StagelineError, shorten
from stageline.distributed.rank_host import Collectives
from stageline.train.task import logits_of

TAKEN = ("event", "step", "loss", "samples", "seconds", "time", "bits_per_byte")
"""Names in the event of a validation that metrics cannot have."""


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
                what = "a name that the validation itself uses" if name in TAKEN else f"{shorten(value)}, not a number"
                raise StagelineError(f"compute_metrics returned {name!r}, which is {what}")
        return {str(name): float(value) for name, value in metrics.items()}


def _array(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()
