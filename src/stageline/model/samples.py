"""Repeated measurements of layers: their typical time and spread, when there are enough, and which layers are equal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

KINDS = "FIWB"
"""The kinds of action that are measured, in the order of `Layer.ranges`."""
MAX_OUTLIER = 3.0
"""A measurement counts as at most this many times the median."""
STABLE = 0.02
"""Measurements suffice if the standard error of their mean is below this fraction."""
MAX_FACTOR = 4
"""Unstable measurements are repeated up to this many times as often as requested."""
MAX_SECONDS = 5.0
"""Seconds after which unstable measurements are no longer repeated."""
FEW = 3
"""Fewer repeats are made as requested, since they cannot show how stable they are."""

Times = dict[str, list[float]]
"""The seconds of every measurement, by kind of action."""


def typical(seconds: Sequence[float]) -> float:
    """Return the time that an action takes on average, where single outliers count little.

    A step is a sum of many actions, some of which are slow on a busy machine, so it takes longer than their medians.

    >>> typical([1.0, 1.0, 1.0, 2.0]), typical([1.0, 1.0, 1.0, 1000.0])
    (1.25, 1.5)
    """
    limit = MAX_OUTLIER * statistics.median(seconds)
    return statistics.fmean(min(value, limit) for value in seconds)


def relative_range(totals: Sequence[float]) -> float:
    """Return how far measurements of the same thing are from their middle, as a fraction of it.

    >>> round(relative_range([0.9, 1.0, 1.1]), 3), relative_range([1.0])
    (0.1, 0.0)
    """
    middle = typical(totals)
    return (max(totals) - min(totals)) / 2 / middle if middle > 0 else 0.0


def standard_error(totals: Sequence[float]) -> float:
    """Return the standard error of the mean, as a fraction of it; infinity for a single measurement."""
    if len(totals) < 2:
        return float("inf")
    middle = statistics.fmean(totals)
    return statistics.stdev(totals) / middle / len(totals) ** 0.5 if middle > 0 else 0.0


def repeat(run: Callable[[], float], repeats: int) -> list[float]:
    """Call a function that returns a time, so often, and more often until the times are stable or it takes too long.

    >>> len(repeat(lambda: 1.0, 5)), len(repeat(iter([1.0, 9.0] * 20).__next__, 5))
    (5, 20)
    """
    begin, totals = time.perf_counter(), list[float]()
    while len(totals) < repeats or (
        repeats >= FEW
        and len(totals) < MAX_FACTOR * repeats
        and standard_error(totals) > STABLE
        and time.perf_counter() - begin < MAX_SECONDS
    ):
        totals.append(run())
    return totals


@dataclass
class LayerSamples:
    """All measurements of one layer."""

    key: Hashable
    """Equal for layers that should take the same time."""
    times: Times

    def low_and_high(self, kind: str) -> tuple[float, float]:
        """Return the range of a kind of action."""
        return min(self.times[kind]), max(self.times[kind])


def pooled(layers: Sequence[LayerSamples]) -> list[dict[str, float]]:
    """Return the typical times of each layer by kind; equal layers, if their measurements overlap, are pooled.

    >>> quick, slow, other = ({kind: [time] * 2 for kind in KINDS} for time in (1.0, 3.0, 9.0))
    >>> layers = [LayerSamples("a", times | {"F": times["F"] + [2.0]}) for times in (quick, slow)]
    >>> [times["F"] for times in pooled([*layers, LayerSamples("a", other)])]
    [2.0, 2.0, 9.0]
    """
    groups: dict[Hashable, list[LayerSamples]] = {}
    for layer in layers:
        groups.setdefault(layer.key, []).append(layer)
    return [{kind: typical(_pool(layer, groups[layer.key], kind)) for kind in KINDS} for layer in layers]


def _pool(layer: LayerSamples, equals: Sequence[LayerSamples], kind: str) -> list[float]:
    """Return the measurements of all equal layers whose range overlaps that of every other one that is left."""
    low, high = layer.low_and_high(kind)
    overlapping = [other for other in equals if (ends := other.low_and_high(kind))[0] <= high and ends[1] >= low]
    return [seconds for other in overlapping for seconds in other.times[kind]]


INDICES = ("idx", "index", "id", "number")
"""How attributes end that say where a layer is, not what it is."""


def layer_key(module: nn.Module, inputs: Sequence[Any]) -> Hashable:
    """Return what the time of a layer depends on: its classes, sizes and options, and its inputs.

    >>> first, second, third = (layer_key(nn.Linear(4, size), []) for size in (4, 4, 5))
    >>> first == second, first == third
    (True, False)
    """
    modules = tuple((type(part), part.training, _options(vars(part))) for part in module.modules())
    tensors = [*module.parameters(), *module.buffers(), *(leaf for leaf in inputs if isinstance(leaf, Tensor))]
    values = tuple(repr(leaf)[:80] for leaf in inputs if isinstance(leaf, bool | int | float | str))
    return modules, tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors), values


def _options(attributes: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the plain attributes of a module, as text."""
    plain = (bool, int, float, str, tuple, list, dict)
    return tuple(
        (name, repr(value))
        for name, value in attributes.items()
        if isinstance(value, plain) and not name.startswith("_") and not name.endswith(INDICES)
    )
