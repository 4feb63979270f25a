"""A config as TOML: every option with its sentence, what it takes, and its default."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from stageline.train.config.config import Config
from stageline.train.config.options import Option, options, sections

WIDTH = 100


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
