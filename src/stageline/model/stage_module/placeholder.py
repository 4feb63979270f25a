"""Tensors that are not there: they have a shape, a type and a device, and remember which values they stand for.

A stage runs the whole forward of a model, and only its own units compute. What the others would give is absent: what is
computed from it is absent too, without memory or time, up to the units that stand still. If one of the stage's own
units is given something absent, it is an error that names it, and never a wrong number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.common.errors import StagelineError
from stageline.model.stage_module.inplace_history import History, Memory

Keys = frozenset[str]
"""The names of the values that a tensor was computed from."""


@dataclass
class Writes:
    """What a forward writes in place while it is looked at."""

    into_others: set[str] = field(default_factory=set)
    """Absent values that were written into tensors that are there. What is computed from such a tensor does not know of
    it, so all that comes later has to be taken to need them."""
    changed: set[str] = field(default_factory=set)
    """Absent values that were themselves changed."""
    history: History = field(default_factory=History)
    """What units change in place."""


class _Looking(threading.local):
    writes: Writes | None = None


_looking = _Looking()


@contextmanager
def writes_allowed(writes: Writes | None = None) -> Iterator[Writes]:
    """While this lasts, absent values may be written into tensors that are there; gives what was written."""
    _looking.writes = found = writes or Writes()
    try:
        yield found
    finally:
        _looking.writes = None
        found.history.close()


class Absent(Tensor):
    """A tensor without contents.

    >>> x = Absent.of(torch.empty(2, 3, device="meta"), "cpu", frozenset({"blocks.0"}))
    >>> y = x.float() * torch.ones(3) + 1
    >>> y.shape, y.device.type, sorted(keys_of(y)), torch.zeros_like(x).tolist()
    (torch.Size([2, 3]), 'cpu', ['blocks.0'], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    """

    _meta: Tensor
    _keys: Keys
    _memory: Memory

    @staticmethod
    def of(meta: Tensor, device: torch.device | str, keys: Keys) -> Absent:
        """A tensor like one on the meta device, said to be on another one."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            Absent, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device(device)
        )
        made._meta, made._keys = meta, keys
        made._memory = Memory(next(iter(keys), None))
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it stands for."""
        return f"Absent({tuple(self.shape)}, {self.dtype}, of {', '.join(sorted(self._keys)) or 'nothing'})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute shapes and types alone."""
        kwargs, writes = dict(kwargs or {}), _looking.writes
        name = func.name().split("::")[-1].split(".")[0]
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        keys: Keys = frozenset().union(*(leaf._keys for leaf in given if isinstance(leaf, Absent)))
        device = next(leaf.device for leaf in given if isinstance(leaf, Absent))
        if name in ("_local_scalar_dense", "is_nonzero", "equal", "item"):
            raise StagelineError(
                f"the model looks into a value of {', '.join(sorted(keys))} outside of its blocks ({name}), and that "
                "value is on another stage"
            )
        if name.endswith("_like") or name.startswith("new_"):
            return func(*_map(_real, args), **_map(_real, kwargs))
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        found = _shapes(name, func, _map(_meta, args), _map(_meta, kwargs))
        changed = args[0] if name.endswith("_") and not name.startswith("__") and args else None
        if isinstance(changed, Tensor):
            if writes is not None:
                writes.history.write(changed, writes.history.read(given))
            if isinstance(changed, Absent):
                if writes is not None:
                    writes.changed |= changed._keys
                changed._keys = keys
                return changed
            if writes is not None:
                writes.into_others |= keys
                return changed
            raise StagelineError(
                f"the model writes a value of {', '.join(sorted(keys))}, which is on another stage, into a tensor "
                f"outside of its blocks ({name})"
            )
        result = pytree.tree_map(
            lambda leaf: Absent.of(leaf, device, keys) if isinstance(leaf, Tensor) else leaf, found
        )
        if writes is not None:
            _remember(result, func, given, writes.history)
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _remember(result: Any, func: Any, given: Sequence[Tensor], history: History) -> None:
    """Let a view share the memory of what it shows, and anything else know what it was computed from."""
    reads = history.read(given)
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Absent):
            shown = given[0] if func.is_view else None
            leaf._memory = shown._memory if isinstance(shown, Absent) else Memory(reads=reads)


_known: dict[Any, Any] = {}
"""What functions gave on the meta device, where their arguments say all about it: torch needs long to find it out."""

MOST = 4096
"""How many of them are remembered."""


def _shapes(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function gives on the meta device, as it did for the same arguments before."""
    if name.endswith("_"):  # it changes one of them
        return _find_shapes(name, func, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (func, torch.get_default_dtype(), spec, tuple(map(_described, leaves)))
    try:
        found = _known.get(key)
    except TypeError:  # an argument that cannot be a part of a key
        return _find_shapes(name, func, args, kwargs)
    if found is None:
        if len(_known) >= MOST:
            _known.clear()
        found = _known[key] = _find_shapes(name, func, args, kwargs)
    return _map(Tensor.detach, found)  # each with a form of its own, which may be changed in place


def _described(leaf: Any) -> Any:
    """All that a function on the meta device can know of an argument."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, leaf.is_conj(), leaf.is_neg()
    return type(leaf), leaf


def _find_shapes(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function gives on the meta device, also where torch has no rule for it."""
    if name == "bincount":  # as long as is asked for; longer ones are known only from the contents
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return torch.empty(max(int(least), 1), dtype=torch.int64, device="meta")
    return func(*args, **kwargs)


def _map(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Absent):
        return tensor._meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _real(tensor: Tensor) -> Tensor:
    """Something of the same shape that costs no memory, for functions that only look at that."""
    if isinstance(tensor, Absent):
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return tensor


def keys_of(tree: Any) -> Keys:
    """The names of all absent values that a tree was computed from."""
    return frozenset().union(*(leaf._keys for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Absent)))


@contextmanager
def without_memory(frame: nn.Module, inputs: Any) -> Iterator[None]:
    """While this lasts, tensors of a model that have no memory yet are absent, and said to be where the inputs are.

    A forward may move its buffers to the device of its inputs, and from the meta device torch moves none.

    >>> linear = nn.Linear(2, 2, device="meta")
    >>> with without_memory(linear, torch.ones(1)):
    ...     print(linear.weight.to("cpu"))
    Absent((2, 2), torch.float32, of nothing)
    """
    device = next((leaf.device for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)), torch.device("cpu"))
    places: list[dict[str, Any]] = [
        held for module in frame.modules() for held in (module._parameters, module._buffers, vars(module))
    ]
    metas = [
        (held, name, value)
        for held in places
        for name, value in held.items()
        if isinstance(value, Tensor) and not isinstance(value, Absent) and value.is_meta
    ]
    try:
        for held, name, value in metas:
            held[name] = Absent.of(value.detach(), device, frozenset())
        yield
    finally:
        for held, name, value in metas:
            held[name] = value
