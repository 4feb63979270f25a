"""`stageline verify`: prove a schedule, or say what is wrong with it."""

from __future__ import annotations

import typer

from stageline.cli.options import Json, Sizes, Target, takes
from stageline.cli.output import console, print_json
from stageline.common.errors import ScheduleError
from stageline.schedules.verify import verify


@takes(sizes=Sizes)
def command(schedule: Target, sizes: Sizes, json: Json = False) -> None:
    """Prove that a schedule is complete and cannot deadlock, or name the rule it breaks and where.

    \b
    stageline verify mine.csv
    stageline verify zb-h1 -p 8 -m 32 --json
    """
    try:
        certificate = verify(sizes.make(schedule))
    except ScheduleError as error:
        if not json:
            raise
        found = {"rule": error.rule, "rank": error.rank, "position": error.position, "message": str(error)}
        print_json({"valid": False, **found})
        raise typer.Exit(2) from None
    if json:
        print_json({"valid": True, **certificate.to_json()})
    else:
        console().print(str(certificate), markup=False)
