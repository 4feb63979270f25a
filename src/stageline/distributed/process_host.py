"""This process as one rank among others: messages over its own sockets, failures over its own control channel."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stageline.common.errors import PeerFailed, PipelineError, StagelineError, TransportError
from stageline.distributed.collectives import ProcessCollectives
from stageline.distributed.failures import (
    GRADIENTS,
    Change,
    JobFailures,
    OutOfMemory,
    RankFailure,
    changed_output,
    failure,
    first_change,
    may_follow_change,
    note_missing_value,
    note_record,
)
from stageline.distributed.layout import Layout
from stageline.distributed.peer_connections import ended_by_peer
from stageline.distributed.rank_host import Floats, HostedStep, RankProgress, RankRunner
from stageline.faults.flight_recorder import FlightRecorder
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.verdict import Failure, Verdict, describe, located
from stageline.schedules.schedule import Schedule
from stageline.transport.clock_alignment import Alignment
from stageline.transport.gpu.nccl import NcclError
from stageline.transport.protocol import Traffic, Transport

ALIGN_EVERY = 10.0
"""Seconds after which the clocks of ranks on several machines are aligned again, before the next step; longer if
aligning would exceed 0.1% of the run time."""

SMALL = 1 << 17
"""Up to this many numbers over all ranks are gathered individually instead of being summed on the way."""


class ProcessHost(ProcessCollectives):
    """This process is one rank of a torch.distributed group; the pipeline's own groups join it to the others."""

    def __init__(self, deadline: float, layout: Layout) -> None:
        super().__init__(deadline, layout)
        self._within = self._transport.exchange(layout.rows[self.replica])
        self.clocks: Alignment | None = None
        self._clocks_drift = self._clocks_are_stale = False
        self._align_after, self._ranks = ALIGN_EVERY, layout.ranks
        self._traffic: tuple[Schedule, dict[tuple[int, Traffic], int], dict[tuple[int, Traffic], int]] | None = None

    def transport(self, rank: int) -> Transport:
        """The transport of this process."""
        return self._transport

    def progress(self, rank: int) -> RankProgress:
        """The control channel, which reads it with every beat."""
        return self._control

    def flight(self, rank: int) -> FlightRecorder:
        """The flight recorder of this process."""
        return self._failures.flight

    def begin(self) -> None:
        """Begin a step; raise if the job lost a rank."""
        JobFailures.latest = self._failures.reference
        self._control.begin()
        verdict = self._control.verdict()
        if verdict is not None:
            self._failures.check(verdict)
        if self._clocks_are_stale:
            self._align()

    def check_same(self, facts: dict[str, str]) -> None:
        """Compare the facts, and then the clocks."""
        super().check_same(facts)
        self._align()

    def _align(self) -> None:
        """Measure the offsets between the clocks of this replica, all its ranks together."""
        began = time.perf_counter()
        self._clocks_are_stale = False
        self.clocks = self.align(self._within)
        self._clocks_drift = not self.clocks.exact
        self._align_after = max(ALIGN_EVERY, 1e3 * (time.perf_counter() - began))

    def end(self) -> None:
        """End a step."""
        self._failures.running = None
        self._control.end()

    def abandon(self, error: BaseException) -> None:
        """Leave a step permanently, as after Ctrl-C, and tell the ranks that would wait for this one."""
        self._failures.abandon(error)

    def run(self, step: HostedStep) -> tuple[list[Any], Floats]:
        """Run this rank in this thread; all ranks reach the end of the step together, failed or not."""
        results, own, failed = self.run_rank(step)
        return results, self._end_together(failed, own)

    def run_rank(self, step: HostedStep) -> tuple[list[Any], Floats, RankFailure | None]:
        """Run this rank; failed or not, all its messages of this step are sent and received afterwards."""
        runner: RankRunner = step.executors.executors[0]
        runner.stopped = None
        self._failures.running = runner
        results: list[Any] = []
        failed: RankFailure | None = None
        device = None if runner.device is None else torch.device("cuda", runner.device)
        self._transport.begin(*self._expected(step.executors.schedule, runner), device)
        verdict = self._control.verdict()
        if verdict is not None:  # it arrived while this step was being prepared
            self._failures.hear(verdict)
        reducer = step.reducer
        if reducer is not None:
            reducer.begin()
        try:
            if step.refused is not None or step.request is None:
                raise step.refused or StagelineError("there is nothing to run")
            self._failures.acting = threading.get_native_id()
            results = [runner.run(step.request, None if reducer is None else reducer.ready)]
            self._failures.acting = None
            step.issued()
            own = step.make_record(results)
        except BaseException as error:
            self._failures.acting = None
            failed = RankFailure(time.time(), runner.doing, error)
            own = np.zeros(step.size)
            self._report(runner, error)
            step.issued()
        if reducer is not None:  # also after a failure: the other replicas wait for this one's part
            reducer.finish(failed is None)
        try:
            self._transport.finish(self.deadline)
        except TransportError as error:
            raise self._failures.lose(str(error)) from (failed.error if failed else error)
        return results, own, failed

    def _expected(
        self, schedule: Schedule, runner: RankRunner
    ) -> tuple[dict[tuple[int, Traffic], int], dict[tuple[int, Traffic], int]]:
        """How many messages this rank receives from, and sends to, each other rank in a step of the schedule."""
        if self._traffic is None or self._traffic[0] is not schedule:
            expected: dict[tuple[int, Traffic], int] = {}
            owed: dict[tuple[int, Traffic], int] = {}
            for channel in schedule.channels:
                if channel.target == runner.rank:
                    expected[(runner.processes[channel.source], channel.traffic)] = len(channel.messages)
                if channel.source == runner.rank:
                    owed[(runner.processes[channel.target], channel.traffic)] = len(channel.messages)
            self._traffic = (schedule, expected, owed)
        return self._traffic[1], self._traffic[2]

    def _report(self, runner: RankRunner, error: BaseException) -> None:
        """Tell all ranks of this rank's failure, and learn whether another rank's failure caused it."""
        secondary = isinstance(error, TransportError) or ended_by_peer(error)
        report = Failure.of(error, self._control.doing, secondary=secondary)
        if isinstance(error, PeerFailed):
            report = replace(report, origin=error.origin)
        if not isinstance(error, Exception):  # this rank leaves the step, and does not reach its end with the others
            report = replace(report, final=True)
        if isinstance(error, torch.AcceleratorError | NcclError):  # its GPU will not send what others wait for
            report = replace(report, final=True)
        self._control.report(report)
        self._transport.fail(error, f"{self.layout.name(runner.process)} failed in {runner.doing}")
        self._control.waits = EVERYONE
        verdict = self._failures.blamed()
        runner.record(verdict, self._control.lost)
        runner.forget()
        if not isinstance(error, Exception):
            self._failures.leave()
            raise error
        if verdict is not None and verdict.final:
            raise self._failures.over(verdict) from error

    def _end_together(self, failed: RankFailure | None, own: Floats) -> Floats:
        """Add up the step records; or tell all ranks of all replicas which rank failed first."""
        flags = np.zeros(3)
        if failed is not None:
            flags[int(isinstance(failed.error, PeerFailed))] = failed.time
        if self._clocks_drift and self.clocks is not None and self.here[0] == 0:  # so all ranks align in the same step
            flags[2] = time.perf_counter() - self.clocks.moment > self._align_after
        origin, totals = self._gather_sums(flags, own)
        if origin is None:
            return totals
        raise self.failed(failed, origin) from (failed.error if failed else None)

    def failed(self, failed: RankFailure | None, origin: int, left: str = GRADIENTS) -> PipelineError:
        """The error that all ranks raise together: that of the process that failed first.

        The flight records name it, too; the failure monitor knows who was heard first, which may be another rank.
        """
        own: dict[str, Any] = {}
        running = self._failures.running
        if failed is not None:
            cause = Failure.of(failed.error, located(failed.doing))
            text = str(failure(self.layout.name(self.process), failed.doing, failed.error, left))
            own = {"text": text, "where": self._control.where, "cause": cause.to_json()}
            if isinstance(failed.error, OutOfMemory):
                own["memory"] = failed.error.facts()
            kinds = may_follow_change(failed.error)
            if cause.action == "F" and running is not None and any(kinds):
                own["step"], own["kinds"] = running.step, kinds
        first = json.loads(self.broadcast_to_all(json.dumps(own), origin))
        error = OutOfMemory(first["text"], **first["memory"]) if "memory" in first else PipelineError(first["text"])
        cause, blamed = Failure(**first["cause"]), self._failures.blamed()
        ranks = () if blamed is None else blamed.ranks
        verdict = cause.verdict(origin, where=first["where"], round=self._control.round, ranks=ranks)
        verdict = self._failures.named(verdict)
        if "step" in first:
            error, verdict = self._blame_change(error, verdict, int(first["step"]), first["kinds"], left)
        if verdict.traceback and origin != self.process:
            error.add_note(f"on {self.layout.place_name(origin)}:\n{verdict.traceback}")
        if self.layout.ranks > 1:
            note_missing_value(error, verdict)
        note_record(error, [self._failures.record(verdict)])
        return error

    def _blame_change(
        self, error: PipelineError, verdict: Verdict, step: int, kinds: Sequence[bool], left: str
    ) -> tuple[PipelineError, Verdict]:
        """Name the rank whose stage changed its output if another rank failed on it; all ranks call this."""
        running = self._failures.running
        own = first_change(step, verdict, () if running is None else running.changes, kinds)
        replica = self.layout.place(verdict.culprit)[0]
        stages = self.all_gather(np.array([0.0 if own is None else own.stage + 1.0]))[replica, :, 0]
        if not stages.any():
            return error, verdict
        blamed = self.layout.rows[replica][int(np.argmin(np.where(stages > 0, stages, np.inf)))]
        change = Change(*json.loads(self.broadcast_to_all(json.dumps(own), blamed)))
        failed = f"stage {verdict.stage} on {self.layout.name(verdict.culprit)}"
        error = changed_output(self.layout.name(blamed), change, failed, verdict.text, left)
        verdict = replace(verdict, culprit=blamed, stage=change.stage, doing=describe(change.place))
        return error, self._failures.named(verdict)

    def _gather_sums(self, flags: Floats, own: Floats) -> tuple[int | None, Floats]:
        """Which process was the first to fail, if one did; and the sums of the step records of this replica."""
        small = own.size * self._ranks <= SMALL
        rows = self.gather(self._within, np.concatenate([flags, own]) if small else flags)
        self._clocks_are_stale = bool(rows[:, 2].any())
        # When each kind of failure first occurred, and on which process: causes, and consequences of other failures.
        if rows[:, :2].any() or self.replica_group is not None:
            first = np.array([_first(rows[:, kind], self.layout.rows[self.replica]) for kind in range(2)])
            if self.replica_group is not None:
                known = self.replica_group.all_gather(first.reshape(-1)).reshape(-1, 2, 2)
                first = np.array([_first(known[:, kind, 0], known[:, kind, 1]) for kind in range(2)])
            if first[:, 0].any():
                return int(first[0, 1] if first[0, 0] else first[1, 1]), np.zeros(0)
        return None, rows[:, flags.size :].sum(axis=0) if small else self.all_reduce(own)


def _first(times: Floats, processes: Sequence[int] | Floats) -> tuple[float, float]:
    """The earliest of the times that are not 0, and its process."""
    at = int(np.argmin(np.where(times > 0, times, np.inf)))
    return float(times[at]), float(processes[at])
