"""The memory of every rank over a step.

F allocates the activation at its start. B frees it at its end; I frees all but the residue, which W frees. In
inference, F frees the activation itself. The transient memory of an action is held while it runs.
"""

from __future__ import annotations

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs, Floats, per_stage


def _levels(schedule: Schedule, costs: Costs, low: int, high: int) -> tuple[Floats, Floats]:
    """Return the memory of one rank during and after each of its actions."""
    kind = schedule.action_kinds[low:high]
    stage, microbatch = schedule.stage_ids[low:high], schedule.microbatch_ids[low:high]
    scale = costs.scales(schedule.microbatches)[microbatch]
    activation = per_stage("activation", costs.activation, schedule.stages)[stage] * scale
    residue = per_stage("residue", costs.residue, schedule.stages)[stage] * scale
    transient = np.stack(costs.transients(schedule.stages))[kind, stage] * scale
    takes = np.where(kind == kinds.F, activation, 0.0)
    otherwise = 0.0 if schedule.training else activation
    frees = np.select(
        [kind == kinds.B, kind == kinds.I, kind == kinds.W], [activation, activation - residue, residue], otherwise
    )
    after = np.maximum(np.cumsum(takes - frees), 0.0)  # rounding may leave a negative rest
    before = np.concatenate([[0.0], after[:-1]])
    during = before + takes + transient
    head = np.flatnonzero(schedule.pair_starts[low:high])
    # A pair holds the memory of both actions from its start to its end.
    both = during[head] + transient[head + 1]
    during[head] = during[head + 1] = both
    after[head] = both
    return during, after


def peaks_of(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the peak memory of each rank."""
    peaks = []
    for part in schedule.slices():
        during, after = _levels(schedule, costs, part.start, part.stop)
        peaks.append(float(max(during.max(initial=0.0), after.max(initial=0.0))))
    return tuple(peaks)


def memory_of(schedule: Schedule, costs: Costs, start: Floats, end: Floats, rank: int) -> tuple[Floats, Floats]:
    """Return the times at which the memory of a rank changes, and the level from each of them on."""
    low, high = int(schedule.bounds[rank]), int(schedule.bounds[rank + 1])
    during, after = _levels(schedule, costs, low, high)
    times = np.stack([start[low:high], end[low:high]], axis=1).reshape(-1)
    levels = np.stack([during, after], axis=1).reshape(-1)
    if schedule.has_overlaps:
        # Keep only the common start and end of a pair.
        head = np.flatnonzero(schedule.pair_starts[low:high])
        keep = np.ones(len(times), dtype=bool)
        keep[2 * head + 1] = keep[2 * head + 2] = False
        times, levels = times[keep], levels[keep]
    return times, levels
