"""`stageline train`: a training job from a config file and flags."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

if TYPE_CHECKING:
    from stageline.train.config.config import Parallelism

# What knows the options of a config is imported where it is needed: the other verbs need not wait for it.


class Train(TyperCommand):
    """A command with a flag for every option of a config: words keep their order, and help is made from the fields."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave the words as they are, but for a cry for help."""
        asks = any(word in ("-h", "--help") for word in args)
        return super().parse_args(ctx, ["--help"] if asks else ["--", *args])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        from stageline.cli.manual import manual

        out = Console(highlight=False)
        for part in manual(self.help or "", out.width):
            out.print(part)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete flags."""
        from stageline.cli.words import flags

        found = super().shell_complete(ctx, incomplete)
        item = type(super().shell_complete(ctx, "--help")[0])
        return [*found, *(item(flag, help=said) for flag, said in flags() if flag.startswith(incomplete or " "))]


def command(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Train a model: a built-in job, or one from a config file, with every option as a flag.

    What is not said in the file or by a flag is as by default. --set and flags win over the file, later ones over
    earlier ones.
    """
    from stageline.cli.words import understand
    from stageline.train.config.io import complain, gather

    asked = understand(words or [])
    config, errors = gather(asked.path, asked.sets)
    complain([*asked.errors, *errors])
    printing, checking = "--print-config" in asked.switches, "--check" in asked.switches
    if printing:
        typer.echo(config.to_toml(), nl=False)
    if checking or not printing:
        from stageline.train.config.rules import known_without_torch, validate

        validate(config)
    if checking and not known_without_torch(config):
        from stageline.train.preflight import preflight

        preflight(config)
    if checking:
        typer.echo(f"{asked.path or 'the config'} is fine{_processes(config.parallelism)}", err=printing)
    if asked.switches:
        return
    from stageline.train.trainer import Trainer

    Trainer(config).run()


def _processes(asked: Parallelism) -> str:
    """What a job with replicas has to be started with, where the check itself runs in one process."""
    replicas = asked.data_parallel_replicate_degree
    if replicas < 2 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return ""
    count = asked.pipeline_parallel_degree * replicas
    return (
        f"; parallelism.data_parallel_replicate_degree is {replicas}, and replicas are processes: start {count} "
        f"with torchrun --nproc-per-node {count} -m stageline train"
    )
