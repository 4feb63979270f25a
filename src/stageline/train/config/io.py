"""Reading and writing a config: a TOML file, settings such as "training.steps=100", plain data; and comparing two.

tomllib reads TOML. It is written by hand, because each option has comments, which only tomlkit could write: a package
for thirty lines.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stageline._version import __version__
from stageline.common.errors import JsonError, StagelineError, nearest, shorten
from stageline.train.config.config import Config
from stageline.train.config.options import did_you_mean, flag_value, options, sections, show, toml_value

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

    >>> config = read_config(None, ["training.steps=20", "activation_checkpoint.modules=blocks.*.mlp,head"])
    >>> config.training.steps, config.activation_checkpoint.modules
    (20, ('blocks.*.mlp', 'head'))
    >>> read_config(None, ["training.stepz=20"])
    Traceback (most recent call last):
    ...
    stageline.StagelineError: unknown option training.stepz; did you mean training.steps?
    """
    config, errors = read_with_errors(path, settings)
    raise_errors(errors)
    return config


def read_with_errors(path: str | Path | None, settings: Sequence[str]) -> tuple[Config, list[str]]:
    """Read as much of a config as is valid; return it with all errors."""
    config = Config()
    errors = [] if path is None else _apply(config, *_load(Path(path)), source=f"{path}: ")
    errors += filter(None, (_apply_setting(config, setting) for setting in settings))
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
    return f"{section} = {show(content)} is outside any section{did_you_mean(section)}"


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
        return f"{shorten(setting)} names no option; write section.name=value, for example training.steps=300"
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
    """Return the whole config as TOML, each option with its help, what it accepts, and its default.

    >>> print(write_toml(Config()).split("[comm]")[1].split("# Sample")[0].strip())
    # Seconds without a sign of life from a rank until the job fails and names it.
    # Must be a number > 0.
    train_timeout_seconds = 60.0  # default
    """
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
    """Return the config as plain data, for JSON; `from_dict` reads it back.

    >>> to_dict(Config())["compile"]
    {'enable': False, 'backend': 'inductor'}
    """
    data: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for option in options().values():
        value = option.get(config)
        data[option.section][option.name] = list(value) if option.is_list else value
    return data


def from_dict(data: Mapping[str, Any]) -> Config:
    """Return the config of a dict from `to_dict`; options that an older version did not write have their defaults.

    >>> from_dict(to_dict(Config())) == Config()
    True
    """
    if not isinstance(data, Mapping):
        raise StagelineError(f"a config as plain data is a dict of sections, got {shorten(data)}")
    unknown = [str(section) for section in data if section not in sections()]
    for section, content in data.items():
        if section in sections() and isinstance(content, Mapping):
            unknown += [f"{section}.{name}" for name in content if f"{section}.{name}" not in options()]
    if unknown:
        raise StagelineError(
            f"Stageline {__version__} does not know {', '.join(unknown)}: a newer version wrote this config; use that "
            f"version, or remove {'it' if len(unknown) == 1 else 'them'}"
        )
    config = Config()
    raise_errors(_apply(config, data, [], source=""))
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
            raise StagelineError(f"ignore names {key!r}, which is neither an option nor a section{did_you_mean(key)}")
    return [
        f"{key} is {show(option.get(now))} but was {show(option.get(before))}"
        for key, option in options().items()
        if option.get(now) != option.get(before) and not {key, option.section} & ignored
    ]
