"""The verbs of the command, and its errors: one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer
import typer.main

from stageline._version import __version__
from stageline.cli.numbers import check_numbers
from stageline.common.errors import ScheduleError, StagelineError, in_flags

VERBS = (
    "train", "launch", "generate", "checkpoint", "report", "studio", "families", "show", "verify", "simulate",
    "compare", "synthesize", "plan", "trace", "doctor", "inspect", "profile", "check", "selftest",
)  # fmt: skip
"""The modules of the verbs. Each has a function `command`, or functions `VERBS` of its own and their `root`."""


def make_app(words: Sequence[str] = ()) -> typer.Typer:
    """Return the command with the verb that the words begin with, or with all verbs if they begin with none."""
    context = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    settings: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": "rich"}
    app = typer.Typer(name="stageline", pretty_exceptions_enable=False, context_settings=context, **settings)
    app.callback(help=help_text(root))(root)
    named = [verb for verb in VERBS if [verb] == list(words[:1])]
    for name in named or VERBS:  # one verb starts sooner than all of them
        module = import_module(f"stageline.cli.{name}")
        if hasattr(module, "VERBS"):
            group = typer.Typer(**settings)
            for inner, function in module.VERBS.items():
                group.command(inner, help=help_text(function))(check_numbers(function))
            app.add_typer(group, name=name, help=help_text(module.root))
        else:
            command = app.command(name, help=help_text(module.command), **getattr(module, "SETTINGS", {}))
            command(check_numbers(module.command))
    return app


def help_text(verb: Callable[..., None]) -> str:
    """Return a docstring with each paragraph in one line, for typer to wrap, and each example in its own."""
    text, _, examples = cleandoc(verb.__doc__ or "").partition("\n\nExamples:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    lines = ["Examples:", *(f"$ {line.strip()}" for line in examples.splitlines())]
    return "\n\n".join([*paragraphs, "\n".join(lines)])


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


def _flag_names(app: typer.Typer, words: Sequence[str]) -> dict[str, str]:
    """Return the flags of the verb on the command line by the names of their Python parameters."""
    verb = next((word for word in words if not word.startswith("-")), "")
    command = getattr(typer.main.get_command(app), "commands", {}).get(verb)
    options = [parameter for parameter in getattr(command, "params", []) if parameter.param_type_name == "option"]
    return {option.name: max(option.opts, key=len) for option in options if option.opts}


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    app = make_app(words)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(args=words, prog_name="stageline")
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0
    except BrokenPipeError:
        # The reader of the pipe has closed it; keep Python from reporting that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except StagelineError as error:
        rule = f" [{error.rule}]" if isinstance(error, ScheduleError) and error.rule not in ("input", "format") else ""
        typer.echo(f"error{rule}: {in_flags(str(error), _flag_names(app, words))}", err=True)
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
