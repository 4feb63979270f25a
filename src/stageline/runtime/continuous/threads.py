"""A run whose ranks are threads: a board on which they read and write what they tell each other."""

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
from stageline.distributed.thread_host import ThreadWorld
from stageline.faults.monitor.blame import EVERYONE
from stageline.faults.monitor.verdict import place
from stageline.runtime.continuous.rank_loop import LEFT, Judged, Lane, Offer, Terms, judge
from stageline.runtime.executor import Executor, Executors, RankResult
from stageline.runtime.step_report import times_of
from stageline.tensors.garbage import no_collections
from stageline.tensors.thread_context import Surroundings

Pull = Callable[[int], Offer]
"""Asks the caller's batches for the next one."""


class Closed(Exception):
    """The run is over for a rank: the caller left it, or a step failed."""


class Board:
    """What the ranks and the caller of a run share."""

    def __init__(self, world: ThreadWorld, ranks: int, first: int) -> None:
        """The first step may be made at once."""
        self.world, self.ranks = world, ranks
        self.changed = threading.Condition()
        self.offers: dict[int, Offer] = {}
        self.rows: dict[int, dict[int, Floats]] = {}
        self.results: dict[int, dict[int, RankResult]] = {}
        self.redone: dict[int, int] = {}
        self.permitted = first
        """The last step whose optimizers may step."""
        self.at: dict[int, tuple[int, Executor]] = {}
        """The step that each rank is in, and what runs it."""
        self.stopped: tuple[int, PeerFailed] | None = None
        """The earliest step that a failure was told of."""
        self.failures: dict[int, tuple[int, BaseException]] = {}
        """The step and the error of each rank that failed."""
        self.closed = False
        self.ended = 0
        """How many ranks are at their end."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so; whoever writes it down may fail, and then the board is closed."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.closed)
            if not ready():
                raise Closed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Change the board, and wake who reads it."""
        with self.changed:
            yield
            self.changed.notify_all()

    def stop(self, step: int, rank: int, error: BaseException, where: str) -> None:
        """Wake the ranks that are in this step or in one after it, and let none of them begin another action."""
        with self.writing():
            if self.stopped is None or step < self.stopped[0]:
                self.stopped = (step, PeerFailed(f"a rank stopped: {where}: {type(error).__name__}: {error}", rank))
            for at, executor in self.at.values():
                if at >= step:
                    executor.stopped = self.stopped[1]
        self.world.hub.set_failure(rank, error, where, step)

    def close(self, error: BaseException) -> None:
        """End the run on all ranks, wherever they are."""
        with self.writing():
            self.closed = True
        self.stop(-1, EVERYONE, error, "the run was ended")


class ThreadGround:
    """One rank's end of a board."""

    def __init__(self, board: Board, rank: int) -> None:
        """Of a rank."""
        self._board, self._rank = board, rank
        self._progress = board.world.progress(rank)

    def ahead(self, step: int) -> None:
        """The caller asks for batches by itself."""

    def offer(self, step: int) -> Offer:
        """Wait until the caller has asked for the batch: that may take as long as it takes."""
        self._board.wait(lambda: step in self._board.offers)
        return self._board.offers[step]

    def turn(self, offer: Offer) -> tuple[RankResult | None, RankFailure | None]:
        """Run the program, unless a step that failed before this one, or this one, is known."""
        board = self._board
        assert offer.crew is not None
        assert offer.work is not None
        executor = offer.crew.executors[self._rank]
        try:
            self._progress.doing, self._progress.waits = "before its first action", None
            with board.changed:
                stopped = board.stopped
                executor.stopped = stopped[1] if stopped is not None and stopped[0] <= offer.step else None
                board.at[self._rank] = (offer.step, executor)
            return executor.run(offer.work), None
        except BaseException as error:
            failed = RankFailure(time.time(), executor.doing, error)
            self.stop(offer, failed)
            if not isinstance(error, Exception):
                raise
            return None, failed

    def stop(self, offer: Offer, failed: RankFailure) -> None:
        """Wake those who wait for what will not come."""
        with self._board.changed:
            self._board.failures.setdefault(self._rank, (offer.step, failed.error))
        self._board.stop(offer.step, self._rank, failed.error, f"rank {self._rank} failed {place(failed.doing)}")

    def tell(self, offer: Offer, row: Floats, result: RankResult | None) -> None:
        """Write it down."""
        with self._board.writing():
            self._board.rows.setdefault(offer.step, {})[self._rank] = row
            if result is not None:
                self._board.results.setdefault(offer.step, {})[self._rank] = result

    def hear(self, offer: Offer) -> Floats:
        """Wait for all rows."""
        rows = self._board.rows
        failed = self._rank in self._board.failures
        if not failed:
            self._progress.waits = EVERYONE
        self._board.wait(lambda: len(rows.get(offer.step, ())) == self._board.ranks)
        if not failed:
            self._progress.waits = None
        found: Floats = np.stack(list(rows[offer.step].values())).sum(axis=0)
        return found

    def meet(self, offer: Offer) -> None:
        """Wait for all ranks; the last one forgets what was sent, and who failed, since."""
        board = self._board
        with board.writing():
            board.redone[offer.step] = board.redone.get(offer.step, 0) + 1
            if board.redone[offer.step] == board.ranks:
                board.world.hub.reset()
                board.stopped = None
                board.failures.clear()
        board.wait(lambda: board.redone[offer.step] >= board.ranks)

    def drain(self, offer: Offer, error: BaseException) -> None:
        """What is left of a step is forgotten with the board."""

    def failure(self, offer: Offer, failed: RankFailure | None, culprit: int) -> BaseException:
        """The caller raises the error; this rank just ends."""
        return Closed()


class ThreadRun:
    """The run as the caller sees it: starts the ranks, feeds them, and is told of every step that is judged."""

    def __init__(
        self,
        world: ThreadWorld,
        terms: Terms,
        make: Callable[[int, ThreadGround], Lane],
        pull: Pull,
        started: Callable[[], None],
    ) -> None:
        """`make` gives a rank its lane; `started` is called on its thread before anything else."""
        self._started = started
        self._world, self._terms, self._pull = world, terms, pull
        self._board = Board(world, len(world.here), terms.first)
        self.lanes = [make(rank, ThreadGround(self._board, rank)) for rank in world.here]
        self._delivered = terms.first - 1
        self._threads: list[threading.Thread] = []

    def steps(self) -> Iterator[tuple[Judged, Callable[[], Floats]]]:
        """Every step when it is judged, and what gives the times of its actions."""
        board = self._board
        self._world.hub.reset()
        self._world.begin()
        try:
            offer = self._pull(self._terms.first)
            board.offers[offer.step] = replace(offer, error=None)
            self._start()
            while offer.crew is not None:
                coming = self._pull(offer.step + 1)
                with board.writing():
                    board.offers[coming.step] = replace(coming, error=None)  # it is raised once, here
                judged = self._judged(offer)
                self._delivered = judged.step
                yield judged, self._times(offer.crew, board.results.pop(offer.step))
                with board.writing():
                    board.permitted += 1
                    for known in (board.rows, board.offers, board.redone):
                        known.pop(offer.step - 1, None)  # all ranks have read it
                offer = coming
            if offer.error is not None:
                raise offer.error
        except BaseException as error:
            board.close(error)
            raise
        finally:
            self._end()

    def _start(self) -> None:
        around = Surroundings()
        for lane in self.lanes:
            target = self._drive(lane, around)
            name = f"stageline rank {lane.rank}"
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _drive(self, lane: Lane, around: Surroundings) -> Callable[[], None]:
        board = self._board

        def drive() -> None:
            self._started()
            for judged in lane.steps():
                board.wait(lambda step=judged.step: board.permitted > step)  # type: ignore[misc]

        def run() -> None:
            try:
                around.run(drive)
            except Closed:
                pass
            except BaseException as error:  # all ranks raise it, or it is none of a step's: either way the run is over
                with board.writing():
                    board.failures.setdefault(lane.rank, (lane.terms.first, error))
                board.close(error)
            finally:
                with board.writing():
                    board.ended += 1

        return run

    def _judged(self, offer: Offer) -> Judged:
        """Wait until all ranks have told of a step and, where it was made once more, have made it."""
        board, rows = self._board, self._board.rows
        assert offer.crew is not None
        with no_collections(), board.changed:
            board.changed.wait_for(
                lambda: len(rows.get(offer.step, ())) == board.ranks or board.ended == board.ranks or board.closed
            )
            found = list(rows.get(offer.step, {}).values())
        if len(found) == board.ranks:
            told = self._terms.sheet(offer.crew.schedule).read(np.stack(found).sum(axis=0))
            if told.culprit is None:
                judged = judge(self._terms, offer, told)
                if judged.error is not None:
                    raise judged.error
                if judged.intervenes:
                    try:
                        board.wait(lambda: board.redone.get(offer.step, 0) == board.ranks)
                    except Closed:  # a rank was interrupted meanwhile
                        raise self._failure(offer.crew) from None
                return judged
        raise self._failure(offer.crew)

    def _failure(self, crew: Executors) -> BaseException:
        """What came first: of the earliest step, a cause before what follows from it."""
        for thread in self._threads:
            thread.join()
        failures = self._board.failures
        earliest = min(step for step, _ in failures.values())
        first = {rank: error for rank, (step, error) in failures.items() if step == earliest}
        return self._world.failed(crew, first, LEFT)

    @staticmethod
    def _times(crew: Executors, results: Mapping[int, RankResult]) -> Callable[[], Floats]:
        found = [results[rank] for rank in sorted(results)]
        return lambda: times_of(crew, found, None).reshape(-1)

    def _end(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for lane in self.lanes:
            lane.unwind(self._delivered)
        self._world.hub.reset()
        self._world.end()
