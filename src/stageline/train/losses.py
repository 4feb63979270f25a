"""What is made small, and what it is divided by.

Losses over tokens are summed and divided by the number of targets of a whole step, over all microbatches, accumulated
steps and replicas, so that a short or padded sample weighs by its tokens wherever it lands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stageline.errors import StagelineError, nearest
from stageline.model.huggingface import own_loss
from stageline.runtime.batch import Reduction

IGNORED = -100
"""The target that does not count, as torch and transformers have it."""


@dataclass(frozen=True)
class Loss:
    """A loss function for a pipeline, and how the losses of microbatches become one."""

    function: Callable[[Any, Any], Any]
    reduction: Reduction
    count: Callable[[Tensor], float] | None = None
    """Of targets: how much they weigh, where the sum is divided by that."""


def logits_of(output: Any) -> Tensor:
    """The logits in what a model gives back: a tensor, an output of transformers, a dict or a tuple.

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
        f"the model gives back a {type(output).__name__} without logits; let it give back a tensor, a dict with "
        "'logits' or a tuple that begins with them, or name a loss of your own as package.module:function"
    )


def find_loss(name: str, weights: tuple[float, ...] = (), given: Any = None) -> Loss:
    """The loss of a name; `given` is the model's own, if it came with one.

    >>> loss = find_loss("cross_entropy")
    >>> targets = torch.tensor([[1, 2], [3, IGNORED]])
    >>> float(loss.function(torch.zeros(2, 2, 8), targets)) / loss.count(targets)     # the logarithm of 8
    2.079...
    """
    if name in ("cross_entropy", "own") and given is not None:
        return Loss(given, "mean")
    if name == "cross_entropy":
        return Loss(_summed, "count", lambda targets: float((targets != IGNORED).sum()))
    if name == "weighted_cross_entropy":
        classes = torch.tensor(weights, dtype=torch.float32)
        return Loss(lambda output, targets: _summed(output, targets, classes), "count", _Weigh(classes))
    if name == "mse":
        return Loss(_squared, "mean")
    if name == "own":
        return Loss(own_loss, "mean")
    if ":" in name:
        from stageline.model.named import find_function

        return Loss(find_function(name), "mean")
    known = ["cross_entropy", "weighted_cross_entropy", "mse", "own"]
    raise StagelineError(
        f"training.loss is {name!r}{nearest(name, known)}; give one of {', '.join(known)}, or package.module:function"
    )


def _summed(output: Any, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    logits = logits_of(output)
    if weights is not None and len(weights) != logits.shape[-1]:
        raise StagelineError(
            f"training.loss_weights has {len(weights)} numbers and the model knows {logits.shape[-1]} classes: give "
            "one for each"
        )
    return functional.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        None if weights is None else weights.to(logits.device),
        ignore_index=IGNORED,
        reduction="sum",
    )


def _squared(output: Any, targets: Tensor) -> Tensor:
    found = logits_of(output)
    if found.shape != targets.shape:  # torch would stretch one over the other, and train on something else
        raise StagelineError(
            f"training.loss is mse, the model gives back {tuple(found.shape)} and the targets are "
            f"{tuple(targets.shape)}; give them one shape"
        )
    return functional.mse_loss(found.float(), targets.float())


@dataclass(frozen=True)
class _Weigh:
    """The sum of the weights of targets."""

    classes: Tensor

    def __call__(self, targets: Tensor) -> float:
        counted = targets[targets != IGNORED].to(self.classes.device)
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < len(self.classes):
            raise StagelineError(
                f"training.loss_weights has {len(self.classes)} numbers, and targets go from {int(counted.min())} to "
                f"{int(counted.max())}: give a weight for every class"
            )
        return float(self.classes.double()[counted].sum())
