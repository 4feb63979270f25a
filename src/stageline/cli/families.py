"""`stageline families`: list the schedule families."""

from __future__ import annotations

from stageline.cli.options import Json, Load, load_families
from stageline.cli.output import console, print_json, table
from stageline.schedules.registry import families


def command(json: Json = False, load: Load = None) -> None:
    """List the schedule families with their requirements and options.

    Examples:
      stageline families
      stageline families --load my_families.py --json
    """
    load_families(load)
    known = families().values()
    if json:
        shown = ("name", "description", "constraints", "options", "aliases")
        print_json([{field: getattr(family, field) for field in shown} for family in known])
        return
    columns = ("family", "description", "requires", "options")
    grid = table(*columns, left=columns)
    grid.columns[0].no_wrap = True
    for family in known:
        options = ", ".join(f"{name}={'P' if value is None else value}" for name, value in family.options.items())
        grid.add_row(family.name, family.description, family.constraints or "any P, any M", options)
    console().print(grid)
