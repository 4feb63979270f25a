"""The connections and process groups of a pipeline, apart from the user's default group.

Messages and small collectives travel over the pipeline's own connections, and gradients of replicas over gloo; a user's
NCCL group is never used, nor kept busy. Where every rank of a machine can have a GPU of its own, tensors of GPUs travel
over NCCL (`communicators`). Without replicas, gloo opens no connection, so a firewall may block all ports but ours.
"""

from __future__ import annotations

import datetime
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from stageline.common.errors import PipelineError
from stageline.distributed._torch_private import (
    default_store,
    default_timeout,
    known_groups,
    new_group_of,
    set_group_timeout,
)
from stageline.distributed.bootstrap import (
    default_channel,
    has_own_gpu,
    part_channel,
    start_together,
    unconnected_groups,
)
from stageline.distributed.communicators import Communicators, quiet_groups
from stageline.distributed.layout import Layout, data_choices
from stageline.distributed.process_exit import destroy_at_exit, keep_groups, leave_stuck
from stageline.transport.gpu import nccl
from stageline.transport.tcp.exchange import SocketGroup
from stageline.transport.tcp.links import Links


@dataclass(frozen=True)
class LayoutGroups:
    """The process groups of one process in a layout of replicas."""

    row: SocketGroup
    """The ranks of its replica."""
    replica: Any
    """The same as a process group, for a `DeviceMesh`; it connects when it is first used."""
    replica_group: Any = None
    """Its rank in all replicas; None if there is only one replica."""
    replica_nccl: Any = None
    replica_group_nccl: Any = None
    """The same over NCCL, if every process has its own GPU: for a `DeviceMesh`; pipelines use communicators."""
    data: dict[frozenset[str], Any] = field(default_factory=dict)
    """In a larger mesh: the processes that differ in some of the dimensions of the data alone."""


class Groups:
    """The connections and groups of all pipelines over one default group, or over some of its processes.

    Those processes make them together.
    """

    def __init__(self, deadline: float, layout: Layout) -> None:
        self._members = layout.members
        channel = part_channel(self._members, deadline) if self._members else default_channel(deadline)
        self.monitor, self._address, self._deadline = channel.control, channel.address, deadline
        if layout.members:  # before the first pipeline has a name for every rank
            self.monitor.name_of = layout.name
        self._prefix = channel.next_prefix()
        self._key = f"{self._prefix}/lost"
        self.pending: set[Any] = set()
        """Collectives that have started and not ended."""
        self._question: threading.Thread | None = None
        self._one_question = threading.Lock()
        self._pipelines = self._part_groups = 0
        self._of_layout: dict[Layout, LayoutGroups] = {}
        start_together(self.monitor, self._make)

    def _make(self) -> None:
        with own_part_of_store(self._prefix):
            self.links = Links.join(self._address, self._members)
            self.links.deadline = self._deadline
            self.all = SocketGroup(self.links, range(self.links.ranks), "collective")
            with unconnected_groups():
                self._all_gloo = self._new_group(range(self.links.ranks), "gloo", "control")
            own_gpu = has_own_gpu(os.environ)
            able = self.all.all_gather(np.array([float(own_gpu), float(own_gpu and nccl.library() is not None)]))
            able.wait()
            self._own_gpus, over_nccl = map(bool, able.value.min(axis=0))
            self.communicators = Communicators(self._prefix) if over_nccl else None

    def _new_group(self, processes: Sequence[int], backend: str, what: str) -> Any:
        """A process group; all processes of these groups call this. None on a process outside of it."""
        # gloo connects all members at once: it may wait for a peer behind a firewall no longer than the deadline.
        timeout = datetime.timedelta(seconds=max(1.0, self._deadline)) if backend == "gloo" else None
        try:
            if not self._members:
                group = dist.new_group(processes, timeout, backend, group_desc=f"stageline {what}")
            else:
                self._part_groups += 1
                name = f"{self._prefix}/{what}/{self._part_groups}"
                store = known_groups()[dist.group.WORLD][1]
                if self.links.rank not in processes:
                    return None
                members = [self._members[process] for process in processes]
                group = new_group_of(members, backend, name, store, timeout or default_timeout(backend))
        except RuntimeError as error:
            if backend == "gloo" and self.links.rank in processes and "connect" in str(error).lower():
                raise self.unreachable("gloo", processes, error) from error
            raise
        if timeout is not None and self.links.rank in processes:
            set_group_timeout(default_timeout(backend), group)
        return group

    def unreachable(self, library: str, processes: Iterable[int], error: object) -> PipelineError:
        """The error of a library that could not connect some processes, all of which our own connections reach."""
        mine = self.links.rank
        others = [process for process in dict.fromkeys(processes) if process != mine]
        others = [process for process in others if self.links.host_of(process) != self.links.host_of(mine)] or others
        names = {process: self.monitor.name_of(process) or f"rank {process}" for process in (mine, *others)}
        peers = " and ".join(f"{names[process]} at {self.links.host_of(process)}" for process in others)
        return PipelineError(
            f"{names[mine]} cannot connect to {peers} over {library} within {self._deadline:g} s: allow the hosts to "
            f"connect to each other on the ports of net.ipv4.ip_local_port_range, which {library} uses, and check "
            f"{library.upper()}_SOCKET_IFNAME if it is set ({error})"
        )

    def count(self) -> int:
        """The number of the next pipeline; all processes make them in the same order."""
        self._pipelines += 1
        return self._pipelines

    def of_job(self) -> LayoutGroups:
        """The groups of a job with one replica."""
        return LayoutGroups(self.all, self._all_gloo)

    def for_layout(self, layout: Layout) -> LayoutGroups:
        """The groups of a layout; made by all processes together, the first time."""
        if layout not in self._of_layout:
            _, rank = layout.place(self.links.rank)
            start_together(
                self.monitor,
                lambda: self._make_for_layout(layout),
                max(5.0, self._deadline),
                lambda error: self.unreachable("gloo", layout.replica_group(rank), error),
            )
        return self._of_layout[layout]

    def _make_for_layout(self, layout: Layout) -> None:
        if layout.replicas == 1:
            self._of_layout[layout] = self.of_job()
            return
        replica, rank = layout.place(self.links.rank)
        replica_groups = [layout.replica_group(rank) for rank in range(layout.ranks)]

        def make(backend: str) -> list[Any]:
            """A group for every replica and every rank: all processes make all of them, in the same order."""
            with unconnected_groups():
                rows = [self._new_group(row, backend, "replica") for row in layout.rows]
            across = [self._new_group(ranks, backend, "replica group") for ranks in replica_groups]
            return [rows[replica], across[rank]]

        with own_part_of_store(self._prefix):
            mine = make("gloo")
            data = self._make_data_groups(layout)
            with quiet_groups():  # a part of a mesh has its own
                over_nccl = make("nccl") if self._own_gpus and not self._members else []
            for group in over_nccl:
                destroy_at_exit(group)
        nccl_groups = over_nccl or [None, None]
        row = SocketGroup(self.links, layout.rows[replica], "replica")
        self._of_layout[layout] = LayoutGroups(row, mine[0], mine[1], nccl_groups[0], nccl_groups[1], data)

    def _make_data_groups(self, layout: Layout) -> dict[frozenset[str], Any]:
        """A group for every choice of the dimensions of the data, unless it is the whole replica group."""
        mine: dict[frozenset[str], Any] = {}
        for dimensions in data_choices(layout):
            members = {layout.neighbours(process, dimensions) for row in layout.rows for process in row}
            for processes in sorted(members):
                group = self._new_group(processes, "gloo", f"data {'-'.join(sorted(dimensions))}")
                if self.links.rank in processes:
                    mine[dimensions] = group
        return mine

    def lost(self) -> str:
        """The message of a rank that cannot continue; empty while there is none."""
        return self._ask(lambda store: str(store.get(self._key).decode()) if store.check([self._key]) else "")

    def lose(self, text: str) -> None:
        """Tell the others, which may be waiting, unless a rank already has; the next pipeline makes new connections."""
        self.abort()
        self.keep()
        for group in (self.all, *(groups.row for groups in self._of_layout.values())):
            group.close()
        for known in _groups.values():
            if known.get(self._members) is self:
                del known[self._members]
        if not self.lost():
            self._ask(lambda store: str(store.set(self._key, text)))

    def keep(self) -> None:
        """Keep all groups permanently if a collective is pending for which nobody waits any more."""
        if getattr(self, "_own_gpus", False) or any(not work.is_completed() for work in self.pending):
            keep_groups()

    def abort(self) -> None:
        """End what waits on a GPU for a lost rank. May be called from any thread."""
        communicators: Communicators | None = getattr(self, "communicators", None)
        if communicators is not None:
            communicators.abort()

    def _ask(self, what: Callable[[Any], str]) -> str:
        """Ask the store on a thread: if the process that keeps it is frozen, it never answers."""
        answer: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store ended with the process that kept it
                answer.append(what(default_store()))

        with self._one_question:  # the rank and the client of the monitor may ask at the same time
            if self._question is None or not self._question.is_alive():
                self._question = threading.Thread(target=ask, name="stageline store", daemon=True)
                self._question.start()
                self._question.join(1.0)
                if self._question.is_alive():
                    leave_stuck(self._question)
        return answer[0] if answer else ""


@contextmanager
def own_part_of_store(prefix: str) -> Iterator[None]:
    """Let new groups use a fresh prefix of the store.

    gloo and NCCL exchange their addresses through the store of the default group. Where a script made that group, the
    store may hold addresses of an earlier attempt, and a rank would connect to a process that is gone.
    """
    default, known = dist.group.WORLD, known_groups()
    assert default is not None
    backend, store = known[default]
    known[default] = (backend, PrefixStore(prefix, store))
    try:
        yield
    finally:
        if default in known:
            known[default] = (backend, store)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Groups]] = weakref.WeakKeyDictionary()


def own_groups(deadline: float, layout: Layout) -> Groups:
    """The groups over the current default group, or over the layout's part of it.

    Pipelines share them, as they never run at the same time.
    """
    default = dist.group.WORLD
    assert default is not None
    known = _groups.setdefault(default, {})
    if layout.members not in known:
        known[layout.members] = Groups(deadline, layout)
    return known[layout.members]
