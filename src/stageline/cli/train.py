"""`stageline train`: a training job from a config file and flags."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from stageline.common.errors import shorten

if TYPE_CHECKING:
    from stageline.train.config.config import Parallelism

# The config and its flags are imported where they are used, so that the other verbs start without them.


class TrainCommand(TyperCommand):
    """A command with a flag for each option of a config, beside the parameters of its function."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the function and the flags."""
        from stageline.cli.train_flags import config_flags

        return [*super().get_params(ctx), *config_flags()]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite each flag as a setting, then parse."""
        from stageline.cli.train_flags import as_settings

        return super().parse_args(ctx, list(as_settings(args)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print typer's help of the function, then a panel for each section of the config."""
        from stageline.cli.train_flags import section_panels

        own = TyperCommand(self.name, params=self.params, help=self.help, rich_markup_mode=self.rich_markup_mode)
        own.format_help(ctx, formatter)
        console = Console(highlight=False)
        for panel in section_panels():
            console.print(panel)


def command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG.toml]", help="Config file of the job.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any option; the value is TOML or plain text."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config as TOML with comments, and exit.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Report what is wrong with the config, and exit.")] = False,
) -> None:
    """Train a model: the built-in job, or one from a config file, with every option as a flag.

    Unset options use their defaults. Flags and --set override the file; later ones override earlier ones.

    Examples:
      stageline train
      stageline train job.toml --training.steps 1000 --no-validation.enable
      stageline train job.toml --set optimizer.lr=3e-4 --set model.dropout=0.1
      stageline train --print-config > job.toml
      torchrun --nproc-per-node 4 -m stageline train job.toml
    """
    from stageline.train.config.io import raise_errors, read_with_errors

    path, word_errors = find_file(words or [])
    config, config_errors = read_with_errors(path, settings or [])
    raise_errors([*word_errors, *config_errors])
    if print_config:
        typer.echo(config.to_toml(), nl=False)
    if check or not print_config:
        from stageline.train.config.rules import needs_no_preflight, validate

        validate(config)
    if check:
        if not needs_no_preflight(config):
            from stageline.train.preflight import preflight

            preflight(config)
        typer.echo(f"{path or 'the config'} is valid{_processes_needed(config.parallelism)}", err=print_config)
    if check or print_config:
        return
    from stageline.train.trainer import Trainer

    Trainer(config).run()


def find_file(words: Iterable[str]) -> tuple[str | None, list[str]]:
    """Return the config file among the words that are not flags of the config, and the errors in the others.

    >>> find_file(["a.toml", "--chek"])
    ('a.toml', ['unknown option --chek; did you mean --check?'])
    """
    from stageline.cli.train_flags import suggest_command_flag

    path, errors = None, []
    for word in words:
        if word.startswith("-"):
            suggestion = suggest_command_flag(word)
            errors.append(f"unknown option {word}" + (f"; did you mean {suggestion}?" if suggestion else ""))
        elif not word.endswith(".toml"):
            suggestion = f"; did you mean --set {word}?" if "=" in word else ""
            errors.append(f"{shorten(word)} is neither an option nor a .toml file{suggestion}")
        elif path is not None:
            errors.append(f"there are two config files, {path} and {word}; pass one")
        else:
            path = word
    return path, errors


def _processes_needed(parallelism: Parallelism) -> str:
    """How to start a job with replicas, if the check itself runs in one process."""
    replicas = parallelism.data_parallel_replicate_degree
    if replicas < 2 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return ""
    from stageline.train.config.ranks import ranks_of_job

    processes = ranks_of_job(parallelism) * replicas
    return (
        f"; parallelism.data_parallel_replicate_degree is {replicas}, and each replica needs its own processes: start "
        f"{processes} with torchrun --nproc-per-node {processes} -m stageline train"
    )
