"""Dependencies between the actions of a schedule, and a walk through them in waves.

An entry of a rank's program waits for the entry before it, and for the actions of other stages whose output it takes.
The walk goes in waves: each wave runs the next entry of every rank whose predecessors are done. It is one loop over
arrays, so its cost is proportional to the number of actions. Both `verify` (does the walk reach the end?) and
`simulate` (when does each entry start?) are built on it.

For the walk, the entries of all ranks are concatenated, with a fence before every rank and one at the end:

    place   0  1  2  3  4  5  6  7        the entry after place p is at p + 1, without a lookup,
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
"""Indices of actions, entries or places; there are fewer than 2**31 of each."""
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class Graph:
    """The dependencies of a complete schedule.

    Actions and entries are both numbered across all ranks. The two numberings are the same unless some entries are
    overlapped pairs.
    """

    source: Indices
    """For each action, the action whose output it takes, or −1."""
    rank: NDArray[np.int32]
    """For each action, its rank."""
    pairs: Pairs | None
    """The mapping between actions and entries; None if no entry is an overlapped pair."""
    first: Ints
    """For each rank, its first entry; then the number of entries."""

    @cached_property
    def receivers(self) -> Ints:
        """The actions that take their input from another rank."""
        return np.flatnonzero((self.source >= 0) & (self.rank != self.rank[self.source]))

    @property
    def entries(self) -> int:
        """The number of entries."""
        return int(self.first[-1])

    @property
    def places(self) -> int:
        """The number of places: entries and fences."""
        return self.entries + len(self.first)

    @property
    def fences(self) -> Ints:
        """The places of the fences."""
        return self.first + np.arange(len(self.first))

    @cached_property
    def is_entry(self) -> NDArray[np.bool_]:
        """For each place, whether it is an entry, not a fence."""
        inside = np.ones(self.places, dtype=bool)
        inside[self.fences] = False
        return inside

    def place(self, actions: Ints) -> Indices:
        """Return the places of the entries of these actions."""
        places = self.rank[actions] + np.int32(1)
        places += actions if self.pairs is None else self.pairs.entry_of[actions]
        return places

    def actions_of_entries(self) -> list[Indices]:
        """Return the action of each entry; with pairs, one array of forwards and one of backwards, with −1 for none."""
        if self.pairs is None:
            return [np.arange(len(self.source), dtype=np.int32)]
        return [self.pairs.forward_of, self.pairs.backward_of]

    def by_place(self, values: NDArray[Number]) -> list[NDArray[Number]]:
        """Arrange one value per action by place; with pairs, in one array of forwards and one of backwards.

        Places without a value are 0.
        """
        arrays = []
        for actions in [None] if self.pairs is None else self.actions_of_entries():
            by_place = np.zeros(self.places, dtype=values.dtype)
            by_place[self.is_entry] = values if actions is None else np.where(actions >= 0, values[actions], 0)
            arrays.append(by_place)
        return arrays

    def by_action(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return one value per action, given one per place."""
        by_entry = values[self.is_entry]
        return by_entry if self.pairs is None else by_entry[self.pairs.entry_of]

    @cached_property
    def sources(self) -> list[Indices]:
        """For each place, the place of the entry whose output it takes, or 0; as `by_place` returns it.

        A fence takes its own output, so a rank that has reached its end stays there.
        """
        sources = self.by_place(np.where(self.source >= 0, self.place(self.source), np.int32(0)))
        for source in sources:
            source[self.fences] = self.fences
        return sources

    @cached_property
    def waves(self) -> list[Ints]:
        """The places of each wave; together they hold all entries if and only if there is no deadlock."""
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
    """The mapping between actions and entries of a schedule with overlapped pairs."""

    entry_of: Indices
    """For each action, its entry."""
    forward_of: Indices
    """For each entry, its F, or −1."""
    backward_of: Indices
    """For each entry, its B, I or W, or −1."""


def graph_of(schedule: Schedule) -> Graph:
    """Return the dependencies of a schedule, which must be complete (see `rules`)."""
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


def _link(source: Indices, schedule: Schedule, selected: NDArray[np.bool_], step: int) -> None:
    """Set the source of the selected actions: the one of the neighbouring stage, whose key is `step` away."""
    actions = np.flatnonzero(selected)
    keys = schedule.keys[actions]
    # The first or last stage reads −1 beyond the end.
    table = np.full(schedule.stages * schedule.microbatches + abs(step), -1, dtype=np.int32)
    table[keys] = actions
    keys += keys.dtype.type(step)
    source[actions] = table[keys]
