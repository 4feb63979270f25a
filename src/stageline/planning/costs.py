"""What a plan costs: the time and memory of its stages, some of whose units may be recomputed, and the peak memory of
its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from stageline.common.checked_json import NonNegative
from stageline.model.partition.partition import spans_of
from stageline.model.profile import Layer, Profile
from stageline.schedules.action import B, F, I
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import ReshardAfterForward, lower_sharding
from stageline.timeline.costs import Costs, Floats, PerPair, SharedLink, per_stage
from stageline.timeline.memory import shard_levels
from stageline.timeline.timeline import Timeline

Recompute: TypeAlias = str | tuple[str, ...]
"""What is recomputed: "none", "stage" (every stage as a whole), or the names of units."""


@dataclass(frozen=True)
class Links:
    """The cost of messages between ranks: latency and bytes per second, for all pairs or for each."""

    transfer: PerPair = 0.0
    bandwidth: PerPair | None = None
    shared: tuple[SharedLink, ...] = ()
    """Links that transfers share."""


def stage_costs(profile: Profile, counts: Sequence[int], recompute: Recompute, links: Links) -> Costs:
    """Return the costs of stages: as measured, plus the forwards that a backward recomputes.

    A recomputed stage keeps its input and its output; its backward takes a forward longer, and holds the stage's
    activations while it runs. Units are recomputed one by one.

    >>> layer = Layer("0", "Linear", 1.0, 1.0, 1.0, 2.0, 80, 40, 0, 0, 8, 8, 8, 1)
    >>> profile = Profile((layer, replace(layer, name="1")), "a machine", "cpu", "2.13", 1, 1)
    >>> costs = stage_costs(profile, [1, 1], "stage", Links())
    >>> costs.backward, costs.activation, costs.transient["B"]
    ([3.0, 3.0], [24.0, 8.0], [80.0, 80.0])
    """
    spans = spans_of(counts)
    costs = profile.costs(spans, transfer=links.transfer, bandwidth=links.bandwidth)
    costs = replace(costs, links=links.shared) if links.shared else costs
    if recompute == "none" or recompute == ():
        return costs
    if recompute == "stage":
        return _recompute_stages(profile, spans, costs)
    return _recompute_units(profile, spans, costs, frozenset(recompute))


def _input_bytes(profile: Profile, unit: int) -> int:
    """Return the bytes of a unit's input. For the batch itself, a profile only knows what is kept of it."""
    if unit:
        return profile.layers[unit - 1].message
    first = profile.layers[0]
    return first.arriving + min(first.activation, first.message)


def _sum(layers: Sequence[Layer], name: str) -> float:
    return float(sum(getattr(layer, name) for layer in layers))


def _beside(costs: Costs, recomputed: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return what is recomputed in an action, beside what the action holds anyway."""
    own = costs.transient if isinstance(costs.transient, Mapping) else {}
    total = {kind: list(np.asarray(own.get(kind, 0.0)) + np.array(sizes)) for kind, sizes in recomputed.items()}
    return {kind: list(map(float, np.atleast_1d(sizes))) for kind, sizes in {**own, **total}.items()}


def _with_recompute(
    costs: Costs, forwards: Sequence[float], activation: list[float], transient: dict[str, list[float]]
) -> Costs:
    def longer(values: object) -> list[float]:
        assert isinstance(values, list)
        return [value + forward for value, forward in zip(values, forwards, strict=True)]

    return replace(
        costs,
        backward=longer(costs.backward),
        backward_input=longer(costs.backward_input),
        activation=activation,
        transient=transient,
    )


def _recompute_stages(profile: Profile, spans: Sequence[tuple[int, int]], costs: Costs) -> Costs:
    layers = profile.layers
    activation, transient = [], []
    for start, stop in spans:
        output = layers[stop - 1].message if stop < len(layers) else 0
        activation.append(float(_input_bytes(profile, start) + output))
        transient.append(_sum(layers[start:stop], "activation"))
    forwards = [_sum(layers[start:stop], "forward") for start, stop in spans]
    return _with_recompute(costs, forwards, activation, _beside(costs, {"B": transient, "I": transient}))


def _recompute_units(
    profile: Profile, spans: Sequence[tuple[int, int]], costs: Costs, recomputed: frozenset[str]
) -> Costs:
    layers = profile.layers
    activation, transient_b, transient_i, forwards = [], [], [], []
    for start, stop in spans:
        units = [unit for unit in range(start, stop) if layers[unit].name in recomputed]
        kept = float(sum(_input_bytes(profile, unit) for unit in units))
        kept += _sum([layer for layer in layers[start:stop] if layer.name not in recomputed], "activation")
        kept += 0 if start in units else layers[start].arriving
        if stop < len(layers):
            kept += layers[stop - 1].message if stop - 1 in units else layers[stop - 1].leaving
        activation.append(kept)
        transient_b.append(float(max((layers[unit].activation for unit in units), default=0)))
        # I holds the activations of the current unit, and the residues of the units after it.
        residue, peak = 0.0, 0.0
        for unit in reversed(units):
            peak = max(peak, residue + layers[unit].activation)
            residue += layers[unit].residue
        transient_i.append(peak)
        forwards.append(_sum([layers[unit] for unit in units], "forward"))
    return _with_recompute(costs, forwards, activation, _beside(costs, {"B": transient_b, "I": transient_i}))


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
    graphs: float = 0.0
    """With CUDA graphs: the outputs of all actions, which stay where they are from step to step."""
    gathered: float = 0.0
    """With shards: the parameters that are gathered, and the gradients that are not reduced yet."""

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
    cuda_graphs: bool = False
    """Whether actions are captured as CUDA graphs, so that their outputs stay."""
    shards: int = 1
    """The processes that share parameters, gradients and optimizer state (FSDP2)."""
    by_block: bool = False
    """Whether shards are gathered for every action anew, block by block (`reshard_after_forward="always"`)."""
    optimizer_replicas: int = 1
    """The replicas that divide the optimizer state (ZeRO-1)."""

    @property
    def factors(self) -> tuple[float, float, float, float, float]:
        """Bytes of parameter, gradient, optimizer state, snapshot and (at most) gathered state per parameter byte."""
        gradient = self.gradient_ratio / self.shards
        optimizer = self.optimizer / self.parameter / self.shards / self.optimizer_replicas
        parameter = 1.0 / self.shards
        snapshot = parameter + gradient + optimizer if self.continuous else 0.0
        whole = (0.0 if self.by_block else 1.0) + self.gradient_ratio if self.shards > 1 else 0.0
        return parameter, gradient, optimizer, snapshot, whole

    @property
    def block_factor(self) -> float:
        """Bytes of gathered state per byte of the blocks that are gathered at once, if not all are."""
        return 1.0 if self.by_block and self.shards > 1 else 0.0

    @property
    def gradient_ratio(self) -> float:
        """Bytes of gradient per byte of parameter."""
        return 1.0 if self.gradient is None else self.gradient / self.parameter


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


def stage_bytes(profile: Profile, counts: Sequence[int]) -> tuple[Floats, Floats]:
    """Return for every stage the bytes of its parameters, and those of its two largest neighbouring units."""
    sizes = [[float(layer.parameters) for layer in profile.layers[start:stop]] for start, stop in spans_of(counts)]
    pairs = [max(map(sum, zip(units, [*units[1:], 0.0], strict=True))) for units in sizes]
    return np.array([sum(units) for units in sizes]), np.array(pairs)


def block_bytes(profile: Profile, counts: Sequence[int], rank_of: Sequence[int], ranks: int) -> Floats:
    """Return the bytes of the blocks that a rank gathers at once at most: two of a stage, and two of the next one."""
    pairs: list[list[float]] = [[] for _ in range(ranks)]
    for pair, rank in zip(stage_bytes(profile, counts)[1].tolist(), rank_of, strict=True):
        pairs[rank].append(pair)
    return np.array([sum(sorted(of_rank)[-2:]) for of_rank in pairs])


def gathered_of(schedule: Schedule, sizes: tuple[Floats, Floats], parameters: Floats, states: StateBytes) -> Floats:
    """Return the peak bytes of gathered parameters and of gradients that are not reduced, of each rank.

    They are those of the lowered schedule; `sizes` are those of `stage_bytes`, `parameters` the bytes of each rank.

    >>> import stageline as sl
    >>> sizes = np.array([40.0, 40.0]), np.array([30.0, 30.0])
    >>> s = sl.schedule("1f1b", ranks=2, microbatches=4)
    >>> [gathered_of(s, sizes, sizes[0], StateBytes(shards=2, by_block=blocks)).tolist() for blocks in (False, True)]
    [[80.0, 80.0], [70.0, 70.0]]
    """
    if states.shards == 1:
        return np.zeros(schedule.ranks)
    policy: ReshardAfterForward = "always" if states.by_block else "default"
    lowered = schedule if schedule.sharding is not None else lower_sharding(schedule, reshard_after_forward=policy)
    peaks = np.zeros(schedule.ranks)
    for rank, part in enumerate(schedule.slices()):
        held = sizes[0][schedule.placement.stages_of(rank)].sum()
        scale = parameters[rank] / held if held else 0.0  # a tied parameter counts once
        whole, block = ((size * scale).tolist() for size in sizes)
        gradients = [size * states.gradient_ratio for size in whole]
        costs = Costs(gathered=whole, gathered_block=block, unreduced=gradients)
        peaks[rank] = max(level.max(initial=0.0) for level in shard_levels(lowered, costs, part))
    return peaks


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


def outputs_of(timeline: Timeline) -> Floats:
    """Return the bytes that each rank's actions pass on in a step: outputs of stages, and gradients of their inputs.

    >>> import stageline as sl
    >>> s = sl.schedule("gpipe", ranks=2, microbatches=3)
    >>> outputs_of(sl.simulate(s, sl.Costs(forward=[1, 4], message=10))).tolist()
    [30.0, 30.0]
    """
    schedule, costs = timeline.schedule, timeline.costs
    if costs is None:
        return np.zeros(schedule.ranks)
    message = per_stage("message", costs.message, schedule.stages)
    kind, stage = schedule.action_kinds, schedule.stage_ids
    forward = np.where((kind == F) & (stage < schedule.stages - 1), message[stage], 0.0)
    backward = np.where(((kind == B) | (kind == I)) & (stage > 0), message[np.maximum(stage - 1, 0)], 0.0)
    totals = np.zeros(schedule.ranks)
    np.add.at(totals, schedule.graph.rank, forward + backward)
    return totals


def rank_memory(
    timeline: Timeline, parameters: Floats, sizes: tuple[Floats, Floats], states: StateBytes
) -> tuple[RankMemory, ...]:
    """Return the peak memory of every rank in a simulated step; `sizes` are those of `stage_bytes`."""
    parameter, gradient, optimizer, snapshot, _ = (factor * parameters for factor in states.factors)
    outputs = outputs_of(timeline) if states.cuda_graphs else np.zeros(timeline.schedule.ranks)
    parts = (
        parameter, gradient, optimizer, timeline.peak_memory, buffers_of(timeline), snapshot, outputs,
        gathered_of(timeline.schedule, sizes, parameters, states),
    )  # fmt: skip
    return tuple(RankMemory(*map(float, rank)) for rank in zip(*parts, strict=True))
