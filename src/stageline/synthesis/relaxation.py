"""A relaxation of the problem: lower limits on times and memory that every schedule obeys.

Every backward takes the time, and ends as early, as the better of its two forms allows. An F waits for memory only as
long as it must under every order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from stageline.schedules import action as kinds
from stageline.synthesis.problem import SLACK, Problem, Table
from stageline.timeline.costs import per_stage


class Edge(NamedTuple):
    """A memory precedence of an F: this many I and W of a stage on the same rank must finish first."""

    stage: int
    backwards: int
    weights: int


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A problem in which every backward takes the shorter and earlier of its two forms."""

    problem: Problem

    @cached_property
    def overlap(self) -> Table | None:
        """Minimum duration of an overlapped pair with this F; None if the costs have no overlap."""
        costs, problem = self.problem.costs, self.problem
        if costs.overlap is None:
            return None
        scale = costs.scales(problem.microbatches)
        row = per_stage("overlap", costs.overlap, problem.stages)
        return [list(values) for values in (row[:, None] * (scale + scale.min()) / 2).tolist()]

    @cached_property
    def halves(self) -> list[Table]:
        """Minimum durations of F, I and W over all schedules, with or without split backwards and pairs."""
        problem = self.problem
        forward, whole, first, second = (np.asarray(table) for table in problem.times)
        if problem.split is True:
            head, total = first, first + second
        elif problem.split is False:
            head, total = whole, whole
        else:
            head, total = np.minimum(first, whole), np.minimum(first + second, whole)
        if self.overlap is not None:
            pair = np.asarray(self.overlap)
            for stages in problem.stages_of:
                least, most = pair[stages].min(), max(whole[stages].max(), first[stages].max())
                forward[stages] = np.minimum(forward[stages], np.maximum(0.0, pair[stages] - most))
                rest = np.minimum(second[stages], np.maximum(0.0, total[stages] - head[stages]))
                head[stages] = np.minimum(head[stages], least)
                total[stages] = head[stages] + rest if problem.split is True else head[stages]
        return [forward.tolist(), head.tolist(), (total - head).tolist()]

    @cached_property
    def residue(self) -> Table:
        """Minimum memory that remains of an activation until its W."""
        problem = self.problem
        if problem.split is False:
            return [[0.0] * problem.microbatches for _ in range(problem.stages)]
        residue: Table = np.minimum(problem.activation, problem.residue).tolist()
        return residue

    @cached_property
    def edges(self) -> list[list[list[Edge]]]:
        """For every stage and microbatch, the memory precedences of its F."""
        problem = self.problem
        edges: list[list[list[Edge]]] = [[[] for _ in range(problem.microbatches)] for _ in range(problem.stages)]
        for rank, stages in enumerate(problem.stages_of):
            if problem.caps[rank] == math.inf:
                continue
            for chunk, stage in enumerate(stages):
                for lower in range(chunk + 1):
                    for m, edge in enumerate(self._edges(rank, stages, chunk, lower)):
                        if edge.backwards or edge.weights:
                            edges[stage][m].append(edge)
        return edges

    @cached_property
    def _sums(self) -> list[tuple[list[float], list[float]]]:
        """For every stage, the prefix sums of its activations and of their minimum residues."""
        tables = zip(self.problem.activation, self.residue, strict=True)
        return [([0.0, *accumulate(sizes)], [0.0, *accumulate(residue)]) for sizes, residue in tables]

    def choices(self, stage: int, m: int) -> Iterator[tuple[int, int]]:
        """Yield the minimal (I, W) counts that make room for an F, fewest I first; for one stage per rank.

        The more I have run, the fewer W are needed. F starts after at least one of these choices.
        """
        activations, residues = self._sums[stage]
        transient = self.problem.transients[kinds.F][stage][m]
        room = self.problem.caps[self.problem.rank_of[stage]] * (1 + 2 * SLACK) - transient - activations[m + 1]
        if room >= 0:
            yield 0, 0
            return
        fewest = m + 1
        for backs in range(self.edges[stage][m][0].backwards, m + 1):
            weights = bisect_left(residues, residues[backs] - activations[backs] - room, 0, backs + 1)
            if weights <= backs and weights < fewest:
                fewest = weights
                yield backs, weights
                if not weights:
                    return

    def _edges(self, rank: int, stages: list[int], chunk: int, lower: int) -> list[Edge]:
        """Return, per microbatch, what the F of a chunk needs from a lower chunk (or from its own)."""
        problem = self.problem
        size, residue = problem.activation, self.residue
        transients = problem.transients[kinds.F][stages[chunk]]
        below = [0.0, *accumulate(sum(size[stage][m] for stage in stages[: lower + 1]) for m in range(len(transients)))]
        residues = [0.0, *accumulate(residue[stages[lower]])]
        cap = problem.caps[rank] * (1 + 2 * SLACK)
        backwards = weights = 0
        edges = []
        for m, transient in enumerate(transients):
            between = sum(size[stage][m] for stage in stages[lower + 1 : chunk + 1])
            while backwards < m and below[m + 1] - below[backwards] + between + transient > cap:
                backwards += 1
            current = below[m + 1] - below[m] + between
            while weights < m and residues[m] - residues[weights] + current + transient > cap:
                weights += 1
            backwards = max(backwards, weights)
            edges.append(Edge(stages[lower], backwards, weights))
        return edges
