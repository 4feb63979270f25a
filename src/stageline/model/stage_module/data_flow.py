"""The calls of a forward in order, and the values that each call is computed from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from stageline.common.errors import StagelineError
from stageline.model.stage_module.boundary import GIVE_EXAMPLE, PARAMETER
from stageline.model.stage_module.placeholder import ValueNames


class CallOrderError(StagelineError):
    """A forward that calls its units in another order, or more often, than expected."""


@dataclass(frozen=True)
class CallOrder:
    """The units of a model in the order in which its forward calls them; a unit that is called twice appears twice.

    >>> CallOrder(("a", "b", "a")).position("a", previous_calls=1)
    2
    """

    names: tuple[str, ...]

    def position(self, name: str, previous_calls: int) -> int:
        """Return the position of a call, given the number of earlier calls of the same unit."""
        position = _positions(self.names).get((name, previous_calls))
        if position is None:
            raise CallOrderError(
                f"the model calls {name} {previous_calls + 1} times in one forward, but {self.names.count(name)} were "
                f"expected; {GIVE_EXAMPLE} to record the calls"
            )
        return position


@lru_cache(maxsize=64)
def _positions(names: tuple[str, ...]) -> dict[tuple[str, int], int]:
    return {(name, names[:position].count(name)): position for position, name in enumerate(names)}


@dataclass
class DataFlow:
    """The values that every call of a unit is computed from."""

    of_call: dict[int, ValueNames] = field(default_factory=dict)
    of_output: ValueNames = frozenset()
    copied: ValueNames = frozenset()
    """Values that the forward modifies in place."""
    everything: bool = False
    """Whether all values cross all boundaries, because the flow is unknown."""
    changed_by_units: set[str] = field(default_factory=set)
    """Values that units of this stage modify in place, and its frame does not."""
    unknown_calls: set[int] = field(default_factory=set)
    """Calls that may modify their inputs in place."""

    def after(self, position: int) -> ValueNames:
        """Return the values that the calls from a position on, and the output, are computed from."""
        later = (names for call, names in self.of_call.items() if call >= position)
        return frozenset().union(*later, self.of_output)

    def units_used(self, start: int, stop: int, last: bool) -> set[str]:
        """Return the units whose tensors the frame uses for what a stage computes."""
        names = frozenset().union(*(self.of_call.get(call, frozenset()) for call in range(start, stop)))
        names |= self.of_output if last else frozenset()
        return {name.removeprefix(PARAMETER).split("/")[0] for name in names if name.startswith(PARAMETER)}
