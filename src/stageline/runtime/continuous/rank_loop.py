"""One rank's way through a run: step after step, without waiting for the other ranks between them.

        rank 0   step 0 ────────┤o├ step 1 ────────┤?o├ step 2 …      o  its own step of the optimizer
        rank 1     step 0 ────────┤o├ step 1 ────────┤?o├ step 2 …     ?  is the step before the last good?
        rank 2       step 0 ────────┤o├ step 1 ────────┤?o├ step 2 …

A rank steps its optimizer as soon as its own gradients are complete, and tells the others what it knows of the step:
losses, norms, failures. What all of them told is read one step later. If the gradients should have been clipped, or the
step should not have been made, every rank throws away what it computed since, goes back, and does what should have been
done; all ranks read the same numbers, so they decide the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import PeerFailed, PipelineError
from stageline.distributed.failures import RankFailure, failure
from stageline.distributed.rank_host import Floats
from stageline.runtime.continuous.rollback import Gradients, Part, Snapshot
from stageline.runtime.continuous.step_record import Sheet, Told
from stageline.runtime.executor import Executors, RankResult, StepRequest
from stageline.runtime.grad_norm import norms_of, total_norm
from stageline.runtime.guards.loss_reads import Tensors
from stageline.runtime.guards.non_finite import first
from stageline.runtime.guards.non_finite import not_finite as not_finite_values
from stageline.runtime.optimizer_step import GradientRules, not_finite_text
from stageline.runtime.penalty import Penalty, add_gradients, terms_of, values_of
from stageline.runtime.penalty import not_finite as penalty_not_finite
from stageline.runtime.shared_parameters import Placed, gather
from stageline.runtime.step_report import metrics_of, sums
from stageline.schedules.schedule import Schedule
from stageline.tensors.buffers import Taken, all_buffers, put_back
from stageline.tensors.thread_context import plain_precision

LEFT = "the parameters are those before this step, and there are no gradients"
"""What a step of a run leaves when it fails."""


@dataclass(frozen=True)
class Offer:
    """What a step of a run is to do, if there is one."""

    step: int
    crew: Executors | None = None
    """None where the run is over."""
    work: StepRequest | None = None
    error: BaseException | None = None
    """Why it is over, if not for want of batches."""
    refused: Exception | None = None
    """Why this process cannot take part."""


@dataclass(frozen=True)
class Terms:
    """What holds for all steps of a run."""

    first: int
    """The number of the first step."""
    placed: Placed
    names: Sequence[str]
    """Of all parameters of the model."""
    rules: GradientRules
    penalty: Penalty | None = None
    norm_dtype: torch.dtype = torch.float32
    penalty_reads: Tensors | None = None
    """The parameters of the model, if the penalty can reach them."""

    def sheet(self, schedule: Schedule) -> Sheet:
        """How a rank's row about a step is laid out."""
        return Sheet(schedule, len(self.names), 0 if self.penalty is None else len(self.names))


@dataclass(frozen=True)
class Judged:
    """A step that all ranks have told of."""

    offer: Offer
    told: Told
    norm: Tensor | None = None
    factor: Tensor | None = None
    """What its gradients are multiplied by; None where the step is good as it was made."""
    skipped: bool = False
    """Whether it is left out."""
    error: PipelineError | None = None
    """Why it is a failure."""

    @property
    def step(self) -> int:
        """Its number."""
        return self.offer.step

    @property
    def intervenes(self) -> bool:
        """Whether it has to be made once more, or undone."""
        return self.factor is not None or self.skipped


def judge(terms: Terms, offer: Offer, told: Told) -> Judged:
    """Decide what becomes of a step, by what all ranks told of it: as clipping and checking before it would have."""
    assert offer.crew is not None
    losses, outcome, schedule = told.outcome.losses, told.outcome, offer.crew.schedule
    wrong = not_finite_values(losses, outcome.events, (), schedule) if terms.rules.check_finite else None
    if wrong is not None:
        cause = ArithmeticError(wrong.text)
        error = failure(f"rank {wrong.rank}", wrong.doing, cause, LEFT)
        error.__cause__ = cause
        return Judged(offer, told, error=error)
    said = penalty_not_finite(terms.names, told.outcome.penalties) if terms.rules.check_finite and terms.penalty else ""
    if said:
        text = f"{said}; {LEFT}; check_finite=False lets such penalties pass"
        return Judged(offer, told, error=PipelineError(text))
    if not terms.rules.need_norm:
        return Judged(offer, told)
    decision = terms.rules.decide(total_norm(told.norms, dtype=terms.norm_dtype))
    if decision.failed and decision.norm is not None:
        origin = first(outcome.events)
        where = "" if origin is None else f"; the first value that is not finite is {origin}"
        error = not_finite(offer.step, decision.norm, sum(losses) + outcome.penalty, where)
        return Judged(offer, told, decision.norm, error=error)
    return Judged(offer, told, decision.norm, decision.factor, skipped=decision.skipped)


def not_finite(step: int, norm: Tensor, loss: float, where: str = "") -> PipelineError:
    """The error of a step whose gradients are not finite numbers; `where` says where they began."""
    return PipelineError(
        f"{not_finite_text(step, norm.item(), loss)}{where}; {LEFT}; lower the learning rate, leave such steps out "
        "with skip_not_finite=True, or let them pass with check_finite=False"
    )


class Ground(Protocol):
    """What a rank asks of the world it lives in, from step to step."""

    def ahead(self, step: int) -> None:
        """Begin to find out what this step will do."""

    def offer(self, step: int) -> Offer:
        """What this step does; all ranks are offered the same."""

    def turn(self, offer: Offer) -> tuple[RankResult | None, RankFailure | None]:
        """Run this rank's program."""

    def stop(self, offer: Offer, failed: RankFailure) -> None:
        """Let no rank go on with this step, or with one after it."""

    def tell(self, offer: Offer, row: Floats, result: RankResult | None) -> None:
        """Tell all ranks a row of numbers about a step."""

    def hear(self, offer: Offer) -> Floats:
        """The rows of all ranks about a step, added up; waits for them."""

    def meet(self, offer: Offer) -> None:
        """Make sure that what ran before this has no part in what runs after it."""

    def drain(self, offer: Offer, error: BaseException) -> None:
        """After a failure in this step, take part in the next one as far as others rely on it."""

    def failure(self, offer: Offer, failed: RankFailure | None, culprit: int) -> BaseException:
        """The error that this rank raises for a step that failed."""


@dataclass
class Ran:
    """A step that this rank has run."""

    offer: Offer
    buffers: Taken
    """As they were before it."""
    result: RankResult | None
    failed: RankFailure | None


class Lane:
    """One rank in a run."""

    def __init__(self, rank: int, ground: Ground, terms: Terms, part: Part, own: Mapping[str, nn.Parameter]) -> None:
        """`part` is its optimizer, `own` its parameters by their names in the model."""
        self.rank, self.ground, self.terms = rank, ground, terms
        self._part, self._own = part, own
        self._snapshot = Snapshot(part)
        self._gradients = Gradients(list(own.values()))
        self._current: Ran | None = None
        """The step that is being made."""
        self._waiting: Ran | None = None
        """The step that is made, and not judged yet."""

    @property
    def bytes(self) -> int:
        """How much memory the way back takes."""
        taken = [ran.buffers for ran in (self._current, self._waiting) if ran is not None]
        buffers = sum(copy.nbytes for each in taken for _, _, _, copy in each)
        return self._snapshot.bytes + self._gradients.bytes + buffers

    def steps(self) -> Iterator[Judged]:
        """Run all steps; gives every one back when it is judged, before the next one's optimizer steps."""
        offer = self.ground.offer(self.terms.first)
        while offer.crew is not None:
            self.ground.ahead(offer.step + 1)
            ran = self._run(offer)
            if self._waiting is not None:
                judged = self._judged(self._waiting)
                if judged.intervenes:
                    self._undo(ran)
                    self._again(judged)
                yield judged
                if judged.intervenes:
                    ran = self._run(offer)
            if ran.failed is None:
                self._apply(ran, offer.crew)
            if ran.failed is not None:
                raise self._failure(ran, ran.failed)
            offer = self.ground.offer(offer.step + 1)
        if self._waiting is not None:
            judged = self._judged(self._waiting)
            if judged.intervenes:
                self._again(judged)
            yield judged
        if offer.error is not None:
            raise offer.error

    def _sheet(self, offer: Offer) -> Sheet:
        assert offer.crew is not None
        return self.terms.sheet(offer.crew.schedule)

    def _run(self, offer: Offer) -> Ran:
        assert offer.crew is not None
        self.terms.placed.start(self.rank)
        modules = self.terms.placed.modules[self.rank].values()
        ran = self._current = Ran(offer, [each for module in modules for each in all_buffers(module)], None, None)
        ran.result, ran.failed = self.ground.turn(offer)
        return ran

    def _apply(self, ran: Ran, crew: Executors) -> None:
        """Step this rank's optimizer, with the way back kept, and tell the others of the step."""
        executor = next(each for each in crew.executors if each.rank == self.rank)
        result, work, terms = ran.result, ran.offer.work, self.terms
        assert result is not None
        assert work is not None
        executor.progress.doing = "the step of its optimizer"
        try:
            gather(terms.placed, _nobody, True, self.rank)
            penalties = self._penalise(work.scale)
            found = {name: parameter.grad for name, parameter in self._own.items()}
            row = self._sheet(ran.offer).write(
                self.rank,
                outcome=np.concatenate([sums(crew.schedule, [result]), penalties]),
                norms=self._norms(found) if terms.rules.need_norm else None,
                metrics=metrics_of([result], work.weights),
            )
            self._snapshot.take()
            self._gradients.before()
            self._waiting, self._current = ran, None
            with plain_precision():
                self._part.step()
            self._gradients.after()
        except Exception as error:
            ran.failed = RankFailure(time.time(), executor.doing, error)
        else:
            executor.progress.doing = "after its last step"
            self.ground.tell(ran.offer, row, result)

    def _penalise(self, scale: float) -> Floats:
        """Add the gradients of the penalty on this rank's parameters; give back the penalties."""
        if self.terms.penalty is None:
            return np.zeros(0)
        terms = terms_of(self.terms.penalty, self._own.items(), self.terms.penalty_reads)
        add_gradients(terms, scale)
        return values_of(self.terms.names, terms, lambda name: True)

    def _norms(self, found: Mapping[str, Tensor | None]) -> Floats:
        with plain_precision():
            return norms_of(self.terms.names, found)

    def _judged(self, ran: Ran) -> Judged:
        told = self._sheet(ran.offer).read(self.ground.hear(ran.offer))
        if told.culprit is not None:
            raise self.ground.failure(ran.offer, None, told.culprit)
        judged = judge(self.terms, ran.offer, told)
        if judged.error is not None:
            raise judged.error
        return judged

    def _again(self, judged: Judged) -> None:
        """Go back to before a step of the optimizer, and make it as it should have been made."""
        self._snapshot.restore()
        if judged.factor is not None:
            self._gradients.put_back(judged.factor)
            with plain_precision():
                self._part.step()
            self._zero()
        self.ground.meet(judged.offer)

    def _failure(self, ran: Ran, failed: RankFailure) -> BaseException:
        """Tell all ranks of this one's failure, and learn whose came first."""
        self.ground.stop(ran.offer, failed)
        when = (0.0, failed.time) if isinstance(failed.error, PeerFailed) else (failed.time, 0.0)
        self.ground.tell(ran.offer, self._sheet(ran.offer).write(self.rank, failed=when), None)
        self.ground.drain(ran.offer, failed.error)
        culprit = self._sheet(ran.offer).read(self.ground.hear(ran.offer)).culprit
        assert culprit is not None
        return self.ground.failure(ran.offer, failed, culprit)

    # The way back.

    def _zero(self) -> None:
        for parameter in self._own.values():
            parameter.grad = None

    def _undo(self, ran: Ran) -> None:
        """Throw away what a step computed; no optimizer has seen it."""
        assert ran.offer.crew is not None
        for executor in ran.offer.crew.executors:
            if executor.rank == self.rank:
                executor.forget()
        self.terms.placed.start(self.rank)
        self._zero()
        put_back(ran.buffers)

    def unwind(self, delivered: int) -> None:
        """End the run: parameters, optimizer and buffers are as the step that was delivered last left them."""
        if self._current is not None:
            self._undo(self._current)
        waiting, self._waiting, self._current = self._waiting, None, None
        if waiting is not None and waiting.offer.step > delivered:
            self._snapshot.restore()
            put_back(waiting.buffers)
        self._zero()
        self._gradients.forget()
        self._snapshot = Snapshot(self._part)


def _nobody(tensor: Tensor, owner: int) -> None:
    """All uses of a parameter are on this rank."""
