"""Continuous steps where ranks are threads: they exchange their records over a shared board."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from stageline.common.errors import PeerFailed
from stageline.distributed.failures import RankFailure
from stageline.distributed.rank_host import Floats
from stageline.distributed.thread_host import ThreadHost
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.verdict import place_in_words
from stageline.runtime.continuous.rank_loop import LEFT, DecidedStep, PlannedStep, RankLoop, RunOptions, decide_step
from stageline.runtime.executor import Executor
from stageline.runtime.rank_executors import ExecutorSet
from stageline.runtime.step import no_collections
from stageline.runtime.step_report import RankResult
from stageline.tensors.thread_context import ThreadContext

PlanStep = Callable[[int], PlannedStep]
"""Fetches the batch of a step, and says what the step computes."""


class RunClosed(Exception):
    """The run has ended for a rank: the caller left it, or a step failed."""


class Board:
    """What the ranks and the caller of a run share."""

    def __init__(self, host: ThreadHost, ranks: int, first: int) -> None:
        self.host, self.ranks = host, ranks
        self.changed = threading.Condition()
        self.planned: dict[int, PlannedStep] = {}
        self.rows: dict[int, dict[int, Floats]] = {}
        self.results: dict[int, dict[int, RankResult]] = {}
        self.rolled_back: dict[int, int] = {}
        """How many ranks have repeated or undone the update of a step."""
        self.permitted = first
        """The last step whose optimizers may step."""
        self.at: dict[int, tuple[int, Executor]] = {}
        """The step and the executor of each rank."""
        self.stopped: tuple[int, PeerFailed] | None = None
        """The earliest step that failed."""
        self.failures: dict[int, tuple[int, BaseException]] = {}
        """The step and the error of each rank that failed."""
        self.closed = False
        self.ended = 0
        """How many ranks have ended."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true; raise if the board is closed first."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.closed)
            if not ready():
                raise RunClosed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Change the board, and wake its readers."""
        with self.changed:
            yield
            self.changed.notify_all()

    def stop(self, step: int, rank: int, error: BaseException, where: str) -> None:
        """Wake the ranks in this step or a later one, and let none of them start another action."""
        with self.writing():
            if self.stopped is None or step < self.stopped[0]:
                self.stopped = (step, PeerFailed(f"a rank stopped: {where}: {type(error).__name__}: {error}", rank))
            for at, executor in self.at.values():
                if at >= step:
                    executor.stopped = self.stopped[1]
        self.host.hub.set_failure(rank, error, where, step)

    def close(self, error: BaseException) -> None:
        """End the run on all ranks."""
        with self.writing():
            self.closed = True
        self.stop(-1, EVERYONE, error, "the run was ended")


class ThreadServices:
    """Per-step services of a rank that is a thread."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._progress = board.host.progress(rank)

    def prefetch(self, step: int) -> None:
        """No-op: the caller's thread fetches batches."""

    def plan(self, step: int) -> PlannedStep:
        """Wait, without a deadline, until the caller's thread has fetched the batch."""
        self._board.wait(lambda: step in self._board.planned)
        return self._board.planned[step]

    def run(self, planned: PlannedStep) -> tuple[RankResult | None, RankFailure | None]:
        """Run this rank's program, unless this step or an earlier one has failed."""
        board = self._board
        assert planned.executors is not None
        assert planned.request is not None
        executor = planned.executors.executors[self._rank]
        try:
            self._progress.doing, self._progress.waits = "before its first action", None
            with board.changed:
                stopped = board.stopped
                executor.stopped = stopped[1] if stopped is not None and stopped[0] <= planned.step else None
                board.at[self._rank] = (planned.step, executor)
            return executor.run(planned.request), None
        except BaseException as error:
            failed = RankFailure(time.time(), executor.doing, error)
            self.stop(planned, failed)
            if not isinstance(error, Exception):
                raise
            return None, failed

    def stop(self, planned: PlannedStep, failed: RankFailure) -> None:
        """Wake the ranks that wait for this one."""
        with self._board.changed:
            self._board.failures.setdefault(self._rank, (planned.step, failed.error))
        where = f"rank {self._rank} failed {place_in_words(failed.doing)}"
        self._board.stop(planned.step, self._rank, failed.error, where)

    def send_record(self, planned: PlannedStep, row: Floats, result: RankResult | None) -> None:
        """Write it on the board."""
        with self._board.writing():
            self._board.rows.setdefault(planned.step, {})[self._rank] = row
            if result is not None:
                self._board.results.setdefault(planned.step, {})[self._rank] = result

    def receive_records(self, planned: PlannedStep) -> Floats:
        """The sum of all records."""
        rows = self._board.rows
        failed = self._rank in self._board.failures
        if not failed:
            self._progress.waits = EVERYONE
        self._board.wait(lambda: len(rows.get(planned.step, ())) == self._board.ranks)
        if not failed:
            self._progress.waits = None
        total: Floats = np.stack(list(rows[planned.step].values())).sum(axis=0)
        return total

    def synchronize(self, planned: PlannedStep) -> None:
        """Wait for all ranks; the last one drops the messages and failures since."""
        board = self._board
        with board.writing():
            board.rolled_back[planned.step] = board.rolled_back.get(planned.step, 0) + 1
            if board.rolled_back[planned.step] == board.ranks:
                board.host.hub.reset()
                board.stopped = None
                board.failures.clear()
        board.wait(lambda: board.rolled_back[planned.step] >= board.ranks)

    def drain(self, planned: PlannedStep, error: BaseException) -> None:
        """No-op: what is left of a step is dropped with the board."""

    def failure(self, planned: PlannedStep, failed: RankFailure | None, culprit: int) -> BaseException:
        """End this rank; the caller's thread raises the error."""
        return RunClosed()


class ThreadRun:
    """A run, as the caller sees it: starts the threads of the ranks and plans their steps."""

    def __init__(
        self,
        host: ThreadHost,
        options: RunOptions,
        make_loop: Callable[[int, ThreadServices], RankLoop],
        plan: PlanStep,
        on_start: Callable[[], None],
    ) -> None:
        """`on_start` is called on the thread of each rank before anything else."""
        self._on_start = on_start
        self._host, self._options, self._plan = host, options, plan
        self._board = Board(host, len(host.here), options.first)
        self.loops = [make_loop(rank, ThreadServices(self._board, rank)) for rank in host.here]
        self._delivered = options.first - 1
        self._threads: list[threading.Thread] = []

    def steps(self) -> Iterator[tuple[DecidedStep, Callable[[], Floats]]]:
        """Yields every step when it is decided, with a function that returns the times of its actions."""
        board = self._board
        self._host.hub.reset()
        self._host.begin()
        try:
            planned = self._plan(self._options.first)
            board.planned[planned.step] = replace(planned, error=None)
            self._start()
            while planned.executors is not None:
                coming = self._plan(planned.step + 1)
                with board.writing():
                    board.planned[coming.step] = replace(coming, error=None)  # raised once, here
                decided = self._decide(planned)
                self._delivered = decided.step
                yield decided, self._times(planned.executors, board.results.pop(planned.step))
                with board.writing():
                    board.permitted += 1
                    for by_step in (board.rows, board.planned, board.rolled_back):
                        by_step.pop(planned.step - 1, None)  # all ranks have read it
                planned = coming
            if planned.error is not None:
                raise planned.error
        except BaseException as error:
            board.close(error)
            raise
        finally:
            self._end()

    def _start(self) -> None:
        context = ThreadContext()
        for loop in self.loops:
            target = self._drive(loop, context)
            name = f"stageline rank {loop.rank}"
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _drive(self, loop: RankLoop, context: ThreadContext) -> Callable[[], None]:
        board = self._board

        def drive() -> None:
            self._on_start()
            for decided in loop.steps():
                board.wait(lambda step=decided.step: board.permitted > step)  # type: ignore[misc]

        def run() -> None:
            try:
                context.run(drive)
            except RunClosed:
                pass
            except BaseException as error:  # of a step, on all ranks, or of something else: the run has ended
                with board.writing():
                    board.failures.setdefault(loop.rank, (loop.options.first, error))
                board.close(error)
            finally:
                with board.writing():
                    board.ended += 1

        return run

    def _decide(self, planned: PlannedStep) -> DecidedStep:
        """Wait until all ranks have sent their records of a step and, if needed, have rolled back."""
        board, rows = self._board, self._board.rows
        assert planned.executors is not None
        with no_collections(), board.changed:
            board.changed.wait_for(
                lambda: len(rows.get(planned.step, ())) == board.ranks or board.ended == board.ranks or board.closed
            )
            records = list(rows.get(planned.step, {}).values())
        if len(records) == board.ranks:
            totals = planned.executors.continuous_layout.read(np.stack(records).sum(axis=0))
            if totals.culprit is None:
                decided = decide_step(self._options, planned, totals)
                if decided.error is not None:
                    raise decided.error
                if decided.rolls_back:
                    try:
                        board.wait(lambda: board.rolled_back.get(planned.step, 0) == board.ranks)
                    except RunClosed:  # a rank was interrupted meanwhile
                        raise self._failure(planned.executors) from None
                return decided
        raise self._failure(planned.executors)

    def _failure(self, executors: ExecutorSet) -> BaseException:
        """The first failure of the earliest step that failed; causes come before their effects."""
        for thread in self._threads:
            thread.join()
        failures = self._board.failures
        earliest = min(step for step, _ in failures.values())
        first = {rank: error for rank, (step, error) in failures.items() if step == earliest}
        return self._host.failed(executors, first, LEFT)

    @staticmethod
    def _times(executors: ExecutorSet, results: Mapping[int, RankResult]) -> Callable[[], Floats]:
        ordered = [results[rank] for rank in sorted(results)]
        return lambda: executors.record_layout.times(ordered, None)

    def _end(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for loop in self.loops:
            loop.unwind(self._delivered)
        self._host.hub.reset()
        self._host.end()
