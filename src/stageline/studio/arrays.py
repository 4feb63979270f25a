"""Timelines as arrays for the page: the part that is constant while costs change, and the part that follows them.

An answer is JSON followed by the bytes of its arrays. In the JSON, an array is {"array": [type, offset, length]}.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from stageline.timeline.draw.page import shown_figures
from stageline.timeline.draw.palette import boxes_of
from stageline.timeline.idle import critical_actions
from stageline.timeline.timeline import Timeline

ALIGNMENT = 4
"""Arrays start at a multiple of this, as JavaScript's typed arrays must."""


def pack(answer: Any) -> bytes:
    """Return the bytes of an answer that contains arrays: the size of the JSON, the JSON, and the arrays.

    >>> packed = pack({"start": np.array([0.5, 1.0])})
    >>> packed[4:36]
    b'{"start":{"array":["f4",0,2]}}  '
    >>> np.frombuffer(packed[36:], "<f4").tolist()
    [0.5, 1.0]
    """
    chunks: list[bytes] = []
    size = 0

    def describe(value: object) -> dict[str, Any]:
        nonlocal size
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be sent")
        kind = {"f": "f4", "i": "i4", "u": "u1", "b": "u1"}[value.dtype.kind]
        data = np.ascontiguousarray(value, dtype="<" + kind).tobytes()
        described = {"array": [kind, size, len(value)]}
        chunks.append(data + bytes(-len(data) % ALIGNMENT))
        size += len(chunks[-1])
        return described

    text = json.dumps(answer, default=describe, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return b"".join([len(text).to_bytes(4, "little"), text, *chunks])


def structure_of(timeline: Timeline) -> dict[str, Any]:
    """Return what does not depend on times: the actions of every rank, and where their inputs come from."""
    schedule = timeline.schedule
    boxes = boxes_of(schedule)
    odd = np.zeros(schedule.num_actions, dtype=bool)
    odd[boxes.first] = boxes.odd
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "bounds": schedule.bounds.tolist(),
        "kind": schedule.action_kinds,
        "stage": schedule.stage_ids,
        "microbatch": schedule.microbatch_ids,
        "pair": schedule.pair_starts,
        "odd": odd,
        "source": schedule.graph.source,
        "hosts": list(timeline.hosts) if timeline.ranks_by_host else None,
    }


def times_of(timeline: Timeline, *, idle: bool = False) -> dict[str, Any]:
    """Return what follows the costs: times, memory, figures and the critical path; `idle` adds the causes of gaps."""
    ranks = range(timeline.schedule.ranks)
    origin = timeline.first_start
    arrived = np.full(len(timeline.start), -1.0)
    arrived[timeline.transfers.receivers] = timeline.transfers.arrived - origin
    memory = [timeline.memory(rank) for rank in ranks]
    return {
        "start": timeline.start - origin,
        "end": timeline.end - origin,
        "arrived": arrived,
        "memoryBounds": np.cumsum([0, *(len(times) for times, _ in memory)]),
        "memoryTimes": np.concatenate([times for times, _ in memory]) - origin,
        "memoryLevels": np.concatenate([levels for _, levels in memory]),
        "critical": np.array(critical_actions(timeline), dtype=np.int32),
        **shown_figures(timeline),
        "peak": [float(levels.max(initial=0.0)) for _, levels in memory],
        "busy": list(timeline.busy),
        "idle": [list(causes) for causes in timeline.idle] if idle else None,
    }
