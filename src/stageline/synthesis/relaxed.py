"""A problem made easier: no schedule can do better than these times and this memory say.

Every backward may be as short and as early as the shorter of its two forms, and an F waits for memory only as long as
no order could spare it.
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
    """What memory asks of an F: so many I, and so many W, of this stage of its rank must be done."""

    stage: int
    backwards: int
    weights: int


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A problem in which every backward may be as short as its shorter form, and as early."""

    problem: Problem

    @cached_property
    def overlap(self) -> Table | None:
        """The least time of a pair that holds this F, where pairs may save time."""
        costs, problem = self.problem.costs, self.problem
        if costs.overlap is None:
            return None
        scale = costs.scales(problem.microbatches)
        row = per_stage("overlap", costs.overlap, problem.stages)
        return [list(values) for values in (row[:, None] * (scale + scale.min()) / 2).tolist()]

    @cached_property
    def halves(self) -> list[Table]:
        """Times of F, I and W that no schedule undercuts, whether it splits its backwards, pairs them or not."""
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
            for mine in problem.stages_of:
                least, most = pair[mine].min(), max(whole[mine].max(), first[mine].max())
                forward[mine] = np.minimum(forward[mine], np.maximum(0.0, pair[mine] - most))
                rest = np.minimum(second[mine], np.maximum(0.0, total[mine] - head[mine]))
                head[mine] = np.minimum(head[mine], least)
                total[mine] = head[mine] + rest if problem.split is True else head[mine]
        return [forward.tolist(), head.tolist(), (total - head).tolist()]

    @cached_property
    def kept(self) -> Table:
        """What at least stays of an activation until its W."""
        problem = self.problem
        if problem.split is False:
            return [[0.0] * problem.microbatches for _ in range(problem.stages)]
        kept: Table = np.minimum(problem.activation, problem.residue).tolist()
        return kept

    @cached_property
    def edges(self) -> list[list[list[Edge]]]:
        """For every stage and microbatch, what memory asks of its F."""
        problem = self.problem
        found: list[list[list[Edge]]] = [[[] for _ in range(problem.microbatches)] for _ in range(problem.stages)]
        for rank, mine in enumerate(problem.stages_of):
            if problem.caps[rank] == math.inf:
                continue
            for chunk, stage in enumerate(mine):
                for lower in range(chunk + 1):
                    for m, edge in enumerate(self._edges(rank, mine, chunk, lower)):
                        if edge.backwards or edge.weights:
                            found[stage][m].append(edge)
        return found

    @cached_property
    def _sums(self) -> list[tuple[list[float], list[float]]]:
        """For every stage, its activations and what is kept of them, added up."""
        tables = zip(self.problem.activation, self.kept, strict=True)
        return [([0.0, *accumulate(sizes)], [0.0, *accumulate(kept)]) for sizes, kept in tables]

    def choices(self, stage: int, m: int) -> Iterator[tuple[int, int]]:
        """How many I and W may be done to make room for an F, where a rank holds one stage; the fewest I first.

        The more I are done, the fewer W need be; each choice has the fewest of both. F comes after one of them.
        """
        held, residues = self._sums[stage]
        extra = self.problem.transients[kinds.F][stage][m]
        room = self.problem.caps[self.problem.rank_of[stage]] * (1 + 2 * SLACK) - extra - held[m + 1]
        if room >= 0:
            yield 0, 0
            return
        fewest = m + 1
        for backs in range(self.edges[stage][m][0].backwards, m + 1):
            weights = bisect_left(residues, residues[backs] - held[backs] - room, 0, backs + 1)
            if weights <= backs and weights < fewest:
                fewest = weights
                yield backs, weights
                if not weights:
                    return

    def _edges(self, rank: int, mine: list[int], chunk: int, lower: int) -> list[Edge]:
        """What F of a chunk needs done of a lower chunk (or of its own), microbatch by microbatch."""
        problem = self.problem
        size, kept = problem.activation, self.kept
        transient = problem.transients[kinds.F][mine[chunk]]
        below = [0.0, *accumulate(sum(size[stage][m] for stage in mine[: lower + 1]) for m in range(len(transient)))]
        residues = [0.0, *accumulate(kept[mine[lower]])]
        cap = problem.caps[rank] * (1 + 2 * SLACK)
        backwards = weights = 0
        found = []
        for m, extra in enumerate(transient):
            between = sum(size[stage][m] for stage in mine[lower + 1 : chunk + 1])
            while backwards < m and below[m + 1] - below[backwards] + between + extra > cap:
                backwards += 1
            own = below[m + 1] - below[m] + between
            while weights < m and residues[m] - residues[weights] + own + extra > cap:
                weights += 1
            backwards = max(backwards, weights)
            found.append(Edge(mine[lower], backwards, weights))
        return found
