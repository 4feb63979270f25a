"""The loop of one rank in a run: step after step, without waiting for the other ranks between them.

        rank 0   step 0 ────────┤o├ step 1 ────────┤?o├ step 2 …      o  its own optimizer step
        rank 1     step 0 ────────┤o├ step 1 ────────┤?o├ step 2 …     ?  is the step before the last good?
        rank 2       step 0 ────────┤o├ step 1 ────────┤?o├ step 2 …

A rank steps its optimizer as soon as its own gradients are complete, and sends the others its record of the step:
losses, norms, failures. All records are read one step later. If the gradients should have been clipped, or the step
should have been skipped, every rank discards what it computed since, rolls back, and repeats the update as it should
have been. All ranks read the same numbers, so they decide the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import PeerFailed, PipelineError
from stageline.distributed.failures import RankFailure, failure
from stageline.distributed.rank_host import Floats
from stageline.runtime.continuous.rollback import Gradients, OptimizerPart, Snapshot
from stageline.runtime.executor import StepRequest
from stageline.runtime.guards.foreign_reads import NamedTensors
from stageline.runtime.guards.non_finite import first, not_finite
from stageline.runtime.optimizer_step import GradientRules, StepDecision, norms_of, not_finite_text, total_norm
from stageline.runtime.penalty import Penalty, add_gradients, penalty_not_finite, terms_of, values_of
from stageline.runtime.rank_executors import ExecutorSet
from stageline.runtime.shared_parameters import Placed, sum_shared_gradients
from stageline.runtime.step_report import RankResult, StepTotals, add_up, metrics_of
from stageline.tensors.buffers import BufferCopies, all_buffers, put_back
from stageline.tensors.thread_context import plain_precision

LEFT = "the parameters are those before this step, and there are no gradients"
"""The state that a failed step of a run leaves."""


@dataclass(frozen=True)
class PlannedStep:
    """What a step of a run computes, if there is one."""

    step: int
    executors: ExecutorSet | None = None
    """None if the run has ended."""
    request: StepRequest | None = None
    error: BaseException | None = None
    """Why the run ended, if not because there are no more batches."""
    refused: Exception | None = None
    """Why this process cannot take part."""


@dataclass(frozen=True)
class RunOptions:
    """The options of all steps of a run."""

    first: int
    """The number of the first step."""
    placed: Placed
    names: Sequence[str]
    """The names of all parameters of the model."""
    rules: GradientRules
    """What the gradients of a step must satisfy."""
    penalty: Penalty | None = None
    norm_dtype: torch.dtype = torch.float32
    penalty_reads: NamedTensors | None = None
    """The parameters of the model, if the penalty can reach them."""


@dataclass(frozen=True)
class DecidedStep:
    """A step that all ranks have completed, and whether it is applied, scaled, skipped or failed."""

    planned: PlannedStep
    totals: StepTotals
    decision: StepDecision = field(default_factory=StepDecision)
    error: PipelineError | None = None
    """Why it failed."""

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.planned.step

    @property
    def rolls_back(self) -> bool:
        """Whether the update has to be repeated or undone."""
        return self.decision.factor is not None or self.decision.skipped


def decide_step(options: RunOptions, planned: PlannedStep, totals: StepTotals) -> DecidedStep:
    """Decide whether a step is applied, scaled, skipped or failed, as clipping and checking before the update would."""
    assert planned.executors is not None
    rules, outcome = options.rules, totals.outcome
    if rules.check_finite:
        wrong = not_finite(outcome.losses, outcome.events, (), planned.executors.schedule)
        if wrong is not None:
            cause = ArithmeticError(wrong.text)
            error = failure(f"rank {wrong.rank}", wrong.doing, cause, LEFT)
            error.__cause__ = cause
            return DecidedStep(planned, totals, error=error)
    if rules.check_finite and options.penalty is not None:
        wrong_penalty = penalty_not_finite(options.names, outcome.penalties)
        if wrong_penalty:
            text = f"{wrong_penalty}; {LEFT}; check_finite=False accepts such penalties"
            return DecidedStep(planned, totals, error=PipelineError(text))
    norm = total_norm(totals.norms, dtype=options.norm_dtype) if rules.need_norm else None
    decision = rules.decide(norm)
    if norm is not None and decision.failed:
        origin = first(outcome.events)
        where = "" if origin is None else f"; the first value that is not finite is {origin}"
        error = norm_not_finite(planned.step, norm, add_up(outcome.losses) + outcome.penalty, where)
        return DecidedStep(planned, totals, decision, error)
    return DecidedStep(planned, totals, decision)


def norm_not_finite(step: int, norm: Tensor, loss: float, where: str = "") -> PipelineError:
    """The error of a step whose gradients are not finite numbers; `where` says where they began."""
    return PipelineError(
        f"{not_finite_text(step, norm.item(), loss)}{where}; {LEFT}; lower the learning rate, skip such steps with "
        "skip_not_finite=True, or accept them with check_finite=False"
    )


class RankServices(Protocol):
    """Per-step services of a rank (threads or processes)."""

    def prefetch(self, step: int) -> None:
        """Start fetching the batch of this step."""

    def plan(self, step: int) -> PlannedStep:
        """What this step computes; the same on all ranks."""

    def run(self, planned: PlannedStep) -> tuple[RankResult | None, RankFailure | None]:
        """Run this rank's program."""

    def stop(self, planned: PlannedStep, failed: RankFailure) -> None:
        """Let no rank continue with this step, or with one after it."""

    def send_record(self, planned: PlannedStep, row: Floats, result: RankResult | None) -> None:
        """Send this rank's record of a step to all ranks."""

    def receive_records(self, planned: PlannedStep) -> Floats:
        """The step records of all ranks, added up; waits for them."""

    def synchronize(self, planned: PlannedStep) -> None:
        """Separate messages sent before this call from those sent after it."""

    def drain(self, planned: PlannedStep, error: BaseException) -> None:
        """After a failure in this step, take part in the next one as far as other ranks wait for this one."""

    def failure(self, planned: PlannedStep, failed: RankFailure | None, culprit: int) -> BaseException:
        """The error that this rank raises for a step that failed."""


@dataclass
class CompletedStep:
    """A step that this rank has run."""

    planned: PlannedStep
    buffers: BufferCopies
    """The buffers before the step."""
    result: RankResult | None
    failed: RankFailure | None


class RankLoop:
    """Runs all steps of one rank."""

    def __init__(
        self,
        rank: int,
        services: RankServices,
        options: RunOptions,
        part: OptimizerPart,
        own: Mapping[str, nn.Parameter],
    ) -> None:
        """`part` steps the rank's parameters, which are `own` by their names in the model."""
        self.rank, self.services, self.options = rank, services, options
        self._part, self._own = part, own
        self._snapshot = Snapshot(part)
        self._gradients = Gradients(list(own.values()))
        self._current: CompletedStep | None = None
        """The step that is running."""
        self._waiting: CompletedStep | None = None
        """The step that is complete on this rank but not decided yet."""

    @property
    def bytes(self) -> int:
        """The memory that a rollback needs."""
        kept = [ran.buffers for ran in (self._current, self._waiting) if ran is not None]
        buffers = sum(copy.nbytes for taken in kept for _, _, _, copy in taken)
        return self._snapshot.bytes + self._gradients.bytes + buffers

    def steps(self) -> Iterator[DecidedStep]:
        """Run all steps; yields each when it is decided, before the optimizer steps for the next one."""
        planned = self.services.plan(self.options.first)
        while planned.executors is not None:
            self.services.prefetch(planned.step + 1)
            ran = self._run(planned)
            if self._waiting is not None:
                decided = self._decide(self._waiting)
                if decided.rolls_back:
                    self._undo(ran)
                    self._repeat(decided)
                yield decided
                if decided.rolls_back:
                    ran = self._run(planned)
            if ran.failed is None:
                self._apply(ran, planned.executors)
            if ran.failed is not None:
                raise self._failure(ran, ran.failed)
            planned = self.services.plan(planned.step + 1)
        if self._waiting is not None:
            decided = self._decide(self._waiting)
            if decided.rolls_back:
                self._repeat(decided)
            yield decided
        if planned.error is not None:
            raise planned.error

    def _run(self, planned: PlannedStep) -> CompletedStep:
        assert planned.executors is not None
        self.options.placed.start(self.rank)
        modules = self.options.placed.modules[self.rank].values()
        buffers = [buffer for module in modules for buffer in all_buffers(module)]
        ran = self._current = CompletedStep(planned, buffers, None, None)
        ran.result, ran.failed = self.services.run(planned)
        return ran

    def _apply(self, ran: CompletedStep, executors: ExecutorSet) -> None:
        """Step this rank's optimizer, keep what a rollback needs, and send the record of the step."""
        executor = next(executor for executor in executors.executors if executor.rank == self.rank)
        result, request, options = ran.result, ran.planned.request, self.options
        assert result is not None
        assert request is not None
        executor.progress.doing = "the step of its optimizer"
        try:
            sum_shared_gradients(options.placed, _no_broadcast, True, self.rank)
            penalties = self._penalize(request.scale)
            layout = executors.continuous_layout
            row = layout.write(
                self.rank,
                outcome=np.concatenate([layout.step_record.write([result]), penalties]),
                norms=self._norms() if options.rules.need_norm else None,
                metrics=metrics_of([result], request.weights),
            )
            self._snapshot.take()
            self._gradients.before()
            self._waiting, self._current = ran, None
            with plain_precision():
                self._part.step()
            torch.clear_autocast_cache()  # it caches casts of the old weights until the caller's context ends
            self._gradients.after()
        except Exception as error:
            ran.failed = RankFailure(time.time(), executor.doing, error)
        else:
            executor.progress.doing = "after its last step"
            self.services.send_record(ran.planned, row, result)

    def _penalize(self, scale: float) -> Floats:
        """Add the gradients of the penalty on this rank's parameters; returns the penalties."""
        if self.options.penalty is None:
            return np.zeros(0)
        terms = terms_of(self.options.penalty, self._own.items(), self.options.penalty_reads)
        add_gradients(terms, scale)
        return values_of(self.options.names, terms, lambda name: True)

    def _norms(self) -> Floats:
        gradients = {name: parameter.grad for name, parameter in self._own.items()}
        with plain_precision():
            return norms_of(self.options.names, gradients)

    def _decide(self, ran: CompletedStep) -> DecidedStep:
        assert ran.planned.executors is not None
        totals = ran.planned.executors.continuous_layout.read(self.services.receive_records(ran.planned))
        if totals.culprit is not None:
            raise self.services.failure(ran.planned, None, totals.culprit)
        decided = decide_step(self.options, ran.planned, totals)
        if decided.error is not None:
            raise decided.error
        return decided

    def _repeat(self, decided: DecidedStep) -> None:
        """Roll back an update, and repeat it with clipped gradients, unless the step is skipped."""
        self._snapshot.restore()
        if decided.decision.factor is not None:
            self._gradients.put_back(decided.decision.factor)
            with plain_precision():
                self._part.step()
            self._zero()
        torch.clear_autocast_cache()
        self.services.synchronize(decided.planned)

    def _failure(self, ran: CompletedStep, failed: RankFailure) -> BaseException:
        """Tell all ranks of this rank's failure, and learn which failure came first."""
        assert ran.planned.executors is not None
        layout = ran.planned.executors.continuous_layout
        self.services.stop(ran.planned, failed)
        when = (0.0, failed.time) if isinstance(failed.error, PeerFailed) else (failed.time, 0.0)
        self.services.send_record(ran.planned, layout.write(self.rank, failed=when), None)
        self.services.drain(ran.planned, failed.error)
        culprit = layout.read(self.services.receive_records(ran.planned)).culprit
        assert culprit is not None
        return self.services.failure(ran.planned, failed, culprit)

    # Rollback.

    def _zero(self) -> None:
        for parameter in self._own.values():
            parameter.grad = None

    def _undo(self, ran: CompletedStep) -> None:
        """Discard what a step computed; no optimizer has seen it."""
        assert ran.planned.executors is not None
        for executor in ran.planned.executors.executors:
            if executor.rank == self.rank:
                executor.forget()
        self.options.placed.start(self.rank)
        self._zero()
        put_back(ran.buffers)

    def unwind(self, delivered: int) -> None:
        """End the run: parameters, optimizer and buffers are as the last delivered step left them."""
        if self._current is not None:
            self._undo(self._current)
        waiting, self._waiting, self._current = self._waiting, None, None
        if waiting is not None and waiting.planned.step > delivered:
            self._snapshot.restore()
            put_back(waiting.buffers)
        self._zero()
        self._gradients.forget()
        self._snapshot = Snapshot(self._part)


def _no_broadcast(tensor: Tensor, owner: int) -> None:
    """All uses of a parameter are on this rank."""
