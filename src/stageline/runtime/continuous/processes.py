"""A run whose ranks are processes: what they tell each other travels while they go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from stageline.common.errors import PeerFailed, PipelineError, StagelineError
from stageline.distributed.failures import RankFailure
from stageline.distributed.process_host import ProcessWorld
from stageline.distributed.rank_host import Floats, HostedStep
from stageline.runtime.continuous.rank_loop import LEFT, Judged, Lane, Offer, Terms
from stageline.runtime.executor import RankResult
from stageline.runtime.microbatches import NAMES, Given, disagreement
from stageline.runtime.step import FEW
from stageline.runtime.step_report import times_of
from stageline.tensors.garbage import no_collections

ENDED, REFUSED = len(NAMES), len(NAMES) + 1
"""Columns of what a process tells of its next batch, after those of the batch."""
COLUMNS = list(range(len(NAMES)))


class Pulled(NamedTuple):
    """What the batches of this process gave for a step."""

    batch: Any = None
    given: Given = Given(None, np.zeros(len(NAMES)))
    ended: bool = False
    error: BaseException | None = None


Pull = Callable[[], Pulled]
Plan = Callable[[int, Any, int], Offer]
"""From the number of a step, a batch and how many samples it has, to what the step does."""


class ProcessGround:
    """This process's end."""

    def __init__(self, world: ProcessWorld, pull: Pull, plan: Plan, needs: Mapping[int, set[int]]) -> None:
        """Of a world of processes, which has one replica; `needs` says which ranks read the inputs and the targets."""
        self._world, self._pull, self._plan = world, pull, plan
        self._needs = needs
        self._rank = world.here[0]
        self._coming: dict[int, tuple[Pulled, Callable[[], Floats]]] = {}
        """Of the batches to come: what this process has, and what all of them tell."""
        self._told: dict[int, Callable[[], Floats]] = {}
        self.times: dict[int, Callable[[], Floats]] = {}

    # Batches.

    def ahead(self, step: int) -> None:
        """Ask for the batch of this step, and tell all ranks of it."""
        self._announce(step, self._pull())

    def _announce(self, step: int, pulled: Pulled) -> None:
        row = np.concatenate([pulled.given.row, [float(pulled.ended), float(pulled.error is not None)]])
        self._coming[step] = (pulled, self._world.all_gather_async(row))

    def offer(self, step: int) -> Offer:
        """What all ranks were given, one step ago, for this one."""
        if step not in self._coming:
            self.ahead(step)
        pulled, heard = self._coming.pop(step)
        rows = heard()[0]
        names = self._world.layout.rows[0]
        if rows[:, REFUSED].any():
            culprit = names[int(np.argmax(rows[:, REFUSED]))]
            said = self._world.broadcast_to_all(f"{type(pulled.error).__name__}: {pulled.error}", culprit)
            told = PipelineError(f"the batches of {self._world.layout.name(culprit)} failed at step {step}: {said}")
            return Offer(step, error=pulled.error or told)
        ended = rows[:, ENDED] > 0
        if ended.all():
            return Offer(step)
        if ended.any():
            short, long = names[int(np.argmax(ended))], names[int(np.argmin(ended))]
            text = f"rank {short} has no batch for step {step}, and rank {long} has one: give all as many"
            return Offer(step, error=PipelineError(text))
        apart = disagreement(rows, COLUMNS, self._needs)
        if apart:
            return Offer(step, error=PipelineError(apart))
        return self._plan(step, pulled.batch, int(rows[:, 0].max()))

    # A step.

    def turn(self, offer: Offer) -> tuple[RankResult | None, RankFailure | None]:
        """Run the program; a rank that others wait for still sends what they wait for, or that it cannot."""
        assert offer.crew is not None
        self._world.begin()
        with no_collections():
            results, _, failed = self._world.run_rank(HostedStep(offer.crew, offer.work, offer.refused))
        return (results[0] if results else None), failed

    def stop(self, offer: Offer, failed: RankFailure) -> None:
        """The others hear of it by what they wait for."""

    def tell(self, offer: Offer, row: Floats, result: RankResult | None) -> None:
        """Add it up over all ranks, without waiting, with the times of all actions."""
        assert offer.crew is not None
        crew, size = offer.crew, len(row)
        times = np.zeros(3 * crew.schedule.num_actions)
        if result is not None:
            times = times_of(crew, [result], self._world.clocks).reshape(-1)
        if times.size * crew.schedule.ranks > FEW:  # what the next step depends on is not to wait for them
            self._told[offer.step] = self._world.all_reduce_async(lambda: row)
            self.times[offer.step] = self._world.all_reduce_async(lambda: times)
            return
        heard = cache(self._world.all_reduce_async(lambda: np.concatenate([row, times])))
        self._told[offer.step] = lambda: heard()[:size]
        self.times[offer.step] = lambda: heard()[size:]

    def hear(self, offer: Offer) -> Floats:
        """What all ranks told."""
        return self._told.pop(offer.step)()

    def meet(self, offer: Offer) -> None:
        """Messages tell their turn, so none is taken for another."""

    def drain(self, offer: Offer, error: BaseException) -> None:
        """Others may be in the next step already: tell them in its turn that this rank has nothing to send."""
        coming = self.offer(offer.step + 1)
        if coming.crew is not None:
            self._announce(coming.step + 1, Pulled(ended=True))
            stopped = PeerFailed(f"step {offer.step} failed: {error}", self._world.process)
            self.turn(Offer(coming.step, coming.crew, refused=stopped))

    def failure(self, offer: Offer, failed: RankFailure | None, culprit: int) -> BaseException:
        """All ranks raise what the first that failed says."""
        error = self._world.failed(failed, self._world.layout.rows[0][culprit], LEFT)
        cause = None if failed is None else failed.error
        error.__cause__ = cause
        own = cause is not None and cause is offer.refused and isinstance(cause, StagelineError)
        return cause if own and cause is not None else error

    def settle(self) -> None:
        """Wait for what is still on its way, so that the next step finds nothing of this run."""
        for wait in (*(heard for _, heard in self._coming.values()), *self._told.values(), *self.times.values()):
            with suppress(PipelineError):
                wait()


class ProcessRun:
    """The run as the caller of this process sees it."""

    def __init__(
        self, world: ProcessWorld, terms: Terms, make: Callable[[int, ProcessGround], Lane], ground: ProcessGround
    ) -> None:
        """`make` gives this rank its lane."""
        self._world, self._terms, self._ground = world, terms, ground
        self.lanes = [make(world.here[0], ground)]
        self._delivered = terms.first - 1

    def steps(self) -> Iterator[tuple[Judged, Callable[[], Floats]]]:
        """Every step when it is judged, and what gives the times of its actions."""
        (lane,) = self.lanes
        try:
            self._world.begin()
            for judged in lane.steps():
                self._delivered = judged.step
                yield judged, self._ground.times.pop(judged.step)
        except BaseException as error:
            if not isinstance(error, Exception | GeneratorExit):
                self._world.abandon(error)
            raise
        finally:
            lane.unwind(self._delivered)
            self._ground.settle()
            self._world.end()
