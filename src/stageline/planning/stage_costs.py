"""What stages cost, where some of their units are computed once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

from stageline.model.profile.profile import Layer, Profile
from stageline.timeline.costs import Costs, PerPair

Again: TypeAlias = str | tuple[str, ...]
"""What is computed once more: "none", "stage" (every stage whole), or the names of units."""


@dataclass(frozen=True)
class Links:
    """What messages between ranks take: a latency, and bytes per second, for all pairs or each."""

    transfer: PerPair = 0.0
    bandwidth: PerPair | None = None


def spans_of(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The first unit of every stage and the one after its last, from how many it has.

    >>> spans_of([2, 3])
    [(0, 2), (2, 5)]
    """
    return list(pairwise(accumulate(counts, initial=0)))


def stage_costs(profile: Profile, counts: Sequence[int], again: Again, links: Links) -> Costs:
    """The costs of stages: as measured, or with the forwards that a backward runs once more, and what that keeps.

    A stage that is computed once more keeps what it was given and what it gave; its backward takes a forward longer,
    and while it runs it holds what the forward kept otherwise. Units that are computed once more do so one by one.

    >>> layer = Layer("0", "Linear", 1.0, 1.0, 1.0, 2.0, 80, 40, 0, 0, 8, 8, 8, 1)
    >>> profile = Profile((layer, replace(layer, name="1")), "a machine", "cpu", "2.13", 1, 1)
    >>> costs = stage_costs(profile, [1, 1], "stage", Links())
    >>> costs.backward, costs.activation, costs.transient["B"]
    ([3.0, 3.0], [24.0, 8.0], [80.0, 80.0])
    """
    spans = spans_of(counts)
    costs = profile.costs(spans, transfer=links.transfer, bandwidth=links.bandwidth)
    if again == "none" or again == ():
        return costs
    if again == "stage":
        return _whole(profile, spans, costs)
    return _by_unit(profile, spans, costs, frozenset(again))


def _given(profile: Profile, unit: int) -> int:
    """Bytes that a unit is given; of the batch itself a profile does not know more than that some of it is kept."""
    if unit:
        return profile.layers[unit - 1].message
    first = profile.layers[0]
    return first.arriving + min(first.activation, first.message)


def _sum(layers: Sequence[Layer], name: str) -> float:
    return float(sum(getattr(layer, name) for layer in layers))


def _longer(costs: Costs, forwards: Sequence[float], keep: list[float], within: dict[str, list[float]]) -> Costs:
    def more(values: object) -> list[float]:
        assert isinstance(values, list)
        return [value + forward for value, forward in zip(values, forwards, strict=True)]

    return replace(
        costs,
        backward=more(costs.backward),
        backward_input=more(costs.backward_input),
        activation=keep,
        transient=within,
    )


def _whole(profile: Profile, spans: Sequence[tuple[int, int]], costs: Costs) -> Costs:
    layers = profile.layers
    keep, within = [], []
    for start, stop in spans:
        gives = layers[stop - 1].message if stop < len(layers) else 0
        keep.append(float(_given(profile, start) + gives))
        within.append(_sum(layers[start:stop], "activation"))
    forwards = [_sum(layers[start:stop], "forward") for start, stop in spans]
    return _longer(costs, forwards, keep, {"B": within, "I": within})


def _by_unit(profile: Profile, spans: Sequence[tuple[int, int]], costs: Costs, again: frozenset[str]) -> Costs:
    layers = profile.layers
    keep, whole, halves, forwards = [], [], [], []
    for start, stop in spans:
        chosen = [unit for unit in range(start, stop) if layers[unit].name in again]
        kept = float(sum(_given(profile, unit) for unit in chosen))
        kept += _sum([layer for layer in layers[start:stop] if layer.name not in again], "activation")
        kept += 0 if start in chosen else layers[start].arriving
        if stop < len(layers):
            kept += layers[stop - 1].message if stop - 1 in chosen else layers[stop - 1].leaving
        keep.append(kept)
        whole.append(float(max((layers[unit].activation for unit in chosen), default=0)))
        # I leaves the residues of the units behind it, and the unit that it is at has all that it needs.
        later, most = 0.0, 0.0
        for unit in reversed(chosen):
            most = max(most, later + layers[unit].activation)
            later += layers[unit].residue
        halves.append(most)
        forwards.append(_sum([layers[unit] for unit in chosen], "forward"))
    return _longer(costs, forwards, keep, {"B": whole, "I": halves})
