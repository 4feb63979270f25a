"""State that layers of several stages share, beside what they are given and give back.

One layer keeps a tensor in a dict, an attribute or a global, and a layer of another stage reads it. Stages run
different microbatches at the same time, on other processes with a copy of their own, so the reader would see another
microbatch's value. What several stages can reach is found once; a forward that puts a value of its microbatch there is
refused. What depends on shapes alone, such as a table that is made once, may be there, and so may counters.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from stageline.common.errors import StagelineError
from stageline.model.reachability import Holder, Name, is_array, is_users, reach
from stageline.model.stage_module.plain_state import Left

Layers = Sequence[tuple[str, nn.Module]]
Twins = Mapping[int, Any]
"""Copies of holders in a second copy of a stage, by the originals' ids."""

_WAY = (
    "let it pass on what a later layer needs as part of its output, or use sl.skippable with sl.stash and sl.pop (see "
    "docs/models.md)"
)


@dataclass(frozen=True)
class Shared:
    """A holder that layers of several stages reach."""

    holder: Holder
    stages: tuple[int, ...]


@dataclass
class Sharing:
    """What the layers of every stage share with those of others."""

    stages: list[list[Shared]]
    norms: list[tuple[str, nn.Module, tuple[int, ...]]] = field(default_factory=list)
    """Norms with running statistics that several stages use."""

    @classmethod
    def of(cls, stages: Sequence[Layers]) -> Sharing:
        """Look through all stages.

        >>> norm = nn.BatchNorm1d(2)
        >>> sharing = Sharing.of([[("0", nn.Linear(2, 2)), ("1", norm)], [("2", norm)]])
        >>> [(name, places) for name, _, places in sharing.norms]
        [('1', (0, 1))]
        """
        reached = [reach(layers) for layers in stages]
        users: dict[Any, list[int]] = {}
        names_set: set[Any] = set()
        for stage, holders in enumerate(reached):
            for key, holder in holders.items():
                users.setdefault(key, []).append(stage)
                if holder.is_set:
                    names_set.add(key)
        found: list[list[Shared]] = []
        norms: dict[Any, tuple[str, nn.Module, tuple[int, ...]]] = {}
        for holders in reached:
            several = [(key, holder) for key, holder in holders.items() if len(users[key]) > 1]
            found.append(
                [Shared(holder, tuple(users[key])) for key, holder in several if _can_change(holder, key in names_set)]
            )
            for key, holder in several:
                if isinstance(holder.value, _NormBase) and holder.value.running_mean is not None:
                    norms.setdefault(key, (holder.path, holder.value, tuple(users[key])))
        return cls(found, list(norms.values()))

    def watch(self, stage: int, twins: Twins | None = None) -> Watch | None:
        """What a stage has to look at; None where it shares nothing."""
        mine = [Shared(_twin(each.holder, twins or {}), each.stages) for each in self.stages[stage]]
        return Watch(stage, mine) if mine else None

    def holders(self) -> list[Any]:
        """Everything that is shared."""
        return [each.holder.value for shared in self.stages for each in shared]

    def refuse_norms(self) -> None:
        """Before a step: refuse running statistics that two stages would update."""
        for name, norm, stages in self.norms:
            if norm.training:
                raise StagelineError(
                    f"{name}, a {type(norm).__name__}, is used by stages {_listed(stages)}, and each use updates its "
                    "running statistics: they would depend on which stage comes first; give each stage a norm of its "
                    "own, cut the model so that all its uses are in one stage, or set track_running_stats=False"
                )


def _can_change(holder: Holder, is_set: bool) -> bool:
    """Leave out what a forward cannot put a value of its own into."""
    if isinstance(holder.value, Name):
        return is_set
    if isinstance(holder.value, types.ModuleType) and not is_users(holder.value.__name__):
        return is_set
    if isinstance(holder.value, type | types.FunctionType):
        return is_set or bool(holder.slots())
    return not (isinstance(holder.value, Tensor) and holder.value.is_meta)


def _twin(holder: Holder, twins: Twins) -> Holder:
    return Holder(twins.get(id(holder.value), holder.value), holder.path)


def _listed(stages: Iterable[int]) -> str:
    *most, last = map(str, stages)
    return f"{', '.join(most)} and {last}" if most else last


_CLOSELY = 16
"""How many forwards of a stage are looked at layer by layer."""


class _Probe:
    """Looks at one holder: cheaply where nothing changes, which is nearly always."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.slots = shared.holder.slots()
        self.tensors = self._find()
        self.versions: list[int] = []
        self.copy: Any = None

    def _find(self) -> list[Tensor]:
        return [value for value in self.slots.values() if isinstance(value, Tensor)]

    def before(self, copies: bool) -> None:
        slots = self.shared.holder.slots()
        if not _same_slots(slots, self.slots):  # set meanwhile, by the user or by another stage
            self.slots, self.tensors = slots, self._find()
        self.versions = [tensor._version for tensor in self.tensors] if self.tensors else []
        held = self.shared.holder.value
        # The kernels of some norms change their buffers without a new version.
        self.copy = held.detach().clone() if copies and isinstance(held, Tensor) else None
        if copies and is_array(held):
            self.copy = held.copy()

    def after(self) -> list[tuple[Any, Any, Any, bool]]:
        """For each slot that changed: its key, its old and its new value, and whether this is the same tensor."""
        slots = self.shared.holder.slots()
        same = _same_slots(slots, self.slots)
        moved = self.tensors and [tensor._version for tensor in self.tensors] != self.versions
        if same and not moved and (self.copy is None or _equal(self.copy, self.shared.holder.value)):
            return []
        versions = {id(tensor): version for tensor, version in zip(self.tensors, self.versions, strict=True)}
        found = []
        for key, value in slots.items():
            old = self.slots.get(key)
            if old is not value or key not in self.slots:
                found.append((key, old, value, False))
            elif self.copy is not None and is_array(value):
                found.append((key, self.copy, value, True))
            elif isinstance(value, Tensor) and (versions.get(id(value)) != value._version or self.copy is not None):
                found.append((key, old, value, True))
        self.slots, self.tensors = slots, [value for value in slots.values() if isinstance(value, Tensor)]
        return found


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    return bool(one.shape == two.shape and (one == two).all())


def _same_slots(one: dict[Any, Any], two: dict[Any, Any]) -> bool:
    """Whether the same objects are in the same places."""
    if not one and not two:
        return True
    return len(one) == len(two) and all(map(is_, one.values(), two.values())) and one.keys() == two.keys()


class Watch:
    """Looks at what a stage shares, before and after every call of its layers."""

    def __init__(self, stage: int, shared: Sequence[Shared]) -> None:
        """`shared` is what the stage shares with others."""
        self._stage = stage
        self._probes = [_Probe(each) for each in shared]
        self._calls: dict[str, set[Any]] = {}
        """The shapes that each layer was called with: what depends on shapes alone is there by then."""
        self._counts: Counter[str] = Counter()
        self._left = Left()
        self._forwards = 0

    def closely(self) -> bool:
        """Whether to look at each layer by itself, to name it: in the first forwards, where nearly all is found."""
        self._forwards += 1
        return self._forwards <= _CLOSELY

    def before(self, name: str) -> None:
        """Look at what there is before a call of a layer, or of all layers, of which the first is named."""
        copies = self._counts[name] < 2  # what changes without a new version does so from the first calls on
        self._counts[name] += 1
        for probe in self._probes:
            probe.before(copies)

    def after(self, name: str, given: Any, output: Any) -> None:
        """Refuse what a call left there of its microbatch."""
        shapes = tuple(given.shape) if isinstance(given, Tensor) else _shapes(given)
        known = self._calls.setdefault(name, set())
        for probe in self._probes:
            for key, old, value, same in probe.after():
                if _is_of_microbatch(old, value, same, shapes in known, (given, output)):
                    self._refuse(name, probe.shared, key, value)
                place = (name, shapes, id(probe), key)
                if not same and self._left.differs(place, probe.shared.holder.value, old, value, shapes):
                    self._refuse(name, probe.shared, key, value)
        known.add(shapes)

    def _refuse(self, name: str, shared: Shared, key: Any, value: Any) -> None:
        holder, others = shared.holder, [stage for stage in shared.stages if stage != self._stage]
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        many = "s" if len(others) > 1 else ""
        raise StagelineError(
            f"{name} of stage {self._stage} leaves {what} in {_place(holder, key)}, which stage{many} "
            f"{_listed(others)} can reach too: on threads it may be another microbatch's there, on processes it never "
            f"arrives; {_WAY}"
        )


def _place(holder: Holder, key: Any) -> str:
    if isinstance(holder.value, Name):
        return f"the global {key}"
    if key == "":
        return holder.path
    return f"{holder.path}[{key!r}]" if isinstance(holder.value, dict | list) else f"{holder.path}.{key}"


def _shapes(given: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))


def _tensors(value: Any, depth: int = 3) -> list[Tensor]:
    """The tensors in a value, also in objects of a user's own class."""
    if isinstance(value, Tensor):
        return [value]
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and not isinstance(leaf, nn.Module | type) and hasattr(leaf, "__dict__"):
            found += [tensor for each in vars(leaf).values() for tensor in _tensors(each, depth - 1)]
    return found


def _is_of_microbatch(old: Any, value: Any, same: bool, again: bool, seen: Any) -> bool:
    """Whether a value that a call left somewhere is one of its microbatch, and no table, cache or counter.

    `same` is a tensor that was changed in place; `again` says that the layer was called with these shapes before.
    """
    if same and not isinstance(value, Tensor):  # an array; counts in one only grow
        return not (value.dtype.kind in "iu" and bool((value >= old).all()))
    tensors = _tensors(value)
    if any(tensor.requires_grad and not isinstance(tensor, nn.Parameter) for tensor in tensors):
        return True
    if tensors:
        near = {_storage(leaf) for leaf in pytree.tree_leaves(seen) if isinstance(leaf, Tensor)}
        if same or any(_storage(tensor) in near for tensor in tensors):
            return True
        return again and not _same_values(_tensors(old), tensors)
    if isinstance(value, bool | float):
        return again and type(old) is type(value) and old != value
    # A counter only grows.
    return again and isinstance(value, int) and isinstance(old, int) and value < old


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse, or made of other tensors
        return id(tensor)


def _same_values(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    return len(old) == len(new) and all(
        mine.shape == theirs.shape and torch.equal(mine, theirs) for mine, theirs in zip(old, new, strict=True)
    )
