"""What is to be cut, for which ranks: checked, and as the numbers that the search works on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stageline.errors import StagelineError, nearest, shorten
from stageline.model.cuts import Floats, Ints, Problem, running, whole
from stageline.schedules.placement import Placement

Numbers: TypeAlias = Sequence[float] | NDArray[Any]
Span: TypeAlias = tuple[int, int]
PLACEMENTS = ("loop", "v")
LARGEST = 1e100
"""Sums of larger numbers could overflow; not a number compares as outside, too."""


@dataclass(frozen=True, eq=False)
class Request:
    """Layers, and the ranks that are to hold them; every value is one that can be."""

    costs: Floats
    ranks: int
    chunks: int
    placement: str
    memory: Floats | None
    caps: Floats | None
    speed: Floats
    names: tuple[str, ...] | None

    @classmethod
    def of(
        cls,
        costs: Numbers,
        ranks: int,
        chunks: int,
        placement: str,
        memory: Numbers | None,
        caps: float | Numbers | None,
        speed: Numbers | None,
        names: Sequence[str] | None,
    ) -> Request:
        """Check what was given, and name what cannot be."""
        ranks, chunks = _count("ranks", ranks), _count("chunks", chunks)
        if placement not in PLACEMENTS:
            raise StagelineError(
                f"placement is {shorten(placement)}{nearest(str(placement), PLACEMENTS)}; it must be "
                "'loop' (0 1 2 0 1 2) or 'v' (0 1 2 2 1 0)"
            )
        known = None if names is None else tuple(map(str, names))
        times = _numbers("costs", costs, None, "one per layer", known)
        layers = len(times)
        if layers < ranks * chunks:
            raise StagelineError(
                f"{ranks} ranks with {chunks} chunks each are {ranks * chunks} stages, and there are {layers} layers; "
                "every stage needs a layer: use fewer ranks or chunks, or give smaller layers"
            )
        if known is not None and len(known) != layers:
            raise StagelineError(f"names has {len(known)} entries, and costs {layers}; give one name per layer")
        if caps is not None and memory is None:
            raise StagelineError("caps were given without memory; give memory=, the bytes of each layer, too")
        held = None if memory is None else _numbers("memory", memory, layers, "one per layer", known)
        room = None
        if caps is not None:
            each = np.full(ranks, caps) if np.ndim(caps) == 0 else caps
            room = _numbers("caps", each, ranks, "one number, or one per rank", largest=math.inf)
        speeds = np.ones(ranks) if speed is None else _numbers("speed", speed, ranks, "one per rank")
        if (speeds <= 0).any():
            slow = int(np.argmin(speeds))
            raise StagelineError(
                f"speed[{slow}] is {speeds[slow]:g}; it must be above 0: leave a rank out that is not used"
            )
        return cls(times, ranks, chunks, placement, held, room, speeds, known)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.costs)

    @property
    def stages(self) -> int:
        """How many stages they are cut into."""
        return self.ranks * self.chunks

    @property
    def rank_of(self) -> Ints:
        """The rank of every stage."""
        places = Placement.snake if self.placement == "v" else Placement.loop
        return np.asarray(places(self.ranks, self.chunks).table[0], dtype=np.int64)

    @property
    def power(self) -> int:
        """The power of two that costs were multiplied with in `problem`."""
        return whole(self.costs)[1]

    def name(self, layer: int) -> str:
        """A layer as errors call it."""
        return f"layer {layer}" + (f" ({self.names[layer]})" if self.names else "")

    def sums(self, values: Floats, cut: Ints) -> tuple[float, ...]:
        """The sum over the layers of every rank, rounded once."""
        parts: list[list[float]] = [[] for _ in range(self.ranks)]
        for (start, stop), rank in zip(pairwise(cut), self.rank_of, strict=True):
            parts[rank] += values[start:stop].tolist()
        return tuple(map(math.fsum, parts))

    def problem(self, pinned: Mapping[int | str, int]) -> Problem:
        """The same as whole numbers."""
        low, high = self._places(pinned)
        held, power = whole(np.zeros(self.layers) if self.memory is None else self.memory)
        caps = np.full(self.ranks, np.inf) if self.caps is None else np.rint(np.ldexp(self.caps, power))
        return Problem(running(whole(self.costs)[0]), running(held), self.rank_of, self.speed, caps, low, high)

    def _places(self, pinned: Mapping[int | str, int]) -> tuple[Ints, Ints]:
        """Between which places every cut must lie."""
        pins = sorted((self._layer(layer), self._stage(layer, stage)) for layer, stage in pinned.items())
        # The first and the last layer are in the first and the last stage, whatever is pinned.
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
            why = f"the {right[1] - left[1] + 1} stages from {left[1]} to {right[1]} need a layer each, and these are "
            why += f"{right[0] - left[0] + 1}"
        raise StagelineError(f"{where[0]}, and {where[1]}: {why}; pin one of them elsewhere, or not at all")

    def _layer(self, given: Any) -> int:
        if isinstance(given, str):
            if self.names is None:
                raise StagelineError(f"pinned has the layer {shorten(given)}, and layers have no names; give names=")
            if given not in self.names:
                raise StagelineError(
                    f"pinned has the layer {shorten(given)}, and no layer is named so{nearest(given, self.names)}"
                )
            return self.names.index(given)
        if not _is_whole(given) or not 0 <= given < self.layers:
            raise StagelineError(
                f"pinned has the layer {shorten(given)}; give a number from 0 to {self.layers - 1}, or a name"
            )
        return int(given)

    def _stage(self, layer: int | str, given: Any) -> int:
        if not _is_whole(given) or not 0 <= given < self.stages:
            raise StagelineError(
                f"pinned[{layer!r}] is stage {shorten(given)}; there are {self.stages}, so give 0 to {self.stages - 1}"
            )
        return int(given)

    def cut_of(self, stages: Sequence[Any]) -> Ints:
        """A cut from the first and last layer of every stage, or from how many layers each holds."""
        found = list(stages)
        if len(found) != self.stages:
            raise StagelineError(
                f"{len(found)} stages were given, and {self.ranks} ranks with {self.chunks} chunks each "
                f"have {self.stages}; give as many"
            )
        if all(map(_is_whole, found)):
            found = list(pairwise([sum(found[:end]) for end in range(len(found) + 1)]))
        place = 0
        for stage, span in enumerate(found):
            if not isinstance(span, Sequence) or len(span) != 2 or not all(map(_is_whole, span)):
                raise StagelineError(
                    f"stage {stage} is {shorten(span)}; give (first layer, layer after the last) for every stage, "
                    "or a number of layers for every stage"
                )
            if span[0] != place or span[1] <= place:
                raise StagelineError(
                    f"stage {stage} holds the layers {span[0]} to {span[1]}, the last not included; it must start at "
                    f"{place}, where the stage before it ends, and hold at least one"
                )
            place = span[1]
        if place != self.layers:
            raise StagelineError(
                f"the stages hold {place} layers, and there are {self.layers}; every layer needs a stage"
            )
        return np.array([0, *(span[1] for span in found)])


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _count(name: str, value: Any) -> int:
    if not _is_whole(value) or value < 1:
        raise StagelineError(f"{name} is {shorten(value)}; give a whole number from 1")
    return int(value)


def _numbers(
    name: str,
    values: Any,
    count: int | None,
    meant: str,
    names: tuple[str, ...] | None = None,
    largest: float = LARGEST,
) -> Floats:
    """Numbers from 0, as many as there must be."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise StagelineError(f"{name} is {shorten(values)}; give numbers, {meant}") from None
    if found.ndim != 1 or not len(found):
        raise StagelineError(f"{name} is {shorten(values)}; give a list of numbers, {meant}")
    if count is not None and len(found) != count:
        raise StagelineError(f"{name} has {len(found)} entries, and there must be {count}: {meant}")
    wrong = np.flatnonzero(~((found >= 0) & (found <= largest)))
    if len(wrong):
        at = int(wrong[0])
        which = f" ({names[at]})" if names is not None and at < len(names) else ""
        raise StagelineError(f"{name}[{at}]{which} is {found[at]:g}; it must be a number from 0 that is not infinite")
    return found
