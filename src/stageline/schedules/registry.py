"""Schedule families: registered, listed, looked up and called by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from operator import index
from pkgutil import iter_modules
from typing import Any, SupportsIndex, TypeAlias, TypeVar

from stageline.common.errors import ScheduleError, StagelineError, nearest, shorten
from stageline.schedules.schedule import Schedule

Maker: TypeAlias = Callable[..., Schedule | Sequence[Sequence[Any]]]
AnyMaker = TypeVar("AnyMaker", bound=Maker)

OWN_FAMILIES = "stageline.schedules.families"

LARGEST_SIZE = 2**20
"""Maximum number of ranks, microbatches and chunks."""
LARGEST_SCHEDULE = 2**26
"""Maximum number of actions."""


@dataclass(frozen=True)
class Family:
    """A named function that builds schedules for any number of ranks and microbatches that it supports."""

    name: str
    description: str
    constraints: str
    aliases: tuple[str, ...]
    make: Maker
    training: bool = True
    """Whether its programs are for training; False for inference."""

    @property
    def options(self) -> dict[str, Any]:
        """Its options besides ranks and microbatches, with their defaults."""
        parameters = list(inspect.signature(self.make).parameters.values())[2:]
        return {parameter.name: parameter.default for parameter in parameters}

    def __str__(self) -> str:
        constraints = f" ({self.constraints})" if self.constraints else ""
        return f"{self.name}: {self.description}{constraints}"


_families: dict[str, Family] = {}


def family(
    name: str, description: str, *, constraints: str = "", aliases: Sequence[str] = (), training: bool = True
) -> Callable[[AnyMaker], AnyMaker]:
    """Register a family: a function of ranks and microbatches that returns one program per rank.

    The function returns lists of actions, lists of their text forms, or a `Schedule`. With `training=False`, the
    programs are for inference: every stage runs only F.

    >>> import stageline as sl
    >>> @sl.family("one-by-one", "each microbatch finishes before the next one starts")
    ... def one_by_one(ranks, microbatches):
    ...     return [[f"{r}{k}{m}" for m in range(microbatches) for k in "FB"] for r in range(ranks)]
    >>> s = sl.schedule("one-by-one", ranks=2, microbatches=2)
    >>> list(map(str, s.programs[1]))
    ['1F0', '1B0', '1F1', '1B1']
    """

    def register(make: AnyMaker) -> AnyMaker:
        if not make.__module__.startswith(OWN_FAMILIES):
            _load_own_families()
        registered = Family(name, description, constraints, tuple(aliases), make, training)
        for key in (name, *aliases):
            known = _families.get(key.lower())
            if known is not None and _origin(known.make) != _origin(make):
                raise ScheduleError(f"a family named {key!r} already exists; choose another name")
        for key in (name, *aliases):
            _families[key.lower()] = registered
        return make

    return register


def _origin(make: Maker) -> tuple[str, str]:
    """Return where a family is defined; a module that is reloaded may register it again."""
    return make.__module__, make.__qualname__


def _load_own_families() -> None:
    package = import_module(OWN_FAMILIES)
    for name in sorted(module.name for module in iter_modules(package.__path__)):
        import_module(f"{package.__name__}.{name}")


def families() -> dict[str, Family]:
    """Return all families by name.

    >>> import stageline as sl
    >>> print(sl.families()["zb-v"].description)
    zero bubble on a V: two stages per rank, down and up again
    """
    _load_own_families()
    return {family.name: family for family in sorted(_families.values(), key=lambda family: family.name)}


def find_family(name: str | type) -> Family:
    """Return a family by its name, an alias, or the name of torch's schedule class; case is ignored.

    >>> find_family("Interleaved1F1B").name, find_family("ScheduleInterleaved1F1B").name
    ('interleaved', 'interleaved')
    """
    _load_own_families()
    name = name.__name__ if isinstance(name, type) else name
    key = str(name).lower()
    family = _families.get(key) or _families.get(key.removeprefix("schedule"))
    if family is None:
        near = nearest(str(name), families()) or nearest(str(name), sorted(_families))  # aliases are not listed
        raise ScheduleError(f"no schedule family is named {shorten(name)}{near}; there are: {', '.join(families())}")
    return family


def schedule(name: str | type, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Build a schedule of a named family.

    `options` depend on the family, such as `chunks` (stages per rank) and `group`; `stageline.families()` lists them.

    >>> import stageline as sl
    >>> sl.schedule("interleaved", ranks=4, microbatches=8, chunks=2)
    <Schedule interleaved: 4 ranks, 8 stages, 8 microbatches, 128 actions>
    """
    family = find_family(name)
    unknown = [key for key in options if key not in family.options]
    if unknown:
        known = ", ".join(family.options) or "no options"
        raise ScheduleError(
            f"{family.name} has no option {unknown[0]!r}{nearest(unknown[0], family.options)}; it accepts {known}"
        )
    ranks, microbatches = whole(family.name, "ranks", ranks), whole(family.name, "microbatches", microbatches)
    values = _option_values(family, {key: value for key, value in options.items() if value is not None})
    per_rank = max([1, *(value for value in values.values() if isinstance(value, int))])
    if ranks * microbatches * per_rank > LARGEST_SCHEDULE:
        raise ScheduleError(
            f"{family.name} with {ranks} ranks and {microbatches} microbatches has more than {LARGEST_SCHEDULE} "
            "actions, the maximum"
        )
    return replace(_build(family, ranks, microbatches, values), name=family.name, options=values)


def _option_values(family: Family, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with numpy numbers converted to Python's; raise `ScheduleError` if one is missing or wrong."""
    values = dict(options)
    for key, default in family.options.items():
        if default is inspect.Parameter.empty and key not in values:
            raise ScheduleError(f"{family.name} requires a value for its option {key!r}")
        if key in values and (default is None or (isinstance(default, int) and not isinstance(default, bool))):
            values[key] = whole(family.name, key, values[key])
        elif key in values and hasattr(values[key], "item"):
            values[key] = values[key].item()
    return values


def _build(family: Family, ranks: int, microbatches: int, options: dict[str, Any]) -> Schedule:
    """Call the function of a family, and check the sizes of the schedule that it returns."""
    try:
        schedule = family.make(ranks, microbatches, **options)
        if not isinstance(schedule, Schedule):
            schedule = Schedule.from_programs(schedule, microbatches=microbatches, training=family.training)
    except StagelineError:
        raise
    except Exception as error:
        raise ScheduleError(f"the family {family.name} failed: {type(error).__name__}: {error}") from error
    if (schedule.ranks, schedule.microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"the family {family.name} was called for {ranks} ranks and {microbatches} microbatches, but returned a "
            f"schedule for {schedule.ranks} and {schedule.microbatches}"
        )
    return schedule


def whole(name: str, key: str, value: object) -> int:
    """Return a size as an int; raise `ScheduleError` if it is not a whole number from 1."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        size = index(value)
        if 1 <= size <= LARGEST_SIZE:
            return size
    raise ScheduleError(f"{name} needs {key} to be a whole number from 1 to {LARGEST_SIZE}, got {shorten(value)}")


def require(condition: bool, message: str) -> None:
    """Raise `ScheduleError` if a family does not support these sizes; the message names the nearest that work."""
    if not condition:
        raise ScheduleError(message)


def require_even(name: str, ranks: int, most: int = LARGEST_SIZE) -> None:
    """Raise `ScheduleError` if the number of ranks is odd; the message suggests at most `most` ranks."""
    even = [near for near in (ranks - 1, ranks + 1) if 0 < near <= most]
    nearest_even = " or ".join(map(str, even)) or "2"
    require(ranks % 2 == 0, f"{name} needs an even number of ranks, got {ranks}; nearest: {nearest_even}")
