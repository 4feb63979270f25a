"""What the processes of a job do together: every wait ends when a rank is lost, whatever it waits for."""

from __future__ import annotations

import datetime
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import PipelineError, StagelineError, TransportError, shorten
from stageline.distributed._torch_private import gloo_of, set_gloo_timeout, store_port
from stageline.distributed.bootstrap import start_together
from stageline.distributed.failures import JobFailures
from stageline.distributed.layout import Layout
from stageline.distributed.peer_connections import BLOCKED, PeerConnections
from stageline.distributed.process_groups import LayoutGroups, own_groups
from stageline.distributed.rank_host import Floats
from stageline.faults.monitor.blame import EVERYONE
from stageline.schedules.channels import Channel
from stageline.transport.clock_alignment import Alignment
from stageline.transport.gpu.nccl import Communicator
from stageline.transport.gpu.payloads import ChannelEnds
from stageline.transport.protocol import ProcessTransport, RowExchange
from stageline.transport.tcp.exchange import SocketGroup, SocketWork
from stageline.transport.tcp.transport import SocketTransport

Result = TypeVar("Result")
SLOWEST_NCCL = 60.0
"""Seconds in which NCCL connects the ranks of a large job."""
GLOO_CHUNK = 2 * 2**20
"""gloo cuts a tensor into a chunk for every process, and adds up each chunk in another order. The chunks of a table
with as many rows as processes are its rows, if a row has at most this size in bytes."""
MOST_PEERS = 256
"""Up to this many processes compare their connections: over gloo, every process is connected to all others."""


class ProcessCollectives:
    """One process's part in what all processes of a job, or those of its replica, do together."""

    def __init__(self, deadline: float, layout: Layout) -> None:
        """Make the groups, all processes together, or use those of an earlier pipeline."""
        self.deadline, self.layout = deadline, layout
        self._groups = own_groups(deadline, layout)
        self._control = self._groups.monitor
        self._control.set_deadline(deadline)
        communicators = self._groups.communicators
        payloads = None if communicators is None else communicators.payloads
        self._transport: ProcessTransport = SocketTransport(self._groups.links, payloads, self._groups.count())
        self._transport.patience = self._control.busy
        self._failures = JobFailures(self._groups, layout, self._transport)
        self._lost_checked = 0.0
        """When the store was last queried for a lost rank."""
        self.process = self._control.rank
        self.replica, rank = layout.place(self.process)
        self.here = [rank]
        self.single_process = layout.ranks == 1
        across = self._transport.exchange(layout.replica_group(rank))
        self.replica_group = ReplicaGroup(self, across) if layout.replicas > 1 else None
        """All rows; see `data_group` for those that get different samples."""
        self._layout_groups = self._groups.of_job() if layout.replicas == 1 else None

    @property
    def name(self) -> str:
        """The name of this process in an error."""
        return self.layout.place_name(self.process)

    @property
    def layout_groups(self) -> LayoutGroups:
        """The process groups of this replica and of this rank in all replicas."""
        assert self._layout_groups is not None, "the layout was not agreed on"
        return self._layout_groups

    def connect_gpus(self, channels: Iterable[Channel], device: torch.device | None) -> None:
        """Make the communicators of this pipeline's channels and replicas, all processes together.

        `device` is the GPU of this process's stages. Tensors of ranks without one travel with their headers.
        """
        communicators = self._groups.communicators
        if communicators is None:
            return
        row, rank = self.layout.rows[self.replica], self.here[0]
        has_gpu = self.all_gather(np.array([float(device is not None)]))[..., 0] > 0
        if device is None:
            return
        ends: list[ChannelEnds] = [
            (row[channel.source], row[channel.target], channel.traffic)
            for channel in channels
            if rank in (channel.source, channel.target)
            and has_gpu[self.replica, channel.source]
            and has_gpu[self.replica, channel.target]
        ]
        replicas = self.layout.replica_group(rank) if has_gpu[:, rank].all() else ()
        peers = [process for end in ends for process in end[:2]] + list(replicas)
        start_together(
            self._control,
            lambda: communicators.join(self.process, ends, replicas, device),
            max(self.deadline, SLOWEST_NCCL),
            lambda error: self._groups.unreachable("NCCL", peers, error),
        )

    def replica_communicator(self, processes: Sequence[int]) -> Communicator | None:
        """The communicator of a replica group; None if it has none."""
        communicators = self._groups.communicators
        return None if communicators is None else communicators.of_replicas(processes)

    def limit_collectives(self, groups: Iterable[Any]) -> None:
        """Let no process wait in these groups, which layers use themselves, for longer than the deadline.

        One that failed never joins the others there, and they would wait for half an hour. NCCL has its own limit.
        """
        for group in groups:
            if (gloo := gloo_of(group)) is not None:
                set_gloo_timeout(datetime.timedelta(seconds=self.deadline), gloo)

    def watch_peers(self, groups: Iterable[Any]) -> None:
        """Let no layer on the CPU wait in these groups for a process that has failed but lives.

        All processes call this together.
        """
        by_gloo = any(gloo_of(group) is not None for group in groups)
        port = int(self._groups.links.address.rpartition("|")[2])
        rows = self.all_gather(np.array([port, store_port(), by_gloo], dtype=float)).reshape(-1, 3)
        self._failures.peers = PeerConnections()
        if rows[:, 2].any() and len(rows) <= MOST_PEERS:
            self._failures.peers = PeerConnections.find(self.all_gather, {int(port) for port in rows[:, :2].flat})

    @contextmanager
    def freeing_peers(self) -> Iterator[None]:
        """Let collectives of layers fail on the other processes if this one, which has failed, waits for them here."""
        timer = self._failures.peers.shut_down_soon(BLOCKED)
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def naming_lost(self) -> Iterator[None]:
        """Let collectives of DTensors outside of steps name the process that died while they waited for it."""
        try:
            yield
        except (StagelineError, NotImplementedError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self._failures.lose(f"{self.name} lost another rank: {error}") from error

    def data_group(self, dimensions: Collection[str]) -> ReplicaGroup:
        """The processes that differ from this one in these dimensions of the data alone."""
        assert self.replica_group is not None
        chosen = frozenset(dimensions)
        if chosen not in self.layout_groups.data:
            return self.replica_group
        processes = self.layout.neighbours(self.process, chosen)
        return ReplicaGroup(self, self._transport.exchange(processes), processes, self.layout_groups.data[chosen])

    def start(self, start: Callable[[], Any]) -> Callable[[], None]:
        """Start a collective; call the result to wait for it, unless a rank is lost."""
        if self._failures.lost:  # start nothing that the others could mistake for another collective
            raise self._failures.lose(self._failures.lost)
        try:
            work = start()
        except RuntimeError as error:
            raise self._failures.lose(f"{self.name} lost another rank: {error}") from error
        pending = set() if isinstance(work, SocketWork) else self._groups.pending
        pending.add(work)

        def wait() -> None:
            before, self._control.waits = self._control.waits, EVERYONE
            try:
                self._wait(work)
                pending.discard(work)
            finally:
                self._control.waits = before

        return wait

    def _wait(self, work: Any) -> None:
        began = time.monotonic()
        while not isinstance(work, OnDevice):
            try:
                work.wait(datetime.timedelta(seconds=0.01 if self._failures.lost else 0.2))
                return
            except RuntimeError:
                if work.is_completed():
                    break
                began = self._check_on_others(began)
        while not work.is_completed():
            time.sleep(1e-3)
            began = self._check_on_others(began)
        try:
            work.wait()  # done just now, or for the reason why it failed
        except RuntimeError as error:
            raise self._failures.lose(f"{self.name} lost another rank: {error}") from error

    def _check_on_others(self, began: float) -> float:
        """Raise if a rank is lost, or if the deadline has passed since `began` and no other rank is working."""
        self._failures.check(self._control.verdict())
        if time.monotonic() - self._lost_checked > 0.2:
            lost, self._lost_checked = self._groups.lost(), time.monotonic()
            if lost:
                raise self._failures.lose(lost)
        if time.monotonic() - began > self.deadline:
            others = (rank for rank in range(self._control.ranks) if rank != self.process)
            if self._control.lost is not None or not any(map(self._control.busy, others)):
                raise self._failures.lose(
                    f"{self.name} waited {self.deadline:g} s for all ranks to reach the same point, but none of them "
                    "is doing any work"
                )
            return time.monotonic()
        return began

    def gather(self, exchange: RowExchange, row: Floats) -> Floats:
        """The rows of the ranks of an exchange."""
        return self._exchanging(lambda check: exchange.gather(row, check))

    def align(self, exchange: RowExchange) -> Alignment:
        """The offsets between the clocks of the ranks of an exchange."""
        return self._exchanging(exchange.align)

    def _exchanging(self, call: Callable[[Callable[[], None]], Result]) -> Result:
        """Call a function that waits for other ranks. `call` receives a check to run periodically while it waits."""
        before, self._control.waits = self._control.waits, EVERYONE
        began = time.monotonic()

        def check() -> None:
            nonlocal began
            began = self._check_on_others(began)

        try:
            return call(check)
        except TransportError as error:
            raise self._failures.lose(f"{self.name} lost another rank: {error}") from error
        finally:
            self._control.waits = before

    # Of all replicas.

    def all_gather(self, row: Floats) -> Floats:
        """The rows of all processes, by replica and rank."""
        return self.all_gather_async(row)()

    def all_gather_async(self, row: Floats) -> Callable[[], Floats]:
        """Start an `all_gather`; call the result to wait for it."""
        known = self._start_on_sockets(lambda: self._groups.all.all_gather(np.asarray(row, dtype=np.float64)))
        return lambda: np.asarray(known()[np.array(self.layout.rows)])

    def check_same(self, facts: dict[str, str]) -> None:
        """Compare digests of the facts; if one differs, name it and the first rank that differs from most.

        Then make the process groups of the layout, on which all processes agree by now.
        """
        names = sorted(facts)
        mine = np.array([_digest(facts[name]) for name in names], dtype=np.int64)
        gathered = self._start_on_sockets(lambda: self._groups.all.all_gather(mine.view(np.float64)))()
        digests = gathered.view(np.int64)
        for index, name in enumerate(names):
            values = [int(row[index]) for row in digests]
            usual = Counter(values).most_common(1)[0][0]  # of the most ranks; that of rank 0 in a tie
            odd = next((rank for rank, value in enumerate(values) if value != usual), None)
            if odd is not None:
                other = values.index(usual)
                one, another = first_difference(*(self.broadcast_to_all(facts[name], rank) for rank in (odd, other)))
                first, second = map(self.layout.place_name, (odd, other))
                raise PipelineError(
                    f"{first} and {second} differ in {name}: {first} has {one} and {second} has {another}; pass the "
                    "same on all ranks"
                )
        self._layout_groups = self._groups.for_layout(self.layout)

    def broadcast_to_all(self, text: str, process: int) -> str:
        """The text of one process, on all processes of all replicas."""
        return self._broadcast(text.encode(), process, self._groups.all).tobytes().decode()

    # Of one replica.

    def all_reduce(self, values: Floats) -> Floats:
        """Add up over the ranks of this replica."""
        return self.all_reduce_async(lambda: values)()

    def all_reduce_async(self, values: Callable[[], Floats]) -> Callable[[], Floats]:
        """Start an `all_reduce`; call the result to wait for it."""
        own = np.asarray(values(), dtype=np.float64)
        return self._start_on_sockets(lambda: self.layout_groups.row.all_reduce(own))

    def broadcast_tensor(self, tensor: Tensor, owner: int) -> None:
        """Copy the tensor of one rank to all ranks of this replica, through the memory of the host."""
        process = self.layout.rows[self.replica][owner]
        own = tensor.detach().cpu().contiguous()
        data = own.reshape(-1).view(torch.uint8).numpy().tobytes() if process == self.process else b""
        received = self._broadcast(data, process, self.layout_groups.row)
        if process != self.process and len(received):
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(received).view(tensor.dtype).reshape(tensor.shape))

    def broadcast(self, text: str, owner: int) -> str:
        """The text of one rank, on all ranks of this replica."""
        process = self.layout.rows[self.replica][owner]
        return self._broadcast(text.encode(), process, self.layout_groups.row).tobytes().decode()

    def _broadcast(self, data: bytes, process: int, group: SocketGroup) -> NDArray[np.uint8]:
        own = data if process == self.process else None
        return self._start_on_sockets(lambda: group.broadcast(own, process))()

    def _start_on_sockets(self, start: Callable[[], SocketWork]) -> Callable[[], NDArray[Any]]:
        """Start a collective over the pipeline's own connections; call the result to wait for its value."""
        works: list[SocketWork] = []

        def started() -> SocketWork:
            works.append(start())
            return works[0]

        wait = self.start(started)

        def value() -> NDArray[Any]:
            wait()
            return works[0].value

        return value

    # Of any group.

    def broadcast_tensor_in_group(self, tensor: Tensor, process: int, group: Any) -> None:
        """Copy the tensor of one process to the others of a group, through the memory of the host."""
        sent = tensor.detach().cpu().contiguous()
        # As bytes: gloo does not support all dtypes.
        whole = sent.reshape(-1).view(torch.uint8)
        if len(whole):
            source = self.layout.in_job(process)
            self.start(lambda: dist.broadcast(whole, src=source, group=group, async_op=True))()
        if process != self.process:
            with torch.no_grad():
                tensor.copy_(sent)

    def broadcast_in_group(self, text: str, process: int, group: Any) -> str:
        """The text of one process, on all processes of a group."""
        size = torch.tensor([len(text.encode())])
        self.broadcast_tensor_in_group(size, process, group)
        sent = torch.zeros(int(size), dtype=torch.uint8)
        if process == self.process and text:
            sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()
        self.broadcast_tensor_in_group(sent, process, group)
        return bytes(sent.numpy()).decode()


class OnDevice:
    """A collective on a GPU, which is polled."""

    def __init__(self, work: Any) -> None:
        self.is_completed, self.wait = work.is_completed, work.wait


class ReplicaGroup:
    """The processes that are the same rank of every row, and so hold the same stages; or some of them."""

    def __init__(
        self,
        collectives: ProcessCollectives,
        exchange: RowExchange,
        processes: Sequence[int] | None = None,
        group: Any = None,
    ) -> None:
        """`processes` and their process group, if they are not those of all rows."""
        self._collectives, self._exchange, self._own_group = collectives, exchange, group
        self._processes = processes or collectives.layout.replica_group(collectives.here[0])

    @property
    def position(self) -> int:
        """The place of this process in the group."""
        return list(self._processes).index(self._collectives.process)

    @property
    def _group(self) -> Any:
        own = self._own_group
        return self._collectives.layout_groups.replica_group if own is None else own

    def all_gather(self, row: Floats) -> Floats:
        """The rows of this rank in all replicas, in their order."""
        return self._collectives.gather(self._exchange, row)

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return len(self._processes)

    def all_reduce_async(self, table: Tensor) -> Callable[[], None]:
        """Start summing a contiguous tensor over all replicas, in place; call the result to wait for it.

        Over gloo, elements of one row of a table with an even number of columns, and as many rows as there are
        replicas, are added in the same order. A tensor on a GPU needs NCCL: see `direct`.
        """
        group, communicator = self._group, self._communicator
        if communicator is not None and table.is_cuda:
            return self._collectives.start(lambda: OnDevice(communicator.all_reduce(table)))

        def start(piece: Tensor) -> Callable[[], None]:
            return self._collectives.start(lambda: dist.all_reduce(piece, group=group, async_op=True))

        width = GLOO_CHUNK * len(table) * table.shape[1] // table.nbytes
        if len(table) == 1 or table.shape[1] <= width:
            return start(table)
        columns = torch.split(table, width, dim=1)
        pieces = [piece.contiguous() for piece in columns]
        started = [start(piece) for piece in pieces]

        def wait() -> None:
            for end, own, piece in zip(started, columns, pieces, strict=True):
                end()
                own.copy_(piece)

        return wait

    @property
    def direct(self) -> bool:
        """Whether tensors on a GPU are added up without a copy to the host."""
        return self._communicator is not None

    @property
    def _communicator(self) -> Communicator | None:
        return self._collectives.replica_communicator(self._processes)

    def broadcast_async(self, flat: Tensor, position: int) -> Callable[[], None]:
        """Start copying a contiguous tensor of one replica to all, in place; call the result to wait for it."""
        group, communicator = self._group, self._communicator
        if communicator is not None and flat.is_cuda:
            return self._collectives.start(lambda: OnDevice(communicator.broadcast(flat, position)))
        source = self._collectives.layout.in_job(self._processes[position])
        sent = flat.cpu()
        # As bytes: gloo does not support all dtypes.
        whole = sent.view(torch.uint8)
        wait = self._collectives.start(lambda: dist.broadcast(whole, src=source, group=group, async_op=True))

        def received() -> None:
            wait()
            if sent is not flat:
                flat.copy_(sent)

        return received

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Copy the tensor of the first replica to all replicas, in place."""
        self._collectives.broadcast_tensor_in_group(tensor, self._processes[0], self._group)

    def broadcast(self, text: str, replica: int) -> str:
        """The text of one replica, on all replicas."""
        return self._collectives.broadcast_in_group(text, self._processes[replica], self._group)


def first_difference(one: str, other: str) -> tuple[str, str]:
    """The first lines in which two texts differ.

    >>> first_difference("a 1\\nb 2", "a 1\\nb 3")
    ("'b 2'", "'b 3'")
    """
    for first, second in zip_longest(one.split("\n"), other.split("\n")):
        if first != second:
            return tuple("nothing" if line is None else shorten(line, 200) for line in (first, second))  # type: ignore[return-value]
    return shorten(one, 200), shorten(other, 200)


def _digest(text: str) -> int:
    """A digest of 63 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
