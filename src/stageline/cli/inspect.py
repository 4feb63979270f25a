"""`stageline inspect`: the units of a model, and its split into stages."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from stageline.cli.models import Length, ModelName, Samples, Traceback, load_model, user_code
from stageline.cli.options import Json
from stageline.cli.output import console, print_json
from stageline.common.errors import StagelineError

RULES = ("layers", "parameters", "time")


def command(
    model: ModelName,
    stages: Annotated[int, Option("--stages", "-s", min=1, metavar="N", help="Show the split into N stages.")] = 1,
    by: Annotated[
        str, Option(metavar="RULE", help="How to split: layers, parameters, time or type:ClassOfBlock.")
    ] = "layers",
    samples: Samples = 2,
    length: Length = 16,
    traceback: Traceback = False,
    json: Json = False,
) -> None:
    """Show the units of a model in the order in which they run, and its split into stages.

    A unit is never split. It is a block of the model's stack, or a module with parameters before or after it.

    Examples:
      stageline inspect mypackage.models:make --stages 4
      stageline inspect config.json --stages 8 --by parameters
    """
    from stageline.model.split import split

    if by not in RULES and not by.startswith("type:"):
        raise StagelineError(f"--by must be {', '.join(RULES)} or type:ClassOfBlock, got {by!r}")
    loaded = load_model(model, samples, length, traceback=traceback)
    name = type(loaded.model).__name__
    with user_code(f"inspecting {model} failed", traceback):
        staged = split(loaded.model, stages, by=by, example=loaded.inputs)
    units = [(stage, unit) for stage, (start, stop) in enumerate(staged.cut) for unit in staged.units[start:stop]]
    if json:
        rows = [
            {
                "stage": stage,
                "name": unit.name,
                "class": type(unit.module).__name__,
                "block": unit.block,
                "parameters": unit.size,
            }
            for stage, unit in units
        ]
        print_json({"model": name, "stages": len(staged), "units": rows})
        return
    out = console()
    name_width = max([4, *(len(unit.name) for _, unit in units)])
    class_width = max([5, *(len(type(unit.module).__name__) for _, unit in units)])
    out.print(f"{name}: {len(units)} units, {sum(bool(unit.block) for _, unit in units)} of them blocks")
    for stage, unit in units:
        kind = type(unit.module).__name__
        mark = "│" if unit.block else " "
        out.print(f"  {stage:>3} {mark} {unit.name:<{name_width}}  {kind:<{class_width}}  {unit.size:>14,}")
    parameters = list(loaded.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    out.print(f"  {total:,} parameters in {len(parameters)} tensors; shared ones count once")
