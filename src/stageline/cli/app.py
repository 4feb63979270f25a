"""The verbs of the command, and its errors: one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated

import typer
import typer.main

from stageline._version import __version__
from stageline.cli import (
    check,
    checkpoint,
    compare,
    doctor,
    families,
    inspect,
    plan,
    profile,
    report,
    show,
    simulate,
    synthesize,
    trace,
    train,
    verify,
)
from stageline.common.errors import ScheduleError, StagelineError, in_flags

app = typer.Typer(
    name="stageline",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
VERBS = (report, families, show, verify, simulate, compare, synthesize, plan, trace, doctor, inspect, profile, check)


def help_text(verb: Callable[..., None]) -> str:
    """Return a docstring with each paragraph in one line, for typer to wrap, and each example in its own."""
    text, _, examples = cleandoc(verb.__doc__ or "").partition("\n\nExamples:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    lines = ["Examples:", *(f"$ {line.strip()}" for line in examples.splitlines())]
    return "\n\n".join([*paragraphs, "\n".join(lines)])


app.command(
    "train", cls=train.TrainCommand, help=help_text(train.command), context_settings={"ignore_unknown_options": True}
)(train.command)
app.add_typer(checkpoint.app, name="checkpoint", help=help_text(checkpoint.root))
for name, verb in checkpoint.VERBS.items():
    checkpoint.app.command(name, help=help_text(verb))(verb)
for module in VERBS:
    app.command(module.__name__.rpartition(".")[2], help=help_text(module.command))(module.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stageline {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pipeline-parallel training for PyTorch: train models; create, verify, simulate and draw schedules; explain steps.

    Examples:
      stageline train
      stageline show zb-v -p 4 -m 8
    """


app.callback(help=help_text(root))(root)


def _flag_names(arguments: list[str] | None) -> dict[str, str]:
    """Return the flags of the verb on the command line by the names of their Python parameters."""
    words = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in words if not word.startswith("-")), "")
    command = getattr(typer.main.get_command(app), "commands", {}).get(verb)
    options = [parameter for parameter in getattr(command, "params", []) if parameter.param_type_name == "option"]
    return {option.name: max(option.opts, key=len) for option in options if option.opts}


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="stageline")
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0
    except BrokenPipeError:
        # The reader of the pipe has closed it; keep Python from reporting that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except StagelineError as error:
        rule = f" [{error.rule}]" if isinstance(error, ScheduleError) and error.rule not in ("input", "format") else ""
        typer.echo(f"error{rule}: {in_flags(str(error), _flag_names(arguments))}", err=True)
        for note in getattr(error, "__notes__", []):
            typer.echo(note, err=True)
        # A process that lost a peer is ended by force at its exit, which looks for the error here.
        sys.last_value = error
        return 2
    except MemoryError:
        typer.echo("error: not enough memory for a schedule of this size; use fewer ranks or microbatches", err=True)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {where}{error.strerror or error}", err=True)
        return 2
