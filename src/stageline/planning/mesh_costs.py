"""The costs of stages in a mesh: what tensor parallel, gathers and reductions add, and ranks of different speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from stageline.model.partition.partition import spans_of
from stageline.model.profile import Layer, Profile
from stageline.planning.costs import Links, Recompute, StateBytes, stage_costs
from stageline.planning.mesh import Network, all_gather, all_reduce
from stageline.planning.profiles import TIMES
from stageline.planning.tensor_parallel import TensorParallel
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import lower_sharding
from stageline.timeline.costs import Costs, Floats

BUCKET = 25 * 2**20
"""Bytes of gradients that replicas add up at a time."""
FLOAT32 = 4.0
"""Replicas add gradients up in float32 at least."""


class HostOverhead(NamedTuple):
    """Seconds that a rank spends beside the layers."""

    action: float = 0.0
    """On every action."""
    message: float = 0.0
    """On every message that it sends to, or receives from, another rank."""

    def added_to(self, times: Mapping[str, Any], rank_of: Sequence[int]) -> dict[str, Any]:
        """Return the times of the actions of every stage with this overhead.

        Forwards and gradients of inputs exchange messages with the stages before and after.

        >>> HostOverhead(1.0, 0.5).added_to({"forward": [2.0, 2.0, 2.0], "backward_weight": [4.0, 4.0, 4.0]}, [0, 1, 1])
        {'forward': array([3.5, 3.5, 3. ]), 'backward_weight': array([5., 5., 5.])}
        """
        crosses = np.concatenate([[0], np.diff(np.asarray(rank_of)) != 0, [0]]).astype(np.float64)
        messages = self.message * (crosses[:-1] + crosses[1:])
        return {
            name: np.asarray(value) + self.action + (0.0 if name == "backward_weight" else messages)
            for name, value in times.items()
        }


NO_OVERHEAD = HostOverhead()


class Collectives(NamedTuple):
    """Seconds of a step that a rank spends in collectives."""

    tensor_parallel: float = 0.0
    """Within its actions."""
    gathers: float = 0.0
    """Beside its actions, as reductions are."""
    reductions: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return sum(self)


@dataclass(frozen=True)
class MeshTime:
    """What the other dimensions of a mesh, and the speed of the ranks, do to the time of a pipeline."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)
    speed: tuple[float, ...] | None = None
    """The relative speed of every pipeline rank; None if they are as fast as the profile."""

    @property
    def is_uniform(self) -> bool:
        """Whether all pipeline ranks are alike."""
        return self.speed is None and self.network.is_uniform

    @property
    def reduces(self) -> bool:
        """Whether gathers or reductions take time."""
        known = {*self.network.rate, *(name for name, value in self.network.latency.items() if np.any(value))}
        return not known.isdisjoint(("dp_shard", "dp_replicate"))

    @property
    def notes(self) -> list[str]:
        """What is assumed."""
        others = [name for name, size in self.mesh.items() if name != "pp" and size > 1]
        notes = []
        if others and not self.network.rate:
            notes.append(f"without bandwidth=, collectives along {' and '.join(others)} take no time")
        if self.tensor_parallel.parts > 1 and self.tensor_parallel.units is None:
            notes.append(
                "tp: no tp_plan is known, so all parameters and the time of every unit are divided, with two "
                "all-reduces of its output in the forward and two in the backward, as in Megatron"
            )
        return notes

    def layer_seconds(self, profile: Profile, recompute: bool, split: bool = True) -> list[float]:
        """Return the time of every layer for a microbatch, with the collectives of tensor parallel: F, I and W, or B if
        the backward is not split; with `recompute`, F twice."""

        def seconds_of(layer: Layer) -> float:
            return (layer.seconds if split else layer.forward + layer.backward) + recompute * layer.forward

        seconds = np.array(list(map(seconds_of, profile.layers)))
        if self.tensor_parallel.parts > 1:
            sent, hops = (list(map(seconds_of, part.layers)) for part in self.tensor_parallel.traffic(profile))
            seconds = seconds + self.network.seconds("tp", sent, hops, [0] * len(seconds))
        return [float(value) for value in seconds]

    def costs(
        self,
        profile: Profile,
        counts: Sequence[int],
        recompute: Recompute,
        rank_of: Sequence[int],
        states: StateBytes,
        overhead: HostOverhead = NO_OVERHEAD,
    ) -> Costs:
        """Return the costs of stages on their ranks."""
        links = self.network.links
        costs = stage_costs(profile, counts, recompute, links)
        times: dict[str, Any] = {name: np.asarray(getattr(costs, name), dtype=np.float64) for name in TIMES}
        times = overhead.added_to(times, rank_of)
        if self.speed is not None:
            times = {name: value / np.asarray(self.speed)[list(rank_of)] for name, value in times.items()}
        for name, value in self._tensor_parallel_times(profile, counts, recompute, rank_of).items():
            times[name] = times[name] + value
        costs = replace(costs, **{name: value.tolist() for name, value in times.items()})
        shard_costs: dict[str, Any] = self._shard_costs(profile, counts, rank_of, states)
        return replace(costs, **shard_costs)

    def _tensor_parallel_times(
        self, profile: Profile, counts: Sequence[int], recompute: Recompute, rank_of: Sequence[int]
    ) -> dict[str, Floats]:
        """Return the time that the actions of every stage spend in collectives."""
        if self.tensor_parallel.parts == 1:
            return {}
        sent, hops = (stage_costs(part, counts, recompute, Links()) for part in self.tensor_parallel.traffic(profile))
        return {name: self.network.seconds("tp", getattr(sent, name), getattr(hops, name), rank_of) for name in TIMES}

    def collectives(
        self,
        profile: Profile,
        counts: Sequence[int],
        recompute: Recompute,
        rank_of: Sequence[int],
        states: StateBytes,
        microbatches: int,
    ) -> Collectives:
        """Return the time of all collectives on the rank that has most of them."""
        ranks = max(rank_of) + 1
        inside = self._tensor_parallel_times(profile, counts, recompute, rank_of)
        beside = self._shard_costs(profile, counts, rank_of, states)
        gathers = 2 * microbatches if states.by_block else 1
        none = np.zeros(len(counts))
        parts = [
            microbatches * (inside.get("forward", none) + inside.get("backward", none)),
            gathers * np.asarray(beside.get("gather", none)),
            np.asarray(beside.get("reduce", none)),
        ]
        by_rank = np.stack([np.bincount(np.asarray(rank_of), part, ranks) for part in parts])
        return Collectives(*map(float, by_rank[:, int(np.argmax(by_rank.sum(axis=0)))]))

    def fastest(self) -> MeshTime:
        """Return the same with the best link of each dimension everywhere, and equal ranks: for bounds."""
        network = Network(
            Links(),
            {name: float(np.min(value)) for name, value in self.network.latency.items()},
            {name: float(np.max(value)) for name, value in self.network.rate.items()},
        )
        return replace(self, network=network, speed=None)

    def _shard_costs(
        self, profile: Profile, counts: Sequence[int], rank_of: Sequence[int], states: StateBytes
    ) -> dict[str, list[float]]:
        """Return the times of gathers and reductions of every stage, without those that take none."""
        shards, replicas = (self.mesh.get(name, 1) for name in ("dp_shard", "dp_replicate"))
        if not self.reduces:
            return {}
        units = [
            np.array([layer.parameters for layer in profile.layers[start:stop] if layer.parameters], dtype=np.float64)
            for start, stop in spans_of(counts)
        ]
        sizes, numbers = np.array([part.sum() for part in units]), np.array([len(part) for part in units])
        ends = np.array([max(part[:1].max(initial=0.0), part[-1:].max(initial=0.0)) for part in units])
        seconds = self.network.seconds
        # Over shards, every unit by itself; over replicas, in buckets.
        (sent, block), hops = (all_gather(size, shards)[0] for size in (sizes, ends)), shards - 1
        scattered = seconds("dp_shard", sent * states.gradient_ratio, hops * numbers, rank_of)
        held = sizes * max(states.gradient_ratio, FLOAT32 / states.parameter) / shards
        added, hops_of_bucket = all_reduce(held, replicas)
        added_up = seconds("dp_replicate", added, hops_of_bucket * np.ceil(held / BUCKET), rank_of)
        times = {
            "gather": seconds("dp_shard", sent, hops * numbers, rank_of),
            "gather_block": seconds("dp_shard", block, hops * (ends > 0), rank_of),
            "reduce": scattered + added_up,
        }
        return {name: value.tolist() for name, value in times.items() if shards > 1 or name == "reduce"}


def lowered(schedule: Schedule, costs: Costs, mesh: Mapping[str, int], reshard: Any) -> Schedule:
    """Return the schedule with its shard actions, if they take time."""
    if not np.any(costs.gather) and not np.any(costs.reduce):
        return schedule
    return lower_sharding(schedule, reshard_after_forward=reshard, gathers=mesh.get("dp_shard", 1) > 1)
