"""The options of a training job, read off the dataclasses: what each accepts, and how a value is written and read.

`common.checked_json` checks the values, as it does those of JSON files. Two things are written by hand, as no library
does them: a flag's text is TOML or plain text, and a suggestion may come from another section.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from stageline.common.checked_json import Range, convert, describe
from stageline.common.errors import JsonError, nearest, shorten
from stageline.train.config.config import Config


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
    annotation: Any
    default: Any
    help: str
    example: Any = None
    resume: Literal["same", "warning", "free"] = "free"

    @property
    def key(self) -> str:
        """The section and the name, as in "training.steps"."""
        return f"{self.section}.{self.name}"

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return get_origin(self.annotation) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed strings; empty if all are."""
        return get_args(self.annotation) if get_origin(self.annotation) is Literal else ()

    @property
    def range(self) -> Range | None:
        """The range of a number, or of the numbers in a list."""
        item = get_args(self.annotation)[0] if self.is_list else self.annotation
        return get_args(item)[1] if get_origin(item) is Annotated else None

    @property
    def type(self) -> type:
        """bool, int, float or str; of a list, the type of its items."""
        item = get_args(self.annotation)[0] if self.is_list else self.annotation
        return str if self.choices else get_args(item)[0] if get_origin(item) is Annotated else item

    @property
    def expected(self) -> str:
        """What the option accepts, in words."""
        return "one of " + ", ".join(self.choices) if self.choices else describe(self.annotation)

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
        """Return the value as the field holds it, or raise `JsonError`.

        >>> options()["training.dtype"].accept("bfloat6")
        Traceback (most recent call last):
        ...
        stageline.common.errors.JsonError: training.dtype must be one of float32, bfloat16, got "bfloat6" (did you mean
        'bfloat16'?)
        """
        try:
            accepted = convert(value, self.annotation, self.key)
        except JsonError:
            suggestion = nearest(value, self.choices) if self.choices and isinstance(value, str) else ""
            raise JsonError(f"{self.key} must be {self.expected}, got {show(value)}{suggestion}") from None
        for text in accepted if self.is_list else [accepted]:
            if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise JsonError(f"{self.key} must be valid Unicode, got {shorten(text)}")
        return accepted

    def parse(self, text: str) -> Any:
        """Return the value of a text on the command line: TOML, or what the type suggests."""
        if not self.is_list:
            return self.accept(_parse_item(self.type, text))
        if text.lstrip().startswith("["):
            if (items := _parse_toml(text)) is None:
                raise JsonError(f"{self.key} must be {self.expected}, got {text}, which is not TOML")
            return self.accept(items)
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        return self.accept([_parse_item(self.type, part) for part in parts])


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
        hints = get_type_hints(holder, include_extras=True)
        for field in fields(holder):
            option = Option(section, field.name, hints[field.name], field.default, **field.metadata)
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
