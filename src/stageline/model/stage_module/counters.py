"""Numbers that a forward sets on the model, outside of its units."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from stageline.common.errors import StagelineError
from stageline.model._torch_private import MODULE_ATTRIBUTES
from stageline.model.reachability import is_object, reach, slots_of

_MAX_DEPTH = 3
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
        """Inspect the frames, except for containers that units reach: `shared_state` checks those.

        >>> model = nn.Sequential(nn.Tanh())
        >>> model.calls = [0]
        >>> counters = Counters([model])
        >>> before = counters.read()
        >>> model.calls[0] += 1
        >>> counters.restore(before)
        >>> model.calls
        [0]
        """
        self._frames = frames
        self._changed: set[Place] = set()
        self._reached_by_units: set[int] = set()
        self._forwards = 0
        if any(_has_containers(frame) for frame in frames):
            self._reached_by_units = {id(holder.value) for holder in reach(units).values()}

    def read(self) -> Numbers:
        """Return all numbers."""
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
            place = f"{path}[{key!r}]" if isinstance(holder, dict | list | deque) else f"{path}.{key}".strip(".")
            if isinstance(value, int | float):
                yield place, holder, key, value
            elif (
                depth < _MAX_DEPTH
                and self._forwards < _DEEP_FORWARDS
                and _may_hold_numbers(value)
                and id(value) not in self._reached_by_units
            ):
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
                f"the forward changes {path} of {type(self._frames[index]).__name__} every time, outside of its units, "
                "and every stage runs that; keep it outside of the model, or in a unit"
            )


def _has_containers(frame: nn.Module) -> bool:
    return any(_may_hold_numbers(value) for name, value in vars(frame).items() if name not in MODULE_ATTRIBUTES)


def _may_hold_numbers(value: Any) -> bool:
    return isinstance(value, dict | list | deque) or (is_object(value) and not isinstance(value, tuple | str))
