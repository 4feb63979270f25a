"""`stageline families`: what there is."""

from __future__ import annotations

from typing import Annotated

import typer

from stageline.cli.options import Json, load_families
from stageline.cli.output import console, print_json
from stageline.schedules.registry import families


def command(
    json: Json = False,
    load: Annotated[
        list[str] | None,
        typer.Option("--load", metavar="FILE.py", help="Load a file or module with families of your own."),
    ] = None,
) -> None:
    """List the schedule families, what each is for and what it asks.

    \b
    stageline families
    """
    for name in load or []:
        load_families(name)
    known = families()
    if json:
        print_json(
            [
                {
                    "name": family.name,
                    "description": family.description,
                    "constraints": family.constraints,
                    "options": family.options,
                    "aliases": list(family.aliases),
                }
                for family in known.values()
            ]
        )
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("family", "what it is", "asks", "options"):
        table.add_column(column, no_wrap=column == "family", overflow="fold")
    for family in known.values():
        options = ", ".join(f"{name}={'P' if value is None else value}" for name, value in family.options.items())
        table.add_row(family.name, family.description, family.constraints or "any P, any M", options)
    console().print(table)
