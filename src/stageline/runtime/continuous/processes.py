"""Continuous steps where ranks are processes: records are exchanged while the ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from stageline.common.errors import PeerFailed, PipelineError, StagelineError
from stageline.distributed.failures import RankFailure
from stageline.distributed.process_host import ProcessHost
from stageline.distributed.rank_host import Floats, HostedStep
from stageline.runtime.batches.comparison import NAMES, BatchRow, disagreement
from stageline.runtime.continuous.rank_loop import LEFT, DecidedStep, PlannedStep, RankLoop, RunOptions
from stageline.runtime.rank_executors import MOST_TIMES
from stageline.runtime.step import no_collections
from stageline.runtime.step_report import RankResult

ENDED, REFUSED = len(NAMES), len(NAMES) + 1
"""Columns of the row that a process sends about its next batch, after those of the batch."""
COLUMNS = list(range(len(NAMES)))


class NextBatch(NamedTuple):
    """The next batch of this process, or why there is none."""

    batch: Any = None
    described: BatchRow = BatchRow(None, np.zeros(len(NAMES)))
    ended: bool = False
    error: BaseException | None = None


Fetch = Callable[[], NextBatch]
PlanStep = Callable[[int, Any, int], PlannedStep]
"""From the number of a step, a batch and its number of samples, to what the step computes."""


class ProcessServices:
    """Per-step services of the rank of this process, in a pipeline with one replica."""

    def __init__(self, host: ProcessHost, fetch: Fetch, plan: PlanStep, readers: Mapping[int, set[int]]) -> None:
        """`readers` are the ranks that read the inputs, and those that read the targets."""
        self._host, self._fetch, self._plan, self._readers = host, fetch, plan, readers
        self._coming: dict[int, tuple[NextBatch, Callable[[], Floats]]] = {}
        """For the next steps: the batch of this process, and the rows of all processes."""
        self._records: dict[int, Callable[[], Floats]] = {}
        self.times: dict[int, Callable[[], Floats]] = {}

    # Batches.

    def prefetch(self, step: int) -> None:
        """Fetch the batch of this step, and describe it to all ranks."""
        self._describe(step, self._fetch())

    def _describe(self, step: int, next_batch: NextBatch) -> None:
        flags = [float(next_batch.ended), float(next_batch.error is not None)]
        row = np.concatenate([next_batch.described.complete(), flags])
        self._coming[step] = (next_batch, self._host.all_gather_async(row))

    def plan(self, step: int) -> PlannedStep:
        """What this step computes, from the batches that all ranks fetched one step ago."""
        if step not in self._coming:
            self.prefetch(step)
        next_batch, gathered = self._coming.pop(step)
        rows = gathered()[0]
        names = self._host.layout.rows[0]
        if rows[:, REFUSED].any():
            culprit = names[int(np.argmax(rows[:, REFUSED]))]
            reason = self._host.broadcast_to_all(f"{type(next_batch.error).__name__}: {next_batch.error}", culprit)
            error = PipelineError(f"the batches of {self._host.layout.name(culprit)} failed at step {step}: {reason}")
            return PlannedStep(step, error=next_batch.error or error)
        ended = rows[:, ENDED] > 0
        if ended.all():
            return PlannedStep(step)
        if ended.any():
            short, long = names[int(np.argmax(ended))], names[int(np.argmin(ended))]
            text = (
                f"rank {short} has no batch for step {step}, but rank {long} has one; pass the same number of "
                "batches to every rank"
            )
            return PlannedStep(step, error=PipelineError(text))
        apart = disagreement(rows, COLUMNS, self._readers)
        if apart:
            return PlannedStep(step, error=PipelineError(apart))
        return self._plan(step, next_batch.batch, int(rows[:, 0].max()))

    # A step.

    def run(self, planned: PlannedStep) -> tuple[RankResult | None, RankFailure | None]:
        """Run this rank's program; if it fails, tell the ranks that wait for its messages."""
        assert planned.executors is not None
        self._host.begin()
        with no_collections():
            results, _, failed = self._host.run_rank(HostedStep(planned.executors, planned.request, planned.refused))
        return (results[0] if results else None), failed

    def stop(self, planned: PlannedStep, failed: RankFailure) -> None:
        """No-op: the other ranks learn of it from the messages they wait for."""

    def send_record(self, planned: PlannedStep, row: Floats, result: RankResult | None) -> None:
        """Start summing it over all ranks, with the times of all actions."""
        assert planned.executors is not None
        layout, size = planned.executors.record_layout, len(row)
        times = np.zeros(3 * layout.actions)
        if result is not None:
            times = layout.times([result], self._host.clocks)
        if times.size * layout.ranks > MOST_TIMES:  # the next step depends on the record, and must not wait for them
            self._records[planned.step] = self._host.all_reduce_async(lambda: row)
            self.times[planned.step] = self._host.all_reduce_async(lambda: times)
            return
        reduced = cache(self._host.all_reduce_async(lambda: np.concatenate([row, times])))
        self._records[planned.step] = lambda: reduced()[:size]
        self.times[planned.step] = lambda: reduced()[size:]

    def receive_records(self, planned: PlannedStep) -> Floats:
        """The sum of all records."""
        return self._records.pop(planned.step)()

    def synchronize(self, planned: PlannedStep) -> None:
        """No-op: every message has its step in its header."""

    def drain(self, planned: PlannedStep, error: BaseException) -> None:
        """Take part in the next step, which other ranks may have started, to tell them that this one sends nothing."""
        coming = self.plan(planned.step + 1)
        if coming.executors is not None:
            self._describe(coming.step + 1, NextBatch(ended=True))
            stopped = PeerFailed(f"step {planned.step} failed: {error}", self._host.process)
            self.run(PlannedStep(coming.step, coming.executors, refused=stopped))

    def failure(self, planned: PlannedStep, failed: RankFailure | None, culprit: int) -> BaseException:
        """The error of the rank that failed first, which all ranks raise."""
        error = self._host.failed(failed, self._host.layout.rows[0][culprit], LEFT)
        cause = None if failed is None else failed.error
        error.__cause__ = cause
        own = cause is not None and cause is planned.refused and isinstance(cause, StagelineError)
        return cause if own and cause is not None else error

    def settle(self) -> None:
        """Wait for all collectives of this run, so that the next step finds none of them."""
        gathered = (rows for _, rows in self._coming.values())
        for wait in (*gathered, *self._records.values(), *self.times.values()):
            with suppress(PipelineError):
                wait()


class ProcessRun:
    """A run, as the caller in this process sees it."""

    def __init__(
        self,
        host: ProcessHost,
        options: RunOptions,
        make_loop: Callable[[int, ProcessServices], RankLoop],
        services: ProcessServices,
    ) -> None:
        self._host, self._services = host, services
        self.loops = [make_loop(host.here[0], services)]
        self._delivered = options.first - 1

    def steps(self) -> Iterator[tuple[DecidedStep, Callable[[], Floats]]]:
        """Yields every step when it is decided, with a function that returns the times of its actions."""
        (loop,) = self.loops
        try:
            self._host.begin()
            for decided in loop.steps():
                self._delivered = decided.step
                yield decided, self._services.times.pop(decided.step)
        except BaseException as error:
            if not isinstance(error, Exception | GeneratorExit):
                self._host.abandon(error)
            raise
        finally:
            loop.unwind(self._delivered)
            self._services.settle()
            self._host.end()
