"""Models named on the command line: a function, or a Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from stageline.common.errors import StagelineError, place_of
from stageline.common.imports import find_function

if TYPE_CHECKING:
    from torch import nn

FORMS = "a model, (model, inputs), (model, inputs, targets) or (model, inputs, targets, loss_fn)"
"""What the function of a model may return."""
ModelName = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help=f"package.module:function that returns {FORMS}; or a Hugging Face config.json, or a folder that "
        "contains one.",
        show_default=False,
    ),
]
Samples = Annotated[
    int, Option(min=1, metavar="N", help="Samples in the random batch that is generated for a Hugging Face model.")
]
Length = Annotated[int, Option(min=2, metavar="N", help="Tokens per sample of that batch.")]
Repeats = Annotated[int, Option(min=1, metavar="N", help="Rounds of measurements; more are run if times vary.")]
Threads = Annotated[
    int | None, Option(min=1, metavar="N", help="Number of torch threads; use the same number as in your job.")
]
Traceback = Annotated[bool, Option("--traceback", help="Show the traceback of an error in the model's code.")]


@dataclass(frozen=True)
class LoadedModel:
    """A model and its batch."""

    model: nn.Module
    inputs: Any = None
    targets: Any = None
    loss_fn: Any = None


@contextmanager
def user_code(problem: str, traceback: bool) -> Iterator[None]:
    """Report what the user's code raises in one line, with its file and line; with `traceback`, re-raise it."""
    try:
        yield
    except StagelineError as error:
        if traceback and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
    except (ModuleNotFoundError, typer.Exit):
        raise
    except (Exception, SystemExit) as error:
        if traceback:
            raise
        lines = str(error).strip().splitlines()
        reason = f": {_cut(lines[0])}" if lines else ""
        raise StagelineError(
            f"{problem}: {type(error).__name__}{reason}{place_of(error)}; --traceback shows the full traceback"
        ) from error


def _cut(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def load_model(name: str, samples: int, length: int, *, traceback: bool) -> LoadedModel:
    """Build the model that a name stands for, with random weights; `traceback` is as for `user_code`."""
    from stageline.model.huggingface import config_file

    if (file := config_file(name)) is not None:
        return _from_config(file, samples, length)
    if ":" not in name:
        raise StagelineError(f"MODEL must be package.module:function or a config.json, got {name!r}")
    with user_code(f"{name} cannot be imported", traceback):
        function = find_function(name)
    with user_code(f"{name} failed", traceback):
        returned = function()
    return _from_returned(name, returned)


def load_with_inputs(name: str, samples: int, length: int, threads: int | None, traceback: bool) -> LoadedModel:
    """Build a model that will be measured with this many threads, and so needs inputs."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(name, samples, length, traceback=traceback)
    if loaded.inputs is None:
        raise StagelineError(f"{name} does not return inputs; it must return (model, inputs)")
    return loaded


def _from_returned(name: str, returned: Any) -> LoadedModel:
    from torch import nn

    parts = returned if isinstance(returned, tuple) else (returned,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 4:
        raise StagelineError(f"{name} returned {type(returned).__name__}; it must return {FORMS}")
    if len(parts) > 2 and callable(parts[2]):
        raise StagelineError(f"{name} returned a function as the targets; it must return {FORMS}, in this order")
    if len(parts) > 3 and parts[3] is not None and not callable(parts[3]):
        raise StagelineError(
            f"{name} returned {type(parts[3]).__name__} as the loss function; it must return {FORMS}, where loss_fn "
            "is a function of output and targets"
        )
    return LoadedModel(*parts)


def _from_config(path: Path, samples: int, length: int) -> LoadedModel:
    import torch

    from stageline.model.huggingface import own_loss, read_config

    config = read_config(path)
    torch.manual_seed(0)
    model = config.make()
    if config.vocab_size is None:
        return LoadedModel(model)
    tokens = torch.randint(0, config.vocab_size, (samples, min(length, config.positions or length)))
    return LoadedModel(model, {"input_ids": tokens, "labels": tokens}, tokens, own_loss)
