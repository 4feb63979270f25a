"""`stageline profile`: what the layers of a model cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stageline.cli.models import Length, Model, Samples, Traceback, find_model, of_the_user
from stageline.cli.options import Json
from stageline.cli.output import console
from stageline.common.errors import StagelineError


def command(
    model: Model,
    stages: Annotated[int, typer.Option("--stages", "-s", min=1, help="Show the best cut into so many stages.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measurements; their median counts.")] = 5,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of torch, as in your job.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Keep the profile as JSON.")
    ] = None,
    samples: Samples = 2,
    length: Length = 64,
    traceback: Traceback = False,
    json: Json = False,
) -> None:
    """Measure what the units of a model cost, one microbatch: F, I and W in time, activations and parameters in bytes.

    \b
    stageline profile mypackage.models:make --output profile.json
    stageline profile config.json --samples 4 --length 512 --stages 4
    """
    import torch

    from stageline.model.partition.partition import evaluate, even_sizes, partition
    from stageline.model.profile.profiler import profile

    if threads is not None:
        torch.set_num_threads(threads)
    named = find_model(model, samples, length, whole=traceback)
    if named.inputs is None:
        raise StagelineError(f"{model} gives no inputs; let it return (model, inputs)")
    with of_the_user(f"measuring {model} failed", traceback):
        found = profile(named.model, named.inputs, repeats=repeats)
    if output is not None:
        found.write(output)
    if json:
        typer.echo(found.to_text(), nl=False)
        return
    out = console()
    out.print(str(found), markup=False)
    if stages > 1:
        names = [layer.name for layer in found.layers]
        even = evaluate(even_sizes(len(names), stages), found.seconds, stages, names=names)
        out.print(partition(found.seconds, stages, names=names).chart(before=even), markup=False)
