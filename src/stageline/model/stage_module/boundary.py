"""What crosses a stage boundary of a model that runs its own forward."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model._torch_private import version_of
from stageline.model.stage_module.placeholder import PlaceholderTensor, ValueNames, on_meta
from stageline.tensors.pytree import flatten, plain, unflatten

INPUT = "input"
GIVE_EXAMPLE = (
    "pass example= to Pipeline or split, a batch with the same inputs as step receives "
    "(sl.Pipeline(model, …, example=inputs))"
)
"""The advice for calls that a dry run has not seen."""
PARAMETER = "parameter "
"""Prefix of the names of values that are tensors of units."""

OutputDescription = tuple[int, str, tuple[Any, ...]]
"""The position of a call, the tree of its output, and its leaves; a tensor is given as dtype, shape and device."""


@dataclass
class BoundaryValues:
    """The values that cross a stage boundary: the model's inputs, outputs that later units need, and their forms."""

    tree: str
    leaves: list[Any]
    """The leaves of the model's arguments."""
    values: dict[str, Any]
    """Outputs of units, by name."""
    outputs: list[OutputDescription]
    copied: ValueNames = frozenset()
    """Values that the forward modifies in place, and therefore receives as copies."""
    versions: dict[str, int] = field(default_factory=dict)
    """The version of every value when it was stored."""

    @classmethod
    def first(cls, value: Any, defaults: Mapping[str, Any]) -> BoundaryValues:
        """Return the values of the first stage, from a batch (see `arguments`)."""
        args, kwargs = arguments(value)
        leaves, tree = flatten((args, {**defaults, **kwargs}), "the batch")
        return cls(tree, list(leaves), {}, [])

    @classmethod
    def read(cls, value: Any) -> BoundaryValues:
        """Return what `write` of the previous stage wrote."""
        tree, leaves, names, values, outputs = value
        return cls(tree, list(leaves), dict(zip(json.loads(names), values, strict=True)), list(_read_outputs(outputs)))

    def write(self) -> Any:
        """Return everything as one tree of tensors and strings."""
        outputs = json.dumps(self.outputs)
        return (self.tree, tuple(self.leaves), json.dumps(list(self.values)), tuple(self.values.values()), outputs)

    def form(self) -> str:
        """Return what decides which values are needed: the structure of the inputs and their types, without sizes."""
        kinds = [f"{leaf.dtype}/{leaf.dim()}" if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves]
        return json.dumps([self.tree, kinds])

    def inputs(self, placeholders: bool = False) -> tuple[Any, Any]:
        """Return the arguments of the model; with `placeholders`, floating-point tensors are replaced by them."""
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                self.versions[f"{INPUT}.{index}"] = version_of(leaf)
        leaves = [self._input(index, leaf, placeholders) for index, leaf in enumerate(self.leaves)]
        args, kwargs = unflatten(leaves, self.tree)
        return args, kwargs

    def _input(self, index: int, leaf: Any, placeholders: bool) -> Any:
        if isinstance(leaf, str) and leaf.startswith(_DROPPED):
            dtype, shape, device = json.loads(leaf[len(_DROPPED) :])
            return _placeholder(dtype, shape, device, f"{INPUT}.{index}")
        if placeholders and isinstance(leaf, Tensor) and leaf.is_floating_point():
            return PlaceholderTensor.of(on_meta(leaf), leaf.device, frozenset({f"{INPUT}.{index}"}))
        return leaf

    def drop_inputs(self, needed: ValueNames) -> None:
        """Replace inputs that no later stage needs by their form; integer inputs are small and stay."""
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and f"{INPUT}.{index}" not in needed:
                self.leaves = [*self.leaves]
                self.leaves[index] = _DROPPED + json.dumps(_form(leaf))

    def store(self, position: int, name: str, output: Any, copied: ValueNames) -> None:
        """Store the output of a unit; values in `copied` are cloned, because the forward modifies them."""
        leaves, tree = _flatten_output(output, name)
        self.outputs.append(
            (position, tree, tuple(_form(leaf) if isinstance(leaf, Tensor) else [leaf] for leaf in leaves))
        )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value_name = name_of_value(position, index)
                self.values[value_name] = leaf.clone() if value_name in copied else leaf
                self.versions[value_name] = version_of(self.values[value_name])

    def changed(self, arrived: BoundaryValues) -> dict[str, int]:
        """Return the values and inputs that were modified in place since they were stored, with their versions."""
        versions = {name: version_of(value) for name, value in self.values.items() if name in self.versions}
        changed = {name: version for name, version in versions.items() if version != self.versions[name]}
        for index, leaf in enumerate(arrived.leaves):
            name = f"{INPUT}.{index}"
            if isinstance(leaf, Tensor) and name in arrived.versions and version_of(leaf) != arrived.versions[name]:
                changed[name] = version_of(leaf)
        return changed

    def check_versions(self, arrived: BoundaryValues, changed_by_units: ValueNames) -> None:
        """Refuse to pass on what the frame modified in place: a later stage would modify it again.

        A unit modifies its inputs only on its own stage, so `changed_by_units` may be passed on.
        """
        for name in self.changed(arrived):
            if name in changed_by_units:
                continue
            if name.startswith(INPUT):
                raise StagelineError(f"the forward modifies its {name} in place; make it use a copy (x = x.clone())")
            raise StagelineError(
                f"the forward modifies value {name} in place outside its units; make it use a copy (x.clone()), or "
                "move the change into a unit"
            )

    def output(self, position: int, name: str) -> Any:
        """Return the output of a unit of an earlier stage, with placeholders for what was not passed on."""
        for call, tree, leaves in self.outputs:
            if call == position:
                values = [self._leaf(name_of_value(position, index), leaf) for index, leaf in enumerate(leaves)]
                return (values[0], {}) if tree == _tensor_alone() else unflatten(values, tree)
        raise StagelineError(f"the model calls {name}, but no earlier stage did; {GIVE_EXAMPLE} to record the calls")

    def _leaf(self, name: str, description: Sequence[Any]) -> Any:
        if len(description) == 1:
            return description[0]
        if name in self.values:
            return self.values[name].clone() if name in self.copied else self.values[name]
        dtype, shape, device = description
        return _placeholder(dtype, shape, device, name)


@cache
def _tensor_alone() -> str:
    """The tree of the most common output of a unit: a tensor, and nothing that was collected."""
    return flatten((torch.empty(0), {}), "a unit")[1]


def _flatten_output(output: Any, name: str) -> tuple[list[Any], str]:
    """Flatten what a unit returned, and what was collected meanwhile."""
    value, collected = output
    if type(value) is Tensor and not collected and not value.is_nested:  # the usual case
        return [value], _tensor_alone()
    if isinstance(value, Tensor) and not collected:
        return flatten(value, name)[0], _tensor_alone()
    return flatten(output, name)


_DROPPED = "\0absent "
"""Prefix of the form of an input that was dropped."""


def arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments and keywords: a tuple is arguments, a dict keywords, anything else one argument.

    >>> arguments((1, 2)), arguments({"x": 1}), arguments(3)
    (((1, 2), {}), ((), {'x': 1}), ((3,), {}))
    """
    value = plain(value)
    if isinstance(value, dict):
        return (), dict(value)
    return (tuple(value) if isinstance(value, tuple) else (value,)), {}


def name_of_value(position: int, leaf: int) -> str:
    """Return the name of a leaf of a call's output."""
    return f"{position}.{leaf}"


def _form(leaf: Tensor) -> list[Any]:
    return _form_of(leaf.dtype, leaf.shape, leaf.device)


@lru_cache(maxsize=1024)
def _form_of(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> list[Any]:
    return [str(dtype).removeprefix("torch."), list(shape), str(device)]


@lru_cache(maxsize=256)
def _read_outputs(text: str) -> list[OutputDescription]:
    return [(position, tree, tuple(leaves)) for position, tree, leaves in json.loads(text)]


def _placeholder(dtype: str, shape: Sequence[int], device: str, name: str) -> PlaceholderTensor:
    meta = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
    return PlaceholderTensor.of(meta, device, frozenset({name}))


def check_arguments(frame: nn.Module, arrived: BoundaryValues) -> None:
    """Refuse inputs that do not match the signature of the model."""
    args, kwargs = arrived.inputs()
    try:
        signature = inspect.signature(frame.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        received = [f"{len(args)} arguments"] if args else []
        received += [", ".join(kwargs)] if kwargs else []
        names = list(signature.parameters)
        shown = f"({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"
        raise StagelineError(
            f"the first stage cannot take its inputs: {error}; {type(frame).__name__} takes {shown}, but received "
            f"{' and '.join(received) or 'nothing'}; a tuple holds positional arguments, a dict keyword arguments"
        ) from error
