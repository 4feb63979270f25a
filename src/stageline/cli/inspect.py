"""`stageline inspect`: what a model is made of, and where it would be cut."""

from __future__ import annotations

from typing import Annotated

import typer

from stageline.cli.models import Length, Model, Samples, Traceback, find_model, of_the_user
from stageline.cli.options import Json
from stageline.cli.output import console, print_json


def command(
    model: Model,
    stages: Annotated[int, typer.Option("--stages", "-s", min=1, help="Show the cut into so many stages.")] = 1,
    by: Annotated[
        str, typer.Option("--by", help="How to cut: layers, parameters or type:ClassOfBlock.", show_default=True)
    ] = "layers",
    samples: Samples = 2,
    length: Length = 16,
    traceback: Traceback = False,
    json: Json = False,
) -> None:
    """Show the units of a model, in the order in which it calls them, and where it is cut into stages.

    A unit is never cut: a block of the model's stack, or a module with parameters before or after it.

    \b
    stageline inspect mypackage.models:make --stages 4
    stageline inspect config.json --stages 8 --by parameters
    """
    from stageline.model.split import split

    named = find_model(model, samples, length, whole=traceback)
    with of_the_user(f"looking at {model} failed", traceback):
        staged = split(named.model, stages, by=by, example=named.inputs)
    rows = [
        {"stage": stage, "name": unit.name, "class": type(unit.module).__name__, "block": unit.block,
         "parameters": unit.size}
        for stage, (start, stop) in enumerate(staged.cut)
        for unit in staged.units[start:stop]
    ]  # fmt: skip
    if json:
        print_json({"model": type(named.model).__name__, "stages": len(staged), "units": rows})
        return
    out = console()
    width = max([4, *(len(str(row["name"])) for row in rows)])
    kind = max([5, *(len(str(row["class"])) for row in rows)])
    out.print(
        f"{type(named.model).__name__}: {len(rows)} units, {sum(bool(row['block']) for row in rows)} of them blocks"
    )
    for row in rows:
        mark = "│" if row["block"] else " "
        out.print(
            f"  {row['stage']:>3} {mark} {row['name']:<{width}}  {row['class']:<{kind}}  {row['parameters']:>14,}"
        )
    shared = len({id(parameter) for parameter in named.model.parameters()})
    total = sum(parameter.numel() for parameter in named.model.parameters())
    out.print(f"  {total:,} parameters in {shared} tensors, those that several units share counted once")
