"""State that layers of several stages share, beside what they are given and give back.

One layer keeps a tensor in a dict, an attribute or a global, and a layer of another stage reads it. Stages run
different microbatches at the same time, on other processes with a copy of their own, so the reader would see another
microbatch's value. What several stages can reach is found once; a forward that puts a value of its microbatch there is
refused. What depends on shapes alone, such as a table that is made once, may be there, and so may counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError
from stageline.model.reach import Holder, Name, reach

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

    stages: list[dict[str, list[Shared]]]
    """For every stage, by the names of its layers."""
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
        users: dict[Any, set[int]] = {}
        for stage, layers in enumerate(reached):
            for holders in layers.values():
                for key in holders:
                    users.setdefault(key, set()).add(stage)
        found: list[dict[str, list[Shared]]] = []
        norms: dict[Any, tuple[str, nn.Module, tuple[int, ...]]] = {}
        for layers in reached:
            found.append({})
            for name, holders in layers.items():
                several = [(key, holder) for key, holder in holders.items() if len(users[key]) > 1]
                shared = [Shared(holder, tuple(sorted(users[key]))) for key, holder in several]
                found[-1][name] = [each for each in shared if _can_change(each.holder)]
                for key, holder in several:
                    if isinstance(holder.value, _NormBase) and holder.value.running_mean is not None:
                        norms.setdefault(key, (holder.path, holder.value, tuple(sorted(users[key]))))
        return cls(found, list(norms.values()))

    def watch(self, stage: int, twins: Twins | None = None) -> Watch | None:
        """What a stage has to look at; None where it shares nothing."""
        mine = {
            name: [Shared(_twin(each.holder, twins or {}), each.stages) for each in shared]
            for name, shared in self.stages[stage].items()
            if shared
        }
        return Watch(stage, mine) if mine else None

    def holders(self) -> list[Any]:
        """Everything that is shared."""
        return [each.holder.value for layers in self.stages for shared in layers.values() for each in shared]

    def refuse_norms(self) -> None:
        """Before a step: refuse running statistics that two stages would update."""
        for name, norm, stages in self.norms:
            if norm.training:
                raise StagelineError(
                    f"{name}, a {type(norm).__name__}, is used by stages {_listed(stages)}, and each use updates its "
                    "running statistics: they would depend on which stage comes first; give each stage a norm of its "
                    "own, cut the model so that all its uses are in one stage, or set track_running_stats=False"
                )


def _can_change(holder: Holder) -> bool:
    """Leave out what a forward cannot put a value of its own into."""
    if isinstance(holder.value, Name):
        return True
    return not (isinstance(holder.value, Tensor) and holder.value.is_meta)


def _twin(holder: Holder, twins: Twins) -> Holder:
    return Holder(twins.get(id(holder.value), holder.value), holder.path)


def _listed(stages: Iterable[int]) -> str:
    *most, last = map(str, stages)
    return f"{', '.join(most)} and {last}" if most else last


_Slot = tuple[Any, int, Any]
"""A value, its version where it is a tensor, and a copy of it where it may change without a new version."""


class Watch:
    """Looks at what a stage shares, before and after every call of its layers."""

    def __init__(self, stage: int, layers: Mapping[str, list[Shared]]) -> None:
        """`layers` are those that share something."""
        self._stage = stage
        self._layers = layers
        self._calls: dict[str, set[Any]] = {}
        """The shapes that each layer was called with: what depends on shapes alone is there by then."""

    def before(self, name: str) -> list[dict[Any, _Slot]] | None:
        """What there is before a call; None for a layer that shares nothing."""
        shared = self._layers.get(name)
        return (
            None
            if shared is None
            else [self._slots(each.holder, len(self._calls.get(name, ())) < 2) for each in shared]
        )

    @staticmethod
    def _slots(holder: Holder, copies: bool) -> dict[Any, _Slot]:
        slots = holder.slots()
        if isinstance(holder.value, Tensor):  # the kernels of some norms change their buffers without a new version
            return {"": (holder.value, holder.value._version, holder.value.detach().clone() if copies else None)}
        return {key: (value, value._version if isinstance(value, Tensor) else 0, None) for key, value in slots.items()}

    def after(self, name: str, before: list[dict[Any, _Slot]] | None, given: Any, output: Any) -> None:
        """Refuse what a call left there of its microbatch."""
        if before is None:
            return
        shapes = _shapes(given)
        again = shapes in self._calls.setdefault(name, set())
        self._calls[name].add(shapes)
        for shared, slots in zip(self._layers[name], before, strict=True):
            for key, (value, version, _) in self._slots(shared.holder, False).items():
                old = slots.get(key)
                if old is not None and old[0] is value and old[1] == version and _equal(old[2], value):
                    continue
                if _is_of_microbatch(
                    None if old is None else old[0], value, old is not None and old[0] is value, again, (given, output)
                ):
                    self._refuse(name, shared, key, value)

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


def _equal(copy: Tensor | None, value: Any) -> bool:
    return copy is None or torch.equal(copy, value)


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
