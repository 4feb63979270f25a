"""The memory-capped heuristic of the zero-bubble paper, written from its description, with all its variants.

Each rank runs as many F as its memory allows before its first I can arrive, then F and I in turns. W fill gaps that are
longer than a W, and shorter ones if the rank would otherwise idle longer than it may; they also free memory when it is
short. Rank r is always at least one F ahead of rank r+1. Where the description is open, all ways are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from stageline.schedules import action as kinds
from stageline.synthesis.fast_simulate import evaluate
from stageline.synthesis.list_scheduling import EVENTS_PER_CHECK, Board, Code, ProgramPlan, Programs

TARGETS = (1.0, 1.005, 1.02, 1.05)
"""Objective values to aim at, over the lower bound."""


class Variant(NamedTuple):
    """What the description leaves open."""

    allowance: list[float]
    """How long every rank may idle without running a W, even if no other rank idles that long."""
    one_more: bool
    """Whether to run one more F before the first I."""
    skip: bool
    """Whether to skip an F if the next rank has enough."""
    eager: bool
    """Whether an I that has arrived goes first."""
    few: bool
    """Whether to run no more F ahead than 1f1b does."""


class _Progress:
    """The progress of every rank; for one stage per rank."""

    def __init__(self, board: Board, variant: Variant) -> None:
        ranks = board.problem.ranks
        self.board, self.variant = board, variant
        self.last, self.microbatches = ranks - 1, board.problem.microbatches
        self.counts = [[0] * ranks for _ in range(4)]
        """How many F, B, I and W every rank has run, by kind."""
        self.free, self.level, self.bubble = ([0.0] * ranks for _ in range(3))
        self.ends = [math.inf] * (4 * board.size)
        self.programs: Programs = [[] for _ in range(ranks)]
        self.next_is_forward = [False] * ranks
        self.warm_up = _warm_up(board, variant)

    def arrives(self, kind: int, rank: int) -> float:
        """Return when the input of the next action of this kind arrives; infinite while that is unknown."""
        m = self.counts[kind][rank]
        if m >= self.microbatches:
            return math.inf
        key = rank * self.microbatches + m
        if kind == kinds.F:
            source = key - self.microbatches
            return self.ends[source] + self.board.forward_hop[source] if rank else 0.0
        if rank == self.last:
            return self.ends[key]
        source = key + self.microbatches
        return self.ends[kinds.I * self.board.size + source] + self.board.backward_hop[source]

    def code(self, kind: int, rank: int) -> Code:
        """Return the next action of this kind."""
        return kind * self.board.size + rank * self.microbatches + self.counts[kind][rank]

    def has_room(self, rank: int) -> bool:
        code = self.code(kinds.F, rank)
        board = self.board
        need = board.activation[code] + max(board.transient[code], board.spare[rank])
        return self.level[rank] + need <= board.caps[rank]

    def owes_weight(self, rank: int) -> bool:
        return self.counts[kinds.W][rank] < self.counts[kinds.I][rank]

    def run(self, kind: int, rank: int) -> bool:
        """Run the next action of this kind as early as possible."""
        board, code = self.board, self.code(kind, rank)
        start = self.free[rank] if kind == kinds.W else max(self.free[rank], self.arrives(kind, rank))
        if self.programs[rank]:
            self.bubble[rank] += start - self.free[rank]
        self.free[rank] = self.ends[code] = start + board.durations[code]
        self.counts[kind][rank] += 1
        self.programs[rank].append(code)
        key = code % board.size
        activation, residue = board.activation[key], board.residue[key]
        self.level[rank] += {kinds.F: activation, kinds.I: residue - activation, kinds.W: -residue}[kind]
        return True

    def step(self, rank: int) -> bool:
        """Run one action on a rank if the next one is known; return whether it did."""
        forwards, backwards = self.counts[kinds.F][rank], self.counts[kinds.I][rank]
        if backwards == self.microbatches:
            return self.owes_weight(rank) and self.run(kinds.W, rank)
        is_warm_up = forwards < self.warm_up[rank]
        has_gradient = self.arrives(kinds.I, rank) <= self.free[rank]
        forward = is_warm_up or self.next_is_forward[rank]
        if forward and (forwards == self.microbatches or (self.variant.eager and has_gradient)):
            forward = False
        if forward and not self.has_room(rank):
            if self.owes_weight(rank):
                return self.run(kinds.W, rank)
            forward = False
        if forward and self.variant.skip and not is_warm_up and rank < self.last and has_gradient:
            forward = forwards - self.counts[kinds.F][rank + 1] <= 1
        if not forward and backwards >= forwards:
            forward = True
        kind = kinds.F if forward else kinds.I
        start = self.arrives(kind, rank)
        if start == math.inf:
            return False
        gap = start - self.free[rank]
        if gap > 0 and self.owes_weight(rank) and self._must_fill(rank, gap):
            return self.run(kinds.W, rank)
        self.next_is_forward[rank] = not forward
        return self.run(kind, rank)

    def _must_fill(self, rank: int, gap: float) -> bool:
        """Whether to run a W in a gap: it fits, or the rank has idled as long as it may."""
        if gap >= self.board.durations[self.code(kinds.W, rank)]:
            return True
        idle = self.bubble[rank] + gap
        return idle > self.variant.allowance[rank] and idle > max(self.bubble)


def _warm_up(board: Board, variant: Variant) -> list[int]:
    """Return the number of F that every rank runs before its first I."""
    problem = board.problem
    forward, backward = problem.times[kinds.F], problem.times[kinds.I]
    counts = [0] * problem.ranks
    until_gradient = 0.0
    following = 0
    for rank in reversed(range(problem.ranks)):
        time, size = forward[rank][0], problem.activation[rank][0]
        until_gradient += time
        cap = problem.caps[rank] * (1 + 1e-9)
        fits = problem.microbatches if cap >= size * problem.microbatches else int(cap / size)
        waiting = fits if time * fits <= until_gradient else int(until_gradient / time * (1 + 1e-9))
        wanted = min(fits, waiting + variant.one_more, problem.ranks - rank if variant.few else fits)
        following = counts[rank] = min(fits, problem.microbatches, max(1, wanted, following + 1))
        if rank:
            until_gradient += backward[rank][0] + problem.forward_hop[rank - 1][0] + problem.backward_hop[rank][0]
    # Where memory limits an earlier rank, the later ones stay behind it too.
    for rank in range(1, problem.ranks):
        counts[rank] = max(1, min(counts[rank], counts[rank - 1] - 1))
    return counts


def _longest_wait(board: Board, warm_up: list[int]) -> float:
    """Return the longest time that a rank idles before its first I, if no rank delays it."""
    problem = board.problem
    longest = until_gradient = 0.0
    for rank in reversed(range(problem.ranks)):
        time = problem.times[kinds.F][rank][0]
        until_gradient += time
        longest = max(longest, until_gradient - warm_up[rank] * time)
        if rank:
            hops = problem.forward_hop[rank - 1][0] + problem.backward_hop[rank][0]
            until_gradient += problem.times[kinds.I][rank][0] + hops
    return longest


def zero_bubble_plans(
    board: Board, lower_bound: float, is_over: Callable[[], bool] = lambda: False
) -> Iterator[ProgramPlan | None]:
    """Yield the plans of all variants, None for those that deadlock; for one stage per rank and split backwards."""
    ranks = range(board.problem.ranks)
    work = [board.work(rank, whole=False) for rank in ranks]
    aims = [[factor * lower_bound - load for load in work] for factor in TARGETS]
    for number, switches in product(range(2 + len(aims)), product((False, True), repeat=4)):
        variant = Variant([0.0] * len(ranks) if number < 2 else aims[number - 2], *switches)
        if number == 1:
            variant = variant._replace(allowance=[_longest_wait(board, _warm_up(board, variant))] * len(ranks))
        yield evaluate(board, _programs(board, variant, is_over), "the zero-bubble heuristic")


def _programs(board: Board, variant: Variant, is_over: Callable[[], bool]) -> Programs | None:
    """Run the ranks in the order in which they become free; None if all are blocked before the end, or time is up."""
    progress = _Progress(board, variant)
    ready = [(0.0, -rank) for rank in range(board.problem.ranks)]
    ready.sort()
    blocked: set[int] = set()
    num_steps = 0
    while ready:
        num_steps += 1
        if num_steps % EVENTS_PER_CHECK == 0 and is_over():
            return None
        rank = -heappop(ready)[1]
        if not progress.step(rank):
            blocked.add(rank)
            continue
        for other in (rank - 1, rank, rank + 1):
            if other == rank or other in blocked:
                blocked.discard(other)
                heappush(ready, (progress.free[other], -other))
    complete = sum(map(len, progress.programs)) == 3 * board.size
    return progress.programs if complete else None
