"""What every rank holds at most, in parts: weights, gradients, optimizer, activations, messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stageline.common.checked_json import NonNegative
from stageline.model.profile.profile import Profile
from stageline.planning.stage_costs import spans_of
from stageline.timeline.costs import Floats, per_stage
from stageline.timeline.timeline import Timeline


class RankMemory(NamedTuple):
    """The most bytes that a rank holds, by what for."""

    parameters: NonNegative
    gradients: NonNegative
    optimizer: NonNegative
    activations: NonNegative
    """From F to B or W, and what backwards hold while they run: the peak of the step."""
    buffers: NonNegative
    """Messages that have been sent to it and that it has not used yet: the peak of the step."""
    snapshot: float = 0.0
    """What steps that interlock keep to go back: parameters, gradients and the optimizer's state once more."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


@dataclass(frozen=True)
class States:
    """What training holds for every parameter beside it."""

    parameter_bytes: float = 4.0
    """Bytes of one parameter; a profile has only their sum."""
    gradient_bytes: float | None = None
    """Of the gradient of one; as many as the parameter has unless given."""
    optimizer_bytes: float = 8.0
    """Of the optimizer's state for one: two numbers of float32 for AdamW."""
    interlock: bool = False
    """Whether steps interlock, so that a snapshot is kept of all of these."""

    @property
    def factors(self) -> tuple[float, float, float, float]:
        """Bytes of parameter, gradient, optimizer and snapshot for every byte of parameter."""
        gradient = self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes
        each = (1.0, gradient / self.parameter_bytes, self.optimizer_bytes / self.parameter_bytes)
        return *each, sum(each) if self.interlock else 0.0


def weights_of(profile: Profile, counts: Sequence[int], rank_of: Sequence[int], ranks: int) -> Floats:
    """Bytes of the parameters of every rank; a unit that stands in several places counts once on each rank.

    Tied parameters count in every unit that has them, unless one rank has all units.
    """
    if ranks == 1:
        return np.array([float(_once(profile))])
    found = np.zeros(ranks)
    seen: set[tuple[int, str]] = set()
    for (start, stop), rank in zip(spans_of(counts), rank_of, strict=True):
        for layer in profile.layers[start:stop]:
            if (rank, layer.name) not in seen:
                seen.add((rank, layer.name))
                found[rank] += layer.parameters
    return found


def _once(profile: Profile) -> int:
    by_name = {layer.name: layer.parameters - layer.tied for layer in profile.layers}
    return sum(by_name.values())


def buffers_of(timeline: Timeline) -> Floats:
    """The most bytes of messages that wait at each rank, from their sending to the start of what takes them.

    >>> import stageline as sl
    >>> s = sl.schedule("gpipe", ranks=2, microbatches=3)
    >>> buffers_of(sl.simulate(s, sl.Costs(forward=[1, 4], message=10))).tolist()
    [10.0, 20.0]
    """
    schedule, costs = timeline.schedule, timeline.costs
    moved = timeline.transfers
    if costs is None or not len(moved.receivers):
        return np.zeros(schedule.ranks)
    graph = schedule.graph
    boundary = np.minimum(schedule.stage_ids[moved.receivers], schedule.stage_ids[graph.source[moved.receivers]])
    size = per_stage("message", costs.message, schedule.stages)[boundary]
    rank = graph.rank[moved.receivers]
    times = np.concatenate([moved.sent, timeline.start[moved.receivers]])
    change = np.concatenate([size, -size])
    order = np.lexsort((change < 0, times, np.concatenate([rank, rank])))
    level = np.cumsum(change[order])  # what a rank was sent it also takes, so that every rank begins at 0
    found = np.zeros(schedule.ranks)
    np.maximum.at(found, np.concatenate([rank, rank])[order], level)
    return found


def memory_of(timeline: Timeline, weights: Floats, states: States) -> tuple[RankMemory, ...]:
    """All parts, for a simulated step."""
    waiting = buffers_of(timeline)
    one, two, three, again = states.factors
    return tuple(
        RankMemory(*map(float, (one * own, two * own, three * own, peak, more, again * own)))
        for own, peak, more in zip(weights, timeline.peak_memory, waiting, strict=True)
    )
