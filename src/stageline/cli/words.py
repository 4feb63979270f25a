"""The words of `stageline train`: a config file among flags, one for every option of a config, in the order given."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stageline.common.errors import shorten
from stageline.train.config.io import argument
from stageline.train.config.options import Option, did_you_mean, options

SWITCHES = {
    "--print-config": "Print the whole config that these words make, as TOML with comments, and exit.",
    "--check": "Say what is wrong with the config, if anything, and exit.",
}


@dataclass
class Asked:
    """What a command line asks for, as far as it can be understood, and what is wrong with it."""

    path: str | None = None
    sets: list[str] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


def understand(words: Iterable[str]) -> Asked:
    """Sort the words of a command line.

    >>> asked = understand(["--training.steps", "20", "a.toml", "--no-compile.enable", "--set", "model.dim=64"])
    >>> asked.path, asked.sets
    ('a.toml', ['training.steps=20', 'compile.enable=false', 'model.dim=64'])
    >>> understand(["--steps=20"]).errors
    ['there is no option --steps; did you mean --training.steps? (or --validation.steps)']
    """
    asked, waiting = Asked(), deque(words)
    while waiting:
        word = waiting.popleft()
        if word.startswith("-"):
            _flag(asked, word, waiting)
        elif not word.endswith(".toml"):
            near = f"; did you mean --set {word}?" if "=" in word else ""
            asked.errors.append(f"{shorten(word)} is neither an option nor a .toml file{near}")
        elif asked.path is not None:
            asked.errors.append(f"there are two config files, {asked.path} and {word}; give one")
        else:
            asked.path = word
    return asked


def _flag(asked: Asked, word: str, waiting: deque[str]) -> None:
    name, equals, text = word.partition("=")
    value = text if equals else None
    if name in SWITCHES:
        asked.switches.add(name)
        if value is not None:
            asked.errors.append(f"{name} takes no value, got {shorten(value)}")
        return
    if name == "--set":
        value = _next(waiting) if value is None else value
        if value is None:
            asked.errors.append("--set needs a setting, like --set training.steps=200")
        else:
            asked.sets.append(value)
        return
    key = name.removeprefix("--").replace("-", "_")
    off = key not in options() and key.startswith("no_")
    option = options().get(key.removeprefix("no_") if off else key) if name.startswith("--") else None
    if option is None:
        asked.errors.append(f"there is no option {name}{_meant(name)}")
        if value is None and waiting and not waiting[0].startswith("-") and not waiting[0].endswith(".toml"):
            waiting.popleft()  # its value, most likely
    elif option.type is bool:
        _switch(asked, option, off, value, waiting)
    elif off:
        asked.errors.append(f"{name} is no option: only true or false can be turned off; write {usage(option)}")
    else:
        value = _next(waiting) if value is None else value
        if value is None:
            asked.errors.append(f"{name} needs a value, like {usage(option)}")
        else:
            asked.sets.append(f"{option.key}={value}")


def _switch(asked: Asked, option: Option, off: bool, value: str | None, waiting: deque[str]) -> None:
    if value is None and not off and waiting and waiting[0] in ("true", "false"):
        value = waiting.popleft()
    if off and value is not None:
        asked.errors.append(f"--no-{option.key} takes no value; write --{option.key}={shorten(value)} or leave it out")
    asked.sets.append(f"{option.key}={'false' if off else 'true' if value is None else value}")


def _next(waiting: deque[str]) -> str | None:
    """The value after a flag; None if there is another flag or nothing. A number may begin with a minus."""
    return waiting.popleft() if waiting and not waiting[0].startswith("--") else None


def _meant(name: str) -> str:
    own = difflib.get_close_matches(name, [*SWITCHES, "--set", "--help"], n=1, cutoff=0.75)
    key = name.removeprefix("--").removeprefix("no-")
    return f"; did you mean {own[0]}?" if own else did_you_mean(key, flag="--no-" if "--no-" in name else "--")


def usage(option: Option) -> str:
    """How the flag of an option is written.

    >>> usage(options()["training.steps"])
    '--training.steps 200'
    """
    text = argument(option.sample)
    return f"--{option.key}" if option.type is bool else f"--{option.key} {text if ' ' not in text else repr(text)}"


def flags() -> list[tuple[str, str]]:
    """All flags, and a sentence about each.

    >>> [flag for flag, _ in flags() if "compile" in flag]
    ['--compile.enable', '--no-compile.enable', '--compile.backend']
    """
    found = [("--set", "Set any option."), *SWITCHES.items()]
    for option in options().values():
        found.append((f"--{option.key}", option.help))
        if option.type is bool:
            found.append((f"--no-{option.key}", option.help))
    return found
