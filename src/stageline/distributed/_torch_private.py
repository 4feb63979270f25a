"""Private torch API used by this package. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

__all__ = ["TCPStore", "default_store", "known_groups", "set_group_timeout"]


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def known_groups() -> dict[Any, Any]:
    """The backend and the store of every process group, which torch looks up when it makes a new one."""
    return dist.distributed_c10d._world.pg_map


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """Set how long a collective of a process group may take."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)
