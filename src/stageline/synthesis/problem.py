"""The synthesis problem: stages, the cost of each of their actions, and the memory cap of every rank.

All costs are expanded once into plain lists, `[stage][microbatch]`: the searches read single values millions of times,
and indexing a list is faster than indexing an array.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from stageline.common.errors import CostError, MemoryCapError, StagelineError, shorten
from stageline.common.units import Size, parse_sizes
from stageline.schedules import action as kinds
from stageline.schedules.placement import Pattern, Placement
from stageline.schedules.registry import LARGEST_SCHEDULE, whole
from stageline.timeline.costs import Costs, Floats, per_stage

Table: TypeAlias = list[list[float]]
"""One value per stage and microbatch."""
Objective: TypeAlias = Literal["makespan", "span"]

SLACK = 1e-9
"""Relative tolerance for rounding: of memory above a cap, and of times that count as equal."""
MAX_RANKS_LISTED = 16
"""Up to this many ranks, an error lists the smallest cap of each."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One instance: placement, cost tables, memory caps and objective."""

    costs: Costs
    placement: Placement
    objective: Objective
    split: bool | None
    """Whether every backward is split into I and W (True), none is (False), or both are allowed (None)."""
    caps: list[float]
    """The memory cap of every rank; infinite where there is none."""
    times: list[Table]
    """Durations of F, B, I and W, indexed by kind."""
    transients: list[Table]
    """Memory that F, B, I and W need while they run, indexed by kind."""
    forward_hop: Table
    """Transfer time of a stage's output to the next stage."""
    backward_hop: Table
    """Transfer time of a stage's input gradient to the previous stage."""
    activation: Table
    residue: Table

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.placement.stages

    @property
    def microbatches(self) -> int:
        """Number of microbatches per step."""
        return self.placement.microbatches

    @cached_property
    def pattern(self) -> Pattern:
        """Whether stages go round the ranks or down and up again; with one chunk, "loop"."""
        pattern = self.placement.pattern
        assert pattern is not None
        return pattern

    @cached_property
    def rank_of(self) -> list[int]:
        """The rank of every stage."""
        return [int(rank) for rank in self.placement.table[0]]

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of every rank, in model order."""
        stages: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            stages[rank].append(stage)
        return stages

    @property
    def chunks(self) -> int:
        """Number of stages per rank."""
        return self.stages // self.ranks

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all microbatches have the same costs."""
        return len(set(self.costs.scales(self.microbatches).tolist())) <= 1

    @cached_property
    def mixes(self) -> bool:
        """Whether backwards may be whole or split, and splitting one may take extra time or memory."""
        _, whole, first, second = map(np.asarray, self.times)
        _, during_whole, during_first, during_second = map(np.asarray, self.transients)
        growth = np.subtract(self.residue, self.activation)
        peak = np.maximum(during_first, growth + np.maximum(during_second, 0.0))
        costs_more = (first + second > whole * (1 + SLACK)) | (peak > during_whole * (1 + SLACK))
        return self.split is None and bool(costs_more.any())

    def allows_form(self, whole: bool) -> bool:
        """Whether to try programs with all backwards whole, or all split: allowed, and not known to be worse."""
        return (not whole or self.mixes) if self.split is None else self.split is not whole

    def only_forwards_need_room(self, rank: int) -> bool:
        """Whether a rank has one stage, and no action of it but an F needs more memory than it leaves behind."""
        if self.chunks > 1:
            return False
        (stage,) = self.stages_of[rank]
        sizes = zip(self.residue[stage], self.activation[stage], strict=True)
        has_transients = any(size > 0 for table in self.transients for size in table[stage])
        return not has_transients and all(residue <= activation for residue, activation in sizes)

    @property
    def num_actions(self) -> int:
        """Number of actions of a schedule that splits every backward."""
        return 3 * self.stages * self.microbatches

    def fits(self, peaks: Sequence[float]) -> bool:
        """Whether peak memory is within the caps, up to rounding."""
        return all(peak <= cap * (1 + SLACK) for peak, cap in zip(peaks, self.caps, strict=True))

    @cached_property
    def least_memory(self) -> tuple[float, ...]:
        """The smallest cap of every rank that allows a schedule: one that runs the microbatches one by one."""
        return tuple(
            max(self._least_for(rank, microbatch) for microbatch in range(1 if self.is_uniform else self.microbatches))
            for rank in range(self.ranks)
        )

    def _least_for(self, rank: int, microbatch: int) -> float:
        """Return the memory a rank needs for one microbatch: all forwards, then all backwards.

        Under a given cap, a weight gradient runs as soon as it fits, because it only frees memory; then a whole
        backward, then a split one. These decisions change only at the caps in `refused`, so no others need to be tried.
        """
        level = cap = 0.0
        for stage in self.stages_of[rank]:
            level += self.activation[stage][microbatch]
            cap = max(cap, level + self.transients[kinds.F][stage][microbatch])
        while True:
            _, refused = self.drain(rank, microbatch, level, cap)
            if not refused:
                return cap
            cap = min(refused)

    def drain(self, rank: int, microbatch: int, level: float, cap: float) -> tuple[list[tuple[int, int]], list[float]]:
        """Run the backwards of one microbatch under a cap; return the (kind, stage) run and the caps refused.

        The second list holds the memory needs that exceeded the cap. It is empty if all backwards fit.
        """
        pending = self.stages_of[rank][:]
        deferred: list[int] = []
        refused: list[float] = []
        actions: list[tuple[int, int]] = []
        while pending or deferred:
            moves = [
                (level + self.transients[kinds.W][stage][microbatch], level - self.residue[stage][microbatch], position)
                for position, stage in enumerate(deferred)
            ]
            if pending:
                stage = pending[-1]
                activation, residue = self.activation[stage][microbatch], self.residue[stage][microbatch]
                during_whole, during_input = (self.transients[kind][stage][microbatch] for kind in (kinds.B, kinds.I))
                if self.split is not True:
                    moves.append((level + during_whole, level - activation, -1))
                if self.split is not False:
                    after = level - activation + residue
                    moves.append((max(level + during_input, after), after, -2))
            refused += [move[0] for move in moves if move[0] > cap]
            fitting = [move for move in moves if move[0] <= cap]
            if not fitting:
                return actions, refused
            _, level, choice = fitting[0]
            if choice >= 0:
                actions.append((kinds.W, deferred.pop(choice)))
                continue
            stage = pending.pop()
            actions.append((kinds.B if choice == -1 else kinds.I, stage))
            if choice == -2:
                deferred.append(stage)
        return actions, []


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
    """Validate the arguments of `synthesize` and build the `Problem`; raise `StagelineError` if they are invalid."""
    ranks, microbatches, chunks = (
        whole("synthesize", key, value)
        for key, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks))
    )
    if 3 * ranks * microbatches * chunks > LARGEST_SCHEDULE:
        raise StagelineError(
            f"the schedule would have {3 * ranks * microbatches * chunks} actions, but the limit is "
            f"{LARGEST_SCHEDULE}; use fewer ranks, microbatches or chunks"
        )
    if not isinstance(costs, Costs):
        raise CostError(f"expected sl.Costs, got {shorten(costs)}")
    if placement == "vee":
        warnings.warn('placement="vee" is deprecated; use placement="v"', DeprecationWarning, stacklevel=3)
        placement = "v"
    _one_of("placement", placement, ("loop", "v"))
    _one_of("objective", objective, ("makespan", "span"))
    if split not in (True, False, None):
        raise StagelineError(f"split must be True, False or None (either), got {shorten(split)}")
    stages = ranks * chunks
    costs.check_lengths(stages, microbatches)
    stage_placement = Placement.of_pattern(placement, ranks, chunks, microbatches)
    scale = costs.scales(microbatches)

    def table(row: Floats) -> Table:
        return [list(values) for values in (row[:, None] * scale).tolist()]

    forward_hop, backward_hop = _hops(costs, stage_placement)
    problem = Problem(
        costs=costs,
        placement=stage_placement,
        objective="span" if objective == "span" else "makespan",
        split=split,
        caps=_caps(memory, ranks),
        times=[table(row) for row in costs.times(stages)],
        transients=[table(row) for row in costs.transients(stages)],
        forward_hop=forward_hop,
        backward_hop=backward_hop,
        activation=table(per_stage("activation", costs.activation, stages)),
        residue=table(per_stage("residue", costs.residue, stages)),
    )
    _check_caps(problem)
    return problem


def with_microbatches(problem: Problem, microbatches: int) -> Problem:
    """Return the same problem for another number of microbatches, all with the costs of the first."""
    costs = problem.costs
    if costs.scale is not None:
        costs = replace(costs, scale=[costs.scale[0]] * microbatches)
    return problem_of(
        costs,
        problem.ranks,
        microbatches,
        problem.caps,
        problem.chunks,
        problem.pattern,
        problem.objective,
        problem.split,
    )


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise StagelineError(f"{name} must be {' or '.join(map(repr, known))}, got {shorten(value)}")


def _hops(costs: Costs, placement: Placement) -> tuple[Table, Table]:
    """Return the transfer times of outputs to the next stage and of gradients to the previous; 0 within a rank."""
    rank, scale = placement.table[0], costs.scales(placement.microbatches)
    size = per_stage("message", costs.message, placement.stages)[:-1, None] * scale
    low, high = (np.repeat(ranks[:, None], len(scale), axis=1) for ranks in (rank[:-1], rank[1:]))
    forward, backward = (
        np.where(low == high, 0.0, costs.hops(*ends, size, placement.ranks)).tolist()
        for ends in ((low, high), (high, low))
    )
    none = [0.0] * len(scale)
    return [*forward, none], [none, *backward]


def _caps(memory: Size | Sequence[Size] | None, ranks: int) -> list[float]:
    if memory is None:
        return [math.inf] * ranks
    try:
        caps = np.asarray(parse_sizes(memory), dtype=np.float64)
    except (TypeError, ValueError):
        caps = np.asarray(math.nan)
    if caps.ndim == 0:
        caps = np.full(ranks, float(caps))
    if caps.shape != (ranks,) or not (caps >= 0).all():
        raise StagelineError(
            f"memory must be a number >= 0 or a size like 24GiB, or one for each of the {ranks} ranks; got "
            f"{shorten(memory)}"
        )
    return [float(cap) for cap in caps]


def _check_caps(problem: Problem) -> None:
    least = problem.least_memory
    short = [rank for rank, (need, cap) in enumerate(zip(least, problem.caps, strict=True)) if need > cap * (1 + SLACK)]
    if not short:
        return
    rank = short[0]
    enough, also = f"{max(least):.12g}", ""
    if len(set(problem.caps)) > 1:
        caps = [f"{max(need, cap):.12g}" for need, cap in zip(least, problem.caps, strict=True)]
        enough = ",".join(caps) if len(caps) <= MAX_RANKS_LISTED else f"{least[rank]:.12g} there"
        also = f" (ranks {', '.join(map(str, short[1:]))} also need more)" if 1 < len(short) <= MAX_RANKS_LISTED else ""
        also = also.replace("ranks", "rank").replace("also need", "also needs") if len(short) == 2 else also
    raise MemoryCapError(
        f"no schedule fits: rank {rank} needs a memory of {least[rank]:.12g} for a single microbatch; the cap is "
        f"{problem.caps[rank]:.12g}{also}; the smallest cap that works is {enough}",
        rank=rank,
        least=least,
    )
