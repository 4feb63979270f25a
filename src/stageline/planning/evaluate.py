"""What a try costs: time and memory of its stages, and bounds on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stageline.model.profile.profile import Profile
from stageline.planning.candidates import ranks_of
from stageline.planning.memory import RankMemory, memory_of, weights_of
from stageline.planning.stage_costs import spans_of, stage_costs
from stageline.planning.trial import Asked, Place
from stageline.timeline.costs import Costs, Floats
from stageline.timeline.timeline import Timeline

SLACK = 1e-9
"""Memory may exceed a cap by this share of it: sums round."""
KEPT = 4096
"""How many costs are kept to be used again."""


class Prices:
    """Costs of stages by what is tried, each found once."""

    def __init__(self, asked: Asked) -> None:
        """For what is asked."""
        self._asked = asked
        self._costs: dict[Place, Costs] = {}
        self._profiles: dict[int, Profile] = {}

    def profile(self, samples: int) -> Profile:
        """With so many samples in a microbatch."""
        if samples not in self._profiles:
            self._profiles[samples] = self._asked.sizes.at(samples)
        return self._profiles[samples]

    def costs(self, place: Place) -> Costs:
        """Of the stages."""
        key = replace(place, microbatches=0)
        if key not in self._costs:
            if len(self._costs) > KEPT:
                self._costs.clear()
            self._costs[key] = stage_costs(self.profile(place.samples), place.counts, place.again, self._asked.links)
        return self._costs[key]

    def memory(self, timeline: Timeline, place: Place) -> tuple[RankMemory, ...]:
        """Of every rank, for a simulated step."""
        rows = timeline.schedule.placement.table.tolist()  # with two directions every stage is held twice
        weights = np.sum([self.weights(place, row) for row in rows], axis=0)
        return memory_of(timeline, weights, self._asked.states)

    def weights(self, place: Place, rank_of: Sequence[int]) -> Floats:
        """Bytes of the parameters of every rank."""
        return weights_of(self.profile(place.samples), place.counts, rank_of, place.shape.ranks)

    def fitting(self, memory: Sequence[RankMemory]) -> list[bool]:
        """Whether each rank has room for it."""
        if self._asked.caps is None:
            return [True] * len(memory)
        return [rank.total <= cap * (1 + SLACK) for rank, cap in zip(memory, self._asked.caps, strict=True)]

    def bound(self, place: Place) -> float:
        """No order takes less: a rank runs all it has to, after the first forward has come to it."""
        costs = self.costs(place)
        forward, backward, first, second = costs.times(place.shape.stages)
        work = forward + np.minimum(backward, first + second)
        if place.shape.place is None:
            return float(place.microbatches * work.sum() / place.shape.ranks)
        head = np.concatenate([[0.0], np.cumsum(forward)[:-1]])
        rank_of = np.array(ranks_of(place.shape))
        total = np.bincount(rank_of, work, place.shape.ranks) * place.microbatches
        return float((total + head[: place.shape.ranks]).max())

    def queues(self, place: Place, rank_of: Sequence[int]) -> list[list[str]]:
        """The units of every rank, those first that are worth most."""
        layers = self.profile(place.samples).layers
        queues: list[list[str]] = [[] for _ in range(place.shape.ranks)]
        for (start, stop), rank in zip(spans_of(place.counts), rank_of, strict=True):
            queues[rank] += [layer.name for layer in layers[start:stop]]
        worth = {layer.name: (layer.activation + 1) / (layer.forward + 1e-12) for layer in layers}
        return [sorted(queue, key=lambda name: -worth[name]) for queue in queues]

    def room(self, place: Place) -> list[float] | None:
        """What is left for activations: two messages wait on every way to a rank."""
        asked = self._asked
        if asked.caps is None:
            return None
        rank_of = ranks_of(place.shape)
        fixed = self.weights(place, rank_of) * sum(asked.states.factors)
        message = np.asarray(self.costs(place).message)
        for stage in range(place.shape.stages - 1):
            if rank_of[stage] != rank_of[stage + 1]:
                fixed[rank_of[stage]] += 2 * message[stage]
                fixed[rank_of[stage + 1]] += 2 * message[stage]
        return [float(cap - held) for cap, held in zip(asked.caps, fixed, strict=True)]
