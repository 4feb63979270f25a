"""What a unit does beside what it gives back, which no other stage would see: looked for once, and refused."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.common.errors import StagelineError
from stageline.model.stage_module.changed_objects import Objects

_OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has."""

Attributes = frozenset[tuple[str, str]]
"""Attributes of a unit, by the path of the module in it that has them."""


def tensor_attributes(unit: nn.Module) -> dict[tuple[str, str], list[Tensor]]:
    """The tensors that a unit's modules hold as plain attributes, or in lists and dicts that are.

    >>> unit = nn.Sequential(nn.Tanh())
    >>> unit[0].last = Tensor([1.0])
    >>> tensor_attributes(unit)
    {('0', 'last'): [tensor([1.])]}
    """
    found: dict[tuple[str, str], list[Tensor]] = {}
    for path, module in unit.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor | list | dict | tuple) and key not in _OF_MODULES:
                tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
                if tensors:
                    found[path, key] = tensors
    return found


def fresh_attributes(before: dict[tuple[str, str], list[Tensor]], unit: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Those that hold tensors that they did not hold before, and the first of these."""
    found: dict[tuple[str, str], Tensor] = {}
    for key, tensors in tensor_attributes(unit).items():
        old = set(map(id, before.get(key, ())))
        new = [tensor for tensor in tensors if id(tensor) not in old]
        if new:
            found[key] = next((tensor for tensor in new if tensor.requires_grad), new[0])
    return found


class Effects:
    """Looks at a unit and at what it is given, before and after a call."""

    def __init__(self, name: str, call: Any, given: Any, guarded: Attributes = frozenset()) -> None:
        """Before the call of a unit's method; what is `guarded` may be kept, since other stages cannot read it."""
        self._guarded = guarded
        self._name = name
        self._unit: nn.Module = call.__self__
        self._holders = _containers(given)
        self._sizes = [_contents(each) for each in self._holders]
        self._attributes = tensor_attributes(self._unit)
        self._objects = Objects(given)

    def check(self, output: Any) -> None:
        """After the call."""
        self._objects.check(self._name, output)
        for holder, before in zip(self._holders, self._sizes, strict=True):
            if _contents(holder) != before:
                raise StagelineError(
                    f"{self._name} changes a {type(holder).__name__} that it is given, which other stages do not see; "
                    "let it give back what it puts there"
                )
        for (path, key), tensor in fresh_attributes(self._attributes, self._unit).items():
            if tensor.requires_grad and (path, key) not in self._guarded:
                raise StagelineError(
                    f"{self._name} keeps {path + '.' if path else ''}{key} of its forward as an attribute, which other "
                    "stages do not see; let it give it back, too"
                )


def _containers(given: Any) -> list[Any]:
    args, kwargs = given
    found = [*args, *kwargs.values()]
    return [each for each in found if isinstance(each, MutableMapping | MutableSequence | MutableSet | deque)]


def _contents(holder: Any) -> list[int]:
    held = dict(holder) if isinstance(holder, MutableMapping) else list(holder)
    return [id(leaf) for leaf in pytree.tree_leaves(held)]


def inside_a_checkpoint() -> bool:
    """Whether torch's reentrant checkpointing runs what runs now: without a graph, which it makes later."""
    return _checkpoint("forward") is not None


def _checkpoint(function: str) -> Any:
    """The innermost call of a function of torch's checkpointing that is under way, as a frame of the interpreter."""
    frame: Any = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == function and code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
            return frame
        frame = frame.f_back
    return None


class Checkpoints:
    """The units that run in the same checkpoint: all of them on one stage, or it cannot be run once more there."""

    def __init__(self) -> None:
        """Nothing was called yet."""
        self._first = ("", True)

    def check(self, name: str, own: bool) -> None:
        """A unit is called, one of the stage's own or not."""
        frame = _checkpoint("checkpoint")
        if frame is None:
            return
        # The first unit in this call, which is marked so: to keep the frame would keep all that is in it.
        if frame.f_trace_lines:
            frame.f_trace_lines = False
            self._first = (name, own)
        elif self._first[1] != own:
            raise StagelineError(
                f"the forward runs {self._first[0]} and {name} in one checkpoint, and the model is cut between them; "
                "cut it elsewhere (layers_per_stage=, or by= the first unit of each stage), or leave the checkpoint "
                "out and give recompute= to the pipeline"
            )


def refuse_hooks(found: Any, name: str, outside: Callable[[], bool]) -> None:
    """Let the frame put no hook on what a unit of another stage gave: each stage would put it there once more."""
    for leaf in [found] if isinstance(found, Tensor) else pytree.tree_leaves(found):
        if isinstance(leaf, Tensor):
            leaf.register_hook = partial(_hook, leaf, name, outside)  # type: ignore[method-assign]


def _hook(tensor: Tensor, name: str, outside: Callable[[], bool], hook: Any) -> Any:
    if outside():
        raise StagelineError(
            f"the forward puts a hook on what {name} gives, outside of its units, and several stages run that; call "
            "register_hook inside of a unit"
        )
    return Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]
