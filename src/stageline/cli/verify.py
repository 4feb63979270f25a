"""`stageline verify`: check a schedule against the rules."""

from __future__ import annotations

import typer

from stageline.cli.options import Json, ScheduleName, ScheduleOptions, expand
from stageline.cli.output import console, print_json
from stageline.common.errors import ScheduleError
from stageline.schedules.verify import verify


@expand
def command(schedule: ScheduleName, sizes: ScheduleOptions, json: Json = False) -> None:
    """Verify that a schedule is complete and cannot deadlock, or name the rule it breaks and where.

    Examples:
      stageline verify mine.csv
      stageline verify zb-h1 -p 8 -m 32 --json
    """
    try:
        certificate = verify(sizes.make(schedule))
    except ScheduleError as error:
        if not json:
            raise
        place = {"rule": error.rule, "rank": error.rank, "position": error.position}
        print_json({"valid": False, **place, "message": str(error)})
        raise typer.Exit(2) from None
    if json:
        print_json({"valid": True, **certificate.to_json()})
    else:
        console().print(str(certificate), markup=False)
