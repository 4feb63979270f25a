"""`stageline profile`: measure the units of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from stageline.cli.models import Length, ModelName, Repeats, Samples, Threads, Traceback, load_with_inputs, user_code
from stageline.cli.options import Json, output_option
from stageline.cli.output import console


def command(
    model: ModelName,
    stages: Annotated[int, Option("--stages", "-s", min=1, metavar="N", help="Show the best split into N stages.")] = 1,
    repeats: Repeats = 5,
    threads: Threads = None,
    output: Annotated[
        Path | None, output_option("--output", "-o", metavar="FILE", help="Write the profile as JSON.")
    ] = None,
    samples: Samples = 2,
    length: Length = 64,
    traceback: Traceback = False,
    json: Json = False,
) -> None:
    """Measure each unit of a model with one microbatch: time of F, I and W, memory of activations and parameters.

    Examples:
      stageline profile mypackage.models:make --output profile.json
      stageline profile config.json --samples 4 --length 512 --stages 4
    """
    from stageline.model.partition.partition import evaluate, even_sizes, partition
    from stageline.model.profiler import profile

    loaded = load_with_inputs(model, samples, length, threads, traceback)
    with user_code(f"measuring {model} failed", traceback):
        measured = profile(loaded.model, loaded.inputs, repeats=repeats)
    if output is not None:
        measured.write(output)
    if json:
        typer.echo(measured.to_text(), nl=False)
        return
    out = console()
    out.print(str(measured), markup=False)
    if stages > 1:
        names = [layer.name for layer in measured.layers]
        even = evaluate(even_sizes(len(names), stages), measured.seconds, stages, names=names)
        out.print(partition(measured.seconds, stages, names=names).chart(before=even), markup=False)
