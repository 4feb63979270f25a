"""JSON from files and other processes, parsed and checked against type annotations; and JSON with one line per field.

Hand-written, although msgspec does the same: an error here states the value that was found, and the base install needs
no further compiled package.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from stageline.common.errors import JsonError, shorten

Value = TypeVar("Value")

_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", types.NoneType: "null"}


class Range(NamedTuple):
    """The values that a number may have, for `Annotated[int, Range(1)]`; `above` and `below` are not among them.

    >>> print(Range(1), Range(0, 9), Range(0, below=1), Range(above=0), sep="; ")
    >= 1; from 0 to 9; >= 0 and < 1; > 0
    """

    minimum: float = -math.inf
    maximum: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def allows(self, number: float) -> bool:
        """Whether a finite number is in the range."""
        return self.minimum <= number <= self.maximum and self.above < number < self.below

    def __str__(self) -> str:
        if math.isfinite(self.minimum) and math.isfinite(self.maximum):
            return f"from {self.minimum} to {self.maximum}"
        limits = zip((">=", ">", "<=", "<"), (self.minimum, self.above, self.maximum, self.below), strict=True)
        return " and ".join(f"{symbol} {limit}" for symbol, limit in limits if math.isfinite(limit))


Count = Annotated[int, Range(0, 2**63 - 1)]
PositiveInt = Annotated[int, Range(1, 2**31 - 1)]
NonNegative = Annotated[float, Range(0)]


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Parse JSON; `allow_nan` accepts NaN and Infinity, which Python writes and the standard forbids.

    >>> parse_json('{"loss": NaN}')
    Traceback (most recent call last):
    ...
    stageline.common.errors.JsonError: not JSON: NaN is not allowed
    """
    try:
        return json.loads(text, parse_constant=None if allow_nan else _refuse_constant)
    except (RecursionError, ValueError) as error:
        raise JsonError(f"not JSON: {shorten(str(error), 100).strip(chr(39))}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def check_format(data: object, name: str, version: int, what: str) -> dict[str, Any]:
    """Return the object if its fields `format` and `version` have these values.

    >>> check_format({"format": "stageline-plan", "version": 2}, "stageline-plan", 1, "plan")
    Traceback (most recent call last):
    ...
    stageline.common.errors.JsonError: version 2 of the plan format is not supported; this release reads version 1
    """
    if not isinstance(data, dict):
        raise JsonError(f"not a {what}: expected an object, got {shorten(data)}")
    if data.get("format") != name:
        raise JsonError(f"not a {what}: 'format' is {shorten(data.get('format'))}, expected {name!r}")
    if data.get("version") is True or data.get("version") != version:
        raise JsonError(
            f"version {shorten(data.get('version'))} of the {what} format is not supported; this release reads "
            f"version {version}"
        )
    return data


@overload
def field(data: Mapping[str, Any], name: str, expected: type[Value], where: str = "") -> Value: ...
@overload
def field(data: Mapping[str, Any], name: str, expected: Any, where: str = "") -> Any: ...
def field(data: Mapping[str, Any], name: str, expected: Any, where: str = "") -> Any:
    """Return a required field of an object, checked by `convert`.

    >>> field({"ranks": "four"}, "ranks", int)
    Traceback (most recent call last):
    ...
    stageline.common.errors.JsonError: 'ranks' must be an integer, got 'four'
    """
    if name not in data:
        raise JsonError(f"{_quote(where or name)} is missing")
    return convert(data[name], expected, where or name)


@overload
def convert(value: object, expected: type[Value], where: str) -> Value: ...
@overload
def convert(value: object, expected: Any, where: str) -> Any: ...
def convert(value: Any, expected: Any, where: str) -> Any:
    """Return a parsed value as an instance of an annotated type; raise `JsonError` naming `where` if it is not one.

    Supports str, bool, int, float (finite), None, unions, `Literal`, `Annotated` with a `Range`, lists, tuples,
    dictionaries with string keys, dataclasses and named tuples (an object, or an array of all fields).

    >>> convert([1, 2], tuple[int, ...], "shape")
    (1, 2)
    >>> convert({"file": -1}, dict[str, Count], "sizes")
    Traceback (most recent call last):
    ...
    stageline.common.errors.JsonError: sizes['file'] must be an integer from 0 to 9223372036854775807, got -1
    """
    if expected is Any:
        return value
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Annotated:
        converted = convert(value, arguments[0], where)
        if all(limits.allows(converted) for limits in arguments[1:] if isinstance(limits, Range)):
            return converted
    if origin is Literal and value in arguments:
        return value
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        others = [member for member in arguments if member is not types.NoneType]
        if len(others) == 1:
            return convert(value, others[0], where)
        for member in others:
            with suppress(JsonError):
                return convert(value, member, where)
    if expected is float and (number := number_or_none(value)) is not None and math.isfinite(number):
        return number
    if expected in _NAMES and expected is not float and type(value) is expected:
        return value
    if (origin or expected) in (list, tuple) and isinstance(value, list | tuple):
        return _convert_array(value, origin or expected, arguments, where)
    if (origin or expected) in (dict, Mapping) and isinstance(value, dict):
        if not arguments or arguments[1] is Any:
            return value
        return {str(key): convert(item, arguments[1], f"{where}[{key!r}]") for key, item in value.items()}
    if origin is None and hasattr(expected, "__annotations__"):
        if isinstance(value, dict):
            return from_json(expected, value, where)
        if isinstance(value, list | tuple) and issubclass(expected, tuple):
            hints = _fields(expected)[0]
            return expected(*_convert_array(value, tuple, tuple(hints.values()), where))
    raise _mismatch(where, describe(expected), value)


def from_json(
    expected: type[Value], data: object, where: str, *, allow_unknown: bool = True, prefix: str | None = None
) -> Value:
    """Build a dataclass or named tuple from an object, checking every field.

    `prefix` is put before the names of fields in errors; by default, it is `where` and a dot.

    >>> class Size(NamedTuple):
    ...     name: str
    ...     bytes: Count
    ...     note: str | None = None
    >>> from_json(Size, {"name": "a", "bytes": 3}, "size")
    Size(name='a', bytes=3, note=None)
    >>> from_json(Size, {"name": "a"}, "size")
    Traceback (most recent call last):
    ...
    stageline.common.errors.JsonError: 'size' lacks 'bytes'; its fields: name, bytes, note
    """
    if not isinstance(data, dict):
        raise _mismatch(where, "an object", data)
    kind: Any = expected
    hints, required = _fields(kind)
    for problem, names in (("lacks", required - data.keys()), ("has an unknown", data.keys() - hints.keys())):
        if names and not (allow_unknown and problem != "lacks"):
            raise JsonError(f"{_quote(where)} {problem} {shorten(min(names))}; its fields: {', '.join(hints)}")
    prefix = f"{where}." if prefix is None else prefix
    values = {name: convert(data[name], hints[name], prefix + name) for name in hints if name in data}
    return expected(**values)


@lru_cache
def _fields(expected: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the annotations of all fields, and the names of those without a default."""
    hints = get_type_hints(expected, include_extras=True)
    if hasattr(expected, "_field_defaults"):
        optional = set(expected._field_defaults)
    else:
        from dataclasses import MISSING, fields

        own = fields(expected)
        hints = {field.name: hints[field.name] for field in own}
        optional = {field.name for field in own if (field.default, field.default_factory) != (MISSING, MISSING)}
    return hints, frozenset(hints.keys() - optional)


def _convert_array(value: Any, container: type, arguments: tuple[Any, ...], where: str) -> Any:
    if not arguments:
        return container(value)
    if container is tuple and arguments[-1] is not ...:
        if len(value) != len(arguments):
            raise JsonError(f"{_quote(where)} must have {len(arguments)} elements, got {shorten(value)}")
        return tuple(
            convert(item, kind, f"{where}[{index}]")
            for index, (item, kind) in enumerate(zip(value, arguments, strict=True))
        )
    kind = arguments[0]
    if kind in (str, int) and all(type(item) is kind for item in value):
        return container(value)
    return container([convert(item, kind, f"{where}[{index}]") for index, item in enumerate(value)])


def describe(expected: Any) -> str:
    """Describe the values of an annotated type.

    >>> describe(Annotated[int, Range(1)]), describe(tuple[NonNegative, ...])
    ('an integer >= 1', 'a list of numbers >= 0')
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Annotated:
        return " ".join([describe(arguments[0]), *map(str, arguments[1:])])
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if (origin or expected) in (list, tuple):
        item = arguments[0] if arguments else None
        if item is None or (get_args(item)[:1] or (item,))[0] not in _NAMES:
            return "a list"
        _, noun, *limits = describe(item).split(" ", 2)
        return " ".join([f"a list of {noun}s", *limits])
    return _NAMES.get(expected, "an object")


def _mismatch(where: str, expected: str, value: object) -> JsonError:
    return JsonError(f"{_quote(where)} must be {expected}, got {shorten(value)}")


def _quote(where: str) -> str:
    """Return a path for an error: a plain name in quotes, a long path cut."""
    if where.isidentifier():
        return repr(where)
    return where if len(where) <= 80 else where[:77] + "..."


def number_or_none(value: object) -> float | None:
    """Return a value as a float, or None if it is not a number; infinities and NaN are numbers.

    >>> number_or_none(3), number_or_none("3"), number_or_none(True)
    (3.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def json_lines(data: Mapping[str, Any], long_fields: Sequence[str]) -> Iterator[str]:
    """Yield JSON with one line per field, and one line per element of the long fields, which may be iterators."""
    for index, (key, value) in enumerate(data.items()):
        yield ("{" if index == 0 else ",") + f"\n  {json.dumps(key)}: "
        if key in long_fields and value:
            for position, element in enumerate(value):
                yield ("[" if position == 0 else ",") + "\n    " + json.dumps(element)
            yield "\n  ]"
        else:
            yield json.dumps(value)
    yield "\n}\n"
