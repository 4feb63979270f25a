"""Joining a job: the environment, the other ranks, the control channel, and what all ranks do at the start."""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stageline.common.errors import ControlError, PipelineError, StagelineError
from stageline.distributed import attempts
from stageline.distributed._torch_private import TCPStore, default_store
from stageline.distributed.communicators import quiet_groups
from stageline.distributed.failures import BLAME, note_record
from stageline.distributed.launchers.slurm import slurm_place
from stageline.distributed.layout import Layout, find_layout
from stageline.distributed.process_exit import destroy_at_exit, keep_groups, leave_stuck
from stageline.distributed.rank_host import RankHost
from stageline.distributed.thread_host import ThreadHost
from stageline.faults.flight_recorder import FlightRecorder
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.client import MonitorClient
from stageline.faults.monitor.connection import no_address, share_by_store
from stageline.faults.monitor.verdict import Verdict

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HELLO, _ANSWER, _HEARD = "stageline/hello/{}", "stageline/answer/{}", "stageline/heard/{}/{}"
"""Keys of the store: a rank's random number, the answer to it, and that the rank has read the answer."""


class Meeting:
    """A unique name for one rendezvous: rank 0 chooses it and answers the others, who ask for it.

    torchrun's store outlives a restart, and the store of a script may outlive a process group. Their keys then hold the
    addresses of processes that are gone. So every rank writes a fresh random number, and rank 0 answers it with the
    name of this rendezvous, which is the prefix of all other keys.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> store.set("stageline/hello/1", "of a rank that is gone")
    >>> with ThreadPoolExecutor() as pool:
    ...     other = pool.submit(Meeting, store, 1, 2)
    ...     first = Meeting(store, 0, 2)
    ...     first.answer(lambda: False)
    ...     other.result().name == first.name
    True
    """

    def __init__(self, store: Any, rank: int, ranks: int, patience: float = 300.0) -> None:
        """Choose the name, or wait until rank 0 answers with it, for so many seconds."""
        self._store, self._ranks = store, ranks
        self.name = drawn = secrets.token_hex(8)
        if rank:
            store.set(_HELLO.format(rank), drawn)
            self._await_answer(_ANSWER.format(drawn), patience)
            self.name = store.get(_ANSWER.format(drawn)).decode()
            store.set(_HEARD.format(self.name, rank), "1")

    def _await_answer(self, key: str, patience: float) -> None:
        """Wait for rank 0; where a launcher replaces lost ranks, look whether it was lost meanwhile."""
        recovers, end = attempts.number_of() is not None, time.monotonic() + patience
        while recovers and time.monotonic() < end and not self._store.check([key]):
            _refuse_superseded()
            time.sleep(0.02)
        self._store.wait([key], datetime.timedelta(seconds=0.1 if recovers else patience))

    def answer(self, over: Callable[[], bool]) -> None:
        """On rank 0: answer the others until all know the name or `over()` is true."""
        answered: set[str] = set()
        missing = list(range(1, self._ranks))
        while missing and not over():
            for rank in missing:
                if self._store.check([_HELLO.format(rank)]):
                    drawn = self._store.get(_HELLO.format(rank)).decode()
                    if drawn not in answered:  # perhaps of an earlier rendezvous, where the answer does no harm
                        self._store.set(_ANSWER.format(drawn), self.name)
                        answered.add(drawn)
            missing = [rank for rank in missing if not self._store.check([_HEARD.format(self.name, rank)])]
            if missing:
                time.sleep(0.01)


class JobChannel:
    """The control channel of one rendezvous, and the name under which its ranks use the store."""

    def __init__(self, store: Any, rank: int, ranks: int, deadline: float, host: str = "", job: int = 0) -> None:
        """Open the channel; rank 0 starts the failure monitor, and puts its address into the store.

        For a part of a job, `host` is where its monitor listens, and `job` is the number of all processes.
        """
        try:
            meeting = Meeting(store, rank, ranks, patience=2 * deadline + 10)
        except Exception as error:
            raise no_address(rank, error) from error
        self.name = meeting.name
        self.group: Callable[[], Any] = lambda: None
        """The default group of this rendezvous, while it exists."""
        self._prefixes = 0
        share = share_by_store(PrefixStore(self.name, store), rank, str(ranks), job or ranks)
        self.control = control = MonitorClient.start(rank, ranks, share, deadline, host=host)
        end = time.monotonic() + 2 * deadline + 10
        if rank == 0:
            meeting.answer(lambda: control.verdict() is not None or time.monotonic() > end or attempts.superseded())

    def next_prefix(self) -> str:
        """A prefix in the store for one more set of groups; all processes make them in the same order."""
        self._prefixes += 1
        return f"stageline/{self.name}/{self._prefixes}"


_channels: dict[tuple[int, ...], JobChannel] = {}
"""The last one of the job, under no processes, and those of its parts that this process belongs to."""


def open_channel(store: Any, rank: int, ranks: int, deadline: float) -> JobChannel:
    """Open the control channel of a new rendezvous, and close those of an earlier one."""
    leave_channels()
    return _channels.setdefault((), JobChannel(store, rank, ranks, deadline))


def leave_channels() -> None:
    """Close the control channels of a job that this process leaves."""
    while _channels:
        _channels.popitem()[1].control.close()


def default_channel(deadline: float) -> JobChannel:
    """The control channel of the current default group."""
    default = dist.group.WORLD
    assert default is not None
    if () not in _channels or _channels[()].group() is not default:
        parts = {members: channel for members, channel in _channels.items() if channel.group() is default}
        for members in parts:
            del _channels[members]
        store = default_store()
        open_channel(store, dist.get_rank(), dist.get_world_size(), deadline).group = weakref.ref(default)
        _channels.update(parts)
    return _channels[()]


def part_channel(members: tuple[int, ...], deadline: float) -> JobChannel:
    """The control channel of some processes of the current default group, which have a failure monitor of their own."""
    default = dist.group.WORLD
    assert default is not None
    known = _channels.get(members)
    if known is None or known.group() is not default:
        if known is not None:
            known.control.close()
        text = ",".join(map(str, members))
        store = PrefixStore(
            f"stageline/part/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}", default_store()
        )
        rank, host = members.index(dist.get_rank()), own_host(os.environ, "")
        channel = JobChannel(store, rank, len(members), deadline, host, dist.get_world_size())
        channel.group = weakref.ref(default)
        _channels[members] = channel
    return _channels[members]


def lost_rank() -> str:
    """The rank that this job lost; empty while it has lost none. Does not wait, so that every wait may call it.

    >>> lost_rank()
    ''
    """
    verdict = final_verdict()
    return "" if verdict is None else str(verdict)


def final_verdict() -> Verdict | None:
    """The verdict that ended this job; None while it runs."""
    verdicts = (channel.control.final for channel in list(_channels.values()))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def own_host(environment: Mapping[str, str], reached: str) -> str:
    """The address at which other ranks reach this machine: STAGELINE_HOST, or that of the control channel.

    Without a control channel, it is loopback if all ranks are on this machine, and else the address of the interface
    that leads to rank 0.

    >>> own_host({"STAGELINE_HOST": "10.0.0.7"}, "127.0.0.1"), own_host({}, "10.0.0.5"), own_host({}, "")
    ('10.0.0.7', '10.0.0.5', '127.0.0.1')
    """
    host = environment.get("STAGELINE_HOST", "") or reached
    if host or environment.get("LOCAL_WORLD_SIZE", "") == environment.get("WORLD_SIZE", ""):
        return host or "127.0.0.1"
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(environment.get("MASTER_ADDR", ""), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def has_own_gpu(environment: Mapping[str, str]) -> bool:
    """Whether this machine has as many GPUs as processes of the job, so that NCCL can serve them."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return False
    here = environment.get("LOCAL_WORLD_SIZE") or str(dist.get_world_size() if dist.is_initialized() else 1)
    return torch.cuda.device_count() >= int(here)


def several_processes(deadline: float) -> bool:
    """Whether this process is one of several; joins the others if the environment says so."""
    if not dist.is_initialized():
        os.environ.update(slurm_place(os.environ))
        if check_environment(os.environ) == 1:
            return False
        _join(deadline)
    return dist.get_world_size() > 1


def find_host(ranks: int, deadline: float, replicas: int | None = None, mesh: DeviceMesh | None = None) -> RankHost:
    """Threads, unless the environment says that this process is one rank of several."""
    if not several_processes(deadline):
        if mesh is not None or replicas not in (None, 1):
            find_layout(ranks, replicas, mesh, 1)
        return ThreadHost(ranks, deadline)
    from stageline.distributed.process_host import ProcessHost  # a job of one process needs none of it

    return ProcessHost(deadline, find_layout(ranks, replicas, mesh, dist.get_world_size()))


def job_host(deadline: float) -> RankHost:
    """All processes of a job, whichever pipelines they belong to; just this one if it is alone."""
    if not several_processes(deadline):
        return ThreadHost(1, deadline)
    from stageline.distributed.process_host import ProcessHost  # a job of one process needs none of it

    return ProcessHost(deadline, Layout.even(dist.get_world_size()))


def _join(deadline: float) -> None:
    """Meet the other ranks. The control channel, which needs only rank 0, names a rank that does not start."""
    store, rank, ranks = _find_store(deadline)
    attempt = attempts.number_of()
    if attempt is not None:
        _refuse_superseded()
        attempts.announcements().arrive(rank, attempt)
        store = PrefixStore(f"attempt/{attempt}", store)
    channel = open_channel(PrefixStore("stageline", store), rank, ranks, deadline)
    verdict = _await_everyone(channel.control, timeout=2 * deadline + 10)
    if verdict is not None:
        raise _not_started(channel.control, verdict)
    backend = "cpu:gloo,cuda:nccl" if has_own_gpu(os.environ) else "gloo"
    ours = PrefixStore(f"default/{channel.name}", store)

    def start() -> None:
        with quiet_groups():
            dist.init_process_group(backend, store=ours, rank=rank, world_size=ranks)

    start_together(channel.control, start)
    if backend != "gloo":
        destroy_at_exit()
    channel.group = weakref.ref(dist.group.WORLD)


def _await_everyone(control: MonitorClient, timeout: float) -> Verdict | None:
    """Wait until every rank is connected; where a launcher replaces lost ranks, look whether one was lost before."""
    end = time.monotonic() + timeout
    while attempts.number_of() is not None and time.monotonic() < end:
        with suppress(ControlError):  # not all are there yet
            return control.everyone(timeout=0.1)
        _refuse_superseded()
    return control.everyone(timeout)


def _refuse_superseded() -> None:
    if attempts.superseded():
        raise PipelineError("another rank was lost while the job recovered from the loss of one")


def _find_store(deadline: float) -> tuple[Any, int, int]:
    """The store at the environment's address, this rank, and the number of ranks.

    torchrun keeps a store; without it rank 0 does, and does not wait for the others.
    """
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
    """Whether a process listens there within this many seconds."""
    end = time.monotonic() + patience
    while True:
        with suppress(OSError), socket.create_connection((host, port), timeout=min(1.0, patience)):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


def start_together(control: MonitorClient, start: Callable[[], object]) -> None:
    """Call a start-up function of all ranks on a thread: its wait for a lost rank cannot be interrupted otherwise."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            start()
        except BaseException as error:
            failed.append(error)

    before, control.doing, control.waits = (control.doing, control.waits), "starting", EVERYONE
    thread = threading.Thread(target=run, name="stageline start", daemon=True)
    thread.start()
    try:
        verdict = None
        while thread.is_alive() and (verdict is None or not verdict.final):
            thread.join(0.05)
            verdict = control.verdict()
        if failed:
            verdict = control.blame(BLAME)
        if verdict is not None and verdict.final:
            leave_stuck(thread)
            keep_groups()
            raise _not_started(control, verdict) from (failed[0] if failed else None)
        if failed:
            raise failed[0]
    finally:
        control.doing, control.waits = before


def _not_started(control: MonitorClient, verdict: Verdict) -> PipelineError:
    verdict = control.named(verdict)
    error = PipelineError(f"{verdict}; start the job again with all ranks")
    with suppress(OSError):
        flight = FlightRecorder(control.rank, control.ranks, control.job)
        note_record(error, [flight.write(verdict=verdict, doing="starting", lost=control.lost)])
    return error


def check_environment(environment: Mapping[str, str]) -> int:
    """The number of processes in the environment that torchrun sets; refuse inconsistent values.

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
