"""The options of a config: what each accepts; reading and writing TOML files, settings and plain data; comparing.

`common.checked_json` checks the values, and tomllib reads TOML. By hand, as no library does it: a flag's text is TOML
or plain text, a suggestion may come from another section, and written TOML has a comment for each option.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from stageline._version import __version__
from stageline.common.checked_json import Range, convert, describe
from stageline.common.errors import JsonError, StagelineError, nearest, shorten
from stageline.distributed.layout import OTHERS
from stageline.train.config.config import Config
from stageline.train.config.ranks import close_degrees, open_degrees


@dataclass(frozen=True)
class Option:
    """One field of one section."""

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
        """Return the value as the field holds it, or raise `JsonError`."""
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
    """Return all options by section.name, in the order of the dataclasses."""
    by_key: dict[str, Option] = {}
    for section, holder in sections().items():
        hints = get_type_hints(holder, include_extras=True)
        for field in fields(holder):
            option = Option(section, field.name, hints[field.name], field.default, **field.metadata)
            by_key[option.key] = option
    return MappingProxyType(by_key)


@cache
def sections() -> MappingProxyType[str, type[Any]]:
    """Return the dataclass of each section by its name."""
    hints = get_type_hints(Config)
    return MappingProxyType({field.name: hints[field.name] for field in fields(Config)})


NOT_SUPPORTED = {"context_parallel_degree": "cp", "expert_parallel_degree": "ep"}
"""Options of torchtitan for dimensions of a mesh that a pipeline does not know."""


def did_you_mean(key: str, prefix: str = "") -> str:
    """Suggest an option for an unknown key: the same name in another section, or the nearest; empty if none is near.

    `prefix` is put before the suggested names.

    >>> did_you_mean("parallelism.expert_parallel_degree")
    '; expert parallelism is not supported; keep all experts of a layer on a rank, and shard them with dp_shard'
    """
    section, _, name = key.replace("-", "_").rpartition(".")
    if name in NOT_SUPPORTED:
        return f"; {OTHERS[NOT_SUPPORTED[name]]}"
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
    """Return a value as an error shows it: as TOML where possible, and not too long."""
    try:
        text = toml_value(value)
    except TypeError:
        return shorten(value)
    return text if len(text) <= 60 else text[:57] + "..."


def toml_value(value: Any) -> str:
    """Return one value as TOML."""
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
    """Return a value as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(flag_value, value))
    return value if isinstance(value, str) else toml_value(value)


FIXED = frozenset(key for key, option in options().items() if option.resume == "same")
"""Options that must be the same in a resumed run."""
WARN = frozenset(key for key, option in options().items() if option.resume == "warning")
"""Options that may differ in a resumed run, with a warning."""
FREE = frozenset(options()) - FIXED - WARN
"""Options that may differ in a resumed run."""
WIDTH = 100
"""Columns of the comments in a written TOML file."""


def read_config(path: str | Path | None = None, settings: Sequence[str] = ()) -> Config:
    """Read a config: the defaults, then the TOML file, then settings such as "training.steps=100"; later ones win.

    One error reports everything that is wrong, one line each.
    """
    config, errors = read_with_errors(path, settings)
    raise_errors(errors)
    return config


def read_with_errors(path: str | Path | None, settings: Sequence[str]) -> tuple[Config, list[str]]:
    """Read as much of a config as is valid; return it with all errors."""
    config = Config(parallelism=open_degrees())
    errors = [] if path is None else _apply(config, *_load(Path(path)), source=f"{path}: ")
    errors += filter(None, (_apply_setting(config, setting) for setting in settings))
    close_degrees(config.parallelism)
    return config, errors


def raise_errors(errors: Sequence[str]) -> None:
    """Raise one error for all, if there are any."""
    if len(errors) == 1:
        raise StagelineError(errors[0])
    if errors:
        raise StagelineError("\n  ".join([f"{len(errors)} errors in the config:", *errors]))


def _load(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a TOML file, and its errors as a file."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), []
    except OSError as error:
        siblings = [str(path.parent / file.name) for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        return {}, [f"cannot read {path}: {error.strerror or error}{nearest(str(path), siblings)}"]
    except UnicodeDecodeError as error:
        return {}, [f"{path} is not valid UTF-8: byte {error.start} is {error.object[error.start]:#04x}"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        return {}, [f"invalid TOML in {path}{_syntax_error(str(error), text)}"]


def _syntax_error(message: str, text: str) -> str:
    """Return the place and the reason of tomllib's error; it gives no place for the end of the document."""
    parts = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.DOTALL)
    if parts is None:
        return f": {message}"
    reason = parts[1][:1].lower() + parts[1][1:]
    end = text.count("\n") + 1, len(text) - text.rfind("\n")
    line, column = parts.group(2, 3) if parts[2] else end
    hint = "; strings need quotes" if reason == "invalid value" else ""
    return f", line {line}, column {column}: {reason}{hint}"


def _apply(config: Config, data: Mapping[str, Any], errors: list[str], source: str) -> list[str]:
    """Set the options in `data`; return the errors, extended by those found here."""
    for section, content in data.items():
        if section not in sections():
            errors.append(source + _unknown_section(section, content))
        elif not isinstance(content, Mapping):
            errors.append(f"{source}{section} is a section, not an option: write [{section}] and its options below it")
        else:
            for name, value in content.items():
                error = _apply_value(config, f"{section}.{name}", value)
                if error:
                    errors.append(source + error)
    return errors


def _unknown_section(section: str, content: Any) -> str:
    if isinstance(content, Mapping):
        return f"unknown section [{section}]{nearest(section, sections())}; the sections are {', '.join(sections())}"
    return f"{section} = {show(content)} is not in a section{did_you_mean(section)}"


def _apply_value(config: Config, key: str, value: Any) -> str:
    """Set one option to a value; return the error, or ''."""
    option = options().get(key)
    if option is None:
        return f"unknown option {key}{did_you_mean(key)}"
    try:
        option.set(config, option.accept(value))
    except JsonError as error:
        return f"{error}; for example {option.name} = {toml_value(option.sample)}"
    return ""


def _apply_setting(config: Config, setting: str) -> str:
    """Set one option as "section.name=value" or "--section.name=value" says; return the error, or ''."""
    key, equals, text = setting.partition("=")
    prefix = "--" if key.startswith("--") else ""
    key = key.removeprefix(prefix).strip()
    if not key:
        return f"{shorten(setting)} does not name an option; write section.name=value, for example training.steps=300"
    option = options().get(key)
    if option is None:
        return f"unknown option {prefix}{key}{did_you_mean(key, prefix)}"
    example = f"{key}={flag_value(option.sample)}"
    if not equals:
        return f"{prefix}{key} has no value; write {shlex.quote(prefix + example)}"
    try:
        option.set(config, option.parse(text))
    except JsonError as error:
        return f"{error}; for example {example}"
    return ""


def write_toml(config: Config) -> str:
    """Return the whole config as TOML, each option with its help, what it accepts, and its default."""
    return "\n".join(_toml_lines(config))


def _toml_lines(config: Config) -> Iterator[str]:
    for section, holder in sections().items():
        yield from _comment(holder.__doc__ or "")
        yield f"[{section}]"
        for option in options().values():
            if option.section == section:
                yield ""
                yield from _comment(option.help)
                if option.range or option.choices or option.is_list:
                    yield from _comment(f"Must be {option.expected}.")
                value = option.get(config)
                note = "default" if value == option.default else f"default: {toml_value(option.default)}"
                yield f"{option.name} = {toml_value(value)}  # {note}"
        yield ""


def _comment(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return the config as plain data, for JSON; `from_dict` reads it back."""
    data: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for option in options().values():
        value = option.get(config)
        data[option.section][option.name] = list(value) if option.is_list else value
    return data


def from_dict(data: Mapping[str, Any]) -> Config:
    """Return the config of a dict from `to_dict`; options that an older version did not write have their defaults."""
    if not isinstance(data, Mapping):
        raise StagelineError(f"a config must be a dict of sections, got {shorten(data)}")
    unknown = [str(section) for section in data if section not in sections()]
    for section, content in data.items():
        if section in sections() and isinstance(content, Mapping):
            unknown += [f"{section}.{name}" for name in content if f"{section}.{name}" not in options()]
    if unknown:
        raise StagelineError(
            f"Stageline {__version__} does not know {', '.join(unknown)}: a newer version wrote this config; use that "
            f"version, or remove {'it' if len(unknown) == 1 else 'them'}"
        )
    config = Config(parallelism=open_degrees())
    raise_errors(_apply(config, data, [], source=""))
    close_degrees(config.parallelism)
    return config


def differences(now: Config, before: Config, ignore: Iterable[str] = ()) -> list[str]:
    """Return the differences between two configs in words; `ignore` names options or whole sections.

    A resumed run refuses the differences with `ignore=FREE | WARN` and warns of those with `ignore=FREE | FIXED`.

    >>> differences(Config.read(None, "training.seed=1", "job.dump_folder=b"), Config(), ignore=["job"])
    ['training.seed is 1 but was 0']
    """
    ignored = set(ignore)
    for key in ignored:
        if key not in options() and key not in sections():
            raise StagelineError(
                f"ignore contains {key!r}, which is neither an option nor a section{did_you_mean(key)}"
            )
    return [
        f"{key} is {show(option.get(now))} but was {show(option.get(before))}"
        for key, option in options().items()
        if option.get(now) != option.get(before) and not {key, option.section} & ignored
    ]
