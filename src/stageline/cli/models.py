"""Models named on the command line: a function, or a Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stageline.common.errors import StagelineError, place_of
from stageline.common.imports import find_function
from stageline.model.huggingface_config import config_file, read_config

if TYPE_CHECKING:
    from torch import nn

FORMS = "a model, (model, inputs), (model, inputs, targets) or (model, inputs, targets, loss_fn)"
"""What a function that is named may return."""
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"package.module:function that returns {FORMS}; or the config.json of a Hugging Face model, or its "
        "folder.",
        show_default=False,
    ),
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Samples of the made-up batch of a Hugging Face model.")]
Traceback = Annotated[
    bool, typer.Option("--traceback", help="Show all of it where the model's own code raises an error.")
]
Length = Annotated[int, typer.Option("--length", min=2, help="Tokens of each sample of it.")]


@dataclass(frozen=True)
class Named:
    """A model, and what it is run on."""

    model: nn.Module
    inputs: Any = None
    targets: Any = None
    loss_fn: Any = None


@contextmanager
def of_the_user(doing: str, whole: bool) -> Iterator[None]:
    """Tell what a user's code raises in one line, with the file and line of theirs; or let all of it be seen."""
    try:
        yield
    except StagelineError as error:
        if whole and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
    except (ModuleNotFoundError, typer.Exit):
        raise
    except (Exception, SystemExit) as error:
        if whole:
            raise
        place = place_of(error)
        text = str(error).strip().splitlines()
        raise StagelineError(
            f"{doing}: {type(error).__name__}{f': {shorten_text(text[0])}' if text else ''}{place}; "
            "--traceback shows all of it"
        ) from error


def shorten_text(text: str, limit: int = 200) -> str:
    """A line of an error, cut where it is long.

    >>> shorten_text("abcdefgh", limit=6)
    'abc...'
    """
    return text if len(text) <= limit else text[: limit - 3] + "..."


def find_model(name: str, samples: int = 8, length: int = 64, *, whole: bool = False) -> Named:
    """Make the model that a name stands for, with random weights; `whole` shows all of what its code raises."""
    if (file := config_file(name)) is not None:
        return _from_config(file, samples, length)
    if ":" not in name:
        raise StagelineError(f"a model is named as package.module:function or as a config.json, got {name!r}")
    with of_the_user(f"{name} cannot be imported", whole):
        function = find_function(name)
    with of_the_user(f"{name} failed", whole):
        made = function()
    return _understood(name, made)


def _understood(name: str, made: Any) -> Named:
    from torch import nn

    parts = made if isinstance(made, tuple) else (made,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 4:
        raise StagelineError(f"{name} returned a {type(made).__name__}; it must return {FORMS}")
    if len(parts) > 2 and callable(parts[2]):
        raise StagelineError(f"{name} returned a function as the targets; it must return {FORMS}, in this order")
    if len(parts) > 3 and parts[3] is not None and not callable(parts[3]):
        raise StagelineError(
            f"{name} returned a {type(parts[3]).__name__} as the loss function; it must return {FORMS}, where loss_fn "
            "is a function of output and targets"
        )
    return Named(*parts)


def _from_config(path: Path, samples: int, length: int) -> Named:
    found = read_config(path)
    import torch

    torch.manual_seed(0)
    model = found.make()
    if found.vocab_size is None:
        return Named(model)
    words = torch.randint(0, found.vocab_size, (samples, min(length, found.positions or length)))
    from stageline.model.huggingface import own_loss

    return Named(model, {"input_ids": words, "labels": words}, words, own_loss)
