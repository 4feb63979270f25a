"""State that layers of several stages share, apart from what they receive and return.

One layer stores a tensor in a dict, an attribute or a global, and a layer of another stage reads it. Stages run
different microbatches at the same time, and other processes have their own copy, so the reader would see the value of
another microbatch. The state that several stages can reach is collected once; a forward that stores a value of its
microbatch there is refused. Values that depend only on shapes, such as a cached table, and counters are allowed.
"""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model._torch_private import NormBase, raw_version, storage_id, tensors_in, tree_leaves
from stageline.model.reachability import GlobalName, Holder, is_array, is_user_module, reach, slot_path

Layers = Sequence[tuple[str, nn.Module]]
Twins = Mapping[int, Any]
"""Copies of holders in a second copy of a stage, by the ids of the originals."""

_ADVICE = (
    "return the values that later layers need as part of the output, or use sl.skippable with sl.stash and sl.pop (see "
    "docs/models.md)"
)


@dataclass
class SharedState:
    """What the layers of every stage share with those of other stages."""

    stages: list[list[Holder]]
    norms: list[tuple[str, nn.Module, tuple[int, ...]]] = field(default_factory=list)
    """Norms with running statistics that several stages use."""

    @classmethod
    def of(cls, stages: Sequence[Layers]) -> SharedState:
        """Search all stages."""
        reached = [reach(layers) for layers in stages]
        users: dict[Any, list[int]] = {}
        assigned: set[Any] = set()
        for stage, holders in enumerate(reached):
            for key, holder in holders.items():
                users.setdefault(key, []).append(stage)
                if holder.is_set:
                    assigned.add(key)
        shared: list[list[Holder]] = []
        norms: dict[Any, tuple[str, nn.Module, tuple[int, ...]]] = {}
        for holders in reached:
            several = {key: holder for key, holder in holders.items() if len(users[key]) > 1}
            for key, holder in several.items():
                holder.stages = tuple(users[key])
                if isinstance(holder.value, NormBase) and holder.value.running_mean is not None:
                    norms.setdefault(key, (holder.path, holder.value, holder.stages))
            shared.append([holder for key, holder in several.items() if _can_change(holder, key in assigned)])
        return cls(shared, list(norms.values()))

    def watch(self, stage: int, twins: Twins | None = None) -> SharedStateWatch | None:
        """Return the watch of a stage; None if it shares nothing."""
        copies = twins or {}
        shared = [replace(holder, value=copies.get(id(holder.value), holder.value)) for holder in self.stages[stage]]
        return SharedStateWatch(stage, shared) if shared else None

    def holders(self) -> list[Any]:
        """Return everything that is shared."""
        return [holder.value for shared in self.stages for holder in shared]

    def refuse_norms(self) -> None:
        """Before a step, refuse running statistics that two stages would update."""
        for name, norm, stages in self.norms:
            if norm.training:
                raise StagelineError(
                    f"{name}, a {type(norm).__name__}, is used by stages {_listed(stages)}, and each use updates its "
                    "running statistics, which would depend on which stage runs first; give each stage its own "
                    "norm, cut the model so that all uses are in one stage, or set track_running_stats=False"
                )


def _can_change(holder: Holder, is_assigned: bool) -> bool:
    """Whether a forward can store a value of its own in a holder."""
    if isinstance(holder.value, GlobalName):
        return is_assigned
    if isinstance(holder.value, types.ModuleType) and not is_user_module(holder.value.__name__):
        return is_assigned
    if isinstance(holder.value, type | types.FunctionType):
        return is_assigned or bool(holder.slots())
    return not (isinstance(holder.value, Tensor) and holder.value.is_meta)


def _listed(stages: Iterable[int]) -> str:
    *most, last = map(str, stages)
    return f"{', '.join(most)} and {last}" if most else last


_LAYERWISE_FORWARDS = 16
"""The number of forwards of a stage that are checked layer by layer."""


class _Probe:
    """Compares one holder before and after a call; cheap if nothing changes, which is nearly always."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self._keep(holder.slots())
        self.versions: list[int] = []
        self.copy: Any = None

    def _keep(self, slots: dict[Any, Any]) -> None:
        self.slots, self.tensors = slots, [value for value in slots.values() if isinstance(value, Tensor)]

    def before(self, copies: bool) -> None:
        slots = self.holder.slots()
        if not _same_slots(slots, self.slots):  # set since the last call, by the user or by another stage
            self._keep(slots)
        self.versions = list(map(raw_version, self.tensors)) if self.tensors else []
        value = self.holder.value
        # The kernels of some norms change their buffers without a new version.
        self.copy = value.detach().clone() if copies and isinstance(value, Tensor) else None
        if copies and is_array(value):
            self.copy = value.copy()

    def after(self) -> list[tuple[Any, Any, Any, bool]]:
        """Return, for each slot that changed: its key, old and new value, and whether it was modified in place."""
        slots = self.holder.slots()
        same = _same_slots(slots, self.slots)
        modified = self.tensors and list(map(raw_version, self.tensors)) != self.versions
        if same and not modified and (self.copy is None or _equal(self.copy, self.holder.value)):
            return []
        versions = {id(tensor): version for tensor, version in zip(self.tensors, self.versions, strict=True)}
        changes = []
        for key, value in slots.items():
            old = self.slots.get(key)
            if old is not value or key not in self.slots:
                changes.append((key, old, value, False))
            elif self.copy is not None and is_array(value):
                changes.append((key, self.copy, value, True))
            elif isinstance(value, Tensor) and (versions.get(id(value)) != raw_version(value) or self.copy is not None):
                changes.append((key, old, value, True))
        self._keep(slots)
        return changes


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    return bool(one.shape == two.shape and (one == two).all())


def _same_slots(one: dict[Any, Any], two: dict[Any, Any]) -> bool:
    """Whether the same objects are in the same places."""
    if not one and not two:
        return True
    return len(one) == len(two) and all(map(is_, one.values(), two.values())) and one.keys() == two.keys()


class SharedStateWatch:
    """Checks what a stage shares, before and after every call of its layers."""

    def __init__(self, stage: int, shared: Sequence[Holder]) -> None:
        self._stage = stage
        self._probes = list(map(_Probe, shared))
        self._shapes: dict[str, set[Any]] = {}
        """The input shapes that each layer was called with: values that depend only on shapes exist by then."""
        self._counts: Counter[str] = Counter()
        self._plain_data = PlainData()
        self._forwards = 0

    def closely(self) -> bool:
        """Whether to check each layer separately in order to name it: in the first forwards, where most is found."""
        self._forwards += 1
        return self._forwards <= _LAYERWISE_FORWARDS

    def before(self, name: str) -> None:
        """Record the state before the call of a layer, or of all layers; `name` is the first layer."""
        copies = self._counts[name] < 2  # what changes without a new version does so from the first calls on
        self._counts[name] += 1
        for probe in self._probes:
            probe.before(copies)

    def after(self, name: str, inputs: Any, output: Any) -> None:
        """Refuse a value of the microbatch that a call has stored."""
        shapes = (
            tuple(inputs.shape) if isinstance(inputs, Tensor) else tuple(tuple(t.shape) for t in tensors_in(inputs))
        )
        known = self._shapes.setdefault(name, set())
        for probe in self._probes:
            for key, old, value, in_place in probe.after():
                if _is_of_microbatch(old, value, in_place, shapes in known, (inputs, output)):
                    self._refuse(name, probe.holder, key, value)
                place = (name, shapes, id(probe), key)
                if not in_place and self._plain_data.differs(place, probe.holder.value, old, value, shapes):
                    self._refuse(name, probe.holder, key, value)
        known.add(shapes)

    def _refuse(self, name: str, holder: Holder, key: Any, value: Any) -> None:
        others = [stage for stage in holder.stages if stage != self._stage]
        is_global = isinstance(holder.value, GlobalName)
        place = f"the global {key}" if is_global else slot_path(holder.path, holder.value, key)
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        plural = "s" if len(others) > 1 else ""
        raise StagelineError(
            f"{name} of stage {self._stage} stores {what} in {place}, which stage{plural} "
            f"{_listed(others)} can also reach: with threads, they may read the value of another microbatch; with "
            f"processes, the value never arrives; {_ADVICE}"
        )


def _tensors(value: Any, depth: int = 3) -> list[Tensor]:
    """Return the tensors in a value, also in objects of user classes."""
    if isinstance(value, Tensor):
        return [value]
    tensors = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif depth and not isinstance(leaf, nn.Module | type) and hasattr(leaf, "__dict__"):
            tensors += [tensor for attribute in vars(leaf).values() for tensor in _tensors(attribute, depth - 1)]
    return tensors


def _is_of_microbatch(old: Any, value: Any, in_place: bool, known_shapes: bool, arguments_and_output: Any) -> bool:
    """Whether a value that a call stored belongs to its microbatch, and is not a table, cache or counter."""
    if in_place and not isinstance(value, Tensor):  # an array; counts in one only grow
        return not (value.dtype.kind in "iu" and bool((value >= old).all()))
    tensors = _tensors(value)
    if any(tensor.requires_grad and not isinstance(tensor, nn.Parameter) for tensor in tensors):
        return True
    if tensors:
        microbatch = set(map(storage_id, tensors_in(arguments_and_output)))
        if in_place or any(storage_id(tensor) in microbatch for tensor in tensors):
            return True
        old_tensors = _tensors(old)
        same_shapes = [tensor.shape for tensor in old_tensors] == [tensor.shape for tensor in tensors]
        return known_shapes and not (same_shapes and all(map(torch.equal, old_tensors, tensors)))
    if isinstance(value, bool | float):
        return known_shapes and type(old) is type(value) and old != value
    # A counter only grows.
    return known_shapes and isinstance(value, int) and isinstance(old, int) and value < old


# Strings, arrays and lists of numbers

_MAX_PLACES = 4096
"""Maximum number of places whose data is remembered."""
_NOT_PLAIN = object()


class PlainData:
    """Strings, arrays and lists that layers store: data of a microbatch changes with every call, names do not."""

    def __init__(self) -> None:
        self._hashes: dict[Hashable, int] = {}

    def differs(self, place: Hashable, holder: Any, old: Any, value: Any, shapes: Any) -> bool:
        """Whether a layer stored something else in a place than before, for inputs of the same shapes."""
        data = _hashable(value)
        if data is _NOT_PLAIN or _was_appended(old, value) or _are_sizes(value, shapes):
            return False
        if old is None and isinstance(holder, list | deque | set):  # one more entry of a log
            return False
        if len(self._hashes) >= _MAX_PLACES and place not in self._hashes:
            return False
        previous = self._hashes.get(place)
        self._hashes[place] = hash(data)
        return previous is not None and previous != self._hashes[place]


def _hashable(value: Any, depth: int = 4) -> Any:
    """Return plain data in a hashable form; bare numbers are checked elsewhere."""
    if isinstance(value, str | bytes):
        return value
    if is_array(value):
        return value.shape, value.tobytes() if value.dtype.kind != "O" else repr(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    if not depth or not isinstance(value, list | tuple | set | frozenset | deque | dict):
        return _NOT_PLAIN
    if isinstance(value, dict):
        entries: list[Any] = [*value.items()]
    else:
        entries = sorted(value, key=repr) if isinstance(value, set | frozenset) else [*value]
    data = tuple(
        entry if isinstance(entry, int | float | complex | type(None)) else _hashable(entry, depth - 1)
        for entry in entries
    )
    return _NOT_PLAIN if any(entry is _NOT_PLAIN for entry in data) else data


def _was_appended(old: Any, value: Any) -> bool:
    """Whether a value is the old string or list with something added at the end."""
    if type(old) is not type(value) or not isinstance(value, str | bytes | list | tuple) or len(old) >= len(value):
        return False
    return bool(value[: len(old)] == old) and len(old) > 0


def _are_sizes(value: Any, shapes: Any) -> bool:
    """Whether a value holds only sizes of the layer's inputs."""
    if not isinstance(value, tuple | list) or not all(type(number) is int for number in value):
        return False
    sizes = {size for shape in shapes for size in (shape if isinstance(shape, tuple) else (shape,))}
    return set(value) <= sizes
