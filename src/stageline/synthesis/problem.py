"""What is asked for: the stages, what each of their actions costs, and the memory that every rank may use.

Everything is laid out once as plain lists, `[stage][microbatch]`, because the searches read single values millions of
times, and a list answers faster than an array does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from stageline.errors import CostError, StagelineError, shorten
from stageline.schedules import action as kinds
from stageline.schedules.placement import Placement
from stageline.schedules.registry import LARGEST_SCHEDULE, whole
from stageline.sizes import Size, read_sizes
from stageline.timeline.costs import Costs, Floats, per_stage

Table: TypeAlias = list[list[float]]
"""One value for every stage and microbatch."""
Objective: TypeAlias = Literal["makespan", "span"]

SLACK = 1e-9
"""Memory may exceed a cap by this share of it, and times that differ by less are the same: sums of floats round."""


MOST_NAMED = 16
"""Up to so many ranks, an error names the smallest cap of each."""


class MemoryCapError(StagelineError):
    """A cap on memory under which no schedule exists.

    `rank` is the first rank that needs more, `least` what every rank needs at least.

    >>> import stageline as sl
    >>> try:
    ...     sl.synthesize(sl.Costs(activation=[1, 3]), ranks=2, microbatches=4, memory=2)
    ... except sl.MemoryCapError as error:
    ...     print(error.rank, error.least)
    ...     print(error)
    1 (1.0, 3.0)
    no schedule fits: rank 1 needs 3 memory for one microbatch alone, and the cap is 2; the smallest that works is 3
    """

    def __init__(self, message: str, *, rank: int, least: tuple[float, ...]) -> None:
        """Keep the figures beside the sentence about them."""
        super().__init__(message)
        self.rank = rank
        self.least = least


@dataclass(frozen=True, eq=False)
class Problem:
    """One instance: sizes, placement, costs as tables, caps, and what is to be made short."""

    costs: Costs
    placement: Placement
    objective: Objective
    split: bool | None
    """Whether every backward runs in two halves (True), none does (False), or both are allowed (None)."""
    caps: list[float]
    """The most memory of every rank; infinite where there is no cap."""
    times: list[Table]
    """Of F, B, I and W, by their numbers."""
    transients: list[Table]
    """Memory of F, B, I and W while they run."""
    ahead: Table
    """How long the output of a stage travels to the next one."""
    back: Table
    """How long the gradient that a stage makes travels to the one before it."""
    activation: Table
    residue: Table

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.placement.stages

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has."""
        return self.placement.microbatches

    @cached_property
    def rank_of(self) -> list[int]:
        """The rank of every stage."""
        return [int(rank) for rank in self.placement.table[0]]

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of every rank, in the order of the model."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            found[rank].append(stage)
        return found

    @property
    def chunks(self) -> int:
        """How many stages a rank holds."""
        return self.stages // self.ranks

    @cached_property
    def is_capped(self) -> bool:
        """Whether any rank has a cap that it could reach."""
        return any(cap < math.inf for cap in self.caps)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all microbatches are alike."""
        return len(set(self.costs.scales(self.microbatches).tolist())) <= 1

    @property
    def num_actions(self) -> int:
        """How many actions a schedule with a split backward has."""
        return 3 * self.stages * self.microbatches

    def fits(self, peaks: Sequence[float]) -> bool:
        """Whether peaks of memory are within the caps, but for rounding."""
        return all(peak <= cap * (1 + SLACK) for peak, cap in zip(peaks, self.caps, strict=True))

    @cached_property
    def least_memory(self) -> tuple[float, ...]:
        """The smallest cap for every rank under which a schedule exists: it runs one microbatch after the other."""
        return tuple(
            max(self._least(rank, microbatch) for microbatch in range(1 if self.is_uniform else self.microbatches))
            for rank in range(self.ranks)
        )

    def _least(self, rank: int, microbatch: int) -> float:
        """What one microbatch needs on a rank: all forwards, then all backwards.

        Under a given cap, a weight gradient that fits is run at once, for it only frees memory, and so is a whole
        backward; half of one is for where a whole one does not fit. Between the caps at which one of these
        decisions changes nothing does, so they are all that need to be tried.
        """
        held = cap = 0.0
        for stage in self.stages_of[rank]:
            held += self.activation[stage][microbatch]
            cap = max(cap, held + self.transients[kinds.F][stage][microbatch])
        while True:
            _, refused = self.drain(rank, microbatch, held, cap)
            if not refused:
                return cap
            cap = min(refused)

    def drain(self, rank: int, microbatch: int, held: float, cap: float) -> tuple[list[tuple[int, int]], list[float]]:
        """Run the backwards of one microbatch under a cap: the (kind, stage) run, and what was refused for its need.

        Where all of them fit, nothing that was refused matters, and none is named.
        """
        left = self.stages_of[rank][:]
        owed: list[int] = []
        refused: list[float] = []
        done: list[tuple[int, int]] = []
        while left or owed:
            moves = [
                (held + self.transients[kinds.W][stage][microbatch], held - self.residue[stage][microbatch], at)
                for at, stage in enumerate(owed)
            ]
            if left:
                stage = left[-1]
                size, kept = self.activation[stage][microbatch], self.residue[stage][microbatch]
                whole_one, first = (self.transients[kind][stage][microbatch] for kind in (kinds.B, kinds.I))
                if self.split is not True:
                    moves.append((held + whole_one, held - size, -1))
                if self.split is not False:
                    moves.append((max(held + first, held - size + kept), held - size + kept, -2))
            refused += [move[0] for move in moves if move[0] > cap]
            fitting = [move for move in moves if move[0] <= cap]
            if not fitting:
                return done, refused
            _, held, which = fitting[0]
            if which >= 0:
                done.append((kinds.W, owed.pop(which)))
                continue
            stage = left.pop()
            done.append((kinds.B if which == -1 else kinds.I, stage))
            if which == -2:
                owed.append(stage)
        return done, []


def problem_of(
    costs: Costs,
    ranks: int,
    microbatches: int,
    memory: Size | Sequence[Size] | None,
    chunks: int,
    placement: str,
    objective: str,
    split: bool | None,
) -> Problem:
    """Lay an instance out, refusing what cannot be meant."""
    ranks, microbatches, chunks = (
        whole("synthesize", key, value)
        for key, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks))
    )
    if 3 * ranks * microbatches * chunks > LARGEST_SCHEDULE:
        raise StagelineError(
            f"synthesize was asked for {3 * ranks * microbatches * chunks} actions and makes at most "
            f"{LARGEST_SCHEDULE}; ask for fewer ranks, microbatches or chunks"
        )
    if not isinstance(costs, Costs):
        raise CostError(f"expected sl.Costs, got {shorten(costs)}")
    _one_of("placement", placement, ("loop", "vee"))
    _one_of("objective", objective, ("makespan", "span"))
    if split not in (True, False, None):
        raise StagelineError(f"split is True, False or None (either), got {shorten(split)}")
    stages = ranks * chunks
    costs.check_lengths(stages, microbatches)
    placed = Placement.loop(ranks, chunks, microbatches)
    if placement == "vee":
        placed = Placement.snake(ranks, chunks, microbatches)
    scale = costs.scales(microbatches)

    def table(row: Floats) -> Table:
        return [list(values) for values in (row[:, None] * scale).tolist()]

    ahead, back = _hops(costs, placed)
    found = Problem(
        costs=costs,
        placement=placed,
        objective="span" if objective == "span" else "makespan",
        split=split,
        caps=_caps(memory, ranks),
        times=[table(row) for row in costs.times(stages)],
        transients=[table(row) for row in costs.transients(stages)],
        ahead=ahead,
        back=back,
        activation=table(per_stage("activation", costs.activation, stages)),
        residue=table(per_stage("residue", costs.residue, stages)),
    )
    _check_caps(found)
    return found


def with_microbatches(problem: Problem, microbatches: int) -> Problem:
    """The same problem for another number of microbatches, all of them alike."""
    costs = problem.costs
    if costs.scale is not None:
        costs = replace(costs, scale=[costs.scale[0]] * microbatches)
    is_loop = problem.chunks == 1 or problem.rank_of[problem.ranks] == 0
    return problem_of(
        costs,
        problem.ranks,
        microbatches,
        problem.caps,
        problem.chunks,
        "loop" if is_loop else "vee",
        problem.objective,
        problem.split,
    )


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise StagelineError(f"{name} is {' or '.join(map(repr, known))}, got {shorten(value)}")


def _hops(costs: Costs, placed: Placement) -> tuple[Table, Table]:
    """How long outputs travel from each stage to the next, and gradients to the one before; 0 within a rank."""
    scale = costs.scales(placed.microbatches)
    rank = placed.table[0]
    message = per_stage("message", costs.message, placed.stages)
    found = []
    for step in (1, -1):
        table = [[0.0] * placed.microbatches for _ in range(placed.stages)]
        for stage in range(placed.stages):
            to = stage + step
            if 0 <= to < placed.stages and rank[stage] != rank[to]:
                size = message[min(stage, to)] * scale
                sources, targets = (np.full(len(scale), rank[at], dtype=np.int32) for at in (stage, to))
                hop = np.broadcast_to(costs.hops(sources, targets, size, placed.ranks), scale.shape)
                table[stage] = [float(time) for time in hop]
        found.append(table)
    return found[0], found[1]


def _caps(memory: Size | Sequence[Size] | None, ranks: int) -> list[float]:
    if memory is None:
        return [math.inf] * ranks
    try:
        given = np.asarray(read_sizes(memory), dtype=np.float64)
    except (TypeError, ValueError):
        given = np.asarray(math.nan)
    if given.ndim == 0:
        given = np.full(ranks, float(given))
    if given.shape != (ranks,) or not (given >= 0).all():
        raise StagelineError(
            "memory takes a number, or one per rank: a number from 0 upwards or a size like 24GiB, or one for each of "
            f"the {ranks} ranks; got {shorten(memory)}"
        )
    return [float(cap) for cap in given]


def _check_caps(problem: Problem) -> None:
    least = problem.least_memory
    short = [rank for rank, (need, cap) in enumerate(zip(least, problem.caps, strict=True)) if need > cap * (1 + SLACK)]
    if not short:
        return
    rank = short[0]
    works, others = f"{max(least):.12g}", ""
    if len(set(problem.caps)) > 1:
        enough = [f"{max(need, cap):.12g}" for need, cap in zip(least, problem.caps, strict=True)]
        works = ",".join(enough) if len(enough) <= MOST_NAMED else f"{least[rank]:.12g} there"
        others = f" (ranks {', '.join(map(str, short[1:]))} need more, too)" if 1 < len(short) <= MOST_NAMED else ""
        others = others.replace("ranks", "rank").replace("need", "needs") if len(short) == 2 else others
    raise MemoryCapError(
        f"no schedule fits: rank {rank} needs {least[rank]:.12g} memory for one microbatch alone, and the cap is "
        f"{problem.caps[rank]:.12g}{others}; the smallest that works is {works}",
        rank=rank,
        least=least,
    )
