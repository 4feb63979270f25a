"""Loss graph: why a loss does not require a gradient, so that no backward can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from stageline.common.errors import StagelineError
from stageline.runtime._torch_private import pytree
from stageline.tensors.pytree import Leaf, tensors_of


def refuse_loss(stage: int, microbatch: int, part: nn.Module, inputs: Sequence[Leaf], output: Any) -> None:
    """Raise the error for a loss that does not require a gradient; it says where the graph ends.

    >>> import torch
    >>> refuse_loss(1, 0, nn.Linear(2, 2), [torch.ones(2)], torch.ones(2))
    Traceback (most recent call last):
      ...
    stageline.StagelineError: the loss of microbatch 0 does not require grad, so no parameter would get a
    gradient: parameters or inputs of stage 1, the last one, require grad, but its output does not; look for detach(),
    no_grad() or an operation without a derivative in its forward
    """
    if any(tensor.requires_grad for tensor in tensors_of(pytree.tree_leaves(output))):
        why = (
            f"the output of stage {stage}, the last one, requires grad, but the loss that loss_fn computed does not; "
            "look for detach(), no_grad(), item() or an operation without a derivative in loss_fn"
        )
    elif any(tensor.requires_grad for tensor in (*part.parameters(), *tensors_of(inputs))):
        why = (
            f"parameters or inputs of stage {stage}, the last one, require grad, but its output does not; look for "
            "detach(), no_grad() or an operation without a derivative in its forward"
        )
    else:
        why = (
            f"neither the parameters nor the inputs of stage {stage}, the last one, require grad; either every "
            "parameter is frozen, or an earlier stage detaches its output: let some parameters require grad"
        )
    raise StagelineError(
        f"the loss of microbatch {microbatch} does not require grad, so no parameter would get a gradient: {why}"
    )
