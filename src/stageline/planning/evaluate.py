"""Evaluate candidates: the time and memory of their stages, and lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stageline.model.partition.partition import spans_of
from stageline.model.profile import Profile
from stageline.planning.candidates import Candidate
from stageline.planning.memory import RankMemory, parameter_bytes, rank_memory
from stageline.planning.request import PlanRequest
from stageline.planning.stage_costs import stage_costs
from stageline.timeline.costs import Costs, Floats
from stageline.timeline.timeline import Timeline

SLACK = 1e-9
"""Memory may exceed a cap by this fraction, because of rounding."""
MAX_COSTS = 4096
"""Maximum number of cached costs."""


class Evaluator:
    """Computes the costs of candidates, and caches them."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._costs: dict[Candidate, Costs] = {}
        self._profiles: dict[int, Profile] = {}

    def profile(self, samples: int) -> Profile:
        """Return the profile for this number of samples in a microbatch."""
        if samples not in self._profiles:
            self._profiles[samples] = self._request.profiles.at(samples)
        return self._profiles[samples]

    def costs(self, candidate: Candidate) -> Costs:
        """Return the costs of the stages."""
        key = replace(candidate, microbatches=0)
        if key not in self._costs:
            if len(self._costs) > MAX_COSTS:
                self._costs.clear()
            profile = self.profile(candidate.samples)
            self._costs[key] = stage_costs(profile, candidate.counts, candidate.recompute, self._request.links)
        return self._costs[key]

    def memory(self, timeline: Timeline, candidate: Candidate) -> tuple[RankMemory, ...]:
        """Return the memory of every rank in a simulated step."""
        rows = timeline.schedule.placement.table.tolist()  # with two directions, two ranks hold every stage
        parameters = np.sum([self._parameters(candidate, row) for row in rows], axis=0)
        return rank_memory(timeline, parameters, self._request.states)

    def _parameters(self, candidate: Candidate, rank_of: Sequence[int]) -> Floats:
        profile = self.profile(candidate.samples)
        return parameter_bytes(profile, candidate.counts, rank_of, candidate.shape.ranks)

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
        total = np.bincount(np.array(shape.rank_of), work, shape.ranks) * candidate.microbatches
        return float((total + arrival[: shape.ranks]).max())

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
        message = np.asarray(self.costs(candidate).message)
        for stage in range(shape.stages - 1):
            if rank_of[stage] != rank_of[stage + 1]:
                fixed[rank_of[stage]] += 2 * message[stage]
                fixed[rank_of[stage + 1]] += 2 * message[stage]
        return [float(cap - used) for cap, used in zip(request.caps, fixed, strict=True)]
