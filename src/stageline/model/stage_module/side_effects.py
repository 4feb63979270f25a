"""Side effects of a unit that other stages would not see: detected in the first call, and refused."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model._torch_private import MODULE_ATTRIBUTES, raw_version, tensors_in, tree_leaves
from stageline.model.reachability import is_object, slots_of

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)
_MAX_OBJECTS = 2_000
"""Maximum number of objects inspected for one call."""
_MAX_DEPTH = 6

Attributes = frozenset[tuple[str, str]]
"""Attributes of a unit: the path of a module in it, and the attribute's name."""


def tensor_attributes(unit: nn.Module) -> dict[tuple[str, str], list[Tensor]]:
    """Return the tensors in plain attributes of a unit's modules, also in lists, tuples and dicts.

    >>> unit = nn.Sequential(nn.Tanh())
    >>> unit[0].last = Tensor([1.0])
    >>> tensor_attributes(unit)
    {('0', 'last'): [tensor([1.])]}
    """
    attributes: dict[tuple[str, str], list[Tensor]] = {}
    for path, module in unit.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor | list | dict | tuple) and name not in MODULE_ATTRIBUTES:
                tensors = tensors_in(value)
                if tensors:
                    attributes[path, name] = tensors
    return attributes


def new_attributes(before: dict[tuple[str, str], list[Tensor]], unit: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return the attributes with tensors that they did not hold before, each with the first such tensor."""
    changed: dict[tuple[str, str], Tensor] = {}
    for key, tensors in tensor_attributes(unit).items():
        old = set(map(id, before.get(key, ())))
        new = [tensor for tensor in tensors if id(tensor) not in old]
        if new:
            changed[key] = next((tensor for tensor in new if tensor.requires_grad), new[0])
    return changed


class SideEffects:
    """Compares a unit and its arguments before and after a call."""

    def __init__(self, name: str, call: Any, arguments: Any, guarded: Attributes = frozenset()) -> None:
        """Record the state before the call; `guarded` attributes may change, since other stages cannot read them."""
        self._guarded = guarded
        self._name = name
        self._unit: nn.Module = call.__self__
        args, kwargs = arguments
        mutable = (MutableMapping, MutableSequence, MutableSet, deque)
        self._containers = [value for value in (*args, *kwargs.values()) if isinstance(value, mutable)]
        self._contents = list(map(_leaf_ids, self._containers))
        self._attributes = tensor_attributes(self._unit)
        self._objects = ArgumentObjects(arguments)

    def check(self, output: Any) -> None:
        """Compare after the call."""
        self._objects.check(self._name, output)
        for container, before in zip(self._containers, self._contents, strict=True):
            if _leaf_ids(container) != before:
                raise StagelineError(
                    f"{self._name} changes a {type(container).__name__} among its inputs, which other stages do not "
                    "see; let it return what it puts there"
                )
        for (path, name), tensor in new_attributes(self._attributes, self._unit).items():
            if tensor.requires_grad and (path, name) not in self._guarded:
                raise StagelineError(
                    f"{self._name} keeps {path + '.' if path else ''}{name} of its forward as an attribute, which "
                    "other stages do not see; let it return it, too"
                )


def _leaf_ids(container: Any) -> list[int]:
    contents = dict(container) if isinstance(container, MutableMapping) else list(container)
    return [id(leaf) for leaf in tree_leaves(contents)]


# Objects among the arguments


@dataclass(frozen=True)
class _ObjectState:
    """One object before a call."""

    value: Any
    argument: Any
    """The argument that it belongs to."""
    path: str
    slots: dict[Any, Any]
    versions: dict[Any, int]


class ArgumentObjects:
    """Compares the objects among a unit's arguments before and after a call."""

    def __init__(self, arguments: Any) -> None:
        """Record their state before the call.

        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace(calls=0)
        >>> objects = ArgumentObjects(((state,), {}))
        >>> state.calls += 1
        >>> objects.check("blocks.0", None)
        Traceback (most recent call last):
        ...
        stageline.StagelineError: blocks.0 changes calls of a SimpleNamespace among its inputs, ...
        """
        self._states: dict[int, _ObjectState] = {}
        for value in _leaves(arguments):
            self._add(value, value, "", 0)

    def _add(self, value: Any, argument: Any, path: str, depth: int) -> None:
        if isinstance(value, types.MethodType):
            value = value.__self__
        if isinstance(value, types.FunctionType):
            value = value.__closure__
        if id(value) in self._states or len(self._states) >= _MAX_OBJECTS or depth > _MAX_DEPTH:
            return
        is_module = isinstance(value, nn.Module)
        if not (is_module and value is argument) and not (isinstance(value, _CONTAINERS) or is_object(value)):
            return
        slots = slots_of(value)
        versions = {
            key: raw_version(slot)
            for key, slot in slots.items()
            if isinstance(slot, Tensor) and not slot.is_inference()
        }
        self._states[id(value)] = _ObjectState(value, argument, path, slots, versions)
        for key, slot in () if is_module else slots.items():
            name = str(key) if not isinstance(value, _CONTAINERS) else f"[{key!r}]"
            self._add(slot, argument, f"{path}.{name}".strip(".").replace(".[", "["), depth + 1)

    def check(self, name: str, output: Any) -> None:
        """After the call, refuse an object that was changed, unless the unit returns it."""
        returned = {id(value) for value in _leaves(output)}
        for state in self._states.values():
            if id(state.argument) in returned:
                continue
            changed_key = _changed_key(state)
            if changed_key is not None:
                raise StagelineError(
                    f"{name} changes {state.path or changed_key[0]} of a {type(state.argument).__name__} among its "
                    "inputs, which other stages do not see; let it return what it puts there"
                )


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield the objects in nested containers."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple | set | deque):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _changed_key(state: _ObjectState) -> tuple[Any] | None:
    """Return the first key, index or attribute whose value has changed, in a tuple."""
    slots = slots_of(state.value)
    for key in (*slots, *(key for key in state.slots if key not in slots)):
        if key not in slots or key not in state.slots:
            return (key,)
        old, new = state.slots[key], slots[key]
        if old is not new and not (_is_plain(old) and type(old) is type(new) and old == new):
            return (key,)
        if key in state.versions and raw_version(new) != state.versions[key]:
            return (key,)
    return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | complex | str | bytes | tuple | type(None)) and not isinstance(value, Tensor)


# Checkpoints and hooks


def inside_reentrant_checkpoint() -> bool:
    """Whether torch's reentrant checkpointing is running: without a graph, which it builds later."""
    return _checkpoint_frame("forward") is not None


def _checkpoint_frame(function: str) -> Any:
    """Return the interpreter frame of the innermost running call of a function of torch's checkpointing."""
    frame: Any = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == function and code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
            return frame
        frame = frame.f_back
    return None


class Checkpoints:
    """Checks that all units in one of the model's checkpoints are on one stage, which has to recompute it."""

    def __init__(self) -> None:
        self._first_unit, self._first_is_own = "", True

    def check(self, name: str, own: bool) -> None:
        """Check the call of a unit; `own` says whether it belongs to this stage."""
        frame = _checkpoint_frame("checkpoint")
        if frame is None:
            return
        # Mark the frame at its first unit. A reference to it would keep its variables alive.
        if frame.f_trace_lines:
            frame.f_trace_lines = False
            self._first_unit, self._first_is_own = name, own
        elif self._first_is_own != own:
            raise StagelineError(
                f"the forward runs {self._first_unit} and {name} in one checkpoint, but the model is cut between them; "
                "cut it elsewhere (layers_per_stage=, or by= the first unit of each stage), or remove the checkpoint "
                "and pass recompute= to the pipeline"
            )


def refuse_hooks(output: Any, name: str, outside: Callable[[], bool]) -> None:
    """Refuse hooks that the frame registers on the output of another stage's unit: every stage would register them."""
    for tensor in [output] if isinstance(output, Tensor) else tensors_in(output):
        tensor.register_hook = partial(_register_hook, tensor, name, outside)  # type: ignore[method-assign]


def _register_hook(tensor: Tensor, name: str, outside: Callable[[], bool], hook: Any) -> Any:
    if outside():
        raise StagelineError(
            f"the forward registers a hook on the output of {name} outside of its units, and several stages run that; "
            "call register_hook inside of a unit"
        )
    return Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]
