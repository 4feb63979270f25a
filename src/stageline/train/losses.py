"""Loss functions, and what they are divided by.

Losses over tokens are summed and divided by the number of targets of a whole step, over all microbatches, accumulation
steps and replicas. So a short or padded sample counts by its tokens, wherever it ends up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stageline.common.errors import StagelineError, nearest
from stageline.model.huggingface import own_loss
from stageline.runtime.setup.options import Reduction

IGNORED = -100
"""The target that is ignored, as in torch and transformers."""


@dataclass(frozen=True)
class Loss:
    """A loss function for a pipeline, and how the losses of microbatches are combined."""

    function: Callable[[Any, Any], Any]
    reduction: Reduction
    count: Callable[[Tensor], float] | None = None
    """Returns the total weight of targets, by which the sum is divided."""


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: a tensor, an output of transformers, a dict or a tuple.

    >>> logits_of({"logits": torch.ones(2)}).shape
    torch.Size([2])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return torch.as_tensor(output["logits"])
    if hasattr(output, "logits"):
        return torch.as_tensor(output.logits)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise StagelineError(
        f"the model returns a {type(output).__name__} without logits; return a tensor, a dict with 'logits' or a "
        "tuple that starts with them, or set training.loss to your own function, as package.module:function"
    )


def find_loss(name: str, weights: tuple[float, ...] = (), model_loss: Any = None) -> Loss:
    """Return the loss with this name; `model_loss` is the model's own loss function, if it has one.

    >>> loss = find_loss("cross_entropy")
    >>> targets = torch.tensor([[1, 2], [3, IGNORED]])
    >>> float(loss.function(torch.zeros(2, 2, 8), targets)) / loss.count(targets)     # the logarithm of 8
    2.079...
    """
    if name in ("cross_entropy", "own") and model_loss is not None:
        return Loss(model_loss, "mean")
    if name == "cross_entropy":
        return Loss(_cross_entropy_sum, "count", lambda targets: float((targets != IGNORED).sum()))
    if name == "weighted_cross_entropy":
        class_weights = torch.tensor(weights, dtype=torch.float32)
        return Loss(
            lambda output, targets: _cross_entropy_sum(output, targets, class_weights),
            "count",
            _TargetWeight(class_weights),
        )
    if name == "mse":
        return Loss(_mean_squared_error, "mean")
    if name == "own":
        return Loss(own_loss, "mean")
    if ":" in name:
        from stageline.common.imports import find_function

        return Loss(find_function(name), "mean")
    known = ["cross_entropy", "weighted_cross_entropy", "mse", "own"]
    raise StagelineError(
        f"training.loss is {name!r}{nearest(name, known)}; use one of {', '.join(known)}, or package.module:function"
    )


def _cross_entropy_sum(output: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    logits = logits_of(output)
    if weights is not None and len(weights) != logits.shape[-1]:
        raise StagelineError(
            f"training.loss_weights has {len(weights)} weights, but the model has {logits.shape[-1]} classes; use one "
            "weight per class"
        )
    return functional.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        None if weights is None else weights.to(logits.device),
        ignore_index=IGNORED,
        reduction="sum",
    )


def _mean_squared_error(output: Any, targets: Tensor) -> Tensor:
    predictions = logits_of(output)
    if predictions.shape != targets.shape:  # torch would broadcast them
        raise StagelineError(
            f"training.loss is mse, but the model returns shape {tuple(predictions.shape)} and the targets have "
            f"{tuple(targets.shape)}; the shapes must be equal"
        )
    return functional.mse_loss(predictions.float(), targets.float())


@dataclass(frozen=True)
class _TargetWeight:
    """Returns the total class weight of targets."""

    weights: Tensor

    def __call__(self, targets: Tensor) -> float:
        valid = targets[targets != IGNORED].to(self.weights.device)
        if valid.numel() and not 0 <= int(valid.min()) <= int(valid.max()) < len(self.weights):
            raise StagelineError(
                f"training.loss_weights has {len(self.weights)} weights, but targets range from {int(valid.min())} to "
                f"{int(valid.max())}; use one weight per class"
            )
        return float(self.weights.double()[valid].sum())
