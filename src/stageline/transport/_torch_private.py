"""Private torch API used by this package. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()
