"""Sharded stages: when FSDP2 gathers their parameters, and when it reduces their gradients.

A step gathers the parameters of a stage once, before its first forward, and keeps them until its last backward. That
backward reduces the gradients of all microbatches, and frees the parameters:

    F0 F1 B0 F2 B1 B2     gathered before F0, reduced and freed in B2

FSDP2's own hooks do the work; here is when they do it. All processes that share a stage run the same program, so they
gather and reduce in the same order.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from stageline.runtime._torch_private import forget_unsharded_gradients
from stageline.tensors.sharded import is_sharded, settle_gradient


class ShardedStage:
    """The FSDP2 modules and the sharded parameters of one stage."""

    def __init__(self, part: nn.Module) -> None:
        sharding: Any = sys.modules.get("torch.distributed.fsdp")
        self._modules: list[Any] = []
        if sharding is not None:
            self._modules = [module for module in part.modules() if isinstance(module, sharding.FSDPModule)]
        self._sharded = [parameter for parameter in part.parameters() if is_sharded(parameter)]
        for module in self._modules:
            # The weights of the losses already divide by the samples of all processes.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_forward(False, recurse=False)
        self._set_last(False)

    def _set_last(self, last: bool) -> None:
        for module in self._modules:
            module.set_is_last_backward(last)
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)

    def before_last_backward(self) -> None:
        """The next backward is the last one of this step: it reduces the gradients and frees the parameters."""
        self._set_last(True)

    def complete(self) -> None:
        """The gradients of the stage are complete."""
        self._set_last(False)
        for parameter in self._sharded:
            settle_gradient(parameter)

    def end(self) -> None:
        """The program has ended: free what is still gathered, as after an evaluation."""
        for module in self._modules:
            module.reshard()

    def forget(self) -> None:
        """Drop what a failed step left: gathered parameters, and gradients that are not reduced."""
        for module in self._modules:
            forget_unsharded_gradients(module)
        self._set_last(False)
        self.end()
