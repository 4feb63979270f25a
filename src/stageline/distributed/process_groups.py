"""The connections and process groups that are the pipeline's own, whatever the user's default group is made of.

Messages travel over sockets, and what the ranks tell each other now and then over gloo; a user's NCCL group is never
used, nor kept busy. Where every rank of a machine can have a GPU of its own, tensors of GPUs travel over NCCL.
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stageline.common.errors import ControlError, PipelineError, StagelineError
from stageline.distributed.failures import note_record
from stageline.distributed.layout import Layout
from stageline.distributed.process_exit import keep_groups, leave_stuck
from stageline.distributed.rendezvous import Meeting
from stageline.faults.flight_recorder import FlightRecorder
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.client import MonitorClient
from stageline.faults.monitor.launch import share_by_store
from stageline.faults.monitor.verdict import Verdict
from stageline.transport.gpu.payloads import PayloadGroups
from stageline.transport.tcp.links import Links

BLAME = 2.0
"""Seconds that a rank which failed waits to learn who failed first."""


@dataclass(frozen=True)
class LayoutGroups:
    """The process groups of one process in a layout of replicas."""

    replica: Any
    """The ranks of its replica."""
    replica_group: Any = None
    """Its rank in all replicas; None where there is one replica."""
    replica_nccl: Any = None
    replica_group_nccl: Any = None
    """The same over NCCL, where every process has a GPU of its own."""


class Groups:
    """What one default group of torch.distributed needs for pipelines; made by all processes together."""

    def __init__(self, deadline: float) -> None:
        """Make the groups, and the channel that tells who fails."""
        watch = watch_over_default(deadline)
        self.watch = watch.control
        self._prefix = watch.next_prefix()
        self._key = f"{self._prefix}/lost"
        self.pending: set[Any] = set()
        """Collectives that were started and not waited for to their end."""
        self._asking: threading.Thread | None = None
        self._pipelines = 0
        self._of_layout: dict[Layout, LayoutGroups] = {}
        together(self.watch, self._make)

    def _make(self) -> None:
        with own_part_of_store(self._prefix):
            self.links = Links.join(own_host(os.environ, self.watch.host))
            self.control = dist.new_group(backend="gloo", group_desc="stageline control")
            able = torch.tensor([int(has_own_gpu(os.environ))])
            dist.all_reduce(able, dist.ReduceOp.MIN, group=self.control)
            self.payloads = PayloadGroups("nccl", "cuda") if int(able) else None

    def count(self) -> int:
        """A number for one more pipeline; all processes make them in the same order."""
        self._pipelines += 1
        return self._pipelines

    def of_job(self) -> LayoutGroups:
        """The groups of a job with one replica."""
        return LayoutGroups(self.control)

    def for_layout(self, layout: Layout) -> LayoutGroups:
        """The groups of a layout; made by all processes together, the first time."""
        if layout not in self._of_layout:
            made: list[LayoutGroups] = []
            together(self.watch, lambda: made.append(self._make_for_layout(layout)))
            self._of_layout[layout] = made[0]
        return self._of_layout[layout]

    def _make_for_layout(self, layout: Layout) -> LayoutGroups:
        if layout.replicas == 1:
            return self.of_job()
        replica, rank = layout.place(dist.get_rank())
        replica_groups = [layout.replica_group(rank) for rank in range(layout.ranks)]

        def make(backend: str) -> list[Any]:
            """A group for every replica and every rank: all processes make all of them, in the same order."""
            rows = [dist.new_group(row, backend=backend, group_desc="stageline replica") for row in layout.rows]
            columns = [
                dist.new_group(ranks, backend=backend, group_desc="stageline replica group") for ranks in replica_groups
            ]
            return [rows[replica], columns[rank]]

        with own_part_of_store(self._prefix):
            mine = make("gloo")
            return LayoutGroups(*mine) if self.payloads is None else LayoutGroups(*mine, *make("nccl"))

    def lost(self) -> str:
        """What a rank told that can go on no more; empty as long as there is none."""
        return self._ask(lambda store: str(store.get(self._key).decode()) if store.check([self._key]) else "")

    def lose(self, text: str) -> None:
        """Tell the others, who may be waiting, if none did; let the next pipeline start with new connections."""
        self.keep()
        for default in [default for default, groups in _made.items() if groups is self]:
            del _made[default]
        if not self.lost():
            self._ask(lambda store: str(store.set(self._key, text)))

    def keep(self) -> None:
        """Keep all groups for good, if something is on the way which nobody waits for any more."""
        if getattr(self, "payloads", None) is not None or any(not work.is_completed() for work in self.pending):
            keep_groups()

    def _ask(self, what: Callable[[Any], str]) -> str:
        """Ask the store, on a thread: it may be kept by a process that froze, and then nothing comes back."""
        answer: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store went with the process that kept it
                answer.append(what(dist.distributed_c10d._get_default_store()))

        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=ask, name="stageline store", daemon=True)
            self._asking.start()
            self._asking.join(1.0)
            if self._asking.is_alive():
                leave_stuck(self._asking)
        return answer[0] if answer else ""


@contextmanager
def own_part_of_store(prefix: str) -> Iterator[None]:
    """Let new groups meet in a part of the store that nobody else has written to.

    The addresses by which gloo and NCCL connect are in the store of the default group. Where a script made that group,
    keys of an earlier attempt may still be there, and a rank would call one that is gone.
    """
    default, known = dist.group.WORLD, dist.distributed_c10d._world.pg_map
    assert default is not None
    backend, store = known[default]
    known[default] = (backend, PrefixStore(prefix, store))
    try:
        yield
    finally:
        if default in known:
            known[default] = (backend, store)


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Groups] = weakref.WeakKeyDictionary()


def own_groups(deadline: float) -> Groups:
    """The groups for the default group of this moment: pipelines share them, as they never run at the same time."""
    default = dist.group.WORLD
    assert default is not None
    if default not in _made:
        _made[default] = Groups(deadline)
    return _made[default]


class Watch:
    """The control channel of one rendezvous, and the name under which its ranks keep what they tell each other."""

    def __init__(self, store: Any, rank: int, ranks: int, deadline: float) -> None:
        """Open the channel; rank 0 starts the failure monitor and shares its address through the store."""
        try:
            meeting = Meeting(store, rank, ranks)
        except Exception as error:
            raise ControlError(
                f"rank {rank} was not told where the control channel is, so rank 0 did not start or has ended: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.name = meeting.name
        self.group: Callable[[], Any] = lambda: None
        """The default group that was made by this rendezvous, as long as it is there."""
        self._made = 0
        share = share_by_store(PrefixStore(self.name, store), rank, str(ranks), ranks)
        self.control = control = MonitorClient.start(rank, ranks, share, deadline)
        end = time.monotonic() + 2 * deadline + 10
        if rank == 0:
            meeting.answer(lambda: control.verdict() is not None or time.monotonic() > end)

    def next_prefix(self) -> str:
        """A part of the store for one more set of groups; all processes make them in the same order."""
        self._made += 1
        return f"stageline/{self.name}/{self._made}"


_watch: list[Watch] = []
"""The last one of this process."""


def watch_over(store: Any, rank: int, ranks: int, deadline: float) -> Watch:
    """Open the control channel of a new rendezvous; what became of an earlier one is over."""
    while _watch:
        _watch.pop().control.close()
    _watch.append(Watch(store, rank, ranks, deadline))
    return _watch[0]


def watch_over_default(deadline: float) -> Watch:
    """The control channel of the default group of this moment."""
    default = dist.group.WORLD
    assert default is not None
    if not _watch or _watch[0].group() is not default:
        store = dist.distributed_c10d._get_default_store()
        watch_over(store, dist.get_rank(), dist.get_world_size(), deadline).group = weakref.ref(default)
    return _watch[0]


def lost_rank() -> str:
    """Who was lost, by which this job is over; empty as long as nobody is. Waits for nothing: ask it in every wait.

    >>> lost_rank()
    ''
    """
    verdict = _watch[0].control.final if _watch else None
    return "" if verdict is None else str(verdict)


def own_host(environment: Mapping[str, str], reached: str) -> str:
    """The address at which other ranks reach this machine: as asked for, or as the control channel was reached from.

    Where there is no control channel, it is loopback if all ranks are here, and else the address of the interface that
    leads to rank 0.

    >>> own_host({"STAGELINE_HOST": "10.0.0.7"}, "127.0.0.1"), own_host({}, "10.0.0.5"), own_host({}, "")
    ('10.0.0.7', '10.0.0.5', '127.0.0.1')
    """
    asked = environment.get("STAGELINE_HOST", "") or reached
    if asked or environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE", ""):
        return asked or "127.0.0.1"
    with suppress(OSError):
        found = socket.getaddrinfo(environment.get("MASTER_ADDR", ""), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as way:
            way.connect(found[4])  # sends nothing
            return str(way.getsockname()[0])
    return "127.0.0.1"


def has_own_gpu(environment: Mapping[str, str]) -> bool:
    """Whether this machine has as many GPUs as processes of the job, so that NCCL can serve them."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return False
    here = environment.get("LOCAL_WORLD_SIZE") or str(dist.get_world_size() if dist.is_initialized() else 1)
    return torch.cuda.device_count() >= int(here)


def several_processes(deadline: float) -> bool:
    """Whether this process is one of several; joins the others if the environment says so."""
    if not dist.is_available():
        return False
    if not dist.is_initialized():
        if check_environment(os.environ) == 1:
            return False
        _join(deadline)
    return dist.get_world_size() > 1


def _join(deadline: float) -> None:
    """Meet the other ranks. One that does not come is named by the control channel, which needs only rank 0."""
    store, rank, ranks = _meet(deadline)
    watch = watch_over(PrefixStore("stageline", store), rank, ranks, deadline)
    verdict = watch.control.everyone(timeout=2 * deadline + 10)
    if verdict is not None:
        raise _not_started(watch.control, verdict)
    backend = "cpu:gloo,cuda:nccl" if has_own_gpu(os.environ) else "gloo"
    ours = PrefixStore(f"default/{watch.name}", store)
    together(watch.control, lambda: dist.init_process_group(backend, store=ours, rank=rank, world_size=ranks))
    watch.group = weakref.ref(dist.group.WORLD)


def _meet(deadline: float) -> tuple[Any, int, int]:
    """The store of the environment's address; torchrun keeps one, else rank 0 does, and waits for nobody."""
    environment, timeout = os.environ, datetime.timedelta(seconds=max(deadline, 1.0))
    rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
            return store, rank, ranks
        if rank and not _answers(host, port, deadline):  # the store itself would try for twice as long
            raise TimeoutError(f"no connection within {deadline:g} s")
        store = TCPStore(host, port, ranks, rank == 0, timeout, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, OSError) as error:
        if rank == 0:
            raise StagelineError(f"rank 0 cannot listen at MASTER_ADDR={host}, MASTER_PORT={port}: {error}") from error
        raise PipelineError(
            f"rank 0 never started: nothing answers at MASTER_ADDR={host}, MASTER_PORT={port} within {deadline:g} s; "
            "start the job again with all ranks"
        ) from error
    return store, rank, ranks


def _answers(host: str, port: int, patience: float) -> bool:
    """Whether someone listens there within so many seconds."""
    end = time.monotonic() + patience
    while True:
        with suppress(OSError), socket.create_connection((host, port), timeout=min(1.0, patience)):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


def together(watch: MonitorClient, make: Callable[[], object]) -> None:
    """Do what all ranks do at the start, and what nothing can wake them from: on a thread, which a lost rank ends."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            make()
        except BaseException as error:
            failed.append(error)

    before, watch.doing, watch.waits = (watch.doing, watch.waits), "starting", EVERYONE
    thread = threading.Thread(target=run, name="stageline start", daemon=True)
    thread.start()
    try:
        verdict = None
        while thread.is_alive() and (verdict is None or not verdict.final):
            thread.join(0.05)
            verdict = watch.verdict()
        if failed:
            verdict = watch.blame(BLAME)
        if verdict is not None and verdict.final:
            leave_stuck(thread)
            keep_groups()
            raise _not_started(watch, verdict) from (failed[0] if failed else None)
        if failed:
            raise failed[0]
    finally:
        watch.doing, watch.waits = before


def _not_started(watch: MonitorClient, verdict: Verdict) -> PipelineError:
    error = PipelineError(f"{verdict}; start the job again with all ranks")
    with suppress(OSError):
        flight = FlightRecorder(watch.rank, watch.ranks, watch.job)
        note_record(error, [flight.write(verdict=verdict, doing="starting", lost=watch.lost)])
    return error


def check_environment(environment: Mapping[str, str]) -> int:
    """How many processes the environment, as torchrun sets it, says there are; refuse one that contradicts itself.

    >>> check_environment({})
    1
    >>> check_environment({"WORLD_SIZE": "4", "RANK": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"})
    Traceback (most recent call last):
        ...
    stageline.StagelineError: the environment says RANK=4 and WORLD_SIZE=4: the rank must be at least 0 and
    below 4; start the processes with torchrun, or unset WORLD_SIZE to run in one process
    """
    cure = "start the processes with torchrun, or unset WORLD_SIZE to run in one process"
    size = _number(environment, "WORLD_SIZE", cure)
    size = 1 if size is None else size
    if size < 1:
        raise StagelineError(f"the environment says WORLD_SIZE={size}, and at least 1 process is needed; {cure}")
    if size == 1:
        return 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise StagelineError(f"the environment says WORLD_SIZE={size} and has no {' and no '.join(missing)}; {cure}")
    for inner, outer in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank, limit = _number(environment, inner, cure), _number(environment, outer, cure)
        if rank is not None and limit is not None and not 0 <= rank < limit:
            raise StagelineError(
                f"the environment says {inner}={rank} and {outer}={limit}: the rank must be at least 0 and below "
                f"{limit}; {cure}"
            )
    local = _number(environment, "LOCAL_WORLD_SIZE", cure)
    if local is not None and local > size:
        raise StagelineError(f"the environment says LOCAL_WORLD_SIZE={local} and only WORLD_SIZE={size}; {cure}")
    return size


def _number(environment: Mapping[str, str], name: str, cure: str) -> int | None:
    text = environment.get(name, "").strip()
    try:
        return int(text) if text else None
    except ValueError:
        raise StagelineError(f"the environment says {name}={text!r}, which is not a whole number; {cure}") from None
