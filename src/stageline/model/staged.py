"""Cutting a model as it is into stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from stageline.errors import StagelineError, nearest, shorten
from stageline.model import huggingface
from stageline.model.frame import Original, StagePart
from stageline.model.replay import Calls, Replay
from stageline.model.units import Unit, find_units

Cut = list[tuple[int, int]]
"""For each stage, the calls that are its own: from the first to the one after the last."""

By = str | Sequence[str]


@dataclass(frozen=True)
class Staged:
    """A model cut into stages, whose modules, names and tensors are still the model's own.

    >>> staged = split(nn.Transformer(8, 2, 2, 2, 16, batch_first=True), stages=4)
    >>> print(staged)
    4 stages of Transformer
      0  encoder.layers.0                          600 parameters
      1  encoder.layers.1, encoder.norm            616 parameters
      2  decoder.layers.0                          904 parameters
      3  decoder.layers.1, decoder.norm            920 parameters
    >>> staged.state_dict().keys() == staged.model.state_dict().keys()
    True
    """

    model: nn.Module
    units: tuple[Unit, ...]
    """What is never cut, in the order in which the model calls it; what it calls twice is there twice."""
    cut: tuple[tuple[int, int], ...]
    """For each stage, its first unit and the one after its last."""

    @property
    def names(self) -> list[list[str]]:
        """The names of the units of each stage."""
        return [[unit.name for unit in self.units[start:stop]] for start, stop in self.cut]

    def parts(self) -> list[nn.Sequential]:
        """A module for each stage, which holds the stage's units under their own names."""
        if isinstance(self.model, nn.Sequential):
            return [
                nn.Sequential(OrderedDict((unit.name, unit.module) for unit in self.units[start:stop]))
                for start, stop in self.cut
            ]
        names = tuple(unit.name for unit in self.units)
        modules = {unit.name: Original(unit.module) for unit in self.units}
        defaults = huggingface.defaults_of(self.model)
        return [
            StagePart(
                self.model, names, frozenset(names[start:stop]), Replay(Calls(names), start, stop, modules, defaults)
            )
            for start, stop in self.cut
        ]

    def state_dict(self) -> dict[str, Any]:
        """The state of all stages, by the names of the whole model and in its order."""
        found = {name: value for part in self.parts() for name, value in part.state_dict().items()}
        return {name: found[name] for name in self.model.state_dict()}

    def __len__(self) -> int:
        """How many stages there are."""
        return len(self.cut)

    def __str__(self) -> str:
        """The units of every stage, and how many parameters they have."""
        lines = [f"{len(self)} stages of {type(self.model).__name__}"]
        for number, (start, stop) in enumerate(self.cut):
            units = self.units[start:stop]
            size = sum({id(unit.module): unit.size for unit in units}.values())
            lines.append(f"{number:3}  {_listed([unit.name for unit in units]):36} {size:8,} parameters")
        return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"


def split(
    model: nn.Module,
    stages: int,
    *,
    by: By = "layers",
    layers_per_stage: Sequence[int] | None = None,
    stack: str | Sequence[str] = (),
    example: Any = None,
) -> Staged:
    """Cut a model into stages, without tracing it and without changing it.

    `by` says where: "layers", as many blocks in every stage, the larger parts first; "parameters", by their number;
    "type:Block", the modules of that class; or the names of the first unit of each stage. `layers_per_stage` gives the
    number of blocks (or of all units) of each stage. `stack` names the list or lists of blocks, which are found
    otherwise. `example` is a batch (a tuple of arguments, a dict of keywords, or one argument) that the model is run on
    once, to see in which order it calls its units; needed where that is not the order in which it defines them, or
    where it calls one of them twice.
    """
    if not isinstance(model, nn.Module):
        raise StagelineError(f"split takes a model, an nn.Module, got {shorten(model)}")
    if not isinstance(stages, int) or stages < 1:
        raise StagelineError(f"stages is a whole number of at least 1, got {shorten(stages)}")
    units = _units(model, by, [stack] if isinstance(stack, str) and stack else list(stack))
    if not isinstance(model, nn.Sequential):
        huggingface.prepare(model)
        units = _in_order(model, units, example)
    if stages > len(units):
        raise StagelineError(
            f"{type(model).__name__} has {len(units)} units ({_listed([unit.name for unit in units])}), and {stages} "
            f"stages are asked for; give at most {len(units)}, or name smaller blocks with by='type:ClassOfBlock'"
        )
    cut = _cut(units, stages, by, layers_per_stage)
    return Staged(model, tuple(units), tuple(cut))


def _units(model: nn.Module, by: By, stack: Sequence[str]) -> list[Unit]:
    if isinstance(model, nn.Sequential) and not stack and not (isinstance(by, str) and by.startswith("type:")):
        return [Unit(name, module, True) for name, module in model._modules.items() if module is not None]
    kind = by.removeprefix("type:") if isinstance(by, str) and by.startswith("type:") else ""
    return find_units(model, stack, kind)


def _in_order(model: nn.Module, units: list[Unit], example: Any) -> list[Unit]:
    """The units in the order of their calls, as far as that is known."""
    if example is not None:
        try:
            return _as_called(model, units, example)
        except Exception as error:
            raise StagelineError(
                f"{type(model).__name__} cannot run on the example, {shorten(error, 200)}; give a tuple of its "
                "arguments, a dict of keywords, or its only argument"
            ) from error
    guess = huggingface.example_of(model)
    with suppress(Exception):  # it is not for every model
        return units if guess is None else _as_called(model, units, guess)
    return units


def _as_called(model: nn.Module, units: list[Unit], example: Any) -> list[Unit]:
    """The units in the order in which a forward calls them, as often as it does; nothing is computed."""
    known = {unit.name: unit for unit in units}
    replay = Replay(
        Calls(()), 0, 0, {unit.name: Original(unit.module) for unit in units}, huggingface.defaults_of(model)
    )
    part = StagePart(model, tuple(known), frozenset(), replay)
    return [known[name] for name in replay.order(part.frame, example)]


def _cut(units: Sequence[Unit], stages: int, by: By, layers_per_stage: Sequence[int] | None) -> Cut:
    if layers_per_stage is not None:
        return _by_counts(units, stages, list(layers_per_stage))
    if not isinstance(by, str):
        return _by_names(units, stages, list(by))
    if by == "layers" or by.startswith("type:"):
        return _evenly(units, stages)
    if by == "parameters":
        return _by_weight(units, stages)
    ways = ["layers", "parameters", "type:ClassOfBlock", "a list of names"]
    raise StagelineError(f"by is one of {', '.join(ways)}, got {by!r}{nearest(by, ways)}")


def even_sizes(count: int, parts: int) -> list[int]:
    """As many in every part, the larger parts first.

    >>> even_sizes(7, 3)
    [3, 2, 2]
    """
    return [count // parts + (part < count % parts) for part in range(parts)]


def _evenly(units: Sequence[Unit], stages: int) -> Cut:
    blocks = [index for index, unit in enumerate(units) if unit.block]
    if stages > len(blocks):
        return _spans(even_sizes(len(units), stages))
    return _at_blocks(units, blocks, even_sizes(len(blocks), stages))


def _spans(sizes: Sequence[int]) -> Cut:
    return list(pairwise(accumulate(sizes, initial=0)))


def _at_blocks(units: Sequence[Unit], blocks: Sequence[int], sizes: Sequence[int]) -> Cut:
    """So many blocks in every stage; what is not a block goes with the block before it, or with the first one."""
    starts = [0, *(blocks[first] for first in list(accumulate(sizes))[:-1])]
    return list(pairwise([*starts, len(units)]))


def _by_counts(units: Sequence[Unit], stages: int, counts: list[int]) -> Cut:
    if len(counts) != stages:
        raise StagelineError(
            f"layers_per_stage has {len(counts)} numbers, and there are {stages} stages: give one for each"
        )
    if any(not isinstance(count, int) or count < 1 for count in counts):
        raise StagelineError(f"layers_per_stage is {counts}: every stage needs at least one layer")
    blocks = [index for index, unit in enumerate(units) if unit.block]
    if sum(counts) == len(blocks):
        return _at_blocks(units, blocks, counts)
    if sum(counts) == len(units):
        return _spans(counts)
    raise StagelineError(
        f"layers_per_stage is {counts}, {sum(counts)} in all, and the model has {len(blocks)} blocks ({len(units)} "
        "units with what is before and after them); let it add up to one of these"
    )


def _by_names(units: Sequence[Unit], stages: int, names: list[str]) -> Cut:
    known = [unit.name for unit in units]
    for name in names:
        if name not in known:
            raise StagelineError(f"there is no unit {name!r}{nearest(name, known)}; the units are {_listed(known)}")
    starts = [known.index(name) for name in names]
    if len(starts) == stages - 1:
        starts.insert(0, 0)
    if len(starts) != stages or starts != sorted(set(starts)):
        raise StagelineError(
            f"by names {len(names)} units for {stages} stages: give the first unit of each, in the order of the model"
        )
    starts[0] = 0
    return list(pairwise([*starts, len(units)]))


def _by_weight(units: Sequence[Unit], stages: int) -> Cut:
    """Cut so that the largest stage is as small as can be."""
    sizes = [unit.size for unit in units]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_greedy(sizes, stages, middle)) <= stages else (middle + 1, high)
    return _spans(_greedy(sizes, stages, low))


def _greedy(sizes: Sequence[int], stages: int, most: int) -> list[int]:
    """Fill stages up to a limit, leaving at least one layer for each of the rest."""
    counts, held = [0], 0
    for index, size in enumerate(sizes):
        left = len(sizes) - index
        if counts[-1] and (held + size > most or left <= stages - len(counts)):
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size
    return counts
