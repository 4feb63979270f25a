"""Backwards that a stage cannot run as usual: a loss without a graph, a backward inside a forward, and DDP or FSDP."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from stageline.common.errors import StagelineError
from stageline.runtime._torch_private import composable_wrappers, pytree
from stageline.tensors.pytree import Leaf, tensors_of


def refuse_loss(stage: int, microbatch: int, part: nn.Module, inputs: Sequence[Leaf], output: Any) -> None:
    """Raise the error for a loss that does not require a gradient; it says where the graph ends."""
    if any(tensor.requires_grad for tensor in tensors_of(pytree.tree_leaves(output))):
        why = (
            f"the output of stage {stage}, the last one, requires grad, but the loss that loss_fn computed does not; "
            "check loss_fn for detach(), no_grad(), item() or an operation without a derivative"
        )
    elif any(tensor.requires_grad for tensor in (*part.parameters(), *tensors_of(inputs))):
        why = (
            f"parameters or inputs of stage {stage}, the last one, require grad, but its output does not; check its "
            "forward for detach(), no_grad() or an operation without a derivative"
        )
    else:
        why = (
            f"neither the parameters nor the inputs of stage {stage}, the last one, require grad: either every "
            "parameter is frozen, or an earlier stage detaches its output; set requires_grad on some parameters"
        )
    raise StagelineError(
        f"the loss of microbatch {microbatch} does not require grad, so no parameter would get a gradient: {why}"
    )


class ActivationDropping:
    """Context managers in which the forward and the loss of a stage run when their graphs are dropped.

    A forward that calls `torch.autograd.grad` or `.backward()` needs its saved tensors before it ends. The first run
    keeps them all until the next one and records whether any was read. Later runs keep or drop them accordingly.
    """

    def __init__(self) -> None:
        self._reads: dict[str, bool] = {}
        self._kept: list[list[Tensor]] = []
        """The tensors of first runs, one each: a graph that held its own output would never be freed."""

    def around(self, what: str) -> AbstractContextManager[Any]:
        """The context manager for `what`: "stage 1", or its loss function."""
        if what not in self._reads:
            self._reads[what] = False
            return saved_tensors_hooks(self._keep, partial(self._note_read, what))
        self.release()
        if self._reads[what]:
            return nullcontext()  # the graph is freed when the forward ends
        return saved_tensors_hooks(lambda tensor: None, partial(_refuse_read, what))

    def release(self) -> None:
        """Free what first runs kept."""
        for holder in self._kept:
            holder.clear()
        self._kept = []

    def _keep(self, tensor: Tensor) -> list[Tensor]:
        self._kept.append([tensor])
        return self._kept[-1]

    def _note_read(self, what: str, holder: list[Tensor]) -> Tensor:
        self._reads[what] = True
        return holder[0]


def _refuse_read(what: str, dropped: None) -> Tensor:
    raise StagelineError(
        f"{what} runs a backward inside its forward (torch.autograd.grad or .backward()) but did not do so the first "
        "time, so recompute='stage' dropped the tensors it needs; make it do so every time, or use "
        "recompute='none'"
    )


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module itself."""
    sharding: Any = sys.modules.get("torch.distributed.fsdp")
    return sharding is not None and isinstance(module, sharding.FSDPModule)


def wrapper_in(part: nn.Module, *, shards: bool = True) -> str:
    """The name of the first data-parallel wrapper (DDP, FSDP, `replicate`) in a stage; empty if there is none.

    Wrappers gather, reduce and free gradients in hooks that run when a backward has added them to the parameters. A
    split backward would run these hooks before the gradients exist, so such a stage runs the whole backward in I.
    `shards` says whether FSDP2 counts: not where the executor does its work (see `runtime.sharding`).
    """
    kinds: dict[Any, str] = {DistributedDataParallel: "DistributedDataParallel"}
    # A module that was never imported wraps nothing, and importing it is slow.
    sharding: Any = sys.modules.get("torch.distributed.fsdp")
    if sharding is not None:
        kinds[sharding.FullyShardedDataParallel] = "FullyShardedDataParallel"
        if shards:
            kinds[sharding.FSDPModule] = "fully_shard"
    for module in part.modules():
        for kind, name in kinds.items():
            if isinstance(module, kind):
                return name
        if "replicate" in composable_wrappers(module):
            return "replicate"
    return ""
