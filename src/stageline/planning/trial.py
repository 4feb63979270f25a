"""What a plan is asked for, what is tried, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stageline.planning.batch_sizes import Sizes
from stageline.planning.candidates import Shape
from stageline.planning.memory import RankMemory, States
from stageline.planning.stage_costs import Again, Links
from stageline.schedules.placement import Placement
from stageline.schedules.runs import backward, forward, weave
from stageline.schedules.schedule import Schedule


@dataclass(frozen=True)
class Asked:
    """What a plan is to be made for."""

    sizes: Sizes
    ranks: int
    splits: tuple[tuple[int, int], ...]
    """The numbers of microbatches that are tried, each with its samples in a microbatch."""
    caps: tuple[float, ...] | None = None
    """The bytes that every rank may hold; None for no cap."""
    states: States = field(default_factory=States)
    links: Links = field(default_factory=Links)
    again: str | tuple[str, ...] = "auto"
    """What is computed once more: "auto", or what is asked for."""
    names: tuple[str, ...] | None = None
    """The families that are tried; None for all."""
    given: Schedule | None = None
    """The schedule, where only its cut is to be found."""
    chunks: int | None = None
    by: Any = "time"
    pinned: tuple[int, ...] | None = None
    synthesis: bool = True
    time_limit: float = 5.0
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """One way to train: a schedule by name or as it is, a cut, and what it takes."""

    name: str
    options: Mapping[str, Any]
    shape: Shape
    microbatches: int
    samples: int
    counts: tuple[int, ...]
    again: Again
    seconds: float
    bubble: float
    memory: tuple[RankMemory, ...]
    fits: bool
    schedule: Schedule | None = field(default=None, repr=False, compare=False)
    """Where no name says it."""

    @property
    def peak(self) -> float:
        """The most that any rank holds."""
        return max(rank.total for rank in self.memory)

    @property
    def order(self) -> tuple[float, float]:
        """The faster is better, and of two that are as fast the smaller."""
        return self.seconds, self.peak


@dataclass(frozen=True)
class Place:
    """What a schedule is synthesized for: everything but the order."""

    shape: Shape
    microbatches: int
    samples: int
    counts: tuple[int, ...]
    again: Again


def place_of(each: Found) -> Place:
    """Everything but the order."""
    return Place(each.shape, each.microbatches, each.samples, each.counts, each.again)


def one_by_one(ranks: int, microbatches: int) -> Schedule:
    """Each microbatch goes all the way before the next one starts.

    >>> [str(action) for action in one_by_one(2, 2).programs[1]]
    ['1F0', '1B0', '1F1', '1B1']
    """
    runs = [
        weave((forward(rank, range(microbatches)), 0), (backward(rank, range(microbatches)), 0))
        for rank in range(ranks)
    ]
    return Schedule.from_runs(runs, Placement.loop(ranks, 1, microbatches), name="one-by-one")
