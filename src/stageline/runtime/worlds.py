"""Where the ranks live: all as threads of this process, or this process as one rank among others.

The pipeline asks its world the few things that differ: which ranks are here, how they run, and how what each of them
knows becomes known to all.
"""

from __future__ import annotations

import datetime
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError
from stageline.runtime.executor import Executor, RankResult, Work
from stageline.runtime.groups import own_groups, several_processes
from stageline.schedules.schedule import Schedule
from stageline.transport.process_group import ProcessGroupTransport
from stageline.transport.protocol import PeerFailed, Traffic, Transport, TransportError
from stageline.transport.threads import ThreadHub

Floats = NDArray[np.float64]


class PipelineError(StagelineError, RuntimeError):
    """A step that failed; says which rank, stage, microbatch and action, and what became of the gradients."""


@dataclass(frozen=True)
class Crew:
    """A schedule, and what runs it on the ranks that are here."""

    schedule: Schedule
    executors: list[Executor]


class World(Protocol):
    """What a pipeline needs to know of where its ranks live."""

    here: list[int]
    """The ranks of this process."""

    def transport(self, rank: int) -> Transport:
        """The end of a rank that is here."""

    def run(self, crew: Crew, work: Work, deadline: float) -> list[RankResult]:
        """Run one step of the ranks that are here."""

    def add_up(self, values: Floats) -> Floats:
        """Add arrays of equal length over all processes; each value is known to one of them and 0 in the others."""

    def agree(self, facts: dict[str, str]) -> None:
        """Make sure that all processes have the same facts, or name the first that differs."""

    def share(self, tensor: Tensor, owner: int) -> None:
        """Give all processes the tensor of the rank that owns it."""

    def tell(self, text: str, owner: int) -> str:
        """Give all processes the text of a rank."""


def find_world(ranks: int) -> World:
    """Threads, unless the environment says that this process is one rank of several."""
    if not several_processes():
        return ThreadWorld(ranks)
    if dist.get_world_size() != ranks:
        raise StagelineError(
            f"the schedule has {ranks} ranks and {dist.get_world_size()} processes were started; start {ranks}, "
            f"or give ranks={dist.get_world_size()}"
        )
    return ProcessWorld()


def failure(rank: int, doing: str, error: BaseException) -> PipelineError:
    """The one error that a failed step raises."""
    return PipelineError(
        f"rank {rank} failed in {doing}: {type(error).__name__}: {error}; no parameter was changed, and gradients may "
        "hold part of this step: call zero_grad() before the next one"
    )


class ThreadWorld:
    """All ranks are threads of this process."""

    def __init__(self, ranks: int) -> None:
        """Start with empty channels."""
        self.here = list(range(ranks))
        self._hub = ThreadHub(ranks)

    def transport(self, rank: int) -> Transport:
        """The end of a rank."""
        return self._hub.end(rank)

    def run(self, crew: Crew, work: Work, deadline: float) -> list[RankResult]:
        """Let every rank run its program on a thread of its own; the first failure stops all."""
        self._hub.reset()
        results: dict[int, RankResult] = {}
        failures: dict[int, BaseException] = {}

        def run(executor: Executor) -> None:
            try:
                results[executor.rank] = executor.run(work, deadline)
            except BaseException as error:
                failures[executor.rank] = error
                executor.transport.fail(error, f"rank {executor.rank} failed in {executor.doing}")

        threads = [
            threading.Thread(target=run, args=(executor,), name=f"stageline rank {executor.rank}", daemon=True)
            for executor in crew.executors
        ]
        if len(threads) == 1:
            run(crew.executors[0])  # a single rank needs no thread; on a GPU, a fresh thread is a third slower
        else:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            own = [rank for rank, error in failures.items() if not isinstance(error, PeerFailed)]
            origin = (own or sorted(failures))[0]
            error = failure(origin, crew.executors[origin].doing, failures[origin])
            for executor in crew.executors:
                executor.forget()
            raise error from failures[origin]
        return [results[rank] for rank in self.here]

    def add_up(self, values: Floats) -> Floats:
        """All is known here already."""
        return values

    def agree(self, facts: dict[str, str]) -> None:
        """One process agrees with itself."""

    def share(self, tensor: Tensor, owner: int) -> None:
        """All is here already."""

    def tell(self, text: str, owner: int) -> str:
        """All is known here already."""
        return text


class ProcessWorld:
    """This process is one rank of a torch.distributed group; the pipeline's own groups join it to the others."""

    def __init__(self) -> None:
        """Make the groups, all processes together, or use those of an earlier pipeline."""
        self._groups = own_groups()
        self._transport = ProcessGroupTransport(self._groups.messages, self._groups.payloads)
        self._lost = ""
        self.here = [self._transport.rank]

    def transport(self, rank: int) -> Transport:
        """This process's end."""
        return self._transport

    def run(self, crew: Crew, work: Work, deadline: float) -> list[RankResult]:
        """Run this rank's program in this thread; all ranks come to the end of the step together, failed or not."""
        (executor,) = crew.executors
        expected: dict[tuple[int, Traffic], int] = {}
        owed: dict[tuple[int, Traffic], int] = {}
        for channel in crew.schedule.channels:
            if channel.target == executor.rank:
                expected[(channel.source, channel.traffic)] = len(channel.messages)
            if channel.source == executor.rank:
                owed[(channel.target, channel.traffic)] = len(channel.messages)
        result: RankResult | None = None
        failed: tuple[float, str, BaseException] | None = None
        self._transport.begin(expected, owed, _device(executor))
        try:
            result = executor.run(work, deadline)
        except BaseException as error:
            failed = (time.time(), executor.doing, error)
            executor.forget()
            self._transport.fail(error, f"rank {executor.rank} failed in {executor.doing}")
            if not isinstance(error, Exception):
                raise
        try:
            self._transport.finish(deadline)
        except TransportError as error:
            raise self._lose(str(error)) from (failed[2] if failed else error)
        self._end_together(failed)
        assert result is not None
        return [result]

    def _end_together(self, failed: tuple[float, str, BaseException] | None) -> None:
        """Let all ranks know whether one failed, and which was the first to."""
        flags = np.zeros((2, self._transport.ranks))
        if failed is not None:
            flags[int(isinstance(failed[2], PeerFailed)), self.here[0]] = failed[0]
        flags = self.add_up(flags.reshape(-1)).reshape(flags.shape)
        if not flags.any():
            return
        times = flags[0] if flags[0].any() else flags[1]
        origin = int(np.argmin(np.where(times > 0, times, np.inf)))
        mine = str(failure(origin, failed[1], failed[2])) if failed is not None else ""
        raise PipelineError(self.tell(mine, origin)) from (failed[2] if failed else None)

    def _lose(self, text: str) -> PipelineError:
        """Tell all that this rank cannot go on; they may wait for it."""
        self._lost = text
        self._groups.lose(text)
        return PipelineError(
            f"{self._lost}; no parameter was changed, and this pipeline cannot go on: start the processes again, or, "
            "if all of them are alive, make a new Pipeline in each"
        )

    def _together(self, start: Callable[[], Any]) -> None:
        """Do what all ranks do together, and wait for it, unless one of them tells that it cannot."""
        if self._lost:  # and so nothing is started that the others could take for something else
            raise self._lose(self._lost)
        work = start()
        while True:
            try:
                work.wait(datetime.timedelta(seconds=0.5))
                return
            except RuntimeError as error:
                if work.is_completed():
                    break
                said = self._groups.lost()
                if said:
                    raise self._lose(said) from error
        try:
            work.wait()  # done just now, or for the reason why it failed
        except RuntimeError as error:
            time.sleep(0.5)  # who stands next to the rank that is gone can name it
            raise self._lose(self._groups.lost() or f"rank {self.here[0]} lost another rank: {error}") from error

    def add_up(self, values: Floats) -> Floats:
        """Add over all processes."""
        tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64).copy())
        self._together(lambda: dist.all_reduce(tensor, group=self._groups.control, async_op=True))
        return np.asarray(tensor.numpy())

    def agree(self, facts: dict[str, str]) -> None:
        """Compare digests of the facts; where one differs, name it and the first rank that has another."""
        names = sorted(facts)
        mine = torch.tensor([_number(facts[name]) for name in names])
        found = [torch.empty_like(mine) for _ in range(self._transport.ranks)]
        self._together(lambda: dist.all_gather(found, mine, group=self._groups.control, async_op=True))
        for index, name in enumerate(names):
            values = [int(each[index]) for each in found]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise PipelineError(
                        f"rank {rank} and rank 0 differ in {name}; rank {self.here[0]} has {facts[name][:80]!r}: "
                        "all ranks must be given the same"
                    )

    def share(self, tensor: Tensor, owner: int) -> None:
        """Broadcast from the owner; what is on a GPU goes through the memory of the host."""
        sent = tensor.detach().cpu().contiguous()
        # As bytes: gloo does not know all types.
        whole = sent.reshape(-1).view(torch.uint8)
        if len(whole):
            self._together(lambda: dist.broadcast(whole, group_src=owner, group=self._groups.control, async_op=True))
        if owner != self.here[0]:
            with torch.no_grad():
                tensor.copy_(sent)

    def tell(self, text: str, owner: int) -> str:
        """Broadcast the text's length and its bytes."""
        size = torch.tensor([len(text.encode())])
        self.share(size, owner)
        sent = torch.zeros(int(size), dtype=torch.uint8)
        if owner == self.here[0] and text:
            sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()
        self.share(sent, owner)
        return bytes(sent.numpy()).decode()


def _device(executor: Executor) -> torch.device | None:
    """Where a rank's stages are, if they have parameters."""
    parameters = (parameter for stage in executor.stages.values() for parameter in stage.part.parameters())
    first = next(parameters, None)
    return None if first is None else first.device


def _number(text: str) -> int:
    """A number of 63 bits that tells texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def digest(tree: Any) -> int:
    """A number of 52 bits, exact in a float, that tells batches apart; 0 for None."""
    if tree is None:
        return 0
    found = hashlib.blake2b(digest_size=8)
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return (int.from_bytes(found.digest(), "big") >> 12) | 1


def same_batch(world: World, ranks: int, samples: int | None, batch: Sequence[tuple[str, Any]]) -> int:
    """Make sure that all ranks that were given a batch were given the same; give back its number of samples."""
    if len(world.here) == ranks:
        if samples is None:
            raise StagelineError("the inputs are None; the first stage needs them")
        return samples
    columns = 1 + len(batch)
    known = np.zeros((ranks, columns))
    known[world.here[0]] = [samples or 0, *(digest(part) for _, part in batch)]
    known = world.add_up(known.reshape(-1)).reshape(ranks, columns)
    for column, name in enumerate(["the number of samples", *(name for name, _ in batch)]):
        given = {value: int(np.argmax(known[:, column] == value)) for value in known[:, column].tolist() if value}
        if len(given) > 1:
            first, second = sorted(given.values())[:2]
            raise PipelineError(f"rank {second} was given another batch than rank {first}: {name} differ")
        if not given:
            raise PipelineError(f"no rank was given {name}")
    return int(known[:, 0].max())
