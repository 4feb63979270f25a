"""The flags of `stageline train`, one for each option of a config, as typer options generated from the dataclasses.

typer declares, parses and completes them. Two parts are written by hand. typer's parser stops at the first error, lets
a flag take the next flag as its value, and forgets the order of different flags; so each flag is first rewritten as a
`--set`. typer's help is a table, which leaves 20 of 80 columns for the sentences; so the sections are printed here.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache

from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperOption

from stageline.train.config.options import Option, flag_value, options, sections

COMMAND_FLAGS = ("--set", "--print-config", "--check", "--help", "-h")


def as_settings(words: Iterable[str]) -> Iterator[str]:
    """Write each flag of the config as a setting, with its value; other words stay as they are.

    >>> list(as_settings(["a.toml", "--training.steps", "8", "--no-compile.enable", "--check"]))
    ['a.toml', '--set=--training.steps=8', '--set=--compile.enable=false', '--check']
    """
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        name = word.partition("=")[0]
        if word == "--set":
            yield f"--set={remaining.popleft() if _value_follows(remaining) else ''}"
        elif not word.startswith("-") or name in COMMAND_FLAGS or suggest_command_flag(name):
            yield word
        else:
            yield f"--set={_as_setting(name, word.removeprefix(name), remaining)}"


def _as_setting(name: str, value: str, remaining: deque[str]) -> str:
    """Return a flag and its value as one word; `value` is empty, or begins with "="."""
    key = name.removeprefix("--").replace("-", "_")
    is_negated = key not in options() and key.startswith("no_")
    option = options().get(key.removeprefix("no_") if is_negated else key)
    if option is None or (is_negated and (option.type is not bool or value)):
        # Unknown, which the config reports. The next word is probably its value.
        follows = not value and remaining and not remaining[0].startswith("-") and not remaining[0].endswith(".toml")
        return f"{name}={remaining.popleft()}" if follows else name + value
    if not value and option.type is bool:
        states = ("true", "false")
        state = remaining.popleft() if not is_negated and remaining and remaining[0] in states else "true"
        value = "=false" if is_negated else f"={state}"
    elif not value and _value_follows(remaining):
        value = f"={remaining.popleft()}"
    return f"--{option.key}{value}"


def _value_follows(remaining: deque[str]) -> bool:
    """Whether the next word is a value; a number may begin with a minus."""
    return bool(remaining) and not remaining[0].startswith("--")


def suggest_command_flag(name: str) -> str:
    """Return the flag of the command that an unknown one is close to; empty if there is none.

    >>> suggest_command_flag("--chek"), suggest_command_flag("--training.steps")
    ('--check', '')
    """
    matches = difflib.get_close_matches(name, COMMAND_FLAGS, n=1, cutoff=0.75)
    return matches[0] if matches else ""


@cache
def config_flags() -> list[TyperOption]:
    """Return a typer option for each option of a config.

    >>> [name for flag in config_flags() for name in (*flag.opts, *flag.secondary_opts) if "compile" in name]
    ['--compile.enable', '--no-compile.enable', '--compile.backend']
    """
    return [
        TyperOption(
            param_decls=[
                option.key.replace(".", "_"),
                f"--{option.key}/--no-{option.key}" if option.type is bool else f"--{option.key}",
            ],
            type=option.type if not option.is_list else str,
            is_flag=option.type is bool,
            autocompletion=lambda context, words, incomplete, choices=option.choices: list(choices),
            help=option.help,
            expose_value=False,
            multiple=True,
        )
        for option in options().values()
    ]


def section_panels() -> Iterator[Panel]:
    """Return a panel for each section of the config: each flag, and below it its help."""
    for section, holder in sections().items():
        lines = [part for option in options().values() if option.section == section for part in _entry(option)]
        title = Text(f"{section}: {(holder.__doc__ or '').rstrip('.')}")
        yield Panel(Group(*lines), title=title, title_align="left", border_style="dim")


def _entry(option: Option) -> tuple[Text, Padding]:
    flag = Text(f"--[no-]{option.key}" if option.type is bool else f"--{option.key}", style="bold cyan")
    if option.type is not bool:
        kind = "choice" if option.choices else option.type.__name__
        flag.append(f" <{kind}>{',…' if option.is_list else ''}", style="bold yellow")
    default = flag_value(option.default) or "empty"
    note = f"default: {default if default == default.strip() else repr(default)}"
    accepted = ", ".join(option.choices) or str(option.range or "")
    help = Text(option.help).append(f" [{f'{accepted}; ' if accepted else ''}{note}]", style="dim")
    return flag, Padding(help, (0, 0, 0, 4))
