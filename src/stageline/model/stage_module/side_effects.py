"""Side effects of a forward that other stages would not see, or would repeat: detected and refused.

Every stage runs the code around the units, the frame, but only its own units compute. So other stages do not see what a
unit stores in an attribute or in an object among its arguments. If a unit of an earlier stage modifies a tensor that
the frame created, a later stage has it unmodified; the output of a unit arrives in its final state, so a later stage
cannot recompute what the frame computed from it before. A number that the frame counts up differs between stages.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model._torch_private import (
    MODULE_ATTRIBUTES,
    TorchDispatchMode,
    storage_id,
    tensors_in,
    tree_leaves,
    version_of,
)
from stageline.model.reachability import is_object, reach, slot_path, slots_of

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)
_PLAIN = (int, float, complex, str, bytes, tuple, type(None))
_MAX_OBJECTS = 2_000
"""Maximum number of objects inspected for one call."""
_MAX_DEPTH = 6

Attributes = frozenset[tuple[str, str]]
"""Attributes of a unit: the path of a module in it, and the attribute's name."""


def tensor_attributes(unit: nn.Module) -> dict[tuple[str, str], list[Tensor]]:
    """Return the tensors in plain attributes of a unit's modules, also in lists, tuples and dicts."""
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
                    "see; return the new values instead"
                )
        for (path, name), tensor in new_attributes(self._attributes, self._unit).items():
            if tensor.requires_grad and (path, name) not in self._guarded:
                raise StagelineError(
                    f"{self._name} keeps {path + '.' if path else ''}{name} of its forward as an attribute, which "
                    "other stages do not see; return it as well"
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
        """Record their state before the call."""
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
        versions = {key: version_of(slot) for key, slot in slots.items() if isinstance(slot, Tensor)}
        self._states[id(value)] = _ObjectState(value, argument, path, slots, versions)
        for key, slot in () if is_module else slots.items():
            name = str(key) if not isinstance(value, _CONTAINERS) else f"[{key!r}]"
            self._add(slot, argument, f"{path}.{name}".strip(".").replace(".[", "["), depth + 1)

    def check(self, name: str, output: Any) -> None:
        """After the call, refuse an object that was changed, unless the unit returns it."""
        returned = {id(value) for value in _leaves(output)}
        for state in self._states.values():
            for key in _changed_keys(state) if id(state.argument) not in returned else ():
                raise StagelineError(
                    f"{name} changes {state.path or key} of a {type(state.argument).__name__} among its inputs, "
                    "which other stages do not see; return the new values instead"
                )


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield the objects in nested containers."""
    if isinstance(tree, dict | list | tuple | set | deque):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(value)
    else:
        yield tree


def _changed_keys(state: _ObjectState) -> Iterator[Any]:
    """Yield the keys, indices or attributes whose values have changed."""
    slots = slots_of(state.value)
    for key in {**slots, **state.slots}:
        if key in slots and key in state.slots:
            old, new = state.slots[key], slots[key]
            is_same = old is new or (isinstance(old, _PLAIN) and type(old) is type(new) and old == new)
            if is_same and (key not in state.versions or version_of(new) == state.versions[key]):
                continue
        yield key


# In-place changes

Read = tuple["StorageHistory", frozenset[int]]
"""Memory that something was computed from, and the calls that had modified it by then."""


class StorageHistory:
    """What happened to the memory of a tensor and its views."""

    __slots__ = ("changes", "reads", "root")

    def __init__(self, root: str | None = None, reads: Iterable[Read] = ()) -> None:
        """`root` is the name of a model input or a unit's output; these cross stage boundaries in their final state."""
        self.root = root
        self.changes: set[int] = set()
        """The calls of units that modified it."""
        self.reads = set(reads)

    def read(self) -> set[Read]:
        """Return the dependencies of a value that is computed from this memory now."""
        own = {(self, frozenset(self.changes))} if self.changes or self.root is not None else set()
        return self.reads | own


class InplaceHistory:
    """Records in-place changes during one forward, and which calls use the modified tensors."""

    def __init__(self) -> None:
        self._real: dict[Any, tuple[StorageHistory, Tensor]] = {}
        self._uses: list[tuple[int, StorageHistory, frozenset[int], frozenset[int]]] = []
        self.control_reads: set[Read] = set()
        """Tensors whose values the forward read: anything later may depend on them."""
        self._modes = ExitStack()

    def of(self, tensor: Tensor) -> StorageHistory | None:
        """Return the history of a tensor; placeholder tensors carry theirs."""
        history: StorageHistory | None = getattr(tensor, "storage_history", None)
        if history is None and self._real:
            history = self._real.get(storage_id(tensor), (None,))[0]
        return history

    def read(self, tensors: Iterable[Tensor]) -> set[Read]:
        """Return the dependencies of a value that is computed from these tensors."""
        return set().union(*(history.read() for tensor in tensors if (history := self.of(tensor)) is not None))

    def write(self, tensor: Tensor, reads: set[Read]) -> None:
        """Record that the forward itself writes to a tensor, or computes it."""
        history = self.of(tensor)
        if history is not None:
            history.reads |= reads
        elif reads:
            self._real[storage_id(tensor)] = (StorageHistory(reads=reads), tensor)

    def change(self, tensor: Tensor, position: int, root: str | None) -> None:
        """Record that a unit modified a tensor in place."""
        history = self.of(tensor)
        if history is None:
            if not self._real:
                self._modes.enter_context(_Follow(self))
            history = StorageHistory(root)
            self._real[storage_id(tensor)] = (history, tensor)  # keeps the tensor alive, so that no id is reused
        history.changes.add(position)

    def use(self, position: int, tree: Any) -> None:
        """Record the arguments of a unit, or the output of the model."""
        for history, changes_then in self.read(tensors_in(tree)) | self.control_reads:
            if history.changes:
                self._uses.append((position, history, changes_then, frozenset(history.changes)))

    def close(self) -> None:
        """End the recording."""
        self._modes.close()

    def check(self, names: Sequence[str], cuts: Iterable[int], copied: Iterable[str]) -> None:
        """Refuse a change that a later stage would miss or see too early; `copied` are values passed as copies."""
        copied, cuts = set(copied), list(cuts)
        for position, history, then, now in sorted(self._uses, key=lambda use: (use[0], sorted(use[3]))):
            arrives = history.root is not None and history.root not in copied
            for call in sorted(now - then if arrives else then):
                if any(call < cut <= position for cut in cuts):
                    user = names[position] if position < len(names) else "the output of the model"
                    raise StagelineError(
                        f"{names[call]} modifies one of its inputs in place, and the forward uses that tensor again "
                        f"for {user}, on another stage, which does not see the change; make {names[call]} use a copy "
                        "(x.clone(), or inplace=False), or return the result"
                    )


class UnchangedInputs:
    """Checks that a unit does not modify its inputs, if only the real call can show it."""

    def __init__(self, name: str, inputs: Any, passed: Iterable[Tensor]) -> None:
        """Record the inputs before the call; `passed` tensors cross stage boundaries and may change."""
        arrives = {storage_id(tensor) for tensor in passed}
        self._name = name
        self._tensors = [tensor for tensor in tensors_in(inputs) if storage_id(tensor) not in arrives]
        self._versions = list(map(version_of, self._tensors))

    def check(self) -> None:
        """Compare after the call."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if version != version_of(tensor):
                raise StagelineError(
                    f"{self._name} modifies one of its inputs in place, a tensor of shape {tuple(tensor.shape)}, and "
                    "the forward may use it again on another stage, which does not see the change; make it use a "
                    "copy (x.clone(), or inplace=False), or return the result"
                )


class _Follow(TorchDispatchMode):
    """Records what is computed from real tensors, once a unit has modified one of them."""

    def __init__(self, history: InplaceHistory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._history = history

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs))
        reads = self._history.read(inputs)
        if reads and not getattr(func, "is_view", False):
            outputs = tensors_in(result)
            for tensor in outputs:
                if not hasattr(tensor, "storage_history"):
                    self._history.write(tensor, reads)
            if not outputs:  # the forward reads the values, for example in an `if`
                self._history.control_reads |= reads
        return result


# Counters

_COUNTER_DEPTH = 3
_DEEP_FORWARDS = 8
"""The number of forwards in which containers and objects are inspected, too."""

Place = tuple[int, str]
Numbers = dict[Place, tuple[Any, Any, Any]]
"""By frame and path: the object that holds a number, its key there, and the number."""


class Counters:
    """Numbers that a forward sets on the frames; a number that changes in every forward is refused.

    Every stage runs this code, and some stages run it more than once, so their counts would differ.
    """

    def __init__(self, frames: Sequence[nn.Module], units: Sequence[tuple[str, nn.Module]] = ()) -> None:
        """Inspect the frames, except for containers that units reach: `shared_state` checks those."""
        self._frames = frames
        self._changed: set[Place] = set()
        self._reached_by_units: set[int] = set()
        self._forwards = 0
        if any(
            _may_hold_numbers(value)
            for frame in frames
            for name, value in vars(frame).items()
            if name not in MODULE_ATTRIBUTES
        ):
            self._reached_by_units = {id(holder.value) for holder in reach(units).values()}

    def read(self) -> Numbers:
        """Return all numbers."""
        if self._forwards >= _DEEP_FORWARDS:
            return {
                (index, key): (frame, key, value)
                for index, frame in enumerate(self._frames)
                for key, value in vars(frame).items()
                if isinstance(value, int | float) and key not in MODULE_ATTRIBUTES
            }
        return {
            (index, path): (holder, key, value)
            for index, frame in enumerate(self._frames)
            for path, holder, key, value in self._numbers(frame, vars(frame), "", 0)
        }

    def _numbers(
        self, holder: Any, slots: dict[Any, Any], path: str, depth: int
    ) -> Iterator[tuple[str, Any, Any, Any]]:
        for key, value in slots.items():
            if depth == 0 and key in MODULE_ATTRIBUTES:
                continue
            place = slot_path(path, holder, key).strip(".")
            if isinstance(value, int | float):
                yield place, holder, key, value
            elif depth < _COUNTER_DEPTH and _may_hold_numbers(value) and id(value) not in self._reached_by_units:
                yield from self._numbers(value, slots_of(value), place, depth + 1)

    def restore(self, before: Numbers) -> None:
        """Undo the changes of a dry run."""
        now = self.read()
        for place, (holder, key, value) in before.items():
            if place not in now or now[place][2] == value:
                continue
            if isinstance(holder, dict | list | deque):
                holder[key] = value
            else:
                object.__setattr__(holder, key, value)

    def changed(self, before: Numbers) -> set[Place]:
        """Return the places whose numbers have changed."""
        return {place for place, (_, _, value) in self.read().items() if place in before and before[place][2] != value}

    def check(self, before: Numbers) -> None:
        """After a forward, refuse a number that also changed in an earlier one."""
        self._forwards += 1
        changed = self.changed(before)
        self.refuse(changed & self._changed)
        self._changed |= changed

    def refuse(self, places: set[Place]) -> None:
        """Raise an error if there are any places."""
        for index, path in sorted(places):
            raise StagelineError(
                f"the forward changes {path} of {type(self._frames[index]).__name__} every time, outside its units, "
                "so every stage changes it; move it out of the model, or into a unit"
            )


def _may_hold_numbers(value: Any) -> bool:
    return isinstance(value, dict | list | deque) or (is_object(value) and not isinstance(value, tuple | str))
