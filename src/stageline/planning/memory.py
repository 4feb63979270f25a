"""The peak memory of every rank: parameters, gradients, optimizer state, activations and message buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stageline.common.checked_json import NonNegative
from stageline.model.partition.partition import spans_of
from stageline.model.profile import Profile
from stageline.timeline.costs import Floats, per_stage
from stageline.timeline.timeline import Timeline


class RankMemory(NamedTuple):
    """The peak bytes of a rank, by purpose."""

    parameters: NonNegative
    gradients: NonNegative
    optimizer: NonNegative
    activations: NonNegative
    """Held from F to B or W, and by running backwards: the peak of the step."""
    buffers: NonNegative
    """Messages that were sent to the rank and not used yet: the peak of the step."""
    snapshot: float = 0.0
    """What continuous steps keep to undo one: a copy of parameters, gradients and optimizer state."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self)


@dataclass(frozen=True)
class StateBytes:
    """The bytes that training holds per parameter."""

    parameter: float = 4.0
    """Of the parameter itself; a profile only has their sum."""
    gradient: float | None = None
    """Of its gradient; if None, as many as of the parameter."""
    optimizer: float = 8.0
    """Of its optimizer state: two float32 numbers for AdamW."""
    continuous: bool = False
    """Whether steps are continuous, so that a snapshot of all of these is kept."""

    @property
    def factors(self) -> tuple[float, float, float, float]:
        """Bytes of parameter, gradient, optimizer state and snapshot, per byte of parameter."""
        gradient = self.parameter if self.gradient is None else self.gradient
        factors = (1.0, gradient / self.parameter, self.optimizer / self.parameter)
        return *factors, sum(factors) if self.continuous else 0.0


def parameter_bytes(profile: Profile, counts: Sequence[int], rank_of: Sequence[int], ranks: int) -> Floats:
    """Return the bytes of the parameters of every rank; a unit in several places counts once on each rank.

    Tied parameters count in every unit that has them, unless one rank has all units.
    """
    if ranks == 1:
        by_name = {layer.name: layer.parameters - layer.tied for layer in profile.layers}
        return np.array([float(sum(by_name.values()))])
    bytes_of_rank = np.zeros(ranks)
    seen: set[tuple[int, str]] = set()
    for (start, stop), rank in zip(spans_of(counts), rank_of, strict=True):
        for layer in profile.layers[start:stop]:
            if (rank, layer.name) not in seen:
                seen.add((rank, layer.name))
                bytes_of_rank[rank] += layer.parameters
    return bytes_of_rank


def buffers_of(timeline: Timeline) -> Floats:
    """Return the peak bytes of messages that wait at each rank, from sending to the start of the action that uses them.

    >>> import stageline as sl
    >>> s = sl.schedule("gpipe", ranks=2, microbatches=3)
    >>> buffers_of(sl.simulate(s, sl.Costs(forward=[1, 4], message=10))).tolist()
    [10.0, 20.0]
    """
    schedule, costs = timeline.schedule, timeline.costs
    transfers = timeline.transfers
    if costs is None or not len(transfers.receivers):
        return np.zeros(schedule.ranks)
    graph, receivers = schedule.graph, transfers.receivers
    boundary = np.minimum(schedule.stage_ids[receivers], schedule.stage_ids[graph.source[receivers]])
    size = per_stage("message", costs.message, schedule.stages)[boundary]
    rank = np.concatenate([graph.rank[receivers], graph.rank[receivers]])
    times = np.concatenate([transfers.sent, timeline.start[receivers]])
    change = np.concatenate([size, -size])
    order = np.lexsort((change < 0, times, rank))
    level = np.cumsum(change[order])  # a rank uses all of its messages, so every rank starts at 0
    peaks = np.zeros(schedule.ranks)
    np.maximum.at(peaks, rank[order], level)
    return peaks


def rank_memory(timeline: Timeline, parameters: Floats, states: StateBytes) -> tuple[RankMemory, ...]:
    """Return the peak memory of every rank in a simulated step."""
    parameter, gradient, optimizer, snapshot = states.factors
    return tuple(
        RankMemory(*map(float, (parameter * own, gradient * own, optimizer * own, peak, buffers, snapshot * own)))
        for own, peak, buffers in zip(parameters, timeline.peak_memory, buffers_of(timeline), strict=True)
    )
