"""What waits for what: the dependencies of a schedule's actions, and a walk through them in waves.

An entry of a rank's program waits for the entry before it, and for the actions of other stages whose output its
actions take. The walk lets every rank take one step at a time: wave after wave, all entries whose
predecessors are done. It is one loop over arrays, so its cost grows with the number of actions, and it is
what both `verify` (does the walk reach the end?) and `simulate` (when does each entry start?) are built on.

For the walk, the entries of all ranks lie end to end with a fence before every rank and one at the end:

    place   0  1  2  3  4  5  6  7        the entry after the one at place p is at p + 1, with no look-up,
            |  a  b  c  |  d  e  |        and place 0, a fence, stands for "none"
            rank 0      rank 1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from stageline.schedules import action as kinds
from stageline.schedules.action import OUTPUT_STEP
from stageline.schedules.schedule import Schedule

Ints: TypeAlias = NDArray[np.integer[Any]]
Indices: TypeAlias = NDArray[np.int32]
"""Numbers of actions, entries or places: there are fewer than two thousand million of each."""
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class Graph:
    """The dependencies of a schedule in which every stage runs F and one backward for every microbatch.

    Actions are numbered through all ranks, and so are entries; where no entry is an overlapped pair the two
    numberings are the same.
    """

    source: Indices
    """For each action, the action of another stage whose output it takes; −1 for none."""
    rank: NDArray[np.int32]
    """For each action, its rank."""
    pairs: Pairs | None
    """How actions and entries belong together, where some entries are overlapped pairs."""
    first: Ints
    """For each rank, its first entry, and one more for the end."""

    @cached_property
    def receivers(self) -> Ints:
        """The actions that take their input from another rank."""
        return np.flatnonzero((self.source >= 0) & (self.rank != self.rank[self.source]))

    @property
    def entries(self) -> int:
        """How many entries there are."""
        return int(self.first[-1])

    @property
    def places(self) -> int:
        """How many places there are: entries and fences."""
        return self.entries + len(self.first)

    @property
    def fences(self) -> Ints:
        """The places of the fences."""
        return self.first + np.arange(len(self.first))

    @cached_property
    def is_entry(self) -> NDArray[np.bool_]:
        """For each place, whether it is an entry and no fence."""
        inside = np.ones(self.places, dtype=bool)
        inside[self.fences] = False
        return inside

    def place(self, actions: Ints) -> Indices:
        """The places of these actions' entries."""
        places = self.rank[actions] + np.int32(1)
        places += actions if self.pairs is None else self.pairs.entry_of[actions]
        return places

    def actions_of_entries(self) -> list[Indices]:
        """List the actions of the entries: one array where each has one, else forwards and backwards, −1 for none."""
        if self.pairs is None:
            return [np.arange(len(self.source), dtype=np.int32)]
        return [self.pairs.forward_of, self.pairs.backward_of]

    def by_place(self, values: NDArray[Number]) -> list[NDArray[Number]]:
        """Lay one value per action out by place: one array, or one for forwards and one for backwards; else 0.

        Each action of an entry has an array of its own, so no two of them meet in one element.
        """
        found = []
        for actions in [None] if self.pairs is None else self.actions_of_entries():
            laid = np.zeros(self.places, dtype=values.dtype)
            laid[self.is_entry] = values if actions is None else np.where(actions >= 0, values[actions], 0)
            found.append(laid)
        return found

    def by_action(self, laid: NDArray[Number]) -> NDArray[Number]:
        """Read one value per action from values laid out by place."""
        by_entry = laid[self.is_entry]
        return by_entry if self.pairs is None else by_entry[self.pairs.entry_of]

    @cached_property
    def sources(self) -> list[Indices]:
        """For each place, the place of the entry whose output it takes; 0 for none. See `by_place`.

        A fence takes its own output: a rank that has come to its end stays there.
        """
        found = self.by_place(np.where(self.source >= 0, self.place(self.source), np.int32(0)))
        for source in found:
            source[self.fences] = self.fences
        return found

    @cached_property
    def waves(self) -> list[Ints]:
        """The places in waves; they hold all entries just when no entries wait for one another."""
        inputs = self.sources
        done = np.zeros(self.places, dtype=bool)
        done[0] = True
        at = self.fences[:-1] + 1
        waves: list[Ints] = []
        while True:
            ready = done.take(inputs[0].take(at))
            for more in inputs[1:]:
                ready &= done.take(more.take(at))
            wave = at[ready]
            if not wave.size:
                return waves
            waves.append(wave)
            done[wave] = True
            at += ready

    @property
    def is_acyclic(self) -> bool:
        """Whether the walk reaches every entry."""
        return sum(len(wave) for wave in self.waves) == self.entries


@dataclass(frozen=True)
class Pairs:
    """How actions and entries belong together, where some entries are overlapped pairs."""

    entry_of: Indices
    """For each action, its entry."""
    forward_of: Indices
    """For each entry, its F, or −1."""
    backward_of: Indices
    """For each entry, its B, I or W, or −1."""


def graph_of(schedule: Schedule) -> Graph:
    """Find what waits for what; the schedule must be complete (see `rules`)."""
    is_forward = schedule.action_kinds == kinds.F
    source = np.full(schedule.num_actions, -1, dtype=np.int32)
    steps = np.array(OUTPUT_STEP)[schedule.action_kinds]
    for step in (1, -1):
        _link(source, schedule, steps == step, -step * schedule.microbatches)

    rank = np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(schedule.bounds))
    if not schedule.has_overlaps:
        return Graph(source, rank, None, schedule.bounds)
    second = np.concatenate([[False], schedule.pair_starts[:-1]])
    entry_of = np.cumsum(~second, dtype=np.int32) - np.int32(1)
    entries = int(entry_of[-1]) + 1
    forward_of, backward_of = (np.full(entries, -1, dtype=np.int32) for _ in range(2))
    forward_of[entry_of[is_forward]] = np.flatnonzero(is_forward)
    backward_of[entry_of[~is_forward]] = np.flatnonzero(~is_forward)
    first = np.append(entry_of, entries)[schedule.bounds].astype(np.int64)
    return Graph(source, rank, Pairs(entry_of, forward_of, backward_of), first)


def _link(source: Indices, schedule: Schedule, chosen: NDArray[np.bool_], step: int) -> None:
    """Give each of these actions the one of the neighbouring stage, whose key is a step away, as its source."""
    actions = np.flatnonzero(chosen)
    keys = schedule.keys[actions]
    # The first or last stage finds −1 beyond the end.
    table = np.full(schedule.stages * schedule.microbatches + abs(step), -1, dtype=np.int32)
    table[keys] = actions
    keys += keys.dtype.type(step)
    source[actions] = table[keys]
