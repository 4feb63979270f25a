"""Dependencies between the actions of a schedule, and a walk through them in waves.

An entry of a rank's program waits for the entry before it, and for the actions of other stages whose output it takes.
The walk goes in waves: each wave runs the next entry of every rank whose predecessors are done. It is one loop over
arrays, so its cost is proportional to the number of actions. Both `verify` (does the walk reach the end?) and
`simulate` (when does each entry start?) are built on it.

An entry without an input has the source −1. Arrays over entries that a walk fills have one element more at the end, so
that index −1 stands for "none", without a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
"""Indices of actions or entries; there are fewer than 2**31 of each."""
Wave: TypeAlias = tuple[Ints, Ints]
"""The ranks that run an entry, and these entries."""
Number = TypeVar("Number", bound=np.generic)

STORED = 1 << 20
"""A walk through more entries than this is repeated instead of stored."""


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
    def receivers(self) -> Indices:
        """The actions that take their input from another rank."""
        return self.receivers_in(slice(0, len(self.source)))

    def receivers_in(self, part: slice) -> Indices:
        """Return the actions of a range that take their input from another rank."""
        source = self.source[part]
        crossing = np.flatnonzero((source >= 0) & (self.rank[part] != self.rank[source]))
        receivers: Indices = (crossing + part.start).astype(np.int32)
        return receivers

    @property
    def entries(self) -> int:
        """The number of entries."""
        return int(self.first[-1])

    def entries_of(self, actions: Ints) -> Ints:
        """Return the entries of these actions."""
        return actions if self.pairs is None else self.pairs.entry_of[actions]

    def actions_of_entries(self) -> list[Indices]:
        """Return the action of each entry; with pairs, one array of forwards and one of backwards, with −1 for none."""
        if self.pairs is None:
            return [np.arange(len(self.source), dtype=np.int32)]
        return [self.pairs.forward_of, self.pairs.backward_of]

    def by_entry(self, values: NDArray[Number]) -> list[NDArray[Number]]:
        """Arrange one value per action by entry; with pairs, in one array of forwards and one of backwards.

        Entries without a value have 0.
        """
        if self.pairs is None:
            return [values]
        return [np.where(actions >= 0, values[actions], 0) for actions in self.actions_of_entries()]

    def by_action(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return one value per action, given one per entry."""
        return values if self.pairs is None else values[self.pairs.entry_of]

    @cached_property
    def sources(self) -> list[Indices]:
        """For each entry, the entry whose output it takes, or −1; as `by_entry` returns it."""
        if self.pairs is None:
            return [self.source]
        numbers = np.append(self.pairs.entry_of, np.int32(-1))
        return [numbers[np.where(slot >= 0, self.source[slot], -1)] for slot in self.actions_of_entries()]

    def walk(self) -> Iterable[Wave]:
        """Return the waves; together they hold all entries if and only if there is no deadlock."""
        return self._stored_walk if self.entries <= STORED else self._walk()

    @cached_property
    def _stored_walk(self) -> list[Wave]:
        return list(self._walk())

    def _walk(self) -> Iterator[Wave]:
        done = np.zeros(self.entries + 1, dtype=bool)
        done[-1] = True
        at, ends = self.first[:-1].copy(), self.first[1:]
        while True:
            ready = at < ends
            for source in self.sources:
                ready &= done.take(source.take(at, mode="clip"))
            ranks = np.flatnonzero(ready)
            if not ranks.size:
                return
            wave = at[ranks]
            yield ranks, wave
            done[wave] = True
            at += ready

    @property
    def is_acyclic(self) -> bool:
        """Whether the walk reaches every entry."""
        return sum(len(wave) for _, wave in self.walk()) == self.entries


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
    source = np.full(schedule.num_actions, -1, dtype=np.int32)
    steps = np.array(OUTPUT_STEP, dtype=np.int8)[schedule.action_kinds]
    for step in (1, -1):
        _link(source, schedule, steps == step, -step * schedule.microbatches)

    rank = np.repeat(np.arange(schedule.ranks, dtype=np.int32), np.diff(schedule.bounds))
    if not schedule.has_overlaps:
        return Graph(source, rank, None, schedule.bounds)
    is_forward = schedule.action_kinds == kinds.F
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
    # The first or last stage reads −1 beyond the end.
    table = np.full(schedule.stages * schedule.microbatches + abs(step), -1, dtype=np.int32)
    for part in schedule.windows():
        table[schedule.keys(part)[selected[part]]] = np.flatnonzero(selected[part]) + part.start
    for part in schedule.windows():
        keys = schedule.keys(part)[selected[part]]
        keys += keys.dtype.type(step)
        source[part][selected[part]] = table[keys]
