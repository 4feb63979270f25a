"""`stageline train`: a training job from a config file and flags, one flag for each option of a config.

The flags are typer options generated from the dataclasses of the config; typer declares, parses and completes them. Two
parts are written by hand. typer's parser stops at the first error, lets a flag take the next flag as its value, and
forgets the order of different flags; so each flag is first rewritten as a `--set`. typer's help is a table, which
leaves 20 of 80 columns for the sentences; so the sections are printed here.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand

from stageline.common.errors import shorten
from stageline.schedules.registry import families
from stageline.train.config.io import Option, flag_value, options, raise_errors, read_with_errors, sections
from stageline.train.config.ranks import processes_to_start
from stageline.train.config.rules import needs_no_preflight, validate

COMMAND_FLAGS = ("--set", "--print-config", "--check", "--help", "-h")


class TrainCommand(TyperCommand):
    """A command with a flag for each option of a config, beside the parameters of its function."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the function and the flags."""
        return [*super().get_params(ctx), *config_flags()]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite each flag as a setting, then parse."""
        return super().parse_args(ctx, list(as_settings(args)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print typer's help of the function, then a panel for each section of the config."""
        own = TyperCommand(self.name, params=self.params, help=self.help, rich_markup_mode=self.rich_markup_mode)
        own.format_help(ctx, formatter)
        console = Console(highlight=False)
        for panel in section_panels():
            console.print(panel)


def command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="CONFIG.toml", help="Config file.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set an option; the value is TOML or plain text."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config as TOML with comments, and exit.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the config, report its errors, and exit.")] = False,
) -> None:
    """Train a model: the built-in job, or one from a config file; every option is also a flag.

    Unset options use their defaults. Flags and --set override the file; later ones override earlier ones.

    The ranks run as processes on this machine: one per GPU or, without GPUs, one per core, up to 4. Under torchrun,
    SLURM or Ray, each process that runs this command is one rank.

    Examples:
      stageline train
      stageline train job.toml --training.steps 1000 --no-validation.enable
      stageline train job.toml --set optimizer.lr=3e-4 --set model.dropout=0.1
      stageline train --print-config > job.toml
      torchrun --nproc-per-node 4 -m stageline train job.toml
    """
    path, word_errors = find_file(words or [])
    config, config_errors = read_with_errors(path, settings or [])
    raise_errors([*word_errors, *config_errors])
    if print_config:
        typer.echo(config.to_toml(), nl=False)
    if check or not print_config:
        validate(config)
    if check:
        if not needs_no_preflight(config):
            from stageline.train.preflight import preflight

            preflight(config)
        typer.echo(f"{path or 'the config'} is valid", err=print_config)
    if check or print_config:
        return
    processes = processes_to_start(config.parallelism)
    if processes > 1:
        from stageline.train.launch import train_on

        train_on(processes, config)
        return
    from stageline.train.trainer import Trainer

    Trainer(config).run()


SETTINGS = {"cls": TrainCommand, "context_settings": {"ignore_unknown_options": True}}


def find_file(words: Iterable[str]) -> tuple[str | None, list[str]]:
    """Return the config file among the words that are not flags of the config, and the errors in the others.

    >>> find_file(["a.toml", "--chek"])
    ('a.toml', ['unknown option --chek; did you mean --check?'])
    """
    path, errors = None, []
    for word in words:
        if word.startswith("-"):
            suggestion = suggest_command_flag(word)
            errors.append(f"unknown option {word}" + (f"; did you mean {suggestion}?" if suggestion else ""))
        elif not word.endswith(".toml"):
            suggestion = f"; did you mean --set {word}?" if "=" in word else ""
            errors.append(f"{shorten(word)} is neither an option nor a .toml file{suggestion}")
        elif path is not None:
            errors.append(f"got two config files, {path} and {word}; pass only one")
        else:
            path = word
    return path, errors


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
def config_flags() -> list[Any]:
    """Return a typer option for each option of a config.

    >>> [name for flag in config_flags() for name in (*flag.opts, *flag.secondary_opts) if "compile.e" in name]
    ['--compile.enable', '--no-compile.enable']
    """

    def flags() -> None:
        """A function with a parameter for each flag, from which typer makes the options."""

    parameters = [
        Parameter(
            option.key.replace(".", "_"),
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                list[str if option.is_list else option.type] | None,  # type: ignore[misc]
                typer.Option(
                    f"--{option.key}/--no-{option.key}" if option.type is bool else f"--{option.key}",
                    autocompletion=_completion(option.key, option.choices),
                    help=option.help,
                    expose_value=False,
                ),
            ],
        )
        for option in options().values()
    ]
    flags.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(flags)
    return list(typer.main.get_command(app).params)


def _completion(key: str, choices: Iterable[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        names = ("auto", *families()) if key == "parallelism.pipeline_parallel_schedule" else choices
        return [name for name in names if name.startswith(incomplete)]

    return complete


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
