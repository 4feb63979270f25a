"""The families by name: how they are declared, listed, looked up and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from operator import index
from pkgutil import iter_modules
from typing import Any, SupportsIndex, TypeAlias

from stageline.common.errors import ScheduleError, StagelineError, nearest, shorten
from stageline.schedules.schedule import Schedule

Maker: TypeAlias = Callable[..., Schedule | Sequence[Sequence[Any]]]

OWN_FAMILIES = "stageline.schedules.families"

LARGEST_SIZE = 2**20
"""No pipeline has more ranks, microbatches or chunks; more is a slip of the finger that would eat the memory."""

LARGEST_SCHEDULE = 2**26


@dataclass(frozen=True)
class Family:
    """A named way of making schedules, for any number of ranks and microbatches its definition allows."""

    name: str
    description: str
    constraints: str
    aliases: tuple[str, ...]
    make: Maker
    training: bool = True
    """Whether programs that its function returns are for training; False for inference."""

    @property
    def options(self) -> dict[str, Any]:
        """What it takes besides ranks and microbatches, with the defaults."""
        parameters = list(inspect.signature(self.make).parameters.values())[2:]
        return {parameter.name: parameter.default for parameter in parameters}

    def __str__(self) -> str:
        """Name it, say what it is and what it asks for."""
        asks = f" ({self.constraints})" if self.constraints else ""
        return f"{self.name}: {self.description}{asks}"


_families: dict[str, Family] = {}


def family(
    name: str, description: str, *, constraints: str = "", aliases: Sequence[str] = (), training: bool = True
) -> Callable[[Maker], Maker]:
    """Declare a family: a function of ranks and microbatches that returns one program per rank.

    The function may return lists of actions, their text forms, or a whole `Schedule`. With `training=False` the
    programs are for inference, where every stage runs F alone.

    >>> import stageline as sl
    >>> @sl.family("one-by-one", "each microbatch goes all the way before the next one starts")
    ... def one_by_one(ranks, microbatches):
    ...     return [[f"{r}{k}{m}" for m in range(microbatches) for k in "FB"] for r in range(ranks)]
    >>> s = sl.schedule("one-by-one", ranks=2, microbatches=2)
    >>> list(map(str, s.programs[1]))
    ['1F0', '1B0', '1F1', '1B1']
    """

    def declare(make: Maker) -> Maker:
        if not make.__module__.startswith(OWN_FAMILIES):
            _load_own_families()
        declared = Family(name, description, constraints, tuple(aliases), make, training)
        for key in (name, *aliases):
            known = _families.get(key.lower())
            if known is not None and _origin(known.make) != _origin(make):
                raise ScheduleError(f"a family named {key!r} exists already: choose another name")
        for key in (name, *aliases):
            _families[key.lower()] = declared
        return make

    return declare


def _origin(make: Maker) -> tuple[str, str]:
    """Where a family is defined: a file that is loaded again may define it again."""
    return make.__module__, make.__qualname__


def _load_own_families() -> None:
    package = import_module(OWN_FAMILIES)
    for module in sorted(found.name for found in iter_modules(package.__path__)):
        import_module(f"{package.__name__}.{module}")


def families() -> dict[str, Family]:
    """List all families by name, each with its description, constraints and options.

    >>> import stageline as sl
    >>> print(sl.families()["zb-v"].description)
    zero bubble on a V: two stages a rank, down and up again
    """
    _load_own_families()
    return {declared.name: declared for declared in sorted(_families.values(), key=lambda declared: declared.name)}


def find_family(name: str | type) -> Family:
    """Look a family up by its name, by torch's name for it, or by torch's class or its name, in any case.

    >>> find_family("Interleaved1F1B").name, find_family("ScheduleInterleaved1F1B").name
    ('interleaved', 'interleaved')
    """
    _load_own_families()
    name = name.__name__ if isinstance(name, type) else name
    key = str(name).lower()
    found = _families.get(key) or _families.get(key.removeprefix("schedule"))
    if found is None:
        known = sorted(_families)
        raise ScheduleError(
            f"no schedule family is named {shorten(name)}{nearest(str(name), known)}; "
            f"there are: {', '.join(families())}"
        )
    return found


def schedule(name: str | type, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Make a schedule of a named family.

    `options` are the family's own, such as `chunks` (stages a rank holds) and `group`;
    `stageline.families()` lists them.

    >>> import stageline as sl
    >>> sl.schedule("interleaved", ranks=4, microbatches=8, chunks=2)
    <Schedule interleaved: 4 ranks, 8 stages, 8 microbatches, 128 actions>
    """
    found = find_family(name)
    unknown = [key for key in options if key not in found.options]
    if unknown:
        takes = ", ".join(found.options) or "no options"
        raise ScheduleError(
            f"{found.name} has no option {unknown[0]!r}{nearest(unknown[0], found.options)}; it takes {takes}"
        )
    given = {key: value for key, value in options.items() if value is not None}
    ranks, microbatches = whole(found.name, "ranks", ranks), whole(found.name, "microbatches", microbatches)
    for key, default in found.options.items():
        if default is inspect.Parameter.empty and key not in given:
            raise ScheduleError(f"{found.name} needs a value for its option {key!r}")
        if key in given and (default is None or (isinstance(default, int) and not isinstance(default, bool))):
            given[key] = whole(found.name, key, given[key])
        elif key in given and hasattr(given[key], "item"):
            given[key] = given[key].item()  # a number of numpy's, which JSON does not know
    per_rank = max([1, *(value for value in given.values() if isinstance(value, int))])
    if ranks * microbatches * per_rank > LARGEST_SCHEDULE:
        raise ScheduleError(
            f"{found.name} with {ranks} ranks and {microbatches} microbatches has more than {LARGEST_SCHEDULE} "
            "actions; no machine runs that many in a step"
        )
    return replace(_call(found, ranks, microbatches, given), name=found.name, options=given)


def _call(found: Family, ranks: int, microbatches: int, given: dict[str, Any]) -> Schedule:
    """Run the family's function, and hold it to the sizes it was asked for."""
    try:
        made = found.make(ranks, microbatches, **given)
        if not isinstance(made, Schedule):
            made = Schedule.from_programs(made, microbatches=microbatches, training=found.training)
    except StagelineError:
        raise
    except Exception as error:
        raise ScheduleError(f"the family {found.name} failed: {type(error).__name__}: {error}") from error
    if (made.ranks, made.microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"the family {found.name} was asked for {ranks} ranks and {microbatches} microbatches, and made a "
            f"schedule for {made.ranks} and {made.microbatches}"
        )
    return made


def whole(name: str, key: str, value: object) -> int:
    """Sizes are whole numbers from 1, of Python or of numpy."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        size = index(value)
        if 1 <= size <= LARGEST_SIZE:
            return size
    raise ScheduleError(f"{name} needs {key} to be a whole number from 1 to {LARGEST_SIZE}, got {shorten(value)}")


def ask(condition: bool, sentence: str) -> None:
    """Refuse sizes that a family's definition does not allow; the sentence names the nearest that work."""
    if not condition:
        raise ScheduleError(sentence)


def ask_even(name: str, ranks: int, most: int = LARGEST_SIZE) -> None:
    """Refuse an odd number of ranks; `most` is how many the number of microbatches allows."""
    even = [near for near in (ranks - 1, ranks + 1) if 0 < near <= most]
    nearest_even = " or ".join(map(str, even)) or "2"
    ask(ranks % 2 == 0, f"{name} needs an even number of ranks, got {ranks}; nearest: {nearest_even}")
