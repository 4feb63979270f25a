"""A process that synthesizes one schedule: the request as JSON on stdin, a line of JSON for each improvement on stdout.

A process of its own, so that the page follows the sliders while a search computes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from stageline.common.errors import StagelineError
from stageline.schedules.io import schedule_lines
from stageline.synthesis.search import SearchProgress
from stageline.synthesis.synthesize import synthesize
from stageline.timeline.costs import Costs


def put(line: dict[str, Any]) -> None:
    """Write a line for the server."""
    sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")
    sys.stdout.flush()


def report(progress: SearchProgress) -> None:
    """Write the state of the search."""
    put({"progress": [progress.seconds, progress.achieved, progress.lower_bound, progress.step]})


def main() -> None:
    """Search, and write the result or the error."""
    request = json.loads(sys.stdin.read())
    try:
        result = synthesize(Costs.from_json(request.pop("costs")), progress=report, **request)
    except StagelineError as error:
        put({"error": str(error)})
        return
    final = (result.seconds, result.achieved, result.lower_bound, result.how)
    best = result.best_named
    named = None if best is None else [best, result.named[best]]
    text = "".join(schedule_lines(result.schedule))
    put({"progress": final, "gap": result.gap, "best": named, "was_cut": result.was_cut, "schedule": text})


if __name__ == "__main__":
    main()
