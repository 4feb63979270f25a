"""The candidates for a plan: families with all their chunk counts, cuts, and the time and memory of their stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from stageline.common.errors import ScheduleError, StagelineError
from stageline.model.partition.partition import even_sizes, partition, spans_of
from stageline.model.profile import Profile
from stageline.planning.costs import (
    RankMemory,
    Recompute,
    block_bytes,
    parameter_bytes,
    rank_memory,
    stage_bytes,
)
from stageline.planning.mesh_costs import Collectives, MeshTime, lowered
from stageline.planning.request import By, PlanRequest
from stageline.schedules.placement import Pattern, Placement
from stageline.schedules.registry import families, schedule
from stageline.schedules.runs import backward, forward, weave
from stageline.schedules.schedule import Schedule
from stageline.synthesis.problem import SLACK
from stageline.timeline.costs import Costs, Floats, per_stage
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

CHUNKS = (2, 3, 4, 6, 8)
"""The numbers of stages per rank that are tried, if a family leaves it open."""
MAX_EXACT = 300
"""Up to this many layers times ranks, two chunks in a loop are cut optimally, which takes long."""


@dataclass(frozen=True)
class Shape:
    """The number of stages, and their placement on the ranks."""

    ranks: int
    stages: int
    placement: Pattern | None
    """None for other placements, which get an even cut only."""

    @property
    def chunks(self) -> int:
        """The number of stages of a rank."""
        return -(-self.stages // self.ranks)

    @property
    def rank_of(self) -> list[int]:
        """The rank of every stage, for a loop or V placement."""
        placement = Placement.of_pattern(self.placement or "loop", self.ranks, self.chunks)
        return [int(rank) for rank in placement.table[0]]


@dataclass(frozen=True)
class Candidate:
    """A way to train, apart from the order of actions."""

    shape: Shape
    microbatches: int
    samples: int
    """In a microbatch."""
    counts: tuple[int, ...]
    """The number of units of every stage."""
    recompute: Recompute


@dataclass(frozen=True)
class Trial:
    """A candidate with a schedule, and its simulated time and memory."""

    candidate: Candidate
    name: str
    """Of the schedule's family."""
    options: Mapping[str, Any]
    seconds: float
    bubble: float
    memory: tuple[RankMemory, ...]
    fits: bool
    schedule: Schedule | None = field(default=None, repr=False, compare=False)
    """If the family and its options do not determine it."""

    @property
    def peak(self) -> float:
        """The bytes of the fullest rank."""
        return max(rank.total for rank in self.memory)

    @property
    def rating(self) -> tuple[float, float]:
        """The value to minimise: the time, then the memory."""
        return self.seconds, self.peak


@dataclass(frozen=True)
class FamilyVariant:
    """A family with options, and the shape of its schedules."""

    name: str
    options: tuple[tuple[str, Any], ...]
    shape: Shape

    def make(self, microbatches: int) -> Schedule | None:
        """Return the schedule; None if the family does not allow these sizes, or gives another shape for them."""
        try:
            result = schedule(self.name, self.shape.ranks, microbatches, **dict(self.options))
        except ScheduleError:
            return None
        is_valid = result.training and result.placement.directions == 1
        return result if is_valid and shape_of(result) == self.shape else None


def shape_of(schedule: Schedule) -> Shape:
    """Return the shape of a schedule."""
    return Shape(schedule.ranks, schedule.stages, schedule.placement.pattern)


def family_variants(ranks: int, units: int, names: Sequence[str] | None, chunks: int | None) -> list[FamilyVariant]:
    """Return all unidirectional training families, or those named, with all chunk counts that the units allow."""
    known = families()
    variants = []
    for name in known if names is None else names:
        if not known[name].training:
            continue
        for options in _options(known[name].options, ranks, units, chunks):
            shape = _shape_on_few_ranks(name, options, ranks)
            if shape is not None and shape.stages <= units and (chunks is None or shape.chunks == chunks):
                variants.append(FamilyVariant(name, tuple(options.items()), shape))
    return variants


def _shape_on_few_ranks(name: str, options: dict[str, Any], ranks: int) -> Shape | None:
    """Return the shape of a family, judged by a small schedule, which is faster to build."""
    sizes = ((1, 1), (1, 2)) if ranks == 1 else ((2, 1), (2, 4), (3, 6), (4, 8), (ranks, 2 * ranks))
    for few_ranks, microbatches in sizes:
        try:
            small = schedule(name, few_ranks, microbatches, **options)
        except ScheduleError:
            continue
        if not small.training or small.placement.directions > 1 or small.stages % few_ranks:
            return None
        return Shape(ranks, small.stages // few_ranks * ranks, shape_of(small).placement)
    return None


def _options(known: dict[str, Any], ranks: int, units: int, chunks: int | None) -> Iterator[dict[str, Any]]:
    """Yield the options that set the number of stages per rank."""
    most = units // ranks
    if "chunks" in known:
        yield from ({"chunks": count} for count in ((chunks,) if chunks else CHUNKS) if count <= most)
    elif "waves" in known:
        yield from ({"waves": count} for count in (1, 2, 3, 4) if 2 * count <= most)
    else:
        yield {}


def one_by_one(ranks: int, microbatches: int) -> Schedule:
    """Return a schedule in which each microbatch completes before the next one starts.

    >>> [str(action) for action in one_by_one(2, 2).programs[1]]
    ['1F0', '1B0', '1F1', '1B1']
    """
    runs = [
        weave((forward(rank, range(microbatches)), 0), (backward(rank, range(microbatches)), 0))
        for rank in range(ranks)
    ]
    return Schedule.from_runs(runs, Placement.loop(ranks, 1, microbatches), name="one-by-one")


@dataclass
class Cuts:
    """The cuts of the units for every shape, found once for one microbatch size: they hardly depend on it."""

    profile: Profile
    by: By = "time"
    fixed: tuple[int, ...] | None = None
    """The number of units of every stage, if the user has set it."""
    time: MeshTime = field(default_factory=MeshTime)
    _cuts: dict[tuple[Shape, bool], list[tuple[int, ...]]] = field(default_factory=dict)

    def of(self, shape: Shape, recompute: bool = False) -> list[tuple[int, ...]]:
        """Return the number of units of each stage, for up to three cuts: with even ranks, even stages, and even sizes.

        With `recompute`, every forward counts twice.
        """
        if self.fixed is not None:
            return [self.fixed] if len(self.fixed) == shape.stages else []
        key = (shape, recompute)
        if key not in self._cuts:
            even = tuple(even_sizes(len(self.profile.layers), shape.stages))
            balanced = [] if shape.placement is None or self.by == "layers" else self._balanced(shape, recompute)
            cuts = balanced if balanced and self.by == "parameters" else [*balanced, even]
            self._cuts[key] = list(dict.fromkeys(cuts))
        return self._cuts[key]

    def _balanced(self, shape: Shape, recompute: bool) -> list[tuple[int, ...]]:
        """Return cuts whose ranks have equal work, and whose stages have: a rank may hold a long and a short stage."""
        assert shape.placement is not None
        costs = self._costs(recompute)
        speed = None if self.time.speed is None or self.by != "time" else self.time.speed
        by_stage = None if speed is None else [speed[rank] for rank in shape.rank_of]
        stages = tuple(partition(costs, shape.stages, speed=by_stage).layers_per_stage)
        if shape.chunks == 1 or self._is_slow(shape):
            return [stages]
        by_rank = partition(costs, shape.ranks, shape.chunks, shape.placement, speed=speed)
        return [tuple(by_rank.layers_per_stage), stages]

    def _is_slow(self, shape: Shape) -> bool:
        """Whether an optimal cut would take long."""
        is_large = len(self.profile.layers) * shape.ranks > MAX_EXACT
        return shape.chunks > 2 or (shape.chunks == 2 and shape.placement == "loop" and is_large)

    def _costs(self, recompute: bool) -> list[float]:
        if self.by == "parameters":
            return [float(layer.parameters) for layer in self.profile.layers]
        return self.time.layer_seconds(self.profile, recompute)

    def roomier(
        self,
        shape: Shape,
        counts: Sequence[int],
        totals: Sequence[float],
        caps: Sequence[float],
        state_factor: float,
        recompute: bool,
    ) -> tuple[int, ...] | None:
        """Return the fastest cut that moves units away from ranks above their memory cap; None if there is none.

        `totals` is the memory of the ranks with `counts`. The memory of a unit depends on the order of actions, so it
        is assumed to be proportional to its parameters (times `state_factor`) plus its activations.
        """
        if self.fixed is not None or shape.placement is None or self.by != "time" or self._is_slow(shape):
            return None
        size = [layer.parameters * state_factor + layer.activation for layer in self.profile.layers]
        own = [0.0] * shape.ranks
        for (start, stop), rank in zip(spans_of(counts), shape.rank_of, strict=True):
            own[rank] += sum(size[start:stop])
        room = [cap * (mine / total) if total else cap for mine, total, cap in zip(own, totals, caps, strict=True)]
        try:
            cut = partition(
                self._costs(recompute), shape.ranks, shape.chunks, shape.placement, memory=size, caps=room,
                speed=self.time.speed,
            )  # fmt: skip
        except StagelineError:
            return None
        return tuple(cut.layers_per_stage)


MAX_COSTS = 4096
"""Maximum number of cached costs."""


class Evaluator:
    """Computes the costs of candidates, and caches them."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self.profile = cache(request.profiles.at)
        """Maps a number of samples in a microbatch to the profile."""
        self._stage_costs = lru_cache(MAX_COSTS)(self._compute_costs)
        self._lowered: tuple[Schedule, Schedule] | None = None

    def _compute_costs(self, shape: Shape, samples: int, counts: tuple[int, ...], recompute: Recompute) -> Costs:
        """Return the costs of stages where they run."""
        request = self._request
        costs = request.time.costs(
            self.profile(samples), counts, recompute, self._rank_of(shape), request.states, request.overhead
        )
        return replace(costs, shares=request.shares)

    def _rank_of(self, shape: Shape) -> list[int]:
        """Return the rank of every stage; with two directions, the first one."""
        fixed = self._request.schedule
        if fixed is None or fixed.stages != shape.stages:
            return shape.rank_of
        return [int(rank) for rank in fixed.placement.table[0]]

    def simulate(self, schedule: Schedule, candidate: Candidate) -> Timeline:
        """Simulate a candidate with its shard actions, if they take time."""
        costs = self.costs(candidate)
        if self._lowered is None or self._lowered[0] is not schedule:
            self._lowered = schedule, lowered(schedule, costs, self._request.mesh, self._request.reshard)
        return simulate(self._lowered[1], costs)

    def costs(self, candidate: Candidate) -> Costs:
        """Return the costs of the stages.

        On one rank, W follows I at once in every family, and both run as one backward.
        """
        costs = self._stage_costs(candidate.shape, candidate.samples, candidate.counts, candidate.recompute)
        if candidate.shape.ranks > 1:
            return costs
        _, whole, first, second = costs.times(len(candidate.counts))
        share = np.divide(whole, first + second, out=np.ones_like(whole), where=first + second > 0)
        return replace(costs, backward_input=(first * share).tolist(), backward_weight=(second * share).tolist())

    def memory(self, timeline: Timeline, candidate: Candidate) -> tuple[RankMemory, ...]:
        """Return the memory of every rank in a simulated step."""
        rows = timeline.schedule.placement.table.tolist()  # with two directions, two ranks hold every stage
        parameters = np.sum([self._parameters(candidate, row) for row in rows], axis=0)
        sizes = stage_bytes(self.profile(candidate.samples), candidate.counts)
        return rank_memory(timeline, parameters, sizes, self._request.states)

    def _parameters(self, candidate: Candidate, rank_of: Sequence[int]) -> Floats:
        profile = self.profile(candidate.samples)
        return parameter_bytes(profile, candidate.counts, rank_of, candidate.shape.ranks)

    def _blocks(self, candidate: Candidate, rank_of: Sequence[int]) -> Floats:
        if not self._request.states.block_factor:
            return np.zeros(candidate.shape.ranks)
        return block_bytes(self.profile(candidate.samples), candidate.counts, rank_of, candidate.shape.ranks)

    def fits(self, memory: Sequence[RankMemory]) -> list[bool]:
        """Return for each rank whether it is within its cap."""
        if self._request.caps is None:
            return [True] * len(memory)
        return [rank.total <= cap * (1 + SLACK) for rank, cap in zip(memory, self._request.caps, strict=True)]

    def bound(self, candidate: Candidate) -> float:
        """Return a lower bound on the step: a rank runs all its work after the first forward has reached it."""
        costs, shape = self.costs(candidate), candidate.shape
        forward, backward, first, second = costs.times(shape.stages)
        work = forward + np.minimum(backward, first + second)
        if shape.placement is None:
            return float(candidate.microbatches * work.sum() / shape.ranks)
        arrival = np.concatenate([[0.0], np.cumsum(forward)[:-1]])
        own = np.bincount(np.array(shape.rank_of), work, shape.ranks)
        total = self._least_shard_time(costs, shape) + own * candidate.microbatches
        shared = (total[list(share.ranks)].sum() / share.throughput for share in costs.shares)
        return max(float((total + arrival[: shape.ranks]).max()), *map(float, shared), 0.0)

    def collectives(self, candidate: Candidate) -> Collectives:
        """Return the time of all collectives of a step, on the rank that has most of them."""
        request = self._request
        return request.time.collectives(
            self.profile(candidate.samples), candidate.counts, candidate.recompute, self._rank_of(candidate.shape),
            request.states, candidate.microbatches,
        )  # fmt: skip

    def least_seconds(self, microbatches: int, samples: int) -> float:
        """Return a lower bound on the step of any cut and order: all work, divided equally."""
        request, profile = self._request, self.profile(samples)
        fastest = request.time.fastest()
        halves, wholes = (fastest.layer_seconds(profile, False, split=split) for split in (True, False))
        together = request.ranks if request.time.speed is None else sum(request.time.speed)
        return microbatches * sum(map(min, halves, wholes)) / together

    @staticmethod
    def _least_shard_time(costs: Costs, shape: Shape) -> Floats:
        """Return what a rank waits at least for the reduction of the stage that it finishes last."""
        least = np.full(shape.ranks, np.inf)
        np.minimum.at(least, shape.rank_of, per_stage("reduce", costs.reduce, shape.stages))
        return least

    def recompute_queues(self, candidate: Candidate, rank_of: Sequence[int]) -> list[list[str]]:
        """Return the units of every rank, in the order in which to recompute them: most memory saved per time first."""
        layers = self.profile(candidate.samples).layers
        queues: list[list[str]] = [[] for _ in range(candidate.shape.ranks)]
        for (start, stop), rank in zip(spans_of(candidate.counts), rank_of, strict=True):
            queues[rank] += [layer.name for layer in layers[start:stop]]
        worth = {layer.name: (layer.activation + 1) / (layer.forward + 1e-12) for layer in layers}
        return [sorted(queue, key=lambda name: -worth[name]) for queue in queues]

    def room(self, candidate: Candidate) -> list[float] | None:
        """Return the memory left for activations, assuming two waiting messages per link; None without caps."""
        request, shape = self._request, candidate.shape
        if request.caps is None:
            return None
        rank_of = shape.rank_of
        fixed = self._parameters(candidate, rank_of) * sum(request.states.factors)
        fixed += self._blocks(candidate, rank_of) * request.states.block_factor
        message = np.asarray(self.costs(candidate).message)
        for stage in range(shape.stages - 1):
            if rank_of[stage] != rank_of[stage + 1]:
                fixed[rank_of[stage]] += 2 * message[stage]
                fixed[rank_of[stage + 1]] += 2 * message[stage]
        return [float(cap - used) for cap, used in zip(request.caps, fixed, strict=True)]
