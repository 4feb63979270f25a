"""Private torch API used by this package. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

__all__ = [
    "TCPStore",
    "default_store",
    "default_timeout",
    "gloo_of",
    "known_groups",
    "new_group_of",
    "root_of",
    "set_gloo_timeout",
    "set_group_timeout",
    "store_port",
]


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def store_port() -> int:
    """The port of the default process group's store; 0 if it has none."""
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return int(getattr(store, "port", 0) or 0)


def known_groups() -> dict[Any, Any]:
    """The backend and the store of every process group, which torch looks up when it makes a new one."""
    return dist.distributed_c10d._world.pg_map


def root_of(mesh: Any) -> Any:
    """The mesh that a mesh was cut out of; a whole mesh is its own."""
    return mesh._get_root_mesh()


def default_timeout(backend: str) -> timedelta:
    """How long a collective of a process group may take by default."""
    c10d: Any = dist.distributed_c10d
    return timedelta(seconds=c10d._get_default_timeout(c10d.Backend(backend)).total_seconds())


def new_group_of(processes: Sequence[int], backend: str, name: str, store: Any, timeout: timedelta) -> Any:
    """A process group that its members alone make.

    `new_group` with use_local_synchronization names a group by how many groups the process is in, which may not be the
    same number on all members.
    """
    c10d: Any = dist.distributed_c10d
    ranks = sorted(processes)
    group, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), ranks, c10d.Backend(backend), store, name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def gloo_of(group: Any) -> Any:
    """The gloo backend of a process group, also of one that uses NCCL for tensors on GPUs; None if it has none."""
    cpu = torch.device("cpu")
    backend = group._get_backend(cpu) if cpu in group._device_types else None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def set_gloo_timeout(timeout: timedelta, gloo: Any) -> None:
    """Set how long a collective of a gloo backend may take."""
    gloo._set_default_timeout(timeout)


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """Set how long a collective of a process group may take."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)
