"""Timelines as one self-contained HTML page with hover and zoom: no network, a few bytes per action."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.common.units import format_size
from stageline.timeline.draw.palette import (
    LOOKS,
    OWN_UNIT,
    SHARD_LOOKS,
    boxes_of,
    memory_unit,
    number,
    shard_boxes,
    shown_memory,
    time_scale,
)
from stageline.timeline.idle import Idle
from stageline.timeline.timeline import Timeline

TEMPLATE = Path(__file__).with_name("page.html")
RESOLUTION = 1 << 20
"""Times are integers in units of the longest makespan divided by this: finer than any screen shows."""


def html(
    timelines: Timeline | Sequence[Timeline],
    title: str | None = None,
    *,
    names: Sequence[str] | None = None,
    seconds: bool | None = None,
    before: str = "",
) -> str:
    """Render one timeline, or several on one time axis, as a self-contained page.

    `names` are the headings, by default the names of the schedules. With `seconds`, times are in seconds and the memory
    of costs in bytes; by default, this is so if one of the steps was measured or the costs say so. `before` is HTML
    that stands before the chart.

    >>> import stageline as sl
    >>> page = html(sl.simulate(sl.schedule("zb-v", ranks=2, microbatches=4)))
    >>> "https://" in page, page.startswith("<!doctype html>")
    (False, True)
    """
    panels = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    end = max((timeline.makespan for timeline in panels), default=0.0) or 1.0
    titles = [timeline.schedule.name for timeline in panels] if names is None else names
    if seconds is None:
        seconds = bool(time_scale(panels)[1])
    data = {
        "seconds": seconds,
        "unit": OWN_UNIT,
        "until": end,
        "step": end / RESOLUTION,
        "looks": [[letter, look.meaning, look.fill, look.pale, look.ink] for letter, look in LOOKS.items()],
        "shardLooks": {letter: [look.meaning, look.fill, look.ink] for letter, look in SHARD_LOOKS.items()},
        "panels": [_panel(timeline, name, end) for timeline, name in zip(panels, titles, strict=True)],
    }
    heading = title or ", ".join(dict.fromkeys(titles))
    # Escape "<" so that no name can close the script element.
    script = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    fields = {"title": escape(heading), "data": script, "before": before}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], page)


def shown_figures(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a timeline, and the names of the causes of idle time, as pages read them."""
    return {
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubbleUncertainty": timeline.bubble_uncertainty,
        "spanBubble": timeline.span_bubble,
        "utilisation": timeline.utilisation,
        "imbalance": timeline.imbalance,
        "causes": [cause.replace("warmup", "warm-up") for cause in Idle._fields],
    }


def _panel(timeline: Timeline, name: str, end_time: float) -> dict[str, Any]:
    schedule = timeline.schedule
    boxes = boxes_of(schedule)
    look = np.array([list(LOOKS).index(letter) for letter in boxes.letter.tolist()], dtype=np.int64)
    start = np.rint((timeline.start[boxes.first] - timeline.first_start) / end_time * RESOLUTION).astype(np.int64)
    end = np.rint((timeline.end[boxes.first] - timeline.first_start) / end_time * RESOLUTION).astype(np.int64)
    pairs = np.flatnonzero(boxes.letter == "&")
    in_bytes = memory_unit(timeline) == "bytes"
    ranks = []
    for rank in range(schedule.ranks):
        on_rank = boxes.rank == rank
        previous_end = np.concatenate([[0], end[on_rank][:-1]])
        ranks.append(
            {
                "look": "".join(str(value) for value in (look[on_rank] + 5 * boxes.odd[on_rank]).tolist()),
                "stage": _collapse(schedule.stage_ids[boxes.first[on_rank]]),
                "microbatch": np.diff(schedule.microbatch_ids[boxes.first[on_rank]], prepend=np.int32(0)).tolist(),
                "gap": (start[on_rank] - previous_end).tolist(),
                "time": (end[on_rank] - start[on_rank]).tolist(),
                "idle": [round(part, 6) for part in timeline.idle[rank]],
                "peak": (format_size if in_bytes else number)(timeline.peak_memory[rank]),
            }
        )
    second = boxes.first[pairs] + 1
    origin = timeline.first_start
    shards = [[b.rank, b.letter, b.stage, b.start - origin, b.end - origin] for b in shard_boxes(timeline)]
    return {
        "shards": shards,
        "name": name,
        "memory": shown_memory(timeline),
        "memoryUnit": "" if in_bytes else memory_unit(timeline) or OWN_UNIT,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        **shown_figures(timeline),
        "ranks": ranks,
        "hosts": list(timeline.hosts) if timeline.ranks_by_host else None,
        "place": schedule.placement.table.tolist(),
        "direction": schedule.placement.direction.tolist() if schedule.placement.directions > 1 else None,
        "pairs": [schedule.stage_ids[second].tolist(), schedule.microbatch_ids[second].tolist()],
    }


def _collapse(values: NDArray[np.int32]) -> list[int]:
    """Return one number if all values are equal, as on a rank with one stage; else all values."""
    distinct = np.unique(values)
    return [int(distinct[0])] if len(distinct) == 1 else [int(value) for value in values]
