"""All ranks as threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stageline.common.errors import PeerFailed, StagelineError
from stageline.distributed.failures import (
    GRADIENTS,
    changed_output,
    failure,
    first_change,
    may_follow_change,
    note_record,
)
from stageline.distributed.layout import Layout
from stageline.distributed.rank_host import Floats, HostedStep, RankExecutors, RankProgress, RankRunner
from stageline.faults.flight_recorder import FlightRecorder
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.verdict import Failure, describe, place_in_words
from stageline.tensors.thread_context import ThreadContext
from stageline.transport.clock_alignment import Alignment
from stageline.transport.protocol import Transport
from stageline.transport.threads import ThreadHub

if TYPE_CHECKING:
    from stageline.distributed.collectives import ReplicaGroup


def join_started(thread: threading.Thread, timeout: float = float("inf")) -> None:
    """Join a thread unless it was never started; `Thread.join` refuses one whose start is not complete.

    >>> join_started(threading.Thread())
    """
    end = time.monotonic() + timeout
    while thread in threading.enumerate() and time.monotonic() < end:  # also lists threads that are starting
        if thread.is_alive():
            thread.join(min(1.0, max(0.0, end - time.monotonic())))
        else:
            time.sleep(0.001)


class ThreadProgress:
    """The progress of a rank that is a thread of this process."""

    def __init__(self) -> None:
        self.doing: object = None
        self.waits: int | None = None
        self.done = 0


class ThreadHost:
    """All ranks are threads of this process, so collectives have nothing to do."""

    def __init__(self, ranks: int, deadline: float = 60.0) -> None:
        self.here = list(range(ranks))
        self.deadline = deadline
        self.layout, self.replica = Layout.even(ranks), 0
        self.replica_group: ReplicaGroup | None = None
        self.single_process = True
        self.clocks: Alignment | None = Alignment((0.0,) * ranks, (0.0,) * ranks, 0.0)
        self.hub = ThreadHub(ranks)
        self._progress = {rank: ThreadProgress() for rank in self.here}
        self._flights = {rank: FlightRecorder(rank, ranks) for rank in self.here}
        self.hub.patience = self._busy

    def _busy(self, rank: int) -> bool:
        """Whether to keep waiting for a rank; one that takes a message at this moment seems to wait, too."""
        done = [notes.done for notes in self._progress.values()]
        if busy(rank, self._progress):
            return True
        time.sleep(0.2)
        return busy(rank, self._progress) or done != [notes.done for notes in self._progress.values()]

    # Hosting ranks.

    def transport(self, rank: int) -> Transport:
        """The rank's end of the in-memory channels."""
        return self.hub.end(rank)

    def progress(self, rank: int) -> RankProgress:
        """Where the rank says what it is doing."""
        return self._progress[rank]

    def flight(self, rank: int) -> FlightRecorder:
        """The flight recorder of the rank."""
        return self._flights[rank]

    def begin(self) -> None:
        """No-op: all ranks are in this process."""

    def run(self, step: HostedStep) -> tuple[list[Any], Floats]:
        """Run every rank on a thread of its own; the first failure stops all."""
        if step.refused is not None or step.request is None:
            raise step.refused or StagelineError("there is nothing to run")
        self.hub.reset()
        runners: list[RankRunner] = step.executors.executors
        results: dict[int, Any] = {}
        failures: dict[int, BaseException] = {}
        context = ThreadContext()

        def run(runner: RankRunner) -> None:
            try:
                results[runner.rank] = context.run(lambda: runner.run(step.request))
                runner.progress.doing = None
            except BaseException as error:
                failures[runner.rank] = error
                self._stop(runners, runner.rank, error, f"rank {runner.rank} failed {place_in_words(runner.doing)}")

        for runner in runners:
            runner.stopped = None
            runner.progress.doing, runner.progress.waits = "before its first action", None
        if len(runners) == 1:
            run(runners[0])  # a single rank needs no thread; on a GPU, a new thread is a third slower
        else:
            self._on_threads(runners, run)
        if failures:
            error = self.failed(step.executors, failures)
            self.hub.reset()
            for runner in runners:  # an error holds its frames, and these hold activations
                runner.stopped = None
            raise error
        ordered = [results[rank] for rank in self.here]
        return ordered, step.make_record(ordered)

    def _stop(self, runners: list[RankRunner], rank: int, error: BaseException, where: str) -> None:
        """Wake all ranks, and let none start another action."""
        for runner in runners:
            runner.stopped = runner.stopped or PeerFailed(f"rank {runner.rank} stopped: {where}", rank)
        self.hub.set_failure(rank, error, where)

    def _on_threads(self, runners: list[RankRunner], run: Callable[[RankRunner], None]) -> None:
        threads = [
            threading.Thread(target=run, args=(runner,), name=f"stageline rank {runner.rank}", daemon=True)
            for runner in runners
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # a KeyboardInterrupt reaches this thread, and the ranks must be told
            self._stop(runners, EVERYONE, error, "the step was interrupted")
            for thread in threads:
                join_started(thread)
            for runner in runners:
                runner.forget()
            raise

    @staticmethod
    def failed(
        executors: RankExecutors[Any], failures: Mapping[int, BaseException], left: str = GRADIENTS
    ) -> BaseException:
        """The error of the rank that failed first; writes the flight records and drops what the step left."""
        runners: list[RankRunner] = executors.executors
        own = [rank for rank, error in failures.items() if not isinstance(error, PeerFailed)]
        origin = (own or sorted(failures))[0]
        first, runner = failures[origin], runners[origin]
        cause = Failure.of(first, runner.progress.doing)
        verdict = cause.verdict(origin)
        error = failure(f"rank {origin}", runner.doing, first, left)
        changes = [change for other in runners for change in other.changes]
        change = first_change(runner.step, cause, changes, may_follow_change(first))
        if cause.action == "F" and change is not None:
            blamed = executors.schedule.placement.rank_of(change.stage, change.microbatch)
            error = changed_output(f"rank {blamed}", change, f"stage {cause.stage} on rank {origin}", cause.text, left)
            verdict = replace(verdict, culprit=blamed, stage=change.stage, doing=describe(change.place))
        note_record(error, [other.record(verdict) for other in runners])
        for other in runners:
            other.forget()
        if not isinstance(first, Exception):
            return first  # such as a KeyboardInterrupt
        error.__cause__ = first
        return error

    def abandon(self, error: BaseException) -> None:
        """No-op: all ranks are in this process and have stopped."""

    def end(self) -> None:
        """Mark all ranks as idle."""
        for notes in self._progress.values():
            notes.doing = notes.waits = None

    # Collectives of one process.

    def check_same(self, facts: dict[str, str]) -> None:
        """No-op: there is one process."""

    def all_gather(self, row: Floats) -> Floats:
        """The row itself, by replica and rank."""
        return row.reshape(1, 1, -1)

    def all_gather_async(self, row: Floats) -> Callable[[], Floats]:
        """The row itself, by replica and rank."""
        return lambda: row.reshape(1, 1, -1)

    def all_reduce(self, values: Floats) -> Floats:
        """The values themselves."""
        return values

    def all_reduce_async(self, values: Callable[[], Floats]) -> Callable[[], Floats]:
        """The values themselves, computed on demand."""
        return values

    def broadcast(self, text: str, owner: int) -> str:
        """The text itself."""
        return text

    def broadcast_to_all(self, text: str, process: int) -> str:
        """The text itself."""
        return text

    def broadcast_tensor(self, tensor: Tensor, owner: int) -> None:
        """No-op: the tensor is already here."""


def busy(rank: int, ranks: Mapping[int, RankProgress]) -> bool:
    """Whether it makes sense to keep waiting for a rank: it works, or a rank that it waits for works.

    >>> first, second = ThreadProgress(), ThreadProgress()
    >>> first.doing = second.doing = "B of stage 0, microbatch 0"
    >>> first.waits = 1
    >>> busy(0, {0: first, 1: second})
    True
    >>> second.waits = 0
    >>> busy(0, {0: first, 1: second})
    False
    """
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        progress = ranks[rank]
        if progress.doing is None:
            return False  # it has finished the step
        if progress.waits is None:
            return True
        if progress.waits == EVERYONE:
            return False
        rank = progress.waits
    return False
