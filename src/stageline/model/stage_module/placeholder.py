"""Placeholder tensors: a shape, a dtype and a device without contents, and the values they stand for.

A stage runs the whole forward of a model, but only its own units compute. The units of other stages return
placeholders. Whatever is computed from a placeholder is a placeholder again, without memory and almost without time. If
one of the stage's own units receives a placeholder, an error names the missing value; the unit never computes with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model._torch_private import (
    buffers_of,
    map_tensors,
    no_torch_function,
    parameters_of,
    tensors_in,
    tree_flatten,
    wrapper_tensor,
)
from stageline.model.stage_module.side_effects import InplaceHistory, StorageHistory

ValueNames = frozenset[str]
"""The names of values that a tensor was computed from."""


@dataclass
class InplaceWrites:
    """In-place writes of a forward during a dry run."""

    into_real: set[str] = field(default_factory=set)
    """Values whose placeholders were written into real tensors. Such a tensor does not know that it depends on them, so
    everything later is assumed to need them."""
    changed: set[str] = field(default_factory=set)
    """Values whose placeholders were themselves modified."""
    history: InplaceHistory = field(default_factory=InplaceHistory)
    """What units modify in place."""


class _DryRunState(threading.local):
    writes: InplaceWrites | None = None


_dry_run = _DryRunState()


@contextmanager
def writes_allowed(writes: InplaceWrites | None = None) -> Iterator[InplaceWrites]:
    """Allow and record writes of placeholders into real tensors."""
    _dry_run.writes = writes = writes or InplaceWrites()
    try:
        yield writes
    finally:
        _dry_run.writes = None
        writes.history.close()


class PlaceholderTensor(Tensor):
    """A tensor without contents.

    >>> x = PlaceholderTensor.of(torch.empty(2, 3, device="meta"), "cpu", frozenset({"blocks.0"}))
    >>> y = x.float() * torch.ones(3) + 1
    >>> y.shape, y.device.type, sorted(placeholders_in(y)), torch.zeros_like(x).tolist()
    (torch.Size([2, 3]), 'cpu', ['blocks.0'], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    """

    on_meta: Tensor
    """A tensor of the same form on the meta device."""
    value_names: ValueNames
    storage_history: StorageHistory

    @staticmethod
    def of(meta: Tensor, device: torch.device | str, value_names: ValueNames) -> PlaceholderTensor:
        """Return a placeholder with the form of a meta tensor, on any device."""
        placeholder: PlaceholderTensor = wrapper_tensor(PlaceholderTensor, meta, device)
        placeholder.on_meta, placeholder.value_names = meta, value_names
        placeholder.storage_history = StorageHistory(next(iter(value_names), None))
        return placeholder

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        names = ", ".join(sorted(self.value_names)) or "nothing"
        return f"PlaceholderTensor({tuple(self.shape)}, {self.dtype}, of {names})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute only shapes and dtypes."""
        kwargs, writes = dict(kwargs or {}), _dry_run.writes
        name = func.name().split("::")[-1].split(".")[0]
        inputs = tensors_in((args, kwargs))
        placeholders = [tensor for tensor in inputs if isinstance(tensor, PlaceholderTensor)]
        value_names: ValueNames = frozenset().union(*(tensor.value_names for tensor in placeholders))
        device = placeholders[0].device
        if name in ("_local_scalar_dense", "is_nonzero", "equal", "item"):
            raise StagelineError(
                f"the model reads a value of {', '.join(sorted(value_names))} outside its blocks ({name}), but that "
                "value is on another stage"
            )
        if name.endswith("_like") or name.startswith("new_"):
            return func(*map_tensors(_zeros, args), **map_tensors(_zeros, kwargs))
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        meta_result = _meta_result(name, func, map_tensors(on_meta, args), map_tensors(on_meta, kwargs))
        target = args[0] if name.endswith("_") and not name.startswith("__") and args else None
        if isinstance(target, Tensor):
            return _write(target, name, inputs, value_names, writes)
        result = map_tensors(lambda tensor: PlaceholderTensor.of(tensor, device, value_names), meta_result)
        if writes is not None:
            _share_history(result, func, inputs, writes.history)
        return result

    __torch_function__ = no_torch_function


def _write(
    target: Tensor, name: str, inputs: Sequence[Tensor], value_names: ValueNames, writes: InplaceWrites | None
) -> Tensor:
    """Record an in-place operation on a placeholder, or of a placeholder on a real tensor."""
    if writes is not None:
        writes.history.write(target, writes.history.read(inputs))
    if isinstance(target, PlaceholderTensor):
        if writes is not None:
            writes.changed |= target.value_names
        target.value_names = value_names
        return target
    if writes is None:
        raise StagelineError(
            f"the model writes a value of {', '.join(sorted(value_names))}, which is on another stage, into a tensor "
            f"outside of its blocks ({name})"
        )
    writes.into_real |= value_names
    return target


def _share_history(result: Any, func: Any, inputs: Sequence[Tensor], history: InplaceHistory) -> None:
    """Let a view share the history of its base, and any other result record its inputs."""
    reads = history.read(inputs)
    base = inputs[0] if func.is_view else None
    for tensor in tensors_in(result):
        if isinstance(tensor, PlaceholderTensor):
            shared = base.storage_history if isinstance(base, PlaceholderTensor) else StorageHistory(reads=reads)
            tensor.storage_history = shared


_meta_results: dict[Any, Any] = {}
"""Results of operators on the meta device, by their arguments: torch is slow to compute them."""

MAX_META_RESULTS = 4096


def _meta_result(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the meta device, or return its previous result for the same arguments."""
    if name.endswith("_"):  # it modifies an argument
        return _run_on_meta(name, func, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    key = (func, torch.get_default_dtype(), spec, tuple(map(_description, leaves)))
    try:
        result = _meta_results.get(key)
    except TypeError:  # unhashable argument
        return _run_on_meta(name, func, args, kwargs)
    if result is None:
        if len(_meta_results) >= MAX_META_RESULTS:
            _meta_results.clear()
        result = _meta_results[key] = _run_on_meta(name, func, args, kwargs)
    return map_tensors(Tensor.detach, result)  # callers may modify the form of theirs in place


def _description(leaf: Any) -> Any:
    """Return everything that an operator on the meta device can know about an argument."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, leaf.is_conj(), leaf.is_neg()
    return type(leaf), leaf


def _run_on_meta(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name == "bincount":  # torch has no rule for it; the true length may depend on the contents
        minlength = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return torch.empty(max(int(minlength), 1), dtype=torch.int64, device="meta")
    return func(*args, **kwargs)


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype on the meta device."""
    if isinstance(tensor, PlaceholderTensor):
        return tensor.on_meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _zeros(tensor: Tensor) -> Tensor:
    """Replace a placeholder by zeros that take no memory, for operators that only look at the shape."""
    if isinstance(tensor, PlaceholderTensor):
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return tensor


def placeholders_in(tree: Any) -> ValueNames:
    """Return the names of all values that the placeholders of a tree stand for."""
    return frozenset().union(*(leaf.value_names for leaf in tensors_in(tree) if isinstance(leaf, PlaceholderTensor)))


@contextmanager
def placeholders_for_meta(frame: nn.Module, inputs: Any) -> Iterator[None]:
    """Replace the meta tensors of a model by placeholders on the device of the inputs.

    A forward may move its buffers to the device of its inputs, which torch refuses for meta tensors.
    """
    device = next((tensor.device for tensor in tensors_in(inputs)), torch.device("cpu"))
    dictionaries: list[dict[str, Any]] = [
        dictionary
        for module in frame.modules()
        for dictionary in (parameters_of(module), buffers_of(module), vars(module))
    ]
    replaced = [
        (dictionary, name, value)
        for dictionary in dictionaries
        for name, value in dictionary.items()
        if isinstance(value, Tensor) and not isinstance(value, PlaceholderTensor) and value.is_meta
    ]
    try:
        for dictionary, name, value in replaced:
            dictionary[name] = PlaceholderTensor.of(value.detach(), device, frozenset())
        yield
    finally:
        for dictionary, name, value in replaced:
            dictionary[name] = value
