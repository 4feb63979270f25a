"""Joining a job: the environment, the other ranks, the control channel, and what all ranks do at the start."""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stageline.common.errors import ControlError, PipelineError, StagelineError, TransportError, TrustError
from stageline.common.handshake import check_tls
from stageline.common.machine import check_ports, route_to
from stageline.common.trust import one_machine
from stageline.distributed import attempts
from stageline.distributed._torch_private import TCPStore, default_store
from stageline.distributed.communicators import quiet_groups
from stageline.distributed.failures import BLAME, note_record
from stageline.distributed.launchers.slurm import slurm_place
from stageline.distributed.layout import Layout, find_layout
from stageline.distributed.meeting import Meeting, use_interface_of
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

LAZY = "TORCH_GLOO_LAZY_INIT"
CURE = (
    "allow the hosts of the job to connect to each other, at least on the ports in STAGELINE_PORTS and on MASTER_PORT"
)
_UNREACHED = "stageline/unreached/{}/{}"
"""Key of the store: why a rank cannot join the others."""


class JobChannel:
    """The control channel of one rendezvous, and the name under which its ranks use the store."""

    def __init__(self, store: Any, rank: int, ranks: int, deadline: float, job: int = 0) -> None:
        """Open the channel; rank 0 starts the failure monitor, and puts its address into the store.

        For a part of a job, `job` is the number of all processes.
        """
        try:
            meeting = Meeting(store, rank, ranks, patience=2 * deadline + 10, job=job)
        except StagelineError:
            raise
        except Exception as error:
            raise no_address(rank, error) from error
        self.name, self.address = meeting.name, meeting.address
        use_interface_of(self.address)
        self.group: Callable[[], Any] = lambda: None
        """The default group of this rendezvous, while it exists."""
        self._prefixes = 0
        share = share_by_store(PrefixStore(self.name, store), rank, str(ranks), job or ranks)
        host = "" if os.environ.get("STAGELINE_CONTROL_HOST") and not job else self.address
        try:
            self.control = control = MonitorClient.start(rank, ranks, share, deadline, host=host)
        except TrustError as error:
            store.set(_UNREACHED.format(self.name, rank), str(error))
            raise
        if rank and control.unreached and not one_machine(job or ranks):
            why = f"rank {rank} cannot reach rank 0's machine: {control.unreached}; {CURE}"
            store.set(_UNREACHED.format(self.name, rank), why)
            control.close(why, clean=False)
            raise PipelineError(why)
        self._store, end = store, time.monotonic() + 2 * deadline + 10
        if rank == 0:
            try:
                meeting.answer(lambda: control.verdict() is not None or time.monotonic() > end or attempts.superseded())
            except BaseException as error:
                control.close(str(error), clean=False)
                raise

    def not_started(self, verdict: Verdict) -> PipelineError:
        """The error of a job of which a rank did not start, with what that rank said about it in the store."""
        key = _UNREACHED.format(self.name, verdict.culprit)
        with suppress(RuntimeError):
            if self._store.check([key]):
                return PipelineError(self._store.get(key).decode())
        return _not_started(self.control, verdict)

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
        channel = JobChannel(store, members.index(dist.get_rank()), len(members), deadline, dist.get_world_size())
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


def has_own_gpu(environment: Mapping[str, str]) -> bool:
    """Whether this machine has as many GPUs as processes of the job, so that NCCL can serve them."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return False
    here = environment.get("LOCAL_WORLD_SIZE") or str(dist.get_world_size() if dist.is_initialized() else 1)
    return torch.cuda.device_count() >= int(here)


def several_processes(deadline: float) -> bool:
    """Whether this process is one of several; joins the others if the environment has so."""
    if not dist.is_initialized():
        os.environ.update(slurm_place(os.environ))
        if check_environment(os.environ) == 1:
            return False
        check_ports(os.environ)
        check_tls()
        _join(deadline)
    return dist.get_world_size() > 1


def find_host(ranks: int, deadline: float, replicas: int | None = None, mesh: DeviceMesh | None = None) -> RankHost:
    """Threads, unless the environment has that this process is one rank of several."""
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
        attempts.refuse_superseded()
        attempts.announcements().arrive(attempts.own_seat(), attempt)
        store = PrefixStore(f"attempt/{attempt}", store)
    channel = open_channel(PrefixStore("stageline", store), rank, ranks, deadline)
    verdict = _await_everyone(channel.control, timeout=2 * deadline + 10)
    if verdict is not None:
        raise channel.not_started(verdict)
    backend = "cpu:gloo,cuda:nccl" if has_own_gpu(os.environ) else "gloo"
    ours = PrefixStore(f"default/{channel.name}", store)

    def start() -> None:
        with quiet_groups(), unconnected_groups():
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
        attempts.refuse_superseded()
    return control.everyone(timeout)


@contextmanager
def unconnected_groups() -> Iterator[None]:
    """Let gloo make groups that connect when they are first used: a pipeline without replicas uses none of them."""
    before = os.environ.get(LAZY)
    os.environ[LAZY] = "1"
    try:
        yield
    finally:
        os.environ.pop(LAZY)
        if before is not None:
            os.environ[LAZY] = before


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
        if rank:
            _await_answer(host, port, deadline)  # the store itself would try for twice as long
        elif route_to(host) is None:  # others may know this machine by that name, which it does not know itself
            host = "localhost"
        store = TCPStore(host, port, ranks, rank == 0, timeout, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, OSError) as error:
        if rank == 0:
            raise StagelineError(
                f"rank 0 cannot listen at MASTER_ADDR={host}, MASTER_PORT={port}; another job may use that port: "
                f"{error}"
            ) from error
        raise PipelineError(
            f"rank 0 never started: nothing answers at MASTER_ADDR={host}, MASTER_PORT={port} within {deadline:g} s "
            f"({error}); restart the job with all ranks"
        ) from error
    return store, rank, ranks


def _await_answer(host: str, port: int, patience: float) -> None:
    """Wait until a process listens there, or raise the last error after this many seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), timeout=min(1.0, patience)).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def start_together(
    control: MonitorClient,
    start: Callable[[], object],
    timeout: float = float("inf"),
    unreachable: Callable[[object], Exception] | None = None,
) -> None:
    """Call a start-up function of all ranks on a thread: its wait for a lost rank cannot be interrupted otherwise.

    `unreachable` makes the error of one that takes longer than `timeout` seconds, or that fails in a library.
    """
    failed: list[BaseException] = []
    end = time.monotonic() + timeout

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
            if time.monotonic() > end and unreachable is not None:
                leave_stuck(thread)
                failed.append(unreachable("no answer in time"))
                break
        if failed:
            verdict = control.blame(BLAME)
            if unreachable is not None and isinstance(failed[0], TransportError):
                failed[0] = unreachable(failed[0])
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
    error = PipelineError(f"{verdict}; restart the job with all ranks")
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
    stageline.StagelineError: RANK is 4 and WORLD_SIZE is 4, but the rank must be at least 0 and
    below 4; start the processes with torchrun, or unset WORLD_SIZE to run in one process
    """
    cure = "start the processes with torchrun, or unset WORLD_SIZE to run in one process"
    size = _number(environment, "WORLD_SIZE", cure)
    size = 1 if size is None else size
    if size < 1:
        raise StagelineError(f"WORLD_SIZE is {size}, but at least 1 process is needed; {cure}")
    if size == 1:
        return 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise StagelineError(f"WORLD_SIZE is {size}, but the environment has no {' and no '.join(missing)}; {cure}")
    for inner, outer in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank, limit = _number(environment, inner, cure), _number(environment, outer, cure)
        if rank is not None and limit is not None and not 0 <= rank < limit:
            raise StagelineError(
                f"{inner} is {rank} and {outer} is {limit}, but the rank must be at least 0 and below {limit}; {cure}"
            )
    local = _number(environment, "LOCAL_WORLD_SIZE", cure)
    if local is not None and local > size:
        raise StagelineError(f"LOCAL_WORLD_SIZE is {local}, which exceeds WORLD_SIZE, {size}; {cure}")
    return size


def _number(environment: Mapping[str, str], name: str, cure: str) -> int | None:
    text = environment.get(name, "").strip()
    try:
        return int(text) if text else None
    except ValueError:
        raise StagelineError(f"{name} is {text!r}, which is not an integer; {cure}") from None
