"""The verbs together, and what is done with errors."""

from __future__ import annotations

import os
import sys
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

ABOUT = "Pipeline-parallel training: train models; make, prove, simulate and draw schedules; explain what was measured."

app = typer.Typer(
    name="stageline",
    help=ABOUT,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("train", cls=train.TrainCommand, context_settings={"ignore_unknown_options": True})(train.command)
app.add_typer(checkpoint.app, name="checkpoint")
for verb in (
    report,
    families,
    show,
    verify,
    simulate,
    compare,
    synthesize,
    plan,
    trace,
    doctor,
    inspect,
    profile,
    check,
):
    app.command(verb.__name__.rsplit(".", 1)[-1])(verb.command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"stageline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pipeline-parallel training: train models; make, prove, simulate and draw schedules; explain what was measured.

    \b
    stageline train
    stageline show zb-v -p 4 -m 8
    """


def _flags(arguments: list[str] | None) -> dict[str, str]:
    """The options of the verb that was called, by the names that Python has for them."""
    words = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in words if not word.startswith("-")), "")
    known = getattr(typer.main.get_command(app), "commands", {}).get(verb)
    options = [each for each in getattr(known, "params", []) if each.param_type_name == "option"]
    return {each.name: max(each.opts, key=len) for each in options if each.opts}


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="stageline")
        return 0
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:
        # Whoever read the output has seen enough; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except StagelineError as error:
        rule = f" [{error.rule}]" if isinstance(error, ScheduleError) and error.rule not in ("input", "format") else ""
        typer.echo(f"error{rule}: {in_flags(str(error), _flags(arguments))}", err=True)
        for note in getattr(error, "__notes__", []):
            typer.echo(note, err=True)
        # A process that lost a peer is ended by force at its exit, and asks there how it went.
        sys.last_value = error
        return 2
    except MemoryError:
        typer.echo(
            "error: not enough memory for a schedule of this size; ask for fewer ranks or microbatches", err=True
        )
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {where}{error.strerror or error}", err=True)
        return 2
