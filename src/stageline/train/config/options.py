"""The options of a training job, read off the dataclasses: what each takes, and what it makes of a value or a text."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stageline.common.errors import StagelineError, nearest, shorten
from stageline.train.config.config import Config

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
"""What the types of fields are to a user."""

FOUND = {float: "no whole number", str: "a text", list: "a list", tuple: "a list", dict: "a section"}
"""What the types of values that do not fit are to a user, where the value does not show it."""


class Unfit(StagelineError):
    """A value that an option does not take: why, if what it takes does not say it, and what was probably meant."""

    def __init__(self, why: str = "", near: str = "") -> None:
        """Keep both for the sentence."""
        super().__init__(why)
        self.near = near


@dataclass(frozen=True)
class Option:
    """One field of one section.

    >>> steps = options()["training.steps"]
    >>> steps.takes, steps.default
    ('a whole number from 1 upwards', 200)
    >>> steps.parse("1_000")
    1000
    """

    section: str
    name: str
    type: type
    """bool, int, float or str; of the items where there are many."""
    many: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    example: Any = None
    fixed: bool = False
    warn: bool = False

    @property
    def key(self) -> str:
        """The section and the name."""
        return f"{self.section}.{self.name}"

    @property
    def resuming(self) -> Literal["same", "warning", "free"]:
        """What a run that goes on from a checkpoint may do with it."""
        return "same" if self.fixed else "warning" if self.warn else "free"

    @property
    def bounds(self) -> str:
        """The bounds in words; empty if there are none.

        >>> [options()[key].bounds for key in ("comm.train_timeout_seconds", "model.dropout", "validation.fraction")]
        ['above 0', 'from 0 to below 1', 'above 0 and below 1']
        """
        low = _number(self.minimum if self.above is None else self.above)
        high = _number(self.maximum if self.below is None else self.below)
        if low and high:
            first = f"from {low} to" if self.above is None else f"above {low} and"
            return f"{first} {'' if self.below is None else 'below '}{high}"
        if high:
            return f"{'up to' if self.below is None else 'below'} {high}"
        if low:
            return f"from {low} upwards" if self.above is None else f"above {low}"
        return ""

    @property
    def takes(self) -> str:
        """What it takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.many:
            inner = {float: "numbers", str: "texts"}[self.type]
            return f"a list of {inner}{self.bounds and ' ' + self.bounds}"
        return KINDS[self.type] + (self.bounds and " " + self.bounds)

    @property
    def sample(self) -> Any:
        """A value to show how one is written."""
        return True if self.type is bool else self.default if self.example is None else self.example

    def accept(self, value: Any) -> Any:
        """The value as the field holds it, or `Unfit`."""
        if not self.many:
            return self._one(value)
        if not isinstance(value, list | tuple):
            raise Unfit(FOUND.get(type(value), ""))
        return tuple(self._one(item) for item in value)

    def parse(self, text: str) -> Any:
        """The value that a text on the command line stands for: TOML where it is, otherwise what the type suggests."""
        if not self.many:
            return self.accept(_from_text(self.type, text))
        if text.lstrip().startswith("["):
            found = _toml(text)
            if found is None:
                raise Unfit("no list in TOML")
            return self.accept(found)
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        return self.accept([_from_text(self.type, item) for item in items])

    def _one(self, value: Any) -> Any:
        found = type(value)
        if found is not self.type and not (self.type is float and found is int):
            raise Unfit(FOUND.get(found, ""))
        if self.type is str:
            return self._text(value)
        if self.type is bool:
            return value
        try:
            number = self.type(value)
        except OverflowError:
            raise Unfit("too large for a number") from None
        if not math.isfinite(number):
            raise Unfit("not finite")
        if (
            (self.minimum is not None and number < self.minimum)
            or (self.maximum is not None and number > self.maximum)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
        ):
            raise Unfit
        return number

    def _text(self, value: str) -> str:
        if self.choices and value not in self.choices:
            raise Unfit(near=nearest(value, self.choices))
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Unfit("not valid Unicode")
        return value


def _number(value: float | None) -> str:
    if value == 2**63 - 1:
        return "2**63 - 1"
    return "" if value is None else f"{value:g}"


def _toml(text: str) -> Any:
    """The value that a text is in TOML; None if it is none."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return found["value"] if len(found) == 1 else None


def _from_text(kind: type, text: str) -> Any:
    found = _toml(text)
    if kind is str:
        return found if isinstance(found, str) else text
    if found is None and kind is float:
        try:
            return float(text)  # .5 and 1., which TOML does not take
        except ValueError:
            return text
    return text if found is None else found


@cache
def options() -> MappingProxyType[str, Option]:
    """All options by section.name, in the order of the dataclasses.

    >>> list(options())[:3]
    ['job.dump_folder', 'job.description', 'model.name']
    """
    found: dict[str, Option] = {}
    for section, holder in sections().items():
        hints = get_type_hints(holder)
        for field in fields(holder):
            kind, many, choices = hints[field.name], False, ()
            if get_origin(kind) is Literal:
                kind, choices = str, get_args(kind)
            elif get_origin(kind) is tuple:
                kind, many = get_args(kind)[0], True
            made = Option(section, field.name, kind, many, choices, field.default, **field.metadata)
            found[made.key] = made
    return MappingProxyType(found)


@cache
def sections() -> MappingProxyType[str, type[Any]]:
    """The dataclass of each section, by its name.

    >>> sections()["job"].__doc__
    'The run as a whole.'
    """
    hints = get_type_hints(Config)
    return MappingProxyType({field.name: hints[field.name] for field in fields(Config)})


def did_you_mean(key: str, flag: str = "") -> str:
    """Say which option was probably meant: a name that is in another section, or the nearest; empty if none is near.

    `flag` stands before the names.

    >>> did_you_mean("steps"), did_you_mean("optimizer.steps")
    ('; did you mean training.steps? (or validation.steps)', '; did you mean training.steps? (or validation.steps)')
    >>> did_you_mean("trainig.step"), did_you_mean("training.sedd")
    ('; did you mean training.steps?', '; did you mean training.seed?')
    """
    section, _, name = key.replace("-", "_").rpartition(".")
    there = [option.key for option in options().values() if option.name == name]
    if there:
        near = _near(section, [known.split(".")[0] for known in there]) if section else None
        first = f"{near}.{name}" if near else there[0]
        others = "" if near else " or ".join(flag + known for known in there if known != first)
        return f"; did you mean {flag}{first}?" + (others and f" (or {others})")
    own = _near(name, [option.name for option in options().values() if option.section == section])
    if own:
        return f"; did you mean {flag}{section}.{own}?"
    full = _near(key, options()) if section else None
    if full is None:
        close = _near(name, [option.name for option in options().values()])
        full = next((option.key for option in options().values() if option.name == close), None)
    return f"; did you mean {flag}{full}?" if full else ""


def _near(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def unfit(key: str, shown: str, error: Unfit, example: str) -> str:
    """The sentence about a value that an option does not take.

    >>> print(unfit("training.steps", '"ten"', Unfit("a text"), "steps = 200"))
    training.steps is "ten", a text; it takes a whole number from 1 upwards, like steps = 200
    """
    option, why = options()[key], str(error) and f", {error}"
    like = "" if option.choices else f", like {example}"
    return f"{key} is {shown}{why}; it takes {option.takes}{error.near}{like}"


def show(value: Any) -> str:
    """A value in an error, as TOML writes it where it can.

    >>> show("ten"), show(True), show((1.0, 2.0))
    ('"ten"', 'true', '[1.0, 2.0]')
    """
    try:
        text = value_text(value)
    except TypeError:
        return shorten(value)
    return text if len(text) <= 60 else text[:57] + "..."


def value_text(value: Any) -> str:
    r"""One value as TOML.

    >>> print(value_text(True), value_text(1e-8), value_text(("a", 'say "b"\n')))
    true 1e-08 ["a", "say \"b\"\n"]
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    raise TypeError(f"no value of a config is a {type(value).__name__}")
