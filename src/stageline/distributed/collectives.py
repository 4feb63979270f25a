"""What the processes of a job do together: every wait ends when a rank is lost, whatever it waits for."""

from __future__ import annotations

import datetime
import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stageline.common.errors import PipelineError, TransportError, shorten
from stageline.distributed.layout import Layout
from stageline.distributed.process_groups import Ways, own_groups
from stageline.distributed.rank_host import Floats
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.client import Control
from stageline.faults.monitor.verdict import Verdict
from stageline.transport.clock_alignment import Alignment
from stageline.transport.tcp.exchange import Exchange

Result = TypeVar("Result")


class Collectives(ABC):
    """One process's part in what all processes, or those of its replica, do together."""

    def __init__(self, deadline: float, layout: Layout) -> None:
        """Make the groups, all processes together, or use those of an earlier pipeline."""
        self._groups = own_groups(deadline)
        self._control: Control = self._groups.watch
        self._control.set_deadline(deadline)
        self._deadline = deadline
        self._lost = ""
        self._asked = 0.0
        self.layout = layout
        self.process = self._control.rank
        self.replica, rank = layout.place(self.process)
        self.here = [rank]
        self._ways: Ways | None = None

    @abstractmethod
    def over(self, verdict: Verdict) -> PipelineError:
        """The job lost a rank."""

    @abstractmethod
    def lose(self, text: str) -> PipelineError:
        """This rank cannot go on; tell all, who may wait for it."""

    @abstractmethod
    def named(self, verdict: Verdict) -> Verdict:
        """A verdict as this pipeline tells it."""

    @property
    def ways(self) -> Ways:
        """The groups of the replica and of the column; made together, when all have agreed on the layout."""
        if self._ways is None:
            self._ways = self._groups.ways(self.layout)
        return self._ways

    def start(self, start: Callable[[], Any]) -> Callable[[], None]:
        """Begin what several ranks do together; what is given back waits for it, unless a rank is lost."""
        if self._lost:  # and so nothing is started that the others could take for something else
            raise self.lose(self._lost)
        try:
            work = start()
        except RuntimeError as error:
            raise self.lose(f"rank {self.process} lost another rank: {error}") from error
        pending = self._groups.pending
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
                work.wait(datetime.timedelta(seconds=0.01 if self._lost else 0.2))
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
            raise self.lose(f"rank {self.process} lost another rank: {error}") from error

    def _check_on_others(self, began: float) -> float:
        """While this rank waits for all others, since then: raise if one is lost, or if all of them wait in vain."""
        verdict = self._control.verdict()
        if verdict is not None and verdict.final:
            raise self.over(self.named(verdict))
        if time.monotonic() - self._asked > 0.2:
            said, self._asked = self._groups.lost(), time.monotonic()
            if said:
                raise self.lose(said)
        if time.monotonic() - began > self._deadline:
            others = (rank for rank in range(self._control.ranks) if rank != self.process)
            if self._control.lost is not None or not any(map(self._control.busy, others)):
                raise self.lose(
                    f"rank {self.process} waited {self._deadline:g} s for all ranks to come to the same point, "
                    "and none of them is at work"
                )
            return time.monotonic()
        return began

    def gather(self, exchange: Exchange, row: Floats) -> Floats:
        """The rows of the ranks that an exchange is between."""
        return self._exchanging(lambda check: exchange.gather(row, check))

    def align(self, exchange: Exchange) -> Alignment:
        """How far the clocks of the ranks are apart that an exchange is between."""
        return self._exchanging(exchange.align)

    def _exchanging(self, call: Callable[[Callable[[], None]], Result]) -> Result:
        """Call something that waits for other ranks and is given what to call meanwhile."""
        before, self._control.waits = self._control.waits, EVERYONE
        began = time.monotonic()

        def check() -> None:
            nonlocal began
            began = self._check_on_others(began)

        try:
            return call(check)
        except TransportError as error:
            raise self.lose(f"rank {self.process} lost another rank: {error}") from error
        finally:
            self._control.waits = before

    # Of all replicas.

    def announce(self, row: Floats) -> Callable[[], Floats]:
        """Gather the rows of all ranks, without waiting."""
        mine = torch.from_numpy(np.ascontiguousarray(row, dtype=np.float64))
        found = [torch.empty_like(mine) for _ in range(self._control.ranks)]
        wait = self.start(lambda: dist.all_gather(found, mine, group=self._groups.control, async_op=True))

        def rows() -> Floats:
            wait()
            known: Floats = np.stack([each.numpy() for each in found])
            return np.asarray(known[np.array(self.layout.rows)])

        return rows

    def agree(self, facts: dict[str, str]) -> None:
        """Compare digests of the facts; where one differs, name it and the first rank that has another."""
        names = sorted(facts)
        mine = torch.tensor([_number(facts[name]) for name in names])
        found = [torch.empty_like(mine) for _ in range(self._control.ranks)]
        self.start(lambda: dist.all_gather(found, mine, group=self._groups.control, async_op=True))()
        for index, name in enumerate(names):
            values = [int(each[index]) for each in found]
            usual = Counter(values).most_common(1)[0][0]  # of the most ranks; of rank 0 where they are as many
            odd = next((rank for rank, value in enumerate(values) if value != usual), None)
            if odd is not None:
                other = values.index(usual)
                one, another = first_difference(self.tell_all(facts[name], odd), self.tell_all(facts[name], other))
                raise PipelineError(
                    f"rank {odd} and rank {other} differ in {name}: rank {odd} has {one} and rank {other} has "
                    f"{another}; all ranks must be given the same"
                )
        _ = self.ways

    def tell_all(self, text: str, process: int) -> str:
        """Give the processes of all replicas the text of one."""
        return self._told(text, process, self._groups.control)

    # Of one replica.

    def add_up(self, values: Floats) -> Floats:
        """Add over all ranks."""
        return self.later(lambda: values)()

    def later(self, values: Callable[[], Floats]) -> Callable[[], Floats]:
        """Add over all ranks, without waiting."""
        tensor = torch.from_numpy(np.ascontiguousarray(values(), dtype=np.float64).copy())
        wait = self.start(lambda: dist.all_reduce(tensor, group=self.ways.replica, async_op=True))

        def total() -> Floats:
            wait()
            return np.asarray(tensor.numpy())

        return total

    def share(self, tensor: Tensor, owner: int) -> None:
        """Broadcast from the owner; what is on a GPU goes through the memory of the host."""
        self.spread(tensor, self.layout.rows[self.replica][owner], self.ways.replica)

    def tell(self, text: str, owner: int) -> str:
        """Give all ranks the text of one."""
        return self._told(text, self.layout.rows[self.replica][owner], self.ways.replica)

    # Of any group.

    def spread(self, tensor: Tensor, process: int, group: Any) -> None:
        """Broadcast a tensor of one process to the others of a group, through the memory of the host."""
        sent = tensor.detach().cpu().contiguous()
        # As bytes: gloo does not know all types.
        whole = sent.reshape(-1).view(torch.uint8)
        if len(whole):
            self.start(lambda: dist.broadcast(whole, src=process, group=group, async_op=True))()
        if process != self.process:
            with torch.no_grad():
                tensor.copy_(sent)

    def _told(self, text: str, process: int, group: Any) -> str:
        """Broadcast the text's length and its bytes."""
        size = torch.tensor([len(text.encode())])
        self.spread(size, process, group)
        sent = torch.zeros(int(size), dtype=torch.uint8)
        if process == self.process and text:
            sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()
        self.spread(sent, process, group)
        return bytes(sent.numpy()).decode()


class OnDevice:
    """What NCCL does: a wait for it with a limit would end the group, so it is asked now and then."""

    def __init__(self, work: Any) -> None:
        """As it was begun."""
        self.is_completed, self.wait = work.is_completed, work.wait


class Column:
    """The processes that are the same rank of every replica, and so hold the same stages: this one's part in it."""

    def __init__(self, world: Collectives, exchange: Exchange) -> None:
        """Of a world that has several replicas."""
        self._world, self._exchange = world, exchange
        self._processes = world.layout.column(world.here[0])

    def gather(self, row: Floats) -> Floats:
        """The rows of this rank in all replicas, in their order."""
        return self._world.gather(self._exchange, row)

    def add(self, flat: Tensor) -> Callable[[], None]:
        """Add a tensor over all replicas, in place and without waiting; when called, wait for it.

        One of a GPU goes over NCCL, and must not come here where there is no group for that: see `direct`.
        """
        ways = self._world.ways
        if flat.is_cuda:
            return self._world.start(lambda: OnDevice(dist.all_reduce(flat, group=ways.fast, async_op=True)))
        return self._world.start(lambda: dist.all_reduce(flat, group=ways.column, async_op=True))

    @property
    def direct(self) -> bool:
        """Whether tensors of a GPU are added without the host."""
        return self._world.ways.fast is not None

    def spread(self, tensor: Tensor) -> None:
        """Give all replicas the tensor of the first."""
        self._world.spread(tensor, self._processes[0], self._world.ways.column)

    def tell(self, text: str, replica: int) -> str:
        """Give all replicas the text of one."""
        return self._world._told(text, self._processes[replica], self._world.ways.column)


def first_difference(one: str, other: str) -> tuple[str, str]:
    """The first lines in which two texts differ.

    >>> first_difference("a 1\\nb 2", "a 1\\nb 3")
    ("'b 2'", "'b 3'")
    """
    for first, second in zip_longest(one.split("\n"), other.split("\n")):
        if first != second:
            return tuple("nothing" if line is None else shorten(line, 200) for line in (first, second))  # type: ignore[return-value]
    return shorten(one, 200), shorten(other, 200)


def _number(text: str) -> int:
    """A number of 63 bits that tells texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
