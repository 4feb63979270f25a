"""The memory-capped heuristic of the zero-bubble paper, written from its description, as a baseline.

Each rank runs as many F as its memory allows before its first I can arrive, then F and I in turns. W fill gaps that are
longer than a W, and shorter ones if the rank would otherwise have the largest bubble; they also free memory when it is
short. Rank r is always at least one F ahead of rank r+1. Where the description is open, both ways are tried: whether to
run one more F before the first I, whether to skip an F if the next rank has enough, whether an I that has arrived goes
first, whether a rank may idle as long as the one that idles longest before its first I, and, to give the heuristic
every chance, whether to run no more F ahead than 1f1b does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import stageline as sl


class _State:
    """The progress of every rank."""

    def __init__(self, costs: sl.Costs, ranks: int, microbatches: int, caps: Sequence[float]) -> None:
        self.ranks, self.microbatches, self.caps = ranks, microbatches, caps
        self.time = {kind: [costs.of(kind, rank) for rank in range(ranks)] for kind in "FIW"}
        self.hop = float(costs.transfer) if isinstance(costs.transfer, int | float) else 0.0
        sizes = (costs.activation, costs.residue)
        self.activation, self.residue = ([*v] if isinstance(v, Sequence) else [v] * ranks for v in sizes)
        self.count = {kind: [0] * ranks for kind in "FIW"}
        self.free, self.level, self.bubble = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.allowance = 0.0
        """How long a rank may idle without running a W, whatever the others do."""
        self.ends: dict[tuple[str, int, int], float] = {}
        self.programs: list[list[str]] = [[] for _ in range(ranks)]

    def arrives(self, kind: str, rank: int) -> float:
        """Return when the next action of this kind could start; infinite while that is unknown."""
        m = self.count[kind][rank]
        if m >= self.microbatches:
            return math.inf
        if kind == "F":
            return self.ends.get(("F", rank - 1, m), math.inf) + self.hop if rank else 0.0
        if rank == self.ranks - 1:
            return self.ends.get(("F", rank, m), math.inf)
        return self.ends.get(("I", rank + 1, m), math.inf) + self.hop

    def has_room(self, rank: int) -> bool:
        return self.level[rank] + self.activation[rank] <= self.caps[rank] * (1 + 1e-9)

    def run(self, kind: str, rank: int) -> None:
        """Schedule the next action of this kind on a rank, as early as possible."""
        m = self.count[kind][rank]
        start = self.free[rank] if kind == "W" else max(self.free[rank], self.arrives(kind, rank))
        if self.programs[rank]:
            self.bubble[rank] += start - self.free[rank]
        self.free[rank] = self.ends[kind, rank, m] = start + self.time[kind][rank]
        self.count[kind][rank] += 1
        self.programs[rank].append(f"{rank}{kind}{m}")
        self.level[rank] += {
            "F": self.activation[rank],
            "I": self.residue[rank] - self.activation[rank],
            "W": -self.residue[rank],
        }[kind]

    def owes(self, rank: int) -> bool:
        return self.count["W"][rank] < self.count["I"][rank]


def _ratio(whole: float, part: float, most: int) -> int:
    return most if whole >= part * most else int(whole / part * (1 + 1e-9))


def _warm_up(state: _State, one_more: bool, few: bool) -> list[int]:
    """Return the number of F that every rank runs before its first I."""
    ranks = state.ranks
    down = [sum(state.time["F"][r] + state.hop for r in range(rank)) for rank in range(ranks)]
    wanted = []
    for rank in range(ranks):
        back = sum(state.time["F"][r] + state.time["I"][r] + 2 * state.hop for r in range(rank + 1, ranks))
        first_back = down[rank] + state.time["F"][rank] + back
        fits = _ratio(state.caps[rank], state.activation[rank], state.microbatches)
        before = _ratio(first_back - down[rank], state.time["F"][rank], fits)
        wanted.append(max(1, min(fits, before + one_more, state.microbatches, ranks - rank if few else fits)))
    for rank in reversed(range(ranks - 1)):
        fits = _ratio(state.caps[rank], state.activation[rank], state.microbatches)
        wanted[rank] = min(fits, state.microbatches, max(wanted[rank], wanted[rank + 1] + 1))
    return wanted


def _longest_wait(state: _State, warm: list[int]) -> float:
    """Return the longest time that a rank idles before its first I, if no rank delays it."""
    waits, back = [0.0], 0.0
    for rank in reversed(range(state.ranks)):
        waits.append(state.time["F"][rank] + back - warm[rank] * state.time["F"][rank])
        back += state.time["F"][rank] + state.time["I"][rank] + 2 * state.hop
    return max(waits)


def _step(state: _State, rank: int, turn: list[str], skip: bool, eager: bool, warm: list[int]) -> bool:
    """Run one action on a rank if the next one is known; return whether it did."""
    forwards, backwards = state.count["F"][rank], state.count["I"][rank]
    if backwards == state.microbatches:
        if state.owes(rank):
            state.run("W", rank)
            return True
        return False
    kind = "F" if forwards < warm[rank] else turn[rank]
    if kind == "F" and (forwards == state.microbatches or (eager and state.arrives("I", rank) <= state.free[rank])):
        kind = "I"
    if kind == "F" and not state.has_room(rank):
        if state.owes(rank):
            state.run("W", rank)
            return True
        kind = "I"
    if kind == "F" and skip and forwards >= warm[rank] and rank < state.ranks - 1:
        ahead = forwards - state.count["F"][rank + 1]
        if ahead > 1 and state.arrives("I", rank) <= state.free[rank]:
            kind = "I"
    if kind == "I" and backwards >= forwards:
        kind = "F"
    start = state.arrives(kind, rank)
    if start == math.inf:
        return False
    gap = start - state.free[rank]
    if state.owes(rank) and gap > 0:
        largest = max(bubble for other, bubble in enumerate(state.bubble) if other != rank) if state.ranks > 1 else 0.0
        if gap >= state.time["W"][rank] or state.bubble[rank] + gap > max(largest, state.allowance):
            state.run("W", rank)
            return True
    state.run(kind, rank)
    turn[rank] = "I" if kind == "F" else "F"
    return True


def zero_bubble_heuristic(
    costs: sl.Costs, ranks: int, microbatches: int, caps: Sequence[float], objective: str = "makespan"
) -> sl.Schedule | None:
    """Return the best of its variants; None if all of them deadlock."""
    best: tuple[float, sl.Schedule] | None = None
    for one_more, skip, eager, few, allows in product((False, True), repeat=5):
        state = _State(costs, ranks, microbatches, caps)
        warm, turn = _warm_up(state, one_more, few), ["I"] * ranks
        state.allowance = _longest_wait(state, warm) if allows else 0.0
        moved = True
        while moved:
            order = sorted(range(ranks), key=lambda rank: (state.free[rank], -rank))
            moved = any(_step(state, rank, turn, skip, eager, warm) for rank in order)
        if sum(map(len, state.programs)) < 3 * ranks * microbatches:
            continue
        schedule = sl.Schedule.from_programs(state.programs, name="zero-bubble heuristic")
        timeline = sl.simulate(schedule, costs)
        fits = all(peak <= cap * (1 + 1e-9) for peak, cap in zip(timeline.peak_memory, caps, strict=True))
        value = timeline.makespan if objective == "makespan" else timeline.span
        if fits and (best is None or value < best[0]):
            best = value, schedule
    return best[1] if best is not None else None
