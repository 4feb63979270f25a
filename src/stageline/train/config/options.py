"""The options of a training job, read off the dataclasses: what each accepts, and how a value is written and read.

The checks are written by hand, because libraries would lose something: msgspec stops at the first error and does not
name the value; pydantic would add five packages to every install, and still need all of these sentences.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stageline.common.errors import StagelineError, nearest, shorten
from stageline.train.config.config import Config

EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
"""The types of options in words."""
WRONG_TYPES = {float: "not an integer", str: "a string", list: "a list", tuple: "a list", dict: "a table"}
"""The types of wrong values in words, where the value does not show its type."""
BOUNDS = {"ge": (">=", operator.ge), "gt": (">", operator.gt), "le": ("<=", operator.le), "lt": ("<", operator.lt)}


class BadValue(StagelineError):
    """A value that an option does not accept, with the reason where it is not obvious, and a suggestion."""

    def __init__(self, reason: str = "", suggestion: str = "") -> None:
        super().__init__(reason)
        self.suggestion = suggestion


@dataclass(frozen=True)
class Option:
    """One field of one section.

    >>> steps = options()["training.steps"]
    >>> steps.expected, steps.default
    ('an integer >= 1', 200)
    >>> steps.parse("1_000")
    1000
    """

    section: str
    name: str
    type: type
    """bool, int, float or str; of a list, the type of its items."""
    is_list: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    example: Any = None
    resume: Literal["same", "warning", "free"] = "free"

    @property
    def key(self) -> str:
        """The section and the name, as in "training.steps"."""
        return f"{self.section}.{self.name}"

    @property
    def bounds(self) -> str:
        """The bounds of a number; empty if there are none.

        >>> [options()[key].bounds for key in ("comm.train_timeout_seconds", "model.dropout", "job.description")]
        ['> 0', '>= 0 and < 1', '']
        """
        limits = [(symbol, getattr(self, name)) for name, (symbol, _) in BOUNDS.items()]
        return " and ".join(f"{symbol} {_limit(limit)}" for symbol, limit in limits if limit is not None)

    @property
    def expected(self) -> str:
        """What the option accepts, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = f"a list of {'numbers' if self.type is float else 'strings'}" if self.is_list else EXPECTED[self.type]
        return f"{kind} {self.bounds}".rstrip()

    @property
    def sample(self) -> Any:
        """A value that shows how one is written."""
        return True if self.type is bool else self.default if self.example is None else self.example

    def get(self, config: Config) -> Any:
        """Return the value of this option in a config."""
        return getattr(getattr(config, self.section), self.name)

    def set(self, config: Config, value: Any) -> None:
        """Set this option in a config."""
        setattr(getattr(config, self.section), self.name, value)

    def accept(self, value: Any) -> Any:
        """Return the value as the field holds it, or raise `BadValue`."""
        if not self.is_list:
            return self._accept_item(value)
        if not isinstance(value, list | tuple):
            raise BadValue(WRONG_TYPES.get(type(value), ""))
        return tuple(map(self._accept_item, value))

    def parse(self, text: str) -> Any:
        """Return the value of a text on the command line: TOML, or what the type suggests."""
        if not self.is_list:
            return self.accept(_parse_item(self.type, text))
        if text.lstrip().startswith("["):
            if (items := _parse_toml(text)) is None:
                raise BadValue("not a list in TOML")
            return self.accept(items)
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        return self.accept([_parse_item(self.type, part) for part in parts])

    def error(self, shown: str, problem: BadValue, example: str) -> str:
        """Return the sentence about a value that is not accepted.

        >>> print(options()["training.steps"].error('"ten"', BadValue("a string"), "steps = 200"))
        training.steps is "ten", a string; it must be an integer >= 1, for example steps = 200
        """
        reason = f", {problem}" if str(problem) else ""
        like = "" if self.choices else f", for example {example}"
        return f"{self.key} is {shown}{reason}; it must be {self.expected}{problem.suggestion}{like}"

    def _accept_item(self, value: Any) -> Any:
        kind = type(value)
        if kind not in ((float, int) if self.type is float else (self.type,)):
            raise BadValue(WRONG_TYPES.get(kind, ""))
        if self.type is bool:
            return value
        if self.type is str:
            if self.choices and value not in self.choices:
                raise BadValue(suggestion=nearest(value, self.choices))
            if any("\ud800" <= letter <= "\udfff" for letter in value):
                raise BadValue("not valid Unicode")
            return value
        try:
            number = self.type(value)
        except OverflowError:
            raise BadValue("too large for a number") from None
        if not math.isfinite(number):
            raise BadValue("not finite")
        for name, (_, holds) in BOUNDS.items():
            limit = getattr(self, name)
            if limit is not None and not holds(number, limit):
                raise BadValue
        return number


def _limit(value: float) -> str:
    return "2**63 - 1" if value == 2**63 - 1 else f"{value:g}"


def _parse_toml(text: str) -> Any:
    """Return the value of a text in TOML; None if it is not TOML."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return document["value"] if len(document) == 1 else None


def _parse_item(kind: type, text: str) -> Any:
    value = _parse_toml(text)
    if kind is str:
        return value if isinstance(value, str) else text
    if value is None and kind is float:
        try:
            return float(text)  # .5 and 1., which are not TOML
        except ValueError:
            return text
    return text if value is None else value


@cache
def options() -> MappingProxyType[str, Option]:
    """Return all options by section.name, in the order of the dataclasses.

    >>> list(options())[:3]
    ['job.dump_folder', 'job.description', 'model.name']
    """
    by_key: dict[str, Option] = {}
    for section, holder in sections().items():
        hints = get_type_hints(holder)
        for field in fields(holder):
            kind, is_list, choices = hints[field.name], False, ()
            if get_origin(kind) is Literal:
                kind, choices = str, get_args(kind)
            elif get_origin(kind) is tuple:
                kind, is_list = get_args(kind)[0], True
            option = Option(section, field.name, kind, is_list, choices, field.default, **field.metadata)
            by_key[option.key] = option
    return MappingProxyType(by_key)


@cache
def sections() -> MappingProxyType[str, type[Any]]:
    """Return the dataclass of each section by its name.

    >>> sections()["job"].__doc__
    'The run as a whole.'
    """
    hints = get_type_hints(Config)
    return MappingProxyType({field.name: hints[field.name] for field in fields(Config)})


def did_you_mean(key: str, prefix: str = "") -> str:
    """Suggest an option for an unknown key: the same name in another section, or the nearest; empty if none is near.

    `prefix` is put before the suggested names.

    >>> did_you_mean("steps"), did_you_mean("optimizer.steps", prefix="--")
    ('; did you mean training.steps? (or validation.steps)', '; did you mean --training.steps? (or --validation.steps)')
    >>> did_you_mean("trainig.step"), did_you_mean("training.sedd")
    ('; did you mean training.steps?', '; did you mean training.seed?')
    """
    section, _, name = key.replace("-", "_").rpartition(".")
    namesakes = [option.key for option in options().values() if option.name == name]
    if namesakes:
        near_section = _closest(section, [namesake.split(".")[0] for namesake in namesakes]) if section else None
        suggestion = f"{near_section}.{name}" if near_section else namesakes[0]
        others = [] if near_section else [prefix + namesake for namesake in namesakes if namesake != suggestion]
        return f"; did you mean {prefix}{suggestion}?" + (f" (or {' or '.join(others)})" if others else "")
    near_name = _closest(name, [option.name for option in options().values() if option.section == section])
    if near_name:
        return f"; did you mean {prefix}{section}.{near_name}?"
    near_key = _closest(key, options()) if section else None
    if near_key is None:
        near_name = _closest(name, [option.name for option in options().values()])
        near_key = next((option.key for option in options().values() if option.name == near_name), None)
    return f"; did you mean {prefix}{near_key}?" if near_key else ""


def _closest(name: str, candidates: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(name.lower(), list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def show(value: Any) -> str:
    """Return a value as an error shows it: as TOML where possible, and not too long.

    >>> show("ten"), show(True), show((1.0, 2.0))
    ('"ten"', 'true', '[1.0, 2.0]')
    """
    try:
        text = toml_value(value)
    except TypeError:
        return shorten(value)
    return text if len(text) <= 60 else text[:57] + "..."


def toml_value(value: Any) -> str:
    r"""Return one value as TOML.

    >>> print(toml_value(True), toml_value(1e-8), toml_value(("a", 'say "b"\n')))
    true 1e-08 ["a", "say \"b\"\n"]
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"no option holds a {type(value).__name__}")


def flag_value(value: Any) -> str:
    """Return a value as it is written on the command line.

    >>> flag_value(("blocks.*.mlp", "head")), flag_value(300), flag_value("outputs")
    ('blocks.*.mlp,head', '300', 'outputs')
    """
    if isinstance(value, tuple):
        return ",".join(map(flag_value, value))
    return value if isinstance(value, str) else toml_value(value)
