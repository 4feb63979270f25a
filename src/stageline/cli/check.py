"""`stageline check`: whether a model computes the same in a pipeline as alone."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from stageline.cli.models import Length, ModelName, Samples, Traceback, load_model, user_code
from stageline.cli.options import Json, complete_families
from stageline.cli.output import console, print_json
from stageline.common.errors import StagelineError

_FORMS = (
    "(model, inputs, targets, loss_fn) or, if the model's output has a loss, (model, inputs) or (model, inputs, "
    "targets)"
)


def command(
    model: ModelName,
    ranks: Annotated[int, Option("--ranks", "-p", min=1, metavar="N", help="Ranks of the pipeline.")] = 2,
    schedule: Annotated[
        str, Option(metavar="NAME", help="A family, or a schedule file.", autocompletion=complete_families)
    ] = "1f1b",
    microbatches: Annotated[
        int | None, Option("--microbatches", "-m", min=1, metavar="N", help="Microbatches. Default: twice the ranks.")
    ] = None,
    samples: Samples = 8,
    length: Length = 32,
    traceback: Traceback = False,
    json: Json = False,
) -> None:
    """Run a model with and without a pipeline on one batch, and compare loss, gradients and buffers bit by bit.

    The function returns (model, inputs, targets, loss_fn). A model whose output contains a loss, such as a Hugging Face
    model with labels, needs no loss_fn: the function can return (model, inputs), where inputs is a dict of keyword
    arguments, or (model, inputs, targets).

    The exit code is 0 for the verdicts "equal" and "reordered" (gradients are summed in a different order and differ
    only by rounding), and 1 for "different".

    Examples:
      stageline check mypackage.models:make --ranks 4 --schedule zb-v
      stageline check config.json --ranks 2
    """
    from stageline.model.huggingface import NO_LOSS, own_loss
    from stageline.runtime.check import check

    loaded = load_model(model, samples, length, traceback=traceback)
    inputs, targets = loaded.inputs, loaded.targets
    if inputs is None:
        raise StagelineError(f"{model} does not return a batch; it must return {_FORMS}")
    with user_code(f"checking {model} failed", traceback):
        try:
            report = check(
                loaded.model,
                inputs if isinstance(inputs, dict) and targets is None else (inputs, targets),
                ranks=ranks,
                schedule=schedule,
                microbatches=microbatches,
                example=inputs,
                loss_fn=loaded.loss_fn or own_loss,
            )
        except StagelineError as error:
            if loaded.loss_fn is None and NO_LOSS in str(error):
                raise StagelineError(
                    f"{model} does not return a loss function, and the model's output {NO_LOSS}; it must return "
                    f"{_FORMS}"
                ) from error
            raise
    if json:
        print_json(
            {"verdict": report.verdict, "equal": report.equal, "loss": report.loss, "alone": report.alone,
             "compared": report.compared, "reference": report.reference,
             "differing": [tensor._asdict() for tensor in report.differing],
             "reordered": [tensor._asdict() for tensor in report.reordered], "tied": list(report.tied)}
        )  # fmt: skip
    else:
        console().print(str(report))
    if report.verdict == "different":
        raise typer.Exit(1)
