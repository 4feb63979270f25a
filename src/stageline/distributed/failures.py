"""Failures of steps and of jobs: the error that all ranks raise, and what a process reports and writes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from stageline.common.errors import PeerFailed, PipelineError, StagelineError, TransportError
from stageline.distributed.attempts import number_of
from stageline.distributed.peer_connections import PeerConnections
from stageline.distributed.process_exit import close_at_exit
from stageline.faults.flight_recorder import FlightRecorder, worth_writing
from stageline.faults.monitor.verdict import Failure, Verdict, describe, place_in_words

if TYPE_CHECKING:
    from stageline.distributed.layout import Layout
    from stageline.distributed.process_groups import Groups
    from stageline.distributed.rank_host import RankRunner
    from stageline.transport.protocol import ProcessTransport

GRADIENTS = "no parameter was changed, and gradients may hold part of this step: call zero_grad() before the next one"
BLAME = 2.0
"""Seconds that a rank which failed waits to learn who failed first."""
_ABOUT_FORM = re.compile(r"dtype|scalar type|shape|size|dimension|channels|same type|Expected", re.IGNORECASE)


class RankFailure(NamedTuple):
    """The failure of one rank in a step."""

    time: float
    """Seconds since the epoch."""
    doing: str
    error: BaseException


class Change(NamedTuple):
    """An output whose form differs from the stage's earlier outputs."""

    step: int
    microbatch: int
    stage: int
    before: str
    now: str
    of_structure: bool = False
    """Whether the number of values or their containers changed, and not only the form of a tensor."""

    @property
    def place(self) -> tuple[str, int, int]:
        """The action that passed it on."""
        return "F", self.stage, self.microbatch

    def __str__(self) -> str:
        return (
            f"stage {self.stage} returned {self.now} for microbatch {self.microbatch} of step {self.step}, but "
            f"returned {self.before} before"
        )


class ChangedOutput(TypeError):
    """A stage passed on an output of a new form, and another stage failed on it."""


class OutOfMemory(PipelineError, torch.OutOfMemoryError):
    """A step that failed because memory did not suffice; `except torch.OutOfMemoryError` catches it, too.

    >>> error = OutOfMemory("rank 1 failed", action="F", stage=2, microbatch=5, planned=2**30, allocated=2**31)
    >>> isinstance(error, torch.cuda.OutOfMemoryError), error.stage, error.allocated
    (True, 2, 2147483648)
    """

    def __init__(
        self,
        message: str,
        *,
        action: str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        planned: float | None = None,
        allocated: int | None = None,
    ) -> None:
        """`action` is its letter; `planned` and `allocated` are bytes of the rank, None if they are not known."""
        super().__init__(message)
        self.action, self.stage, self.microbatch = action, stage, microbatch
        self.planned, self.allocated = planned, allocated

    def facts(self) -> dict[str, Any]:
        """The arguments beside the message, for another process."""
        names = ("action", "stage", "microbatch", "planned", "allocated")
        return {name: getattr(self, name) for name in names}


def failure(who: str, doing: str, error: BaseException, left: str = GRADIENTS) -> PipelineError:
    """The one error that a failed step raises; `left` says what the step left behind."""
    text = f"{who} failed {place_in_words(doing)}: {type(error).__name__}: {error}; {left}"
    return OutOfMemory(text, **error.facts()) if isinstance(error, OutOfMemory) else PipelineError(text)


def changed_output(who: str, change: Change, failed: str, text: str, left: str) -> PipelineError:
    """The error of a step in which one stage changed the form of its output, and another one failed on it."""
    return failure(who, describe(change.place), ChangedOutput(f"{change}; {failed} failed on it: {text}"), left)


def note_record(error: PipelineError, paths: Sequence[Path | None]) -> None:
    """Add a note to an error that says where the flight records are."""
    records = sorted(path for path in paths if path is not None)
    if records:
        more = f" and {len(records) - 1} more beside it" if len(records) > 1 else ""
        error.add_note(
            f"the last actions and messages of the ranks are in {records[0]}{more}: stageline doctor "
            f"{records[0].parent}"
        )


def note_missing_value(error: PipelineError, verdict: Verdict) -> None:
    """Add a note to the error of a layer that misses a value: it may be on another rank.

    >>> error = PipelineError("rank 1 failed")
    >>> note_missing_value(error, Verdict(1, "raised", text="KeyError: 'mask'", action="F", stage=2))
    >>> print(error.__notes__[0])
    not all stages before stage 2 run in its process: values that layers or hooks store in a global or on a module,
    outside their outputs, are not sent between ranks; if the missing value is one of these, pass it through inputs and
    outputs
    """
    kind, _, text = verdict.text.partition(":")
    missing = kind in ("KeyError", "AttributeError") or (kind == "IndexError" and ("list" in text or "deque" in text))
    if missing and verdict.action == "F" and verdict.stage:
        error.add_note(
            f"not all stages before stage {verdict.stage} run in its process: values that layers or hooks store in a "
            "global or on a module, outside their outputs, are not sent between ranks; if the missing value is one "
            "of these, pass it through inputs and outputs"
        )


def may_follow_change(error: BaseException) -> tuple[bool, bool]:
    """Whether an error may come from a tensor whose dtype or shape changed, and whether from a changed container.

    >>> may_follow_change(RuntimeError("mat1 and mat2 must have the same dtype")), may_follow_change(KeyError("mask"))
    ((True, False), (False, True))
    """
    of_form = isinstance(error, RuntimeError | ValueError | TypeError) and bool(_ABOUT_FORM.search(str(error)))
    of_form = of_form and not isinstance(error, torch.OutOfMemoryError)
    of_structure = isinstance(error, TypeError | AttributeError | LookupError | ValueError)
    return of_form, of_structure and not isinstance(error, StagelineError)


def first_change(
    step: int, cause: Failure | Verdict, changes: Iterable[Change], kinds: Sequence[bool]
) -> Change | None:
    """The changed output that explains a failure: of the first stage before it, for the same microbatch.

    `kinds` is what `may_follow_change` returned for the error.
    """
    of_form, of_structure = kinds
    earlier = [
        change
        for change in changes
        if (change.step, change.microbatch) == (step, cause.microbatch)
        and cause.stage is not None
        and change.stage < cause.stage
        and (of_form or (of_structure and change.of_structure))
    ]
    return min(earlier, key=lambda change: change.stage, default=None)


class JobFailures:
    """The failures of one pipeline's ranks, as one process learns of them."""

    latest: ClassVar[Callable[[], JobFailures | None]] = lambda: None
    """Of several pipelines, the one that was made or began a step last: it writes the record when the job ends."""

    def __init__(self, groups: Groups, layout: Layout, transport: ProcessTransport) -> None:
        self.control = groups.monitor
        self.flight = FlightRecorder(transport.rank, transport.ranks, self.control.job)
        self._name = layout.place_name
        self.running: RankRunner | None = None
        """What runs the current step on this rank."""
        self.acting: int | None = None
        """The native number of the thread that runs the actions of a step; None outside of them."""
        self.peers = PeerConnections()
        """Over which layers run collectives themselves."""
        self.lost = ""
        """Why this pipeline cannot continue; empty while it can."""
        self._groups, self._layout, self._transport = groups, layout, transport
        self._left = False
        self.control.on_verdict(self.hear)
        self.control.on_end(self._last_words)
        self.reference = JobFailures.latest = weakref.ref(self)
        if layout.by_place:
            self.control.name_of = layout.name

    def _last_words(self, verdict: Verdict | None) -> None:
        if JobFailures.latest() is self:
            self.record(verdict)

    def named(self, verdict: Verdict) -> Verdict:
        """The verdict with the replica of the rank that failed, if there are several."""
        several = self._layout.replicas > 1
        if self._layout.by_place:
            return replace(verdict, name=self._layout.name(verdict.culprit))
        return replace(verdict, replica=self._layout.place(verdict.culprit)[0]) if several else verdict

    def blamed(self, patience: float = BLAME) -> Verdict | None:
        """Which rank failed first; waits a while until that is known."""
        verdict = self.control.blame(patience)
        return None if verdict is None else self.named(verdict)

    def hear(self, verdict: Verdict) -> None:
        """Wake this rank if it waits for a message that will never arrive, and let it start no other action."""
        verdict = self.named(verdict)
        if verdict.final or verdict.round == self.control.round:
            if self.running is not None:
                self.running.stopped = PeerFailed(
                    f"{self._name(self.control.rank)} stopped: {verdict}", verdict.culprit
                )
            self._transport.interrupt(verdict.culprit, str(verdict), final=verdict.final)
        if verdict.final:
            self._groups.abort()
            self.peers.shut_down_soon()
        elif self.acting is not None and verdict.culprit != self.control.rank:
            self.peers.shut_down_if_blocked(self.acting, self._acts)

    def _acts(self) -> bool:
        """Whether an action is running that does not wait for a message."""
        return self.acting is not None and self.control.waits is None

    def check(self, verdict: Verdict | None) -> None:
        """Raise if the job lost a rank."""
        if verdict is not None and verdict.final:
            raise self.over(self.named(verdict))

    def over(self, verdict: Verdict) -> PipelineError:
        """The error of a job that lost a rank."""
        self.lost = str(verdict)
        remedy = (
            "; restart it" if number_of() is None else " without it; pass this error to sl.rejoin, or restart the job"
        )
        error = PipelineError(f"{verdict}; {GRADIENTS.split(':')[0]}; this job cannot continue{remedy}")
        if verdict.traceback:
            error.add_note(f"on {self._name(verdict.culprit)}:\n{verdict.traceback}")
        note_record(error, [self.record(verdict)])
        self.leave()
        return error

    def lose(self, text: str) -> PipelineError:
        """The error of a pipeline that cannot continue; tells the other ranks, which may wait for this one."""
        if not self.lost:  # the monitor names whoever stays silent, by the deadline at the latest
            self.control.report(Failure.of(TransportError(text), self.control.doing, secondary=True))
        verdict = self.blamed(BLAME if self.lost else self.control.deadline + BLAME)
        if verdict is not None and verdict.final:
            return self.over(verdict)
        if verdict is not None and verdict.culprit == self.control.rank and text in verdict.text:
            verdict = None  # its own report, and nobody else is to blame
        self.lost = self._groups.lost() or (text if verdict is None else f"{verdict} ({text})")
        self._groups.lose(self.lost)
        error = PipelineError(
            f"{self.lost}; no parameter was changed, and this pipeline cannot continue; restart the processes or, if "
            "all of them are alive, create a new Pipeline in each"
        )
        if verdict is not None and verdict.traceback and verdict.culprit != self.control.rank:
            error.add_note(f"on {self._name(verdict.culprit)}:\n{verdict.traceback}")
        note_record(error, [self.record(verdict)])
        return error

    def abandon(self, error: BaseException) -> None:
        """Leave a step permanently, as after Ctrl-C, and tell the ranks that would wait for this one."""
        if not self._left:
            self.control.report(replace(Failure.of(error, self.control.doing), final=True))
            self.leave()

    def leave(self) -> None:
        """End the threads: one that returns from native code while Python exits would take the process down."""
        if not self._left:
            self._left = True
            self._groups.abort()
            self._transport.close()
            close_at_exit(partial(self._transport.close, 1.0))
            self._groups.keep()

    def record(self, verdict: Verdict | None) -> Path | None:
        """Write the flight record, even if the step has not reached its first action."""
        control = self.control
        if self.running is not None:
            return self.running.record(verdict, control.lost)
        if not worth_writing(verdict):
            return None
        try:
            return self.flight.write(verdict=verdict, doing=control.doing, waits=control.waits, lost=control.lost)
        except OSError:
            return None
