"""Wrappers: DDP, FSDP and `replicate` inside a stage.

They gather, reduce and free gradients in hooks that run when a backward has added them to the parameters. A split
backward would run these hooks before the gradients exist, so stages with such modules run the whole backward in I.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stageline.runtime._torch_private import composable_wrappers


def wrapper_in(part: nn.Module) -> str:
    """The name of the first data-parallel wrapper among the modules of a stage; empty if there is none.

    >>> wrapper_in(nn.Sequential(nn.Linear(2, 2)))
    ''
    """
    kinds: dict[Any, str] = {DistributedDataParallel: "DistributedDataParallel"}
    # A module that was never imported wraps nothing, and importing it is slow.
    sharding: Any = sys.modules.get("torch.distributed.fsdp")
    if sharding is not None:
        kinds[sharding.FullyShardedDataParallel] = "FullyShardedDataParallel"
        kinds[sharding.FSDPModule] = "fully_shard"
    for module in part.modules():
        name = next((name for kind, name in kinds.items() if isinstance(module, kind)), "")
        if not name and "replicate" in composable_wrappers(module):
            name = "replicate"
        if name:
            return name
    return ""
