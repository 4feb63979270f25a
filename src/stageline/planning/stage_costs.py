"""The costs of stages, some of whose units may be recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from stageline.model.partition.partition import spans_of
from stageline.model.profile import Layer, Profile
from stageline.timeline.costs import Costs, PerPair

Recompute: TypeAlias = str | tuple[str, ...]
"""What is recomputed: "none", "stage" (every stage as a whole), or the names of units."""


@dataclass(frozen=True)
class Links:
    """The cost of messages between ranks: latency and bytes per second, for all pairs or for each."""

    transfer: PerPair = 0.0
    bandwidth: PerPair | None = None


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
    return _with_recompute(costs, forwards, activation, {"B": transient, "I": transient})


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
    return _with_recompute(costs, forwards, activation, {"B": transient_b, "I": transient_i})
