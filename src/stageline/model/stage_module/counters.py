"""Numbers that a forward sets on the model around its units."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.model.reachability import has_state, reach, slots_of

_OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has."""
_DEPTH = 3
_CLOSELY = 8
"""How many forwards are looked at for numbers in containers and objects."""

Place = tuple[int, str]
Numbers = dict[Place, tuple[Any, Any, Any]]
"""By module and path: what holds a number, under which key, and the number."""


class Counters:
    """Numbers that a forward sets on the model around its units: one that changes in every forward is refused.

    Every stage runs that part, and some more than once, so they would count differently.
    """

    def __init__(self, frames: Sequence[nn.Module], units: Sequence[tuple[str, nn.Module]] = ()) -> None:
        """Look at the modules that hold units, and not at containers that units reach: those are looked at elsewhere.

        >>> model = nn.Sequential(nn.Tanh())
        >>> model.calls = [0]
        >>> counters = Counters([model])
        >>> before = counters.now()
        >>> model.calls[0] += 1
        >>> counters.put_back(before)
        >>> model.calls
        [0]
        """
        self._frames = frames
        self._changed: set[Place] = set()
        self._of_units: set[int] = set()
        self._forwards = 0
        if any(self._holders(frame) for frame in frames):
            self._of_units = {id(holder.value) for holder in reach(units).values()}

    @staticmethod
    def _holders(frame: nn.Module) -> list[Any]:
        return [value for key, value in vars(frame).items() if key not in _OF_MODULES and _holds(value)]

    def now(self) -> Numbers:
        """All of them as they are."""
        return {
            (index, path): (holder, key, value)
            for index, frame in enumerate(self._frames)
            for path, holder, key, value in self._numbers(frame, vars(frame), "", 0)
        }

    def _numbers(
        self, holder: Any, slots: dict[Any, Any], path: str, depth: int
    ) -> Iterator[tuple[str, Any, Any, Any]]:
        for key, value in slots.items():
            if depth == 0 and key in _OF_MODULES:
                continue
            place = f"{path}[{key!r}]" if isinstance(holder, dict | list | deque) else f"{path}.{key}".strip(".")
            if isinstance(value, int | float):
                yield place, holder, key, value
            elif depth < _DEPTH and self._forwards < _CLOSELY and _holds(value) and id(value) not in self._of_units:
                yield from self._numbers(value, slots_of(value), place, depth + 1)

    def put_back(self, before: Numbers) -> None:
        """After a look at the forward, which is none."""
        now = self.now()
        for place, (holder, key, value) in before.items():
            if place not in now or now[place][2] == value:
                continue
            if isinstance(holder, dict | list | deque):
                holder[key] = value
            else:
                object.__setattr__(holder, key, value)

    def moved(self, before: Numbers) -> set[Place]:
        """Those that are no longer what they were."""
        now = self.now()
        return {place for place, (_, _, value) in now.items() if place in before and before[place][2] != value}

    def check(self, before: Numbers) -> None:
        """After a forward."""
        self._forwards += 1
        moved = self.moved(before)
        self.refuse(moved & self._changed)
        self._changed |= moved

    def refuse(self, moved: set[Place]) -> None:
        """Refuse numbers that changed in two forwards."""
        for index, path in sorted(moved):
            raise StagelineError(
                f"the forward changes {path} of {type(self._frames[index]).__name__} every time, outside of its units, "
                "and every stage runs that; keep it outside of the model, or in a unit"
            )


def _holds(value: Any) -> bool:
    """Whether numbers may be in something, which is no module."""
    if isinstance(value, dict | list | deque):
        return True
    return (
        not isinstance(value, Tensor | nn.Module | type | tuple | str)
        and type(value).__module__ != "builtins"
        and has_state(type(value))
    )
