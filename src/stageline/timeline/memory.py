"""What every rank holds over the step.

F takes its activation at its start; B gives it back at its end; I keeps the residue of it, which W gives back. In
inference, where nothing comes back, F gives it back itself.
An action's transient memory is held while it runs.
"""

from __future__ import annotations

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs, Floats, per_stage


def _levels(schedule: Schedule, costs: Costs, low: int, high: int) -> tuple[Floats, Floats]:
    """The memory of one rank during and after each of its actions."""
    plain = schedule.action_kinds[low:high]
    stage, microbatch = schedule.stage_ids[low:high], schedule.microbatch_ids[low:high]
    scale = costs.scales(schedule.microbatches)[microbatch]
    activation = per_stage("activation", costs.activation, schedule.stages)[stage] * scale
    residue = per_stage("residue", costs.residue, schedule.stages)[stage] * scale
    transient = np.stack(costs.transients(schedule.stages))[plain, stage] * scale
    takes = np.where(plain == kinds.F, activation, 0.0)
    let_go = 0.0 if schedule.training else activation
    frees = np.select(
        [plain == kinds.B, plain == kinds.I, plain == kinds.W], [activation, activation - residue, residue], let_go
    )
    after = np.maximum(np.cumsum(takes - frees), 0.0)  # rounding may leave less than nothing
    before = np.concatenate([[0.0], after[:-1]])
    during = before + takes + transient
    head = np.flatnonzero(schedule.pair_starts[low:high])
    # A pair holds what both need from its start to its end.
    both = during[head] + transient[head + 1]
    during[head] = during[head + 1] = both
    after[head] = both
    return during, after


def peaks_of(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """The most memory of each rank."""
    found = []
    for mine in schedule.slices():
        during, after = _levels(schedule, costs, mine.start, mine.stop)
        found.append(float(max(during.max(initial=0.0), after.max(initial=0.0))))
    return tuple(found)


def memory_of(schedule: Schedule, costs: Costs, start: Floats, end: Floats, rank: int) -> tuple[Floats, Floats]:
    """The times at which a rank's memory changes, and the level from each of them on."""
    low, high = int(schedule.bounds[rank]), int(schedule.bounds[rank + 1])
    during, after = _levels(schedule, costs, low, high)
    times = np.stack([start[low:high], end[low:high]], axis=1).reshape(-1)
    levels = np.stack([during, after], axis=1).reshape(-1)
    if schedule.has_overlaps:
        # The first action of a pair ends where the second does: keep the pair's common start and end.
        head = np.flatnonzero(schedule.pair_starts[low:high])
        keep = np.ones(len(times), dtype=bool)
        keep[2 * head + 1] = keep[2 * head + 2] = False
        times, levels = times[keep], levels[keep]
    return times, levels
