"""Objects that a unit is given and changes: what it puts there is seen on its own stage alone."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model.reachability import has_state, slots_of

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)
_MOST = 2_000
"""How many objects are looked at for one call."""
_DEPTH = 6


@dataclass(frozen=True)
class _Seen:
    """One object as it was before a call."""

    value: Any
    root: Any
    """The argument that it belongs to."""
    path: str
    slots: dict[Any, Any]
    versions: dict[Any, int]


class Objects:
    """Looks at the objects that a unit is given, before and after a call."""

    def __init__(self, given: Any) -> None:
        """Before the call, with its arguments and keywords.

        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace(calls=0)
        >>> objects = Objects(((state,), {}))
        >>> state.calls += 1
        >>> objects.check("blocks.0", None)
        Traceback (most recent call last):
        ...
        stageline.StagelineError: blocks.0 changes calls of a SimpleNamespace that it is given, ...
        """
        self._seen: dict[int, _Seen] = {}
        args, kwargs = given
        for value in _flat((args, kwargs)):
            self._look(value, value, "", 0)

    def _look(self, value: Any, root: Any, path: str, depth: int) -> None:
        if isinstance(value, types.MethodType):
            value = value.__self__
        if isinstance(value, types.FunctionType):
            value = value.__closure__
        if id(value) in self._seen or len(self._seen) >= _MOST or depth > _DEPTH:
            return
        is_module = isinstance(value, nn.Module)
        if not (is_module and value is root) and not (isinstance(value, _CONTAINERS) or _is_object(value)):
            return
        slots = slots_of(value)
        versions = {key: each._version for key, each in slots.items() if _has_version(each)}
        self._seen[id(value)] = _Seen(value, root, path, slots, versions)
        for key, each in () if is_module else slots.items():
            name = str(key) if not isinstance(value, _CONTAINERS) else f"[{key!r}]"
            self._look(each, root, f"{path}.{name}".strip(".").replace(".[", "["), depth + 1)

    def check(self, name: str, output: Any) -> None:
        """After the call: refuse what was changed, unless the unit gives the object back."""
        given_back = {id(value) for value in _flat(output)}
        for seen in self._seen.values():
            if id(seen.root) in given_back:
                continue
            key = _changed(seen)
            if key is not None:
                what = seen.path or str(key[0])
                raise StagelineError(
                    f"{name} changes {what} of a {type(seen.root).__name__} that it is given, which other stages do "
                    "not see; let it give back what it puts there"
                )


def _flat(tree: Any) -> Iterator[Any]:
    """The objects of a tree of containers."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _flat(value)
    elif isinstance(tree, list | tuple | set | deque):
        for value in tree:
            yield from _flat(value)
    else:
        yield tree


def _changed(seen: _Seen) -> tuple[Any] | None:
    """The first key, index or attribute that holds something else than before."""
    now = slots_of(seen.value)
    for key in (*now, *(key for key in seen.slots if key not in now)):
        if key not in now or key not in seen.slots:
            return (key,)
        old, new = seen.slots[key], now[key]
        if old is not new and not (_is_plain(old) and type(old) is type(new) and old == new):
            return (key,)
        if key in seen.versions and new._version != seen.versions[key]:
            return (key,)
    return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | complex | str | bytes | tuple | type(None)) and not isinstance(value, Tensor)


def _is_object(value: Any) -> bool:
    return (
        not isinstance(value, Tensor | nn.Module | type)
        and type(value).__module__ != "builtins"
        and has_state(type(value))
    )


def _has_version(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()
