"""`stageline check`: whether a model computes in a pipeline what it computes alone."""

from __future__ import annotations

from typing import Annotated

import typer

from stageline.cli.models import Length, Model, Samples, Traceback, find_model, of_the_user
from stageline.cli.options import Json
from stageline.cli.output import console, print_json
from stageline.common.errors import StagelineError

_FORMS = (
    "(model, inputs, targets, loss_fn), or, where the model's output has a loss, (model, inputs) or "
    "(model, inputs, targets)"
)


def command(
    model: Model,
    ranks: Annotated[int, typer.Option("--ranks", "-p", min=1, help="Ranks of the pipeline.")] = 2,
    schedule: Annotated[str, typer.Option("--schedule", help="A family, or a file of a schedule.")] = "1f1b",
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", min=1, help="Parts of the batch; twice the ranks otherwise.")
    ] = None,
    samples: Samples = 8,
    length: Length = 32,
    traceback: Traceback = False,
    json: Json = False,
) -> None:
    """Run a model alone and in a pipeline on the same batch, and compare the loss, gradients and buffers bit by bit.

    The function returns (model, inputs, targets, loss_fn). A model whose output has a loss, as those of Hugging Face
    given labels, needs no loss_fn: (model, inputs) will do, with a dict of keywords as inputs, and so will
    (model, inputs, targets).

    Ends with 0 where the verdict is "equal" or "reordered" (gradients that are added in another order, and differ by
    rounding alone), and with 1 where it is "different".

    \b
    stageline check mypackage.models:make --ranks 4 --schedule zb-v
    stageline check config.json --ranks 2
    """
    from stageline.runtime.check import check

    named = find_model(model, samples, length, whole=traceback)
    if named.inputs is None:
        raise StagelineError(f"{model} gives no batch; let it return {_FORMS}")
    batch = named.inputs if isinstance(named.inputs, dict) and named.targets is None else (named.inputs, named.targets)
    from stageline.model.huggingface import NO_LOSS, own_loss

    with of_the_user(f"checking {model} failed", traceback):
        try:
            report = check(
                named.model, batch, ranks=ranks, schedule=schedule, microbatches=microbatches, example=named.inputs,
                loss_fn=named.loss_fn or own_loss,
            )  # fmt: skip
        except StagelineError as error:
            if named.loss_fn is None and NO_LOSS in str(error):
                raise StagelineError(
                    f"{model} gives no loss function, and the model's output {NO_LOSS}; let it return {_FORMS}"
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
