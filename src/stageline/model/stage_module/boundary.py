"""What goes from stage to stage of a model that runs its own forward."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model.stage_module.placeholder import Absent, Keys
from stageline.tensors.pytree import flatten, plain, unflatten

INPUT = "input"
GIVE = (
    "give example= to Pipeline or split, a batch with the same inputs as step is given "
    "(sl.Pipeline(model, …, example=inputs))"
)
"""What to do about calls that were not seen."""
PARAMETER = "parameter "
"""What the names of tensors of units start with, among the names of values."""

Told = tuple[int, str, tuple[Any, ...]]
"""Of a call: its position, the shape of its output's tree, and each leaf, a tensor as its type, shape and device."""


@dataclass
class Passed:
    """What goes from stage to stage: the model's inputs, values that later units need, and what outputs are like."""

    tree: str
    leaves: list[Any]
    """The model's arguments, flat."""
    values: dict[str, Any]
    told: list[Told]
    changed: Keys = frozenset()
    """Values that the forward changes in place, of which it gets copies."""
    versions: dict[str, int] = field(default_factory=dict)
    """How often each value had been changed in place when it was kept."""

    @classmethod
    def first(cls, value: Any, defaults: Mapping[str, Any]) -> Passed:
        """What the first stage is given: a tuple of arguments, a dict of keywords, or one argument."""
        args, kwargs = arguments(value)
        leaves, tree = flatten((args, {**defaults, **kwargs}), "the batch")
        return cls(tree, list(leaves), {}, [])

    @classmethod
    def read(cls, value: Any) -> Passed:
        """What another stage wrote."""
        tree, leaves, keys, values, told = value
        return cls(tree, list(leaves), dict(zip(json.loads(keys), values, strict=True)), list(_told(told)))

    def write(self) -> Any:
        """As one tree of tensors and texts."""
        told = json.dumps(self.told)
        return (self.tree, tuple(self.leaves), json.dumps(list(self.values)), tuple(self.values.values()), told)

    def form(self) -> str:
        """What decides which values are needed: the structure of the inputs and their types, and not their sizes."""
        kinds = [f"{leaf.dtype}/{leaf.dim()}" if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves]
        return json.dumps([self.tree, kinds])

    def inputs(self, absent: bool = False) -> tuple[Any, Any]:
        """The arguments of the model; `absent` makes those that are numbers with a gradient stand for themselves."""
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                self.versions[f"{INPUT}.{index}"] = _version(leaf)
        found = [self._input(index, leaf, absent) for index, leaf in enumerate(self.leaves)]
        args, kwargs = unflatten(found, self.tree)
        return args, kwargs

    def _input(self, index: int, leaf: Any, absent: bool) -> Any:
        if isinstance(leaf, str) and leaf.startswith(_GONE):
            dtype, shape, device = json.loads(leaf[len(_GONE) :])
            return _absent(dtype, shape, device, f"{INPUT}.{index}")
        if absent and isinstance(leaf, Tensor) and leaf.is_floating_point():
            return Absent.of(on_meta(leaf), leaf.device, frozenset({f"{INPUT}.{index}"}))
        return leaf

    def forget_inputs(self, wanted: Keys) -> None:
        """Replace inputs that no later stage needs by their type and shape; whole numbers, which are small, stay."""
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and f"{INPUT}.{index}" not in wanted:
                self.leaves = [*self.leaves]
                self.leaves[index] = _GONE + json.dumps(_like(leaf))

    def keep(self, position: int, name: str, found: Any, changed: Keys) -> None:
        """Keep what a unit gave; a copy of what the forward is going to change."""
        leaves, tree = flatten(found, name)
        self.told.append(
            (position, tree, tuple(_like(leaf) if isinstance(leaf, Tensor) else [leaf] for leaf in leaves))
        )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                key = key_of(position, index)
                self.values[key] = leaf.clone() if key in changed else leaf
                self.versions[key] = _version(self.values[key])

    def moved(self, arrived: Passed) -> dict[str, int]:
        """The values and inputs that were changed in place since they were kept, and how often."""
        found = {key: _version(value) for key, value in self.values.items() if key in self.versions}
        moved = {key: version for key, version in found.items() if version != self.versions[key]}
        for index, leaf in enumerate(arrived.leaves):
            name = f"{INPUT}.{index}"
            if isinstance(leaf, Tensor) and name in arrived.versions and _version(leaf) != arrived.versions[name]:
                moved[name] = _version(leaf)
        return moved

    def check_versions(self, arrived: Passed, inside: Keys) -> None:
        """Refuse to pass on what the frame changed in place meanwhile: a later stage would change it once more.

        What units changed, `inside` of them, was changed once and goes on as it is.
        """
        for key in self.moved(arrived):
            if key in inside:
                continue
            if key.startswith(INPUT):
                raise StagelineError(f"the forward changes its {key} in place; let it work on a copy (x = x.clone())")
            raise StagelineError(
                f"the forward changes value {key} in place outside of its units; let it work on a copy (x.clone()) or "
                "put the change into a unit"
            )

    def output(self, position: int, name: str) -> Any:
        """What a unit of an earlier stage gave, absent where it was not passed on."""
        for at, tree, leaves in self.told:
            if at == position:
                found = [self._leaf(key_of(position, index), leaf) for index, leaf in enumerate(leaves)]
                return unflatten(found, tree)
        raise StagelineError(f"the model calls {name}, and no earlier stage did; {GIVE}, so that the calls are seen")

    def _leaf(self, key: str, told: Sequence[Any]) -> Any:
        if len(told) == 1:
            return told[0]
        if key in self.values:
            return self.values[key].clone() if key in self.changed else self.values[key]
        dtype, shape, device = told
        return _absent(dtype, shape, device, key)


_GONE = "\0absent "


def arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments and keywords: a tuple is the one, a dict the other, and all else the only argument.

    >>> arguments((1, 2)), arguments({"x": 1}), arguments(3)
    (((1, 2), {}), ((), {'x': 1}), ((3,), {}))
    """
    value = plain(value)
    if isinstance(value, dict):
        return (), dict(value)
    return (tuple(value) if isinstance(value, tuple) else (value,)), {}


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def key_of(position: int, leaf: int) -> str:
    """The name of a value: the call that gave it, and which leaf of its output it is."""
    return f"{position}.{leaf}"


def _like(leaf: Tensor) -> list[Any]:
    return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), str(leaf.device)]


@lru_cache(maxsize=256)
def _told(text: str) -> list[Told]:
    return [(position, tree, tuple(leaves)) for position, tree, leaves in json.loads(text)]


def _absent(dtype: str, shape: Sequence[int], device: str, key: str) -> Absent:
    return Absent.of(torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta"), device, frozenset({key}))


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, layout and type without contents."""
    if isinstance(tensor, Absent):
        return tensor._meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def check_arguments(frame: nn.Module, arrived: Passed) -> None:
    """Refuse inputs that the model does not take, in the words of its signature."""
    args, kwargs = arrived.inputs()
    try:
        takes = inspect.signature(frame.forward)
    except (TypeError, ValueError):
        return
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        given = [f"{len(args)} arguments"] if args else []
        given += [", ".join(kwargs)] if kwargs else []
        raise StagelineError(
            f"the first stage cannot take its inputs: {error}; {type(frame).__name__} takes {_shown(takes)}, and was "
            f"given {' and '.join(given) or 'nothing'}; a tuple is its arguments, a dict its keywords"
        ) from error


def _shown(takes: inspect.Signature) -> str:
    names = list(takes.parameters)
    return f"({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"
