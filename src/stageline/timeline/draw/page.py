"""Timelines as one self-contained page, with hover and zoom: no network, a few bytes per action."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.timeline.draw.palette import LOOKS, boxes_of
from stageline.timeline.timeline import Timeline

TEMPLATE = Path(__file__).with_name("page.html")
STEPS = 1 << 20
"""Times are written as whole steps of the longest makespan divided by this: finer than any screen shows."""


def html(
    timelines: Timeline | Sequence[Timeline], title: str | None = None, *, names: Sequence[str] | None = None
) -> str:
    """Draw one timeline, or several on one time axis, as a page that needs nothing else.

    Each stands under its schedule's name, or under the one given here.

    >>> import stageline as sl
    >>> page = html(sl.simulate(sl.schedule("zb-v", ranks=2, microbatches=4)))
    >>> "https://" in page, page.startswith("<!doctype html>")
    (False, True)
    """
    shown = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    until = max((timeline.makespan for timeline in shown), default=0.0) or 1.0
    titles = [timeline.schedule.name for timeline in shown] if names is None else names
    data = {
        "until": until,
        "step": until / STEPS,
        "looks": [[letter, look.meaning, look.fill, look.pale, look.ink] for letter, look in LOOKS.items()],
        "panels": [_panel(timeline, name, until) for timeline, name in zip(shown, titles, strict=True)],
    }
    words = title or ", ".join(dict.fromkeys(titles))
    # No "<" inside the script element, so that no name can end it early.
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    return page.replace("{{title}}", escape(words)).replace("{{data}}", packed)


def _panel(timeline: Timeline, name: str, until: float) -> dict[str, Any]:
    schedule = timeline.schedule
    boxes = boxes_of(schedule)
    look = np.array([list(LOOKS).index(letter) for letter in boxes.letter.tolist()], dtype=np.int64)
    start = np.rint((timeline.start[boxes.first] - timeline.first_start) / until * STEPS).astype(np.int64)
    end = np.rint((timeline.end[boxes.first] - timeline.first_start) / until * STEPS).astype(np.int64)
    paired = np.flatnonzero(boxes.letter == "&")
    ranks = []
    for rank in range(schedule.ranks):
        mine = boxes.rank == rank
        before = np.concatenate([[0], end[mine][:-1]])
        ranks.append(
            {
                "look": "".join(str(value) for value in (look[mine] + 5 * boxes.odd[mine]).tolist()),
                "stage": _runs(schedule.stage_ids[boxes.first[mine]]),
                "microbatch": _steps(schedule.microbatch_ids[boxes.first[mine]]),
                "gap": (start[mine] - before).tolist(),
                "time": (end[mine] - start[mine]).tolist(),
                "idle": [round(part, 6) for part in timeline.idle[rank]],
                "peak": timeline.peak_memory[rank],
            }
        )
    second = boxes.first[paired] + 1
    return {
        "name": name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubbleUncertainty": timeline.bubble_uncertainty,
        "spanBubble": timeline.span_bubble,
        "ranks": ranks,
        "place": schedule.placement.table.tolist(),
        "direction": schedule.placement.direction.tolist() if schedule.placement.directions > 1 else None,
        "pairs": [schedule.stage_ids[second].tolist(), schedule.microbatch_ids[second].tolist()],
    }


def _steps(values: NDArray[np.int32]) -> list[int]:
    """Each value as its difference from the one before: mostly one figure."""
    return [int(value) for value in np.diff(values, prepend=np.int32(0))]


def _runs(values: NDArray[np.int32]) -> list[int]:
    """One number where all values are the same, as on a rank with one stage; else every value."""
    distinct = np.unique(values)
    return [int(distinct[0])] if len(distinct) == 1 else [int(value) for value in values]
