"""Reading a config: a TOML file, settings of the command line, plain data; and what differs between two."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stageline._version import __version__
from stageline.common.errors import StagelineError, nearest, shorten
from stageline.train.config.config import Config
from stageline.train.config.options import (
    FOUND,
    Option,
    Unfit,
    did_you_mean,
    options,
    sections,
    show,
    unfit,
    value_text,
)

FIXED = frozenset(key for key, option in options().items() if option.fixed)
"""What must be the same in a run that goes on from a checkpoint."""
WARN = frozenset(key for key, option in options().items() if option.warn)
"""What may differ there, with a warning."""
FREE = frozenset(options()) - FIXED - WARN
"""What may differ there as it likes."""
WIDTH = 100
"""Columns of a written TOML file's comments."""


def read_config(path: str | Path | None = None, sets: Sequence[str] = ()) -> Config:
    """Read a config: the defaults, then the TOML file, then settings like "training.steps=100"; the last word wins.

    Everything that is wrong is said in one error, each in its own line.

    >>> config = read_config(None, ["training.steps=20", "activation_checkpoint.modules=blocks.*.mlp,head"])
    >>> config.training.steps, config.activation_checkpoint.modules
    (20, ('blocks.*.mlp', 'head'))
    >>> read_config(None, ["training.stepz=20"])
    Traceback (most recent call last):
    ...
    stageline.StagelineError: there is no option training.stepz; did you mean training.steps?
    """
    config, errors = gather(path, sets)
    complain(errors)
    return config


def gather(path: str | Path | None, sets: Sequence[str]) -> tuple[Config, list[str]]:
    """Read a config as far as it can be read, and all that is wrong with it."""
    config = Config()
    errors = [] if path is None else _apply(config, *_load(Path(path)), where=f"{path}: ")
    for given in sets:
        error = _set(config, given)
        if error:
            errors.append(error)
    return config, errors


def complain(errors: Sequence[str]) -> None:
    """Raise one error for all that is wrong, if anything is."""
    if len(errors) == 1:
        raise StagelineError(errors[0])
    if errors:
        raise StagelineError("\n  ".join([f"{len(errors)} mistakes in the config:", *errors]))


def _load(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a TOML file says, and what is wrong with it as TOML."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), []
    except OSError as error:
        beside = [str(path.parent / each.name) for each in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        return {}, [f"cannot read {path}: {error.strerror or error}{nearest(str(path), beside)}"]
    except UnicodeDecodeError as error:
        return {}, [
            f"{path} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}; save it as UTF-8"
        ]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        return {}, [f"{path} is no TOML{_syntax(str(error), text)}"]


def _syntax(said: str, text: str) -> str:
    """Where a text is no TOML, and why; the end of the document is a place too."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", said, re.DOTALL)
    if found is None:
        return f": {said}"
    what = found.group(1)[:1].lower() + found.group(1)[1:]
    last = text.count("\n") + 1, len(text) - text.rfind("\n")
    line, column = found.group(2, 3) if found.group(2) else last
    hint = "; a text stands in quotes" if what == "invalid value" else ""
    return f" at line {line}, column {column}: {what}{hint}"


def _apply(config: Config, data: Mapping[str, Any], errors: list[str], where: str) -> list[str]:
    """Put plain data into a config; whatever does not fit is said in errors."""
    for section, content in data.items():
        if section not in sections():
            errors.append(where + _unknown_section(section, content))
        elif not isinstance(content, Mapping):
            errors.append(f"{where}{section} is a section and no option: write [{section}] and below it its options")
        else:
            for name, value in content.items():
                error = _put(config, f"{section}.{name}", value)
                if error:
                    errors.append(where + error)
    return errors


def _unknown_section(section: str, content: Any) -> str:
    if isinstance(content, Mapping):
        near = nearest(section, sections())
        return f"there is no section [{section}]{near}; there are {', '.join(sections())}"
    return f"{section} = {show(content)} stands outside of a section{did_you_mean(section)}"


def _put(config: Config, key: str, value: Any) -> str:
    """Set one option to a value; say what is wrong, or nothing."""
    option = options().get(key)
    if option is None:
        return f"there is no option {key}{did_you_mean(key)}"
    try:
        setattr(getattr(config, option.section), option.name, option.accept(value))
    except Unfit as error:
        return unfit(key, show(value), error, f"{option.name} = {value_text(option.sample)}")
    return ""


def _set(config: Config, given: str) -> str:
    """Set one option as "section.key=value" says; say what is wrong, or nothing."""
    key, equals, text = given.partition("=")
    key = key.strip()
    if not key:
        return f"{shorten(given)} names no option; write it as section.key=value, like training.steps=300"
    option = options().get(key)
    if option is None:
        return f"there is no option {key}{did_you_mean(key)}"
    example = f"{key}={argument(option.sample)}"
    if not equals:
        return f"{key} has no value; write it as {example}"
    try:
        setattr(getattr(config, option.section), option.name, option.parse(text))
    except Unfit as error:
        why = Unfit("" if str(error) == FOUND[str] else str(error), error.near)
        shown = text if text.isprintable() and len(text) <= 60 else shorten(text)
        return unfit(key, shown or "empty", why, example)
    return ""


def argument(value: Any) -> str:
    """A value as one would write it on the command line.

    >>> argument(("blocks.*.mlp", "head")), argument(300), argument("outputs")
    ('blocks.*.mlp,head', '300', 'outputs')
    """
    if isinstance(value, tuple):
        return ",".join(map(argument, value))
    return value if isinstance(value, str) else value_text(value)


def write_toml(config: Config) -> str:
    """The whole config as TOML; reading it back gives an equal one.

    Above each option stand its sentence and what it takes, beside it its default.

    >>> print(write_toml(Config()).split("[comm]")[1].split("# The text")[0].strip())
    # How long a rank may be silent before the job fails with its name.
    # It takes a number above 0.
    train_timeout_seconds = 60.0  # default
    """
    return "\n".join(_lines(config))


def _lines(config: Config) -> Iterator[str]:
    for section, holder in sections().items():
        yield from _comment(holder.__doc__ or "")
        yield f"[{section}]"
        for option in options().values():
            if option.section == section:
                yield ""
                yield from _comment(option.help)
                if option.bounds or option.choices or option.many:
                    yield from _comment(f"It takes {option.takes}.")
                yield _setting(option, getattr(getattr(config, section), option.name))
        yield ""


def _comment(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _setting(option: Option, value: Any) -> str:
    default = "default" if value == option.default else f"default: {value_text(option.default)}"
    return f"{option.name} = {value_text(value)}  # {default}"


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as plain data, for JSON; `from_dict` reads it back.

    >>> to_dict(Config())["compile"]
    {'enable': False, 'backend': 'inductor'}
    """
    found: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for option in options().values():
        value = getattr(getattr(config, option.section), option.name)
        found[option.section][option.name] = list(value) if option.many else value
    return found


def from_dict(data: Mapping[str, Any]) -> Config:
    """The config that `to_dict` made plain data of; what is not said there, as by an older version, is the default.

    >>> from_dict(to_dict(Config())) == Config()
    True
    """
    if not isinstance(data, Mapping):
        raise StagelineError(f"a config as plain data is a dict of sections, got {shorten(data)}")
    newer = [section for section in data if section not in sections()]
    for section, content in data.items():
        if section in sections() and isinstance(content, Mapping):
            newer += [f"{section}.{name}" for name in content if f"{section}.{name}" not in options()]
    if newer:
        them = "it" if len(newer) == 1 else "them"
        raise StagelineError(
            f"Stageline {__version__} does not know {', '.join(map(str, newer))}: a newer version wrote this config; "
            f"use that one, or take {them} out of it"
        )
    config = Config()
    complain(_apply(config, data, [], where=""))
    return config


def differences(now: Config, was: Config, ignore: Iterable[str] = ()) -> list[str]:
    """Say what differs between two configs, in words; `ignore` names options or whole sections.

    A run that goes on finds with `ignore=FREE | WARN` what it must refuse, with `ignore=FREE | FIXED` what it warns of.

    >>> differences(Config.read(None, "training.seed=1", "job.dump_folder=b"), Config(), ignore=["job"])
    ['training.seed is 1 and was 0']
    """
    left_out = set(ignore)
    for key in left_out:
        if key not in options() and key not in sections():
            raise StagelineError(f"ignore names {key!r}, which is no option and no section{did_you_mean(key)}")
    found = []
    for key, option in options().items():
        mine, theirs = (getattr(getattr(config, option.section), option.name) for config in (now, was))
        if mine != theirs and not {key, option.section} & left_out:
            found.append(f"{key} is {show(mine)} and was {show(theirs)}")
    return found
