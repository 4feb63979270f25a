"""The memory of every rank over a step.

F allocates the activation at its start. B frees it at its end; I frees all but the residue, which W frees. In
inference, F frees the activation itself. The transient memory of an action is held while it runs. A sharded stage holds
its gathered parameters from UNSHARD to RESHARD, and its gradients from its first B or W to REDUCE_GRAD.
"""

from __future__ import annotations

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import single_use
from stageline.timeline.costs import Costs, Floats, per_stage


def _levels(schedule: Schedule, costs: Costs, part: slice) -> tuple[Floats, Floats]:
    """Return the memory of one rank during and after each of its actions."""
    kind, stage, microbatch = schedule.action_kinds[part], schedule.stage_ids[part], schedule.microbatch_ids[part]
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
    head = np.flatnonzero(schedule.pair_starts[part])
    # A pair holds the memory of both actions from its start to its end.
    both = during[head] + transient[head + 1]
    during[head] = during[head + 1] = both
    after[head] = both
    if schedule.sharding is not None and (np.any(costs.gathered) or np.any(costs.unreduced)):
        here, then = shard_levels(schedule, costs, part)
        return during + here, after + then
    return during, after


def shard_levels(schedule: Schedule, costs: Costs, part: slice) -> tuple[Floats, Floats]:
    """Return what sharded stages of one rank hold during and after each of its actions: gathered parameters, and
    gradients that are not reduced."""
    count = part.stop - part.start
    during, after = np.zeros(count + 1), np.zeros(count + 1)
    sharding = schedule.sharding
    if sharding is None or not count:
        return during[:-1], after[1:]
    gathered = per_stage("gathered", costs.gathered, schedule.stages)
    block = (
        gathered if costs.gathered_block is None else per_stage("gathered_block", costs.gathered_block, schedule.stages)
    )
    unreduced = per_stage("unreduced", costs.unreduced, schedule.stages)
    kind, stage_of = schedule.action_kinds[part], schedule.stage_ids[part]
    adds = (kind == kinds.B) | (kind == kinds.W)
    # At each place: first the shard actions in their order, then the first B or W of a stage.
    changes: list[list[float]] = [[] for _ in range(count + 1)]
    held: dict[int, float] = {}
    rank = int(np.searchsorted(schedule.bounds, part.start, side="right")) - 1
    for index in sharding.of_rank(rank):
        at, stage, action = int(sharding.places[index]) - part.start, sharding.stage_ids[index], sharding.kinds[index]
        if action == kinds.UNSHARD:
            held[int(stage)] = float((gathered if single_use(schedule, rank, index) is None else block)[stage])
            changes[at].append(held[int(stage)])
        else:
            changes[at].append(-float(unreduced[stage]) if action == kinds.REDUCE_GRAD else -held[int(stage)])
    level, first = 0.0, {stage: np.flatnonzero(adds & (stage_of == stage)) for stage in sharding.stages}
    starts = {int(where[0]): stage for stage, where in first.items() if len(where)}
    for at, steps in enumerate(changes):
        levels = np.cumsum([level, *steps])
        after[at], level = float(levels[1:].max(initial=levels[-1])), float(levels[-1])
        level += float(unreduced[starts[at]]) if at in starts else 0.0
        during[at] = level
    head = np.flatnonzero(schedule.pair_starts[part])
    during[head] = after[head + 1] = during[head + 1]  # of a pair, as of its second action
    return np.maximum(during[:-1], 0.0), np.maximum(after[1:], 0.0)


def peaks_of(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the peak memory of each rank."""
    levels = (np.concatenate(_levels(schedule, costs, part)) for part in schedule.slices())
    return tuple(float(level.max(initial=0.0)) for level in levels)


def memory_of(schedule: Schedule, costs: Costs, start: Floats, end: Floats, rank: int) -> tuple[Floats, Floats]:
    """Return the times at which the memory of a rank changes, and the level from each of them on."""
    part = slice(schedule.bounds[rank], schedule.bounds[rank + 1])
    times = np.stack([start[part], end[part]], axis=1).reshape(-1)
    levels = np.stack(_levels(schedule, costs, part), axis=1).reshape(-1)
    # Of a pair, keep only its common start and end.
    head = np.flatnonzero(schedule.pair_starts[part])
    keep = np.ones(len(times), dtype=bool)
    keep[2 * head + 1] = keep[2 * head + 2] = False
    return times[keep], levels[keep]
