"""Decisions of rank 0: one process decides, and all of them get its answer or its error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stageline.common.errors import StagelineError
from stageline.distributed.rank_host import Collectives


def decide_together(host: Collectives, choose: Callable[[], Any]) -> Any:
    """Call `choose` on rank 0 of the first replica; return its answer, which JSON can hold, on all processes.

    An exception there is raised on all processes: as it is on rank 0, and as a `StagelineError` elsewhere.
    """
    answer, error = {"value": None, "error": ""}, None
    if host.replica == 0 and 0 in host.here:
        try:
            answer["value"] = choose()
        except Exception as failure:
            error = failure
            kind = "" if isinstance(failure, StagelineError) else f"{type(failure).__name__}: "
            answer["error"] = f"{kind}{failure}"
    answer = json.loads(host.broadcast_to_all(json.dumps(answer), host.layout.rows[0][0]))
    if error is not None:
        raise error
    if answer["error"]:
        raise StagelineError(answer["error"])
    return answer["value"]
