"""This process as one rank among others: messages over torch.distributed, blame over a channel of its own."""

from __future__ import annotations

import atexit
import datetime
import hashlib
import logging
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stageline.errors import StagelineError
from stageline.runtime.control.client import Control
from stageline.runtime.control.judge import EVERYONE
from stageline.runtime.control.verdict import Failure, Verdict
from stageline.runtime.executor import Executor, RankResult, Work
from stageline.runtime.flight import Flight
from stageline.runtime.groups import BLAME, own_groups, several_processes
from stageline.runtime.progress import Progress
from stageline.runtime.worlds import (
    GRADIENTS,
    Crew,
    Floats,
    PipelineError,
    SumUp,
    ThreadWorld,
    World,
    failure,
    note_record,
)
from stageline.transport.protocol import PeerFailed, Traffic, Transport, TransportError
from stageline.transport.sockets import SocketTransport

SMALL = 1 << 17
"""Up to how many numbers of all ranks together are told to everyone as they are, and not added up on the way."""


def find_world(ranks: int, deadline: float) -> World:
    """Threads, unless the environment says that this process is one rank of several."""
    if not several_processes(deadline):
        return ThreadWorld(ranks)
    if dist.get_world_size() != ranks:
        raise StagelineError(
            f"the schedule has {ranks} ranks and {dist.get_world_size()} processes were started; start {ranks}, "
            f"or give ranks={dist.get_world_size()}"
        )
    return ProcessWorld(deadline)


def job_world(deadline: float) -> World:
    """All processes of a job, whatever pipelines they are part of; a process alone is all of it."""
    return ProcessWorld(deadline) if several_processes(deadline) else ThreadWorld(1)


class ProcessWorld:
    """This process is one rank of a torch.distributed group; the pipeline's own groups join it to the others."""

    def __init__(self, deadline: float = 60.0) -> None:
        """Make the groups, all processes together, or use those of an earlier pipeline."""
        self._groups = own_groups(deadline)
        self._control: Control = self._groups.watch
        self._control.set_deadline(deadline)
        self._transport = SocketTransport(self._groups.links, self._groups.payloads, self._groups.count())
        self._transport.patience = self._control.busy
        self._flight = Flight(self._transport.rank, self._transport.ranks, self._control.job)
        self._running: Executor | None = None
        self._lost, self._left = "", False
        self._deadline = deadline
        self._asked = 0.0
        self.here = [self._transport.rank]
        self._control.on_verdict(self._hear)
        self._control.on_end(self._last_words)
        _remember(self)

    def transport(self, rank: int) -> Transport:
        """This process's end."""
        return self._transport

    def progress(self, rank: int) -> Progress:
        """The control channel reads it with every beat."""
        return self._control

    def flight(self, rank: int) -> Flight:
        """Where this rank notes what it did."""
        return self._flight

    def begin(self) -> None:
        """Begin a step; a job that lost a rank cannot."""
        _remember(self)
        self._control.begin()
        verdict = self._control.verdict()
        if verdict is not None and verdict.final:
            raise self._over(verdict)

    def end(self) -> None:
        """End a step."""
        self._running = None
        self._control.end()

    def announce(self, row: Floats) -> Callable[[], Floats]:
        """Gather the rows of all ranks, without waiting."""
        mine = torch.from_numpy(np.ascontiguousarray(row, dtype=np.float64))
        found = [torch.empty_like(mine) for _ in range(self._transport.ranks)]
        wait = self._start(lambda: dist.all_gather(found, mine, group=self._groups.control, async_op=True))

        def rows() -> Floats:
            wait()
            return np.stack([each.numpy() for each in found])

        return rows

    def run(
        self, crew: Crew, work: Work | None, deadline: float, sum_up: SumUp, size: int, refused: Exception | None = None
    ) -> tuple[list[RankResult], Floats]:
        """Run this rank's program in this thread; all ranks come to the end of the step together, failed or not."""
        (executor,) = crew.executors
        executor.stopped = None
        self._running = executor
        expected: dict[tuple[int, Traffic], int] = {}
        owed: dict[tuple[int, Traffic], int] = {}
        for channel in crew.schedule.channels:
            if channel.target == executor.rank:
                expected[(channel.source, channel.traffic)] = len(channel.messages)
            if channel.source == executor.rank:
                owed[(channel.target, channel.traffic)] = len(channel.messages)
        results: list[RankResult] = []
        failed: tuple[float, str, BaseException] | None = None
        device = None if executor.device is None else torch.device("cuda", executor.device)
        self._transport.begin(expected, owed, device)
        known = self._control.verdict()
        if known is not None:  # it came while this step was being prepared
            self._hear(known)
        try:
            if refused is not None or work is None:
                raise refused or StagelineError("there is nothing to run")
            results = [executor.run(work, deadline)]
            own = sum_up(results)
        except BaseException as error:
            failed = (time.time(), executor.doing, error)
            own = np.zeros(size)
            self._report(executor, error)
        try:
            self._transport.finish(deadline)
        except TransportError as error:
            raise self._lose(str(error)) from (failed[2] if failed else error)
        return results, self._end_together(failed, own)

    def _report(self, executor: Executor, error: BaseException) -> None:
        """Tell all ranks of this one's failure, and learn whether another's was the cause of it."""
        told = Failure.of(error, self._control.doing, secondary=isinstance(error, TransportError))
        if not isinstance(error, Exception):  # this rank leaves the step, and does not come to its end with the others
            told = replace(told, final=True)
        self._control.report(told)
        self._transport.fail(error, f"rank {executor.rank} failed in {executor.doing}")
        self._control.waits = EVERYONE
        verdict = self._control.verdict(timeout=BLAME)
        executor.record(verdict, self._control.lost)
        executor.forget()
        if not isinstance(error, Exception):
            self._let_go()
            raise error
        if verdict is not None and verdict.final:
            raise self._over(verdict) from error

    def _end_together(self, failed: tuple[float, str, BaseException] | None, own: Floats) -> Floats:
        """Add up what all know; or let all ranks know that one failed, and which was the first to."""
        own_flags = np.zeros(2)
        if failed is not None:
            own_flags[int(isinstance(failed[2], PeerFailed))] = failed[0]
        flags, totals = self._gather_sums(own_flags, own)
        if not flags.any():
            return totals
        times = flags[0] if flags[0].any() else flags[1]
        origin = int(np.argmin(np.where(times > 0, times, np.inf)))
        mine = str(failure(origin, failed[1], failed[2])) if failed is not None else ""
        error = PipelineError(self.tell(mine, origin))
        verdict = self._control.verdict(timeout=BLAME)
        if verdict is not None and verdict.traceback and verdict.culprit != self.here[0]:
            error.add_note(f"on rank {verdict.culprit}:\n{verdict.traceback}")
        note_record(error, [self._record(verdict)])
        raise error from (failed[2] if failed else None)

    def _gather_sums(self, flags: Floats, own: Floats) -> tuple[Floats, Floats]:
        """The flags of all ranks, a column for each, and the sums of what each knows."""
        small = own.size * self._transport.ranks <= SMALL
        before, self._control.waits = self._control.waits, EVERYONE
        began = time.monotonic()

        def check() -> None:
            nonlocal began
            began = self._check_on_others(began)

        try:
            rows = self._transport.gather(np.concatenate([flags, own]) if small else flags, check)
        except TransportError as error:
            raise self._lose(f"rank {self.here[0]} lost another rank: {error}") from error
        finally:
            self._control.waits = before
        known = rows[:, : flags.size].T
        if known.any():
            return known, np.zeros(0)
        return known, rows[:, flags.size :].sum(axis=0) if small else self.add_up(own)

    # What the control channel says.

    def _hear(self, verdict: Verdict) -> None:
        """Wake this rank, if it waits for a message that will not come, and let it begin no other action."""
        if verdict.final or verdict.round == self._control.round:
            running = self._running
            if running is not None:
                running.stopped = PeerFailed(f"rank {self.here[0]} stopped: {verdict}", verdict.culprit)
            self._transport.interrupt(verdict.culprit, str(verdict), final=verdict.final)

    def _last_words(self, verdict: Verdict | None) -> None:
        """Of several pipelines, the one that ran last has something to say."""
        if any(world() is self for world in _worlds):
            self._record(verdict)

    def abandon(self, error: BaseException) -> None:
        """This rank leaves its step for good (Ctrl-C): tell all, who would wait for it."""
        if not self._left:
            self._control.report(replace(Failure.of(error, self._control.doing), final=True))
            self._let_go()

    def _record(self, verdict: Verdict | None) -> Path | None:
        """Write the flight record, also where the step had not come to its first action."""
        running = self._running
        if running is not None:
            return running.record(verdict, self._control.lost)
        try:
            control = self._control
            return self._flight.write(verdict=verdict, doing=control.doing, waits=control.waits, lost=control.lost)
        except OSError:
            return None

    def _over(self, verdict: Verdict) -> PipelineError:
        """The job lost a rank."""
        self._lost = str(verdict)
        error = PipelineError(f"{verdict}; {GRADIENTS.split(':')[0]}; this job cannot go on: start it again")
        if verdict.traceback:
            error.add_note(f"on rank {verdict.culprit}:\n{verdict.traceback}")
        note_record(error, [self._record(verdict)])
        self._let_go()
        return error

    def _let_go(self) -> None:
        """End the threads; one that comes back from native code while Python ends would take the process down."""
        if not self._left:
            self._left = True
            self._transport.close()
            _left.append(self._transport)

    def _lose(self, text: str) -> PipelineError:
        """This rank cannot go on; tell all, who may wait for it."""
        verdict = self._control.verdict(timeout=BLAME)
        if verdict is not None and verdict.final:
            return self._over(verdict)
        self._lost = self._groups.lost() or (text if verdict is None else f"{verdict} ({text})")
        self._groups.lose(self._lost)
        error = PipelineError(
            f"{self._lost}; no parameter was changed, and this pipeline cannot go on: start the processes again, or, "
            "if all of them are alive, make a new Pipeline in each"
        )
        if verdict is not None and verdict.traceback and verdict.culprit != self.here[0]:
            error.add_note(f"on rank {verdict.culprit}:\n{verdict.traceback}")
        note_record(error, [self._record(verdict)])
        return error

    # What all ranks do together.

    def _start(self, start: Callable[[], Any]) -> Callable[[], None]:
        """Begin what all ranks do together; what is given back waits for it, unless a rank is lost."""
        if self._lost:  # and so nothing is started that the others could take for something else
            raise self._lose(self._lost)
        try:
            work = start()
        except RuntimeError as error:
            raise self._lose(f"rank {self.here[0]} lost another rank: {error}") from error

        def wait() -> None:
            before, self._control.waits = self._control.waits, EVERYONE
            try:
                self._wait(work)
            finally:
                self._control.waits = before

        return wait

    def _wait(self, work: Any) -> None:
        began = time.monotonic()
        while True:
            try:
                work.wait(datetime.timedelta(seconds=0.01 if self._lost else 0.2))
                return
            except RuntimeError:
                if work.is_completed():
                    break
                began = self._check_on_others(began)
        try:
            work.wait()  # done just now, or for the reason why it failed
        except RuntimeError as error:
            raise self._lose(f"rank {self.here[0]} lost another rank: {error}") from error

    def _check_on_others(self, began: float) -> float:
        """While this rank waits for all others, since then: raise if one is lost, or if all of them wait in vain."""
        verdict = self._control.verdict()
        if verdict is not None and verdict.final:
            raise self._over(verdict)
        if time.monotonic() - self._asked > 0.2:
            said, self._asked = self._groups.lost(), time.monotonic()
            if said:
                raise self._lose(said)
        if time.monotonic() - began > self._deadline:
            others = (rank for rank in range(self._transport.ranks) if rank != self.here[0])
            if self._control.lost is not None or not any(map(self._control.busy, others)):
                raise self._lose(
                    f"rank {self.here[0]} waited {self._deadline:g} s for all ranks to come to the same point, "
                    "and none of them is at work"
                )
            return time.monotonic()
        return began

    def add_up(self, values: Floats) -> Floats:
        """Add over all processes."""
        return self.later(lambda: values)()

    def later(self, values: Callable[[], Floats]) -> Callable[[], Floats]:
        """Add over all processes, without waiting."""
        tensor = torch.from_numpy(np.ascontiguousarray(values(), dtype=np.float64).copy())
        wait = self._start(lambda: dist.all_reduce(tensor, group=self._groups.control, async_op=True))

        def total() -> Floats:
            wait()
            return np.asarray(tensor.numpy())

        return total

    def agree(self, facts: dict[str, str]) -> None:
        """Compare digests of the facts; where one differs, name it and the first rank that has another."""
        names = sorted(facts)
        mine = torch.tensor([_number(facts[name]) for name in names])
        found = [torch.empty_like(mine) for _ in range(self._transport.ranks)]
        self._start(lambda: dist.all_gather(found, mine, group=self._groups.control, async_op=True))()
        for index, name in enumerate(names):
            values = [int(each[index]) for each in found]
            usual = Counter(values).most_common(1)[0][0]  # of the most ranks; of rank 0 where they are as many
            odd = next((rank for rank, value in enumerate(values) if value != usual), None)
            if odd is not None:
                raise PipelineError(
                    f"rank {odd} and rank {values.index(usual)} differ in {name}; rank {self.here[0]} has "
                    f"{facts[name][:80]!r}: all ranks must be given the same"
                )

    def share(self, tensor: Tensor, owner: int) -> None:
        """Broadcast from the owner; what is on a GPU goes through the memory of the host."""
        sent = tensor.detach().cpu().contiguous()
        # As bytes: gloo does not know all types.
        whole = sent.reshape(-1).view(torch.uint8)
        if len(whole):
            self._start(lambda: dist.broadcast(whole, group_src=owner, group=self._groups.control, async_op=True))()
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


_worlds: list[weakref.ref[ProcessWorld]] = []
"""The world that began a step last, or was made last."""


def _remember(world: ProcessWorld) -> None:
    _worlds[:] = [weakref.ref(world)]


_left: list[SocketTransport] = []
"""The ends of jobs that lost a rank."""


@atexit.register
def _end() -> None:
    """End the process of a job that lost a rank: a collective of gloo that waits for it would hold Python's own end up.
    Registered when this is imported, so that what a script registers later runs before."""
    for transport in _left:
        transport.close(1.0)
    if _left:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        os._exit(0 if uncaught is None else 1)


def _number(text: str) -> int:
    """A number of 63 bits that tells texts apart."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
