"""This process as one rank among others: messages over sockets of its own, blame over a channel of its own."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from stageline.common.errors import PeerFailed, PipelineError, StagelineError, TransportError
from stageline.distributed.collectives import Collectives, Column
from stageline.distributed.layout import Layout, find_layout
from stageline.distributed.process_exit import close_at_exit
from stageline.distributed.process_groups import BLAME, several_processes
from stageline.distributed.rank_host import (
    GRADIENTS,
    Crew,
    Failed,
    Floats,
    SumUp,
    ThreadWorld,
    World,
    changed,
    failure,
    note_aside,
    note_record,
)
from stageline.faults.flight_recorder import Flight, worth_writing
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.verdict import Failure, Verdict, describe, located
from stageline.faults.progress import Progress
from stageline.runtime.executor import Executor, RankResult, Work
from stageline.runtime.grad_reduce import Reducer
from stageline.runtime.guards.changed_outputs import Change, first_change, is_about_form, is_about_structure
from stageline.transport.clock_alignment import Alignment
from stageline.transport.protocol import Traffic, Transport
from stageline.transport.tcp.transport import SocketTransport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ALIGN_EVERY = 10.0
"""Seconds after which the clocks of ranks on several machines are aligned again, before the next step; more where that
would take a thousandth of the time."""

SMALL = 1 << 17
"""Up to how many numbers of all ranks together are told to everyone as they are, and not added up on the way."""


def find_world(ranks: int, deadline: float, replicas: int | None = None, mesh: DeviceMesh | None = None) -> World:
    """Threads, unless the environment says that this process is one rank of several."""
    if not several_processes(deadline):
        if mesh is not None or replicas not in (None, 1):
            find_layout(ranks, replicas, mesh, 1)
        return ThreadWorld(ranks)
    return ProcessWorld(deadline, find_layout(ranks, replicas, mesh, dist.get_world_size()))


def job_world(deadline: float) -> World:
    """All processes of a job, whatever pipelines they are part of; a process alone is all of it."""
    if not several_processes(deadline):
        return ThreadWorld(1)
    return ProcessWorld(deadline, Layout.even(dist.get_world_size()))


class ProcessWorld(Collectives):
    """This process is one rank of a torch.distributed group; the pipeline's own groups join it to the others."""

    def __init__(self, deadline: float, layout: Layout) -> None:
        """Make the groups, all processes together, or use those of an earlier pipeline."""
        super().__init__(deadline, layout)
        self._transport = SocketTransport(self._groups.links, self._groups.payloads, self._groups.count())
        self._transport.patience = self._control.busy
        self._within = self._transport.exchange(layout.rows[self.replica])
        across = self._transport.exchange(layout.column(self.here[0]))
        self.column = Column(self, across) if layout.replicas > 1 else None
        self.clocks: Alignment | None = None
        self._clocks_are_stale, self._align_after = False, ALIGN_EVERY
        self._flight = Flight(self._transport.rank, self._transport.ranks, self._control.job)
        self._running: Executor | None = None
        self._left = False
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
            raise self.over(self.named(verdict))
        if self._clocks_are_stale:
            self._align()

    def agree(self, facts: dict[str, str]) -> None:
        """Compare the facts, and then the clocks."""
        super().agree(facts)
        self._align()

    def _align(self) -> None:
        """Find out how far the clocks of this replica are apart, all its ranks together."""
        began = time.perf_counter()
        self._clocks_are_stale = False
        self.clocks = self.align(self._within)
        self._align_after = max(ALIGN_EVERY, 1e3 * (time.perf_counter() - began))

    def end(self) -> None:
        """End a step."""
        self._running = None
        self._control.end()

    def run(
        self,
        crew: Crew,
        work: Work | None,
        deadline: float,
        sum_up: SumUp,
        size: int,
        refused: Exception | None = None,
        reducer: Reducer | None = None,
    ) -> tuple[list[RankResult], Floats]:
        """Run this rank's program in this thread; all ranks come to the end of the step together, failed or not."""
        results, own, failed = self.turn(crew, work, deadline, sum_up, size, refused, reducer)
        return results, self._end_together(failed, own)

    def turn(
        self,
        crew: Crew,
        work: Work | None,
        deadline: float,
        sum_up: SumUp,
        size: int,
        refused: Exception | None = None,
        reducer: Reducer | None = None,
    ) -> tuple[list[RankResult], Floats, Failed | None]:
        """Run this rank's program; failed or not, all its messages of this turn are sent and received afterwards."""
        (executor,) = crew.executors
        executor.stopped = None
        self._running = executor
        expected: dict[tuple[int, Traffic], int] = {}
        owed: dict[tuple[int, Traffic], int] = {}
        names = executor.names
        for channel in crew.schedule.channels:
            if channel.target == executor.rank:
                expected[(names[channel.source], channel.traffic)] = len(channel.messages)
            if channel.source == executor.rank:
                owed[(names[channel.target], channel.traffic)] = len(channel.messages)
        results: list[RankResult] = []
        failed: Failed | None = None
        device = None if executor.device is None else torch.device("cuda", executor.device)
        self._transport.begin(expected, owed, device)
        known = self._control.verdict()
        if known is not None:  # it came while this step was being prepared
            self._hear(known)
        if reducer is not None:
            reducer.begin()
        try:
            if refused is not None or work is None:
                raise refused or StagelineError("there is nothing to run")
            results = [executor.run(work, deadline, None if reducer is None else reducer.ready)]
            own = sum_up(results)
        except BaseException as error:
            failed = (time.time(), executor.doing, error)
            own = np.zeros(size)
            self._report(executor, error)
        if reducer is not None:  # the others do as much: after a failure, too, nothing is left on the way
            reducer.finish(failed is None)
        try:
            self._transport.finish(deadline)
        except TransportError as error:
            raise self.lose(str(error)) from (failed[2] if failed else error)
        return results, own, failed

    def _report(self, executor: Executor, error: BaseException) -> None:
        """Tell all ranks of this one's failure, and learn whether another's was the cause of it."""
        told = Failure.of(error, self._control.doing, secondary=isinstance(error, TransportError))
        if isinstance(error, PeerFailed):
            told = replace(told, origin=error.origin)
        if not isinstance(error, Exception):  # this rank leaves the step, and does not come to its end with the others
            told = replace(told, final=True)
        self._control.report(told)
        self._transport.fail(error, f"{self.layout.name(executor.name)} failed in {executor.doing}")
        self._control.waits = EVERYONE
        verdict = self._blamed()
        executor.record(verdict, self._control.lost)
        executor.forget()
        if not isinstance(error, Exception):
            self._let_go()
            raise error
        if verdict is not None and verdict.final:
            raise self.over(verdict) from error

    def _end_together(self, failed: Failed | None, own: Floats) -> Floats:
        """Add up what all know; or let all ranks of all replicas know that one failed, and which was the first to."""
        own_flags = np.zeros(3)
        if failed is not None:
            own_flags[int(isinstance(failed[2], PeerFailed))] = failed[0]
        clocks = self.clocks
        if self.here[0] == 0 and clocks is not None and not clocks.exact:  # and so all ranks hear it in the same step
            own_flags[2] = time.perf_counter() - clocks.moment > self._align_after
        origin, totals = self._gather_sums(own_flags, own)
        if origin is None:
            return totals
        raise self.failed(failed, origin) from (failed[2] if failed else None)

    def failed(self, failed: Failed | None, origin: int, left: str = GRADIENTS) -> PipelineError:
        """The error that all ranks raise together: what the process says that failed first.

        The records name it, too: the referee knows who was heard first, and that may be another.
        """
        mine: dict[str, Any] = {}
        if failed is not None:
            told = Failure.of(failed[2], located(failed[1]))
            said = str(failure(self.layout.name(self.process), failed[1], failed[2], left))
            mine = {"said": said, "where": self._control.where, "told": told.to_json()}
            about = is_about_form(failed[2]), is_about_structure(failed[2])
            if told.action == "F" and self._running is not None and any(about):
                mine["step"], mine["about"] = self._running.step, about
        heard = json.loads(self.tell_all(json.dumps(mine), origin))
        error = PipelineError(heard["said"])
        told, known = Failure(**heard["told"]), self._blamed()
        verdict = self.named(
            Verdict(
                origin, "raised", heard["where"], told.doing, told.text, told.traceback, final=False,
                round=self._control.round, action=told.action, stage=told.stage, microbatch=told.microbatch,
                ranks=() if known is None else known.ranks,
            )
        )  # fmt: skip
        if "step" in heard:
            error, verdict = self._blame_change(error, verdict, int(heard["step"]), heard["about"], left)
        if verdict.traceback and origin != self.process:
            error.add_note(f"on rank {origin}:\n{verdict.traceback}")
        if self.layout.ranks > 1:
            note_aside(error, verdict)
        note_record(error, [self._record(verdict)])
        return error

    def _blame_change(
        self, error: PipelineError, verdict: Verdict, step: int, about: Sequence[bool], left: str
    ) -> tuple[PipelineError, Verdict]:
        """Name the rank whose stage changed what it passes on, where another one failed on it; all ranks ask this."""
        changes = [] if self._running is None else self._running.outputs.changes
        mine = first_change(step, verdict.stage, verdict.microbatch, changes, *about)
        replica = self.layout.place(verdict.culprit)[0]
        stages = self.announce(np.array([0.0 if mine is None else mine.stage + 1.0]))()[replica, :, 0]
        if not stages.any():
            return error, verdict
        blamed = self.layout.rows[replica][int(np.argmin(np.where(stages > 0, stages, np.inf)))]
        change = Change(*json.loads(self.tell_all(json.dumps(mine), blamed)))
        failed = f"stage {verdict.stage} on {self.layout.name(verdict.culprit)}"
        named = changed(self.layout.name(blamed), change, failed, verdict.text, left)
        return named, self.named(replace(verdict, culprit=blamed, stage=change.stage, doing=describe(change.place)))

    def _gather_sums(self, flags: Floats, own: Floats) -> tuple[int | None, Floats]:
        """Which process was the first to fail, if one did; and the sums of what the ranks of this replica know."""
        small = own.size * self.layout.ranks <= SMALL
        rows = self.gather(self._within, np.concatenate([flags, own]) if small else flags)
        self._clocks_are_stale = bool(rows[:, 2].any())
        # When each kind of failure came first, and on which process: causes, and what follows from another's.
        first = np.array([self._first(rows[:, kind], self.layout.rows[self.replica]) for kind in range(2)])
        if self.column is not None:
            known = self.column.gather(first.reshape(-1)).reshape(-1, 2, 2)
            first = np.array([self._first(known[:, kind, 0], known[:, kind, 1]) for kind in range(2)])
        if first[:, 0].any():
            return int(first[0, 1] if first[0, 0] else first[1, 1]), np.zeros(0)
        return None, rows[:, flags.size :].sum(axis=0) if small else self.add_up(own)

    @staticmethod
    def _first(times: Floats, processes: Sequence[int] | Floats) -> tuple[float, float]:
        """The earliest of the times that are not 0, and whose it is."""
        at = int(np.argmin(np.where(times > 0, times, np.inf)))
        return float(times[at]), float(processes[at])

    # What the control channel says.

    def named(self, verdict: Verdict) -> Verdict:
        """With the replica of the rank that failed, where there are several."""
        several = self.layout.replicas > 1
        return replace(verdict, replica=self.layout.place(verdict.culprit)[0]) if several else verdict

    def _blamed(self) -> Verdict | None:
        """Who failed first; waits a moment for it to become known."""
        verdict = self._control.blame(BLAME)
        return None if verdict is None else self.named(verdict)

    def _hear(self, told: Verdict) -> None:
        """Wake this rank, if it waits for a message that will not come, and let it begin no other action."""
        verdict = self.named(told)
        if verdict.final or verdict.round == self._control.round:
            running = self._running
            if running is not None:
                running.stopped = PeerFailed(f"rank {self.process} stopped: {verdict}", verdict.culprit)
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
        if not worth_writing(verdict):
            return None
        try:
            control = self._control
            return self._flight.write(verdict=verdict, doing=control.doing, waits=control.waits, lost=control.lost)
        except OSError:
            return None

    def over(self, verdict: Verdict) -> PipelineError:
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
            close_at_exit(partial(self._transport.close, 1.0))
            self._groups.keep()

    def lose(self, text: str) -> PipelineError:
        """This rank cannot go on; tell all, who may wait for it."""
        verdict = self._blamed()
        if verdict is not None and verdict.final:
            return self.over(verdict)
        self._lost = self._groups.lost() or (text if verdict is None else f"{verdict} ({text})")
        self._groups.lose(self._lost)
        error = PipelineError(
            f"{self._lost}; no parameter was changed, and this pipeline cannot go on: start the processes again, or, "
            "if all of them are alive, make a new Pipeline in each"
        )
        if verdict is not None and verdict.traceback and verdict.culprit != self.process:
            error.add_note(f"on rank {verdict.culprit}:\n{verdict.traceback}")
        note_record(error, [self._record(verdict)])
        return error


_worlds: list[weakref.ref[ProcessWorld]] = []
"""The world that began a step last, or was made last."""


def _remember(world: ProcessWorld) -> None:
    _worlds[:] = [weakref.ref(world)]
