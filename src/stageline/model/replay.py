"""Running the forward of a whole model on one stage, and finding out what the next stage needs of it.

The first time that inputs of some form come, the forward runs once with nothing in it: every unit gives absent tensors,
which remember where they come from. So it is known which values each unit is computed from, and which of them have to
cross a cut: in a stack of blocks the hidden states alone, in an encoder and decoder also the encoder's output, in a
U-Net also the skip connections.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError
from stageline.model import huggingface
from stageline.model.absent import Absent, Keys, keys_of, writes_allowed
from stageline.runtime.randomness import draws
from stageline.runtime.tree import flatten, unflatten

INPUT = "input"
Draw = Callable[..., Any]
"""Calls something that may draw random numbers, by the name of what it is."""


class _Reached(BaseException):
    """The forward has come to the first unit of a later stage; nothing in a model may catch it."""


@dataclass(frozen=True)
class Calls:
    """The units of a model in the order in which its forward calls them; one that is called twice is there twice.

    >>> Calls(("a", "b", "a")).position("a", times=1)
    2
    """

    names: tuple[str, ...]

    def position(self, name: str, times: int) -> int:
        """Where a call stands, after so many earlier ones of the same unit."""
        found = self._positions.get((name, times))
        if found is None:
            raise StagelineError(
                f"the model calls {name} {times + 1} times in one forward, and {self.names.count(name)} were expected; "
                "give example= to split, so that the calls are seen"
            )
        return found

    @property
    def _positions(self) -> dict[tuple[str, int], int]:
        return _positions(self.names)


@lru_cache(maxsize=64)
def _positions(names: tuple[str, ...]) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        found[(name, seen.get(name, 0))] = index
        seen[name] = seen.get(name, 0) + 1
    return found


@dataclass
class Needs:
    """What a forward computes from what: for every call of a unit, the values that it is given."""

    of_call: dict[int, Keys] = field(default_factory=dict)
    of_output: Keys = frozenset()
    everything: bool = False
    """Nothing could be found out, so all values cross all cuts."""

    def after(self, position: int) -> Keys:
        """The values that calls from here on, and the output, are computed from."""
        later = (keys for at, keys in self.of_call.items() if at >= position)
        return frozenset().union(*later, self.of_output)


@dataclass
class Replay:
    """The forward of one stage: which calls are its own, and what happens in the others."""

    calls: Calls
    start: int
    stop: int
    modules: dict[str, Any]
    """The units by name, to find out what they give; they may be on the meta device."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Keywords of the model that a batch may leave out."""
    draw: Draw | None = None
    """How the stage lets its units draw random numbers; as they come, unless given."""
    _needs: dict[str, Needs] = field(default_factory=dict)
    _metas: dict[str, nn.Module] = field(default_factory=dict)
    _now: _Now | None = None

    @property
    def first(self) -> bool:
        """Whether the model's inputs come to this stage."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether the model's output leaves this stage."""
        return self.stop == len(self.calls.names)

    @staticmethod
    def draws(module: nn.Module) -> bool:
        """Whether a module without parameters draws random numbers, and so has to draw by its name."""
        return draws(module)

    def run(self, frame: nn.Module, value: Any) -> Any:
        """Run a stage on the model's inputs, or on what the stage before passed on."""
        arrived = Passed.first(value, self.defaults) if self.first else Passed.read(value)
        form = arrived.form()
        if not self.last and form not in self._needs:
            self._needs[form] = self._look(frame, arrived)
        self._now = now = _Now(arrived, None if self.last else self._needs[form])
        args, kwargs = arrived.inputs()
        try:
            found = frame(*args, **kwargs)
        except _Reached:
            return now.passed.write()
        finally:
            self._now = None
        if not self.last:
            raise StagelineError(
                f"the forward of the model ended before it came to {self.calls.names[self.stop]}, with which the next "
                "stage begins; give example= to split, so that the order of its calls is seen"
            )
        lost = keys_of(found)
        if lost:
            raise StagelineError(f"the output of the model needs {', '.join(sorted(lost))}, which no stage passed on")
        return found

    def visit(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called."""
        now = self._now
        if now is None:
            return real(*args, **kwargs)
        if name not in self.modules:  # it has no parameters, and runs on every stage
            return self._drawn(name, real, args, kwargs)
        if now.seen is not None:
            now.seen.append(name)
            return self._dry(name, len(now.seen) - 1, now, args, kwargs)
        position = self.calls.position(name, now.times.get(name, 0))
        now.times[name] = now.times.get(name, 0) + 1
        if now.dry is not None:
            return self._dry(name, position, now, args, kwargs)
        if position < self.start:
            found, more = now.arrived.output(position, name)
            huggingface.collect(more)
            return found
        if position >= self.stop:
            now.pass_on(self.stop)
            raise _Reached
        lost = keys_of((args, kwargs))
        if lost:
            raise StagelineError(
                f"{name} needs {', '.join(sorted(lost))}, which the stages before did not pass on: the forward takes "
                "another way than when it was first seen"
            )
        before = huggingface.lengths(huggingface.collected())
        found = self._drawn(name, real, args, kwargs)
        if not self.last:
            now.passed.keep(position, name, (found, huggingface.since(before)))
        return found

    def _drawn(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return real(*args, **kwargs) if self.draw is None else self.draw(name, lambda: real(*args, **kwargs))

    # Finding out what crosses the cuts.

    def _look(self, frame: nn.Module, arrived: Passed) -> Needs:
        needs = Needs()
        self._now = _Now(arrived, None, dry=needs)
        args, kwargs = arrived.inputs(absent=True)
        try:
            with torch.no_grad(), writes_allowed() as written:
                needs.of_output = keys_of(frame(*args, **kwargs)) | written
        except Exception as error:
            warnings.warn(
                f"what has to pass from stage to stage could not be found out ({type(error).__name__}: {error}); "
                "the outputs of all units are passed on",
                stacklevel=2,
            )
            needs.everything = True
        finally:
            self._now = None
        return needs

    def order(self, frame: nn.Module, value: Any) -> list[str]:
        """The units in the order in which a forward calls them, found by a run with nothing in it."""
        self._now = _Now(Passed.first(value, self.defaults), None, dry=Needs(), seen=[])
        args, kwargs = self._now.arrived.inputs(absent=True)
        try:
            with torch.no_grad(), writes_allowed():
                frame(*args, **kwargs)
            return list(self._now.seen or [])
        except Exception:
            seen = list(self._now.seen or [])
            missing = {id(each.module) for each in self.modules.values()} - {
                id(self.modules[name].module) for name in seen
            }
            if not missing:  # what comes after the last unit does not matter
                return seen
            raise
        finally:
            self._now = None

    def _dry(self, name: str, position: int, now: _Now, args: Any, kwargs: Any) -> Any:
        assert now.dry is not None
        now.dry.of_call[position] = keys_of((args, kwargs))
        lists = huggingface.collected()
        before = huggingface.lengths(lists)
        found = self._shape_of(name, args, kwargs)
        leaves, spec = pytree.tree_flatten((found, huggingface.since(before)))
        for kind, size in before.items():
            del lists[kind][size:]
        device = next((leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), "cpu")
        found, more = pytree.tree_unflatten(
            [
                Absent.of(leaf, device, frozenset({key_of(position, index)})) if isinstance(leaf, Tensor) else leaf
                for index, leaf in enumerate(leaves)
            ],
            spec,
        )
        huggingface.collect(more)
        return found

    def _shape_of(self, name: str, args: Any, kwargs: Any) -> Any:
        """What a unit gives, on the meta device; for one that cannot run there, something like its first argument."""
        given = pytree.tree_map(lambda leaf: _on_meta(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        try:
            if name not in self._metas:
                self._metas[name] = meta_twin(self.modules[name].module)
            return self._metas[name](*given[0], **given[1])
        except Exception:
            first = next((leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)), None)
            if first is None:
                raise
            return first


@dataclass
class _Now:
    """One forward that is under way."""

    arrived: Passed
    needs: Needs | None
    dry: Needs | None = None
    seen: list[str] | None = None
    """The calls so far, where their order is not known yet."""
    times: dict[str, int] = field(default_factory=dict)
    passed: Passed = field(init=False)

    def __post_init__(self) -> None:
        self.passed = Passed(self.arrived.tree, self.arrived.leaves, dict(self.arrived.values), list(self.arrived.told))

    def pass_on(self, stop: int) -> None:
        """Keep of all values those that later stages need."""
        assert self.needs is not None
        if not self.needs.everything:
            wanted = self.needs.after(stop)
            values = self.passed.values
            self.passed.values = {key: value for key, value in values.items() if key in wanted}
            self.passed.forget_inputs(wanted)


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

    @classmethod
    def first(cls, value: Any, defaults: Mapping[str, Any]) -> Passed:
        """What the first stage is given: a tuple of arguments, a dict of keywords, or one argument."""
        kwargs = dict(value) if isinstance(value, dict) else {}
        args = value if isinstance(value, tuple) else () if isinstance(value, dict) else (value,)
        leaves, tree = flatten((tuple(args), {**defaults, **kwargs}), "the batch")
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
        found = [self._input(index, leaf, absent) for index, leaf in enumerate(self.leaves)]
        args, kwargs = unflatten(found, self.tree)
        return args, kwargs

    def _input(self, index: int, leaf: Any, absent: bool) -> Any:
        if isinstance(leaf, str) and leaf.startswith(_GONE):
            dtype, shape, device = json.loads(leaf[len(_GONE) :])
            return _absent(dtype, shape, device, f"{INPUT}.{index}")
        if absent and isinstance(leaf, Tensor) and leaf.is_floating_point():
            return Absent.of(_on_meta(leaf), leaf.device, frozenset({f"{INPUT}.{index}"}))
        return leaf

    def forget_inputs(self, wanted: Keys) -> None:
        """Replace inputs that no later stage needs by their type and shape; whole numbers, which are small, stay."""
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and f"{INPUT}.{index}" not in wanted:
                self.leaves = [*self.leaves]
                self.leaves[index] = _GONE + json.dumps(_like(leaf))

    def keep(self, position: int, name: str, found: Any) -> None:
        """Keep what a unit gave."""
        leaves, tree = flatten(found, name)
        self.told.append(
            (position, tree, tuple(_like(leaf) if isinstance(leaf, Tensor) else [leaf] for leaf in leaves))
        )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.values[key_of(position, index)] = leaf

    def output(self, position: int, name: str) -> Any:
        """What a unit of an earlier stage gave, absent where it was not passed on."""
        for at, tree, leaves in self.told:
            if at == position:
                found = [self._leaf(key_of(position, index), leaf) for index, leaf in enumerate(leaves)]
                return unflatten(found, tree)
        raise StagelineError(
            f"the model calls {name}, and no earlier stage did; give example= to split, so that the calls are seen"
        )

    def _leaf(self, key: str, told: Sequence[Any]) -> Any:
        if len(told) == 1:
            return told[0]
        dtype, shape, device = told
        return self.values[key] if key in self.values else _absent(dtype, shape, device, key)


_GONE = "\0absent "


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


def _on_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Absent):
        return tensor._meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def meta_twin(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device, made without copying its tensors."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    twin = copy.deepcopy(module, memo)
    for each in twin.modules():  # hooks of the user's see what is computed, and not what is only looked at
        each._forward_pre_hooks.clear()
        for key, hook in list(each._forward_hooks.items()):
            if not huggingface.collects(hook):
                del each._forward_hooks[key]
    return twin
