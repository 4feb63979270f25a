"""What a process raises, tells and writes when a rank of its job fails or is lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from stageline.common.errors import PeerFailed, PipelineError
from stageline.distributed.bootstrap import BLAME
from stageline.distributed.failures import GRADIENTS, note_record
from stageline.distributed.layout import Layout
from stageline.distributed.process_exit import close_at_exit
from stageline.distributed.process_groups import Groups
from stageline.distributed.rank_host import RankRunner
from stageline.faults.flight_recorder import FlightRecorder, worth_writing
from stageline.faults.monitor.verdict import Failure, Verdict
from stageline.transport.protocol import ProcessTransport


class JobFailures:
    """The failures of one pipeline's ranks, as one process learns of them."""

    latest: ClassVar[Callable[[], JobFailures | None]] = lambda: None
    """Of several pipelines, the one that was made or began a step last: it writes the record when the job ends."""

    def __init__(self, groups: Groups, layout: Layout, transport: ProcessTransport) -> None:
        self.control = groups.monitor
        self.flight = FlightRecorder(transport.rank, transport.ranks, self.control.job)
        self.running: RankRunner | None = None
        """What runs the current step on this rank."""
        self.lost = ""
        """Why this pipeline cannot continue; empty while it can."""
        self._groups, self._layout, self._transport = groups, layout, transport
        self._left = False
        self.control.on_verdict(self.hear)
        self.control.on_end(self._last_words)
        self.reference = JobFailures.latest = weakref.ref(self)

    def _last_words(self, verdict: Verdict | None) -> None:
        if JobFailures.latest() is self:
            self.record(verdict)

    def named(self, verdict: Verdict) -> Verdict:
        """The verdict with the replica of the rank that failed, if there are several."""
        several = self._layout.replicas > 1
        return replace(verdict, replica=self._layout.place(verdict.culprit)[0]) if several else verdict

    def blamed(self) -> Verdict | None:
        """Which rank failed first; waits briefly until that is known."""
        verdict = self.control.blame(BLAME)
        return None if verdict is None else self.named(verdict)

    def hear(self, verdict: Verdict) -> None:
        """Wake this rank if it waits for a message that will never arrive, and let it start no other action."""
        verdict = self.named(verdict)
        if verdict.final or verdict.round == self.control.round:
            if self.running is not None:
                self.running.stopped = PeerFailed(f"rank {self.control.rank} stopped: {verdict}", verdict.culprit)
            self._transport.interrupt(verdict.culprit, str(verdict), final=verdict.final)

    def check(self, verdict: Verdict | None) -> None:
        """Raise if the job lost a rank."""
        if verdict is not None and verdict.final:
            raise self.over(self.named(verdict))

    def over(self, verdict: Verdict) -> PipelineError:
        """The error of a job that lost a rank."""
        self.lost = str(verdict)
        error = PipelineError(f"{verdict}; {GRADIENTS.split(':')[0]}; this job cannot continue: restart it")
        if verdict.traceback:
            error.add_note(f"on rank {verdict.culprit}:\n{verdict.traceback}")
        note_record(error, [self.record(verdict)])
        self.leave()
        return error

    def lose(self, text: str) -> PipelineError:
        """The error of a pipeline that cannot continue; tells the other ranks, which may wait for this one."""
        verdict = self.blamed()
        if verdict is not None and verdict.final:
            return self.over(verdict)
        self.lost = self._groups.lost() or (text if verdict is None else f"{verdict} ({text})")
        self._groups.lose(self.lost)
        error = PipelineError(
            f"{self.lost}; no parameter was changed, and this pipeline cannot continue: restart the processes, or, if "
            "all of them are alive, create a new Pipeline in each"
        )
        if verdict is not None and verdict.traceback and verdict.culprit != self.control.rank:
            error.add_note(f"on rank {verdict.culprit}:\n{verdict.traceback}")
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
