"""Texts, arrays, and lists of numbers that layers leave where other stages can reach them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

from stageline.model.reachability import is_array

_MOST = 4096
"""How many places are remembered."""
_NOTHING = object()


class Left:
    """What each layer left in each place: data of a microbatch differs from one to the next, names and sizes do not."""

    def __init__(self) -> None:
        """Nothing was left yet."""
        self._hashes: dict[Hashable, int] = {}

    def differs(self, place: Hashable, holder: Any, old: Any, value: Any, shapes: Any) -> bool:
        """Whether a layer left something else in a place than it did for the same shapes before.

        >>> left = Left()
        >>> left.differs("h", {}, None, [0.5], ()), left.differs("h", {}, [0.5], [0.25], ())
        (False, True)
        >>> left.differs("log", {}, "a", "ab", ()), left.differs("log", {}, "ab", "abc", ())
        (False, False)
        """
        data = _data(value)
        if data is _NOTHING or _grew(old, value) or _are_sizes(value, shapes):
            return False
        if old is None and isinstance(holder, list | deque | set):  # one more in a history
            return False
        if len(self._hashes) >= _MOST and place not in self._hashes:
            return False
        before = self._hashes.get(place)
        self._hashes[place] = hash(data)
        return before is not None and before != self._hashes[place]


def _data(value: Any, depth: int = 4) -> Any:
    """Plain data as something that can be hashed; bare numbers are looked at elsewhere."""
    if isinstance(value, str | bytes):
        return value
    if is_array(value):
        return value.shape, value.tobytes() if value.dtype.kind != "O" else repr(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    if isinstance(value, list | tuple | set | frozenset | deque | dict) and depth:
        parts = [*value.items()] if isinstance(value, dict) else sorted(value, key=repr) if isinstance(
            value, set | frozenset
        ) else [*value]  # fmt: skip
        found = tuple(each if isinstance(each, int | float | complex | type(None)) else _data(each, depth - 1)
                      for each in parts)  # fmt: skip
        return _NOTHING if any(each is _NOTHING for each in found) else found
    return _NOTHING


def _grew(old: Any, value: Any) -> bool:
    """Whether something was added at the end of a text or a list."""
    if type(old) is not type(value) or not isinstance(value, str | bytes | list | tuple) or len(old) >= len(value):
        return False
    return bool(value[: len(old)] == old) and len(old) > 0


def _are_sizes(value: Any, shapes: Any) -> bool:
    """Whether something holds nothing but sizes of what the layer was given."""
    if not isinstance(value, tuple | list) or not all(type(each) is int for each in value):
        return False
    sizes = {size for shape in shapes for size in (shape if isinstance(shape, tuple) else (shape,))}
    return set(value) <= sizes
