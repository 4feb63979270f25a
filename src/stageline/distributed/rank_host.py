"""Where the ranks live: all as threads of this process, or this process as one rank among others.

The pipeline asks its world the few things that differ: which ranks are here, how they run, and how what each of them
knows becomes known to all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import PeerFailed, PipelineError, StagelineError
from stageline.distributed.layout import Layout
from stageline.faults.flight_recorder import Flight
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.verdict import Failure, Verdict, describe, place
from stageline.faults.progress import Notes, Progress, busy
from stageline.runtime.executor import Executor, RankResult, Work
from stageline.runtime.guards.changed_outputs import Change, ChangedOutput, origin_of
from stageline.schedules.schedule import Schedule
from stageline.tensors.thread_context import Surroundings
from stageline.transport.clock_alignment import Alignment
from stageline.transport.protocol import Transport
from stageline.transport.threads import ThreadHub

if TYPE_CHECKING:
    from stageline.distributed.collectives import Column
    from stageline.runtime.grad_reduce import Reducer

Floats = NDArray[np.float64]
SumUp = Callable[[list[RankResult]], Floats]
"""What a process knows at the end of a step, as numbers that are added up over all of them."""
Failed = tuple[float, str, BaseException]
"""When a rank failed, in what, and by which error."""


@dataclass(frozen=True)
class Crew:
    """A schedule, and what runs it on the ranks that are here."""

    schedule: Schedule
    executors: list[Executor]


class World(Protocol):
    """What a pipeline needs to know of where its ranks live."""

    here: list[int]
    """The ranks of this process."""
    layout: Layout
    """Which process is which rank of which replica."""
    replica: int
    """The replica that this process is in."""
    column: Column | None
    """This rank in all replicas; None where there is but one."""
    clocks: Alignment | None
    """How far the clocks of the ranks of this replica are apart; None where that is not known."""

    def transport(self, rank: int) -> Transport:
        """The end of a rank that is here."""

    def progress(self, rank: int) -> Progress:
        """Where a rank that is here says what it is doing."""

    def flight(self, rank: int) -> Flight:
        """Where it notes what it did."""

    def begin(self) -> None:
        """Begin a step, on all ranks alike."""

    def announce(self, row: Floats) -> Callable[[], Floats]:
        """Tell all ranks a row of numbers, without waiting; when called, give back all, by replica and rank."""

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
        """Run one step of the ranks that are here, and add up what each process knows, `size` numbers, over a replica.

        Comes back when all ranks of all replicas have finished. With `refused`, this process takes part only to say why
        it cannot. `reducer` adds up gradients over replicas meanwhile.
        """

    def later(self, values: Callable[[], Floats]) -> Callable[[], Floats]:
        """Add up over all processes as `add_up` does, without waiting; when called, give back the sum."""

    def end(self) -> None:
        """End a step, failed or not."""

    def abandon(self, error: BaseException) -> None:
        """Leave a step for good, for something that is no failure of it, such as Ctrl-C."""

    def add_up(self, values: Floats) -> Floats:
        """Add arrays of equal length over all processes; each value is known to one of them and 0 in the others."""

    def agree(self, facts: dict[str, str]) -> None:
        """Make sure that all processes have the same facts, or name the first that differs."""

    def share(self, tensor: Tensor, owner: int) -> None:
        """Give all processes the tensor of the rank that owns it."""

    def tell(self, text: str, owner: int) -> str:
        """Give all processes the text of a rank."""

    def tell_all(self, text: str, process: int) -> str:
        """Give the processes of all replicas the text of one."""


GRADIENTS = "no parameter was changed, and gradients may hold part of this step: call zero_grad() before the next one"


def failure(who: str, doing: str, error: BaseException, left: str = GRADIENTS) -> PipelineError:
    """The one error that a failed step raises; `left` is what it left behind."""
    return PipelineError(f"{who} failed {place(doing)}: {type(error).__name__}: {error}; {left}")


def changed(who: str, change: Change, failed: str, said: str, left: str) -> PipelineError:
    """The error of a step in which one stage changed what it passes on, and another one failed on it."""
    return failure(who, describe(change.place), ChangedOutput(f"{change}; {failed} failed on it: {said}"), left)


def note_record(error: PipelineError, paths: Sequence[Path | None]) -> None:
    """Say with an error where the flight records are."""
    found = sorted(path for path in paths if path is not None)
    if found:
        more = f" and {len(found) - 1} more beside it" if len(found) > 1 else ""
        error.add_note(
            f"the last actions and messages of the ranks are in {found[0]}{more}: stageline doctor {found[0].parent}"
        )


def note_aside(error: PipelineError, verdict: Verdict) -> None:
    """Say with the error of a layer that did not find something why it may not be there on this rank.

    >>> error = PipelineError("rank 1 failed")
    >>> note_aside(error, Verdict(1, "raised", text="KeyError: 'mask'", action="F", stage=2))
    >>> print(error.__notes__[0])
    not all stages before stage 2 run in its process: what their layers or hooks leave beside their outputs, in a global
    or on a module, does not travel between ranks; if it looked for such a value, pass that on among inputs and outputs
    """
    kind, _, said = verdict.text.partition(":")
    missing = kind in ("KeyError", "AttributeError") or (kind == "IndexError" and ("list" in said or "deque" in said))
    if missing and verdict.action == "F" and verdict.stage:
        error.add_note(
            f"not all stages before stage {verdict.stage} run in its process: what their layers or hooks leave beside "
            "their outputs, in a global or on a module, does not travel between ranks; if it looked for such a value, "
            "pass that on among inputs and outputs"
        )


class ThreadWorld:
    """All ranks are threads of this process."""

    def __init__(self, ranks: int) -> None:
        """Start with empty channels."""
        self.here = list(range(ranks))
        self.layout, self.replica = Layout.even(ranks), 0
        self.column: Column | None = None
        self.clocks: Alignment | None = Alignment((0.0,) * ranks, (0.0,) * ranks, 0.0)
        self.hub = ThreadHub(ranks)
        self._progress = {rank: Notes() for rank in self.here}
        self._flights = {rank: Flight(rank, ranks) for rank in self.here}
        self.hub.patience = self._busy

    def _busy(self, rank: int) -> bool:
        """Whether there is reason to go on waiting for a rank; one that takes a message just now seems to wait too."""
        done = [notes.done for notes in self._progress.values()]
        if busy(rank, self._progress):
            return True
        time.sleep(0.2)
        return busy(rank, self._progress) or done != [notes.done for notes in self._progress.values()]

    def transport(self, rank: int) -> Transport:
        """The end of a rank."""
        return self.hub.end(rank)

    def progress(self, rank: int) -> Progress:
        """Where a rank says what it is doing."""
        return self._progress[rank]

    def flight(self, rank: int) -> Flight:
        """Where it notes what it did."""
        return self._flights[rank]

    def begin(self) -> None:
        """All ranks are here."""

    def announce(self, row: Floats) -> Callable[[], Floats]:
        """All is known here already."""
        return lambda: row.reshape(1, 1, -1)

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
        """Let every rank run its program on a thread of its own; the first failure stops all."""
        if refused is not None or work is None:
            raise refused or StagelineError("there is nothing to run")
        self.hub.reset()
        results: dict[int, RankResult] = {}
        failures: dict[int, BaseException] = {}
        around = Surroundings()

        def run(executor: Executor) -> None:
            try:
                results[executor.rank] = around.run(lambda: executor.run(work, deadline))
                executor.progress.doing = None
            except BaseException as error:
                failures[executor.rank] = error
                self._tell(crew, executor.rank, error, f"rank {executor.rank} failed {place(executor.doing)}")

        for executor in crew.executors:
            executor.stopped = None
            executor.progress.doing, executor.progress.waits = "before its first action", None
        if len(crew.executors) == 1:
            run(crew.executors[0])  # a single rank needs no thread; on a GPU, a fresh thread is a third slower
        else:
            self._on_threads(crew, run)
        if failures:
            raise self.failed(crew, failures)
        found = [results[rank] for rank in self.here]
        return found, sum_up(found)

    def _tell(self, crew: Crew, rank: int, error: BaseException, where: str) -> None:
        """Wake all ranks, and let none begin another action."""
        for each in crew.executors:
            each.stopped = each.stopped or PeerFailed(f"rank {each.rank} stopped: {where}", rank)
        self.hub.set_failure(rank, error, where)

    def _on_threads(self, crew: Crew, run: Callable[[Executor], None]) -> None:
        threads = [
            threading.Thread(target=run, args=(executor,), name=f"stageline rank {executor.rank}", daemon=True)
            for executor in crew.executors
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # a KeyboardInterrupt comes to this thread, and the ranks must hear of it
            self._tell(crew, EVERYONE, error, "the step was interrupted")
            for thread in threads:
                if thread in threading.enumerate():  # also one that an interrupt came upon while it was being started
                    thread.join()
            for each in crew.executors:
                each.forget()
            raise

    @staticmethod
    def failed(crew: Crew, failures: Mapping[int, BaseException], left: str = GRADIENTS) -> BaseException:
        """The failure that came first, after everything is put away."""
        own = [rank for rank, error in failures.items() if not isinstance(error, PeerFailed)]
        origin = (own or sorted(failures))[0]
        first, executor = failures[origin], crew.executors[origin]
        told = Failure.of(first, executor.progress.doing)
        verdict = Verdict(
            origin, "raised", doing=told.doing, text=told.text, traceback=told.traceback, final=False,
            action=told.action, stage=told.stage, microbatch=told.microbatch,
        )  # fmt: skip
        error = failure(f"rank {origin}", executor.doing, first, left)
        changes = [change for each in crew.executors for change in each.outputs.changes]
        change = origin_of(first, executor.step, told.stage, told.microbatch, changes) if told.action == "F" else None
        if change is not None:
            blamed = crew.schedule.placement.rank_of(change.stage, change.microbatch)
            error = changed(f"rank {blamed}", change, f"stage {told.stage} on rank {origin}", told.text, left)
            verdict = replace(verdict, culprit=blamed, stage=change.stage, doing=describe(change.place))
        note_record(error, [each.record(verdict) for each in crew.executors])
        for each in crew.executors:
            each.forget()
        if not isinstance(first, Exception):
            return first  # a KeyboardInterrupt stays what it is
        error.__cause__ = first
        return error

    def later(self, values: Callable[[], Floats]) -> Callable[[], Floats]:
        """All is known here already, and is asked for when it is wanted."""
        return values

    def abandon(self, error: BaseException) -> None:
        """All ranks are here, and have been stopped."""

    def end(self) -> None:
        """Nobody is doing anything."""
        for notes in self._progress.values():
            notes.doing = notes.waits = None

    def add_up(self, values: Floats) -> Floats:
        """All is known here already."""
        return values

    def agree(self, facts: dict[str, str]) -> None:
        """One process agrees with itself."""

    def share(self, tensor: Tensor, owner: int) -> None:
        """All is here already."""

    def tell(self, text: str, owner: int) -> str:
        """All is known here already."""
        return text

    def tell_all(self, text: str, process: int) -> str:
        """All is known here already."""
        return text
