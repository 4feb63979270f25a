"""The arguments of `partition`, checked, and as the integers that the search works on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import StagelineError, nearest, shorten
from stageline.model.partition.cuts import CutProblem, Floats, Ints, prefix_sums, to_integers
from stageline.schedules.placement import Placement

Numbers: TypeAlias = Sequence[float] | NDArray[Any]
Span: TypeAlias = tuple[int, int]
PLACEMENTS = ("loop", "v")
MAX_VALUE = 1e100
"""Sums of larger numbers could overflow."""


class PartitionRequest:
    """Layers, and the ranks that hold them; all values are valid."""

    def __init__(
        self,
        costs: Numbers,
        ranks: int,
        chunks: int,
        placement: str,
        memory: Numbers | None,
        caps: float | Numbers | None,
        speed: Numbers | None,
        names: Sequence[str] | None,
    ) -> None:
        """Check the arguments; raise `StagelineError` for an invalid one."""
        self.ranks, self.chunks = ranks, chunks = _count("ranks", ranks), _count("chunks", chunks)
        if placement not in PLACEMENTS:
            raise StagelineError(
                f"placement is {shorten(placement)}{nearest(str(placement), PLACEMENTS)}; it must be "
                "'loop' (0 1 2 0 1 2) or 'v' (0 1 2 2 1 0)"
            )
        self.names = None if names is None else tuple(map(str, names))
        self.costs = _numbers("costs", costs, None, "one per layer", self.names)
        self.layers = layers = len(self.costs)
        if layers < ranks * chunks:
            raise StagelineError(
                f"{ranks} ranks with {chunks} chunks each are {ranks * chunks} stages, but there are {layers} layers; "
                "every stage needs a layer: use fewer ranks or chunks, or smaller layers"
            )
        if self.names is not None and len(self.names) != layers:
            raise StagelineError(
                f"names has {len(self.names)} entries, but costs has {layers}; pass one name per layer"
            )
        if caps is not None and memory is None:
            raise StagelineError("caps needs memory; also pass memory=, the bytes of each layer")
        self.memory = None if memory is None else _numbers("memory", memory, layers, "one per layer", self.names)
        self.caps = None
        if caps is not None:
            per_rank = np.full(ranks, caps) if np.ndim(caps) == 0 else caps
            self.caps = _numbers("caps", per_rank, ranks, "one number, or one per rank", largest=math.inf)
        self.speed = np.ones(ranks) if speed is None else _numbers("speed", speed, ranks, "one per rank")
        if (self.speed <= 0).any():
            slowest = int(np.argmin(self.speed))
            raise StagelineError(
                f"speed[{slowest}] is {self.speed[slowest]:g}; it must be above 0; leave out ranks that are not used"
            )
        self.stages = ranks * chunks
        self.rank_of: Ints = np.asarray(Placement.of_pattern(placement, ranks, chunks).table[0], dtype=np.int64)

    @property
    def power(self) -> int:
        """The exponent of two by which `problem` scales the costs."""
        return to_integers(self.costs)[1]

    def name(self, layer: int) -> str:
        """Return the name of a layer for error messages."""
        return f"layer {layer}" + (f" ({self.names[layer]})" if self.names else "")

    def sums(self, values: Floats, cut: Ints) -> tuple[float, ...]:
        """Return the sum over the layers of every rank, rounded once."""
        parts: list[list[float]] = [[] for _ in range(self.ranks)]
        for (start, stop), rank in zip(pairwise(cut), self.rank_of, strict=True):
            parts[rank] += values[start:stop].tolist()
        return tuple(map(math.fsum, parts))

    def problem(self, pinned: Mapping[int | str, int]) -> CutProblem:
        """Return the same as integers."""
        low, high = self._ranges(pinned)
        memory, power = to_integers(np.zeros(self.layers) if self.memory is None else self.memory)
        caps = np.full(self.ranks, np.inf) if self.caps is None else np.rint(np.ldexp(self.caps, power))
        return CutProblem(
            prefix_sums(to_integers(self.costs)[0]), prefix_sums(memory), self.rank_of, self.speed, caps, low, high
        )

    def _ranges(self, pinned: Mapping[int | str, int]) -> tuple[Ints, Ints]:
        """Return the lowest and highest position of every cut."""
        pins = sorted((self._layer(layer), self._stage(layer, stage)) for layer, stage in pinned.items())
        # The first and the last layer are always in the first and the last stage.
        ends = [(0, 0), *pins, (self.layers - 1, self.stages - 1)]
        for (left, first), (right, second) in pairwise(ends):
            if not 0 <= second - first <= right - left:
                self._refuse_pins((left, first), (right, second), pins)
        low, high = np.arange(self.stages + 1), np.arange(self.stages + 1) + self.layers - self.stages
        low[-1], high[0] = self.layers, 0
        for layer, stage in pins:
            high[stage] = min(high[stage], layer)
            low[stage + 1] = max(low[stage + 1], layer + 1)
        steps = np.arange(self.stages + 1)
        low = np.maximum.accumulate(low - steps) + steps
        high = np.minimum.accumulate((high - steps)[::-1])[::-1] + steps
        return low, high

    def _refuse_pins(self, left: Span, right: Span, pins: list[Span]) -> None:
        where = [
            f"{self.name(layer)} is {'pinned to' if (layer, stage) in pins else 'always in'} stage {stage}"
            for layer, stage in (left, right)
        ]
        if right[1] < left[1]:
            why = "layers come in order, so a later layer cannot be in an earlier stage"
        elif right[0] == left[0]:
            why = "a layer is in one stage only"
        else:
            stages, layers = right[1] - left[1] + 1, right[0] - left[0] + 1
            why = f"the {stages} stages from {left[1]} to {right[1]} need a layer each; there are only {layers} layers"
        raise StagelineError(f"{where[0]}, and {where[1]}: {why}; change or remove one of the pins")

    def _layer(self, layer: Any) -> int:
        if isinstance(layer, str):
            if self.names is None:
                raise StagelineError(f"pinned has the layer {shorten(layer)}, but layers have no names; pass names=")
            if layer not in self.names:
                raise StagelineError(
                    f"pinned has the layer {shorten(layer)}, but no layer has that name{nearest(layer, self.names)}"
                )
            return self.names.index(layer)
        if not _is_integer(layer) or not 0 <= layer < self.layers:
            raise StagelineError(
                f"pinned has the layer {shorten(layer)}; pass a number from 0 to {self.layers - 1}, or a name"
            )
        return int(layer)

    def _stage(self, layer: int | str, stage: Any) -> int:
        if not _is_integer(stage) or not 0 <= stage < self.stages:
            raise StagelineError(
                f"pinned[{layer!r}] is stage {shorten(stage)}; there are {self.stages}, so pass 0 to {self.stages - 1}"
            )
        return int(stage)

    def cut_of(self, stages: Sequence[Any]) -> Ints:
        """Return a cut from the first and last layer of every stage, or from the number of layers of each."""
        spans = list(stages)
        if len(spans) != self.stages:
            raise StagelineError(
                f"got {len(spans)} stages; {self.ranks} ranks with {self.chunks} chunks each have {self.stages} stages"
            )
        if all(map(_is_integer, spans)):
            spans = list(pairwise([sum(spans[:end]) for end in range(len(spans) + 1)]))
        position = 0
        for stage, span in enumerate(spans):
            if not isinstance(span, Sequence) or len(span) != 2 or not all(map(_is_integer, span)):
                raise StagelineError(
                    f"stage {stage} is {shorten(span)}; pass (first layer, layer after the last) for every stage, "
                    "or a number of layers for every stage"
                )
            if span[0] != position or span[1] <= position:
                raise StagelineError(
                    f"stage {stage} holds the layers {span[0]} to {span[1]}, the last not included; it must start at "
                    f"{position}, where the previous stage ends, and hold at least one layer"
                )
            position = span[1]
        if position != self.layers:
            raise StagelineError(
                f"the stages hold {position} layers, but there are {self.layers}; every layer needs a stage"
            )
        return np.array([0, *(span[1] for span in spans)])


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _count(name: str, value: Any) -> int:
    if not _is_integer(value) or value < 1:
        raise StagelineError(f"{name} is {shorten(value)}; pass an integer from 1")
    return int(value)


def _numbers(
    name: str,
    values: Any,
    count: int | None,
    expected: str,
    names: tuple[str, ...] | None = None,
    largest: float = MAX_VALUE,
) -> Floats:
    """Convert to an array of `count` finite numbers >= 0."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise StagelineError(f"{name} is {shorten(values)}; pass numbers, {expected}") from None
    if numbers.ndim != 1 or not len(numbers):
        raise StagelineError(f"{name} is {shorten(values)}; pass a list of numbers, {expected}")
    if count is not None and len(numbers) != count:
        raise StagelineError(f"{name} has {len(numbers)} entries; expected {count}: {expected}")
    invalid = np.flatnonzero(~((numbers >= 0) & (numbers <= largest)))
    if len(invalid):
        index = int(invalid[0])
        label = f" ({names[index]})" if names is not None and index < len(names) else ""
        raise StagelineError(f"{name}[{index}]{label} is {numbers[index]:g}; it must be a finite number >= 0")
    return numbers
