"""Simulation: every action takes what it costs and starts as soon as it can."""

from __future__ import annotations

import numpy as np

from stageline.common.errors import CostError, shorten
from stageline.schedules.action import REDUCE_GRAD, RESHARD, UNSHARD, W
from stageline.schedules.dependencies import Graph
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import Sharding
from stageline.schedules.verify import ensure_progress
from stageline.timeline.costs import Costs, Floats, per_stage
from stageline.timeline.sharing import Shared, run_shared
from stageline.timeline.timeline import ShardTimes, Timeline, Transfers


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Compute the start and end of every action and transfer.

    An action starts when its rank is free and its input has arrived. The actions of an overlapped pair start when both
    are ready, and end together. Transfers run in parallel with compute. So do gathers and reductions of shards; those
    of one rank run one after the other. Ranks that share cores or a GPU (`Costs.shares`) and transfers that share a
    link (`Costs.links`) slow each other down.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=4, microbatches=8)
    >>> t = sl.simulate(s, sl.Costs(forward=10, backward_input=11, backward_weight=7, transfer=1))
    >>> t.makespan
    324.0
    """
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise CostError(f"expected sl.Costs, got {shorten(costs)}")
    ensure_progress(schedule)
    costs.check_lengths(schedule.stages, schedule.microbatches)
    graph = schedule.graph
    hop = hop_times(schedule, costs)
    shards, arrived = None, None
    shared = Shared.of(costs, schedule.ranks)
    if shared and schedule.sharding is not None:
        raise CostError(
            "costs with shares or links cannot be simulated with shard actions; simulate the schedule without them"
        )
    if shared:
        shared_hop = hop if costs.bandwidth is None else hop_times(schedule, costs, latency=False)
        start, end, arrived = run_shared(graph, durations(schedule, costs), hop, shared_hop, shared)
    elif schedule.sharding is None:
        start, end = _run(graph, durations(schedule, costs), hop)
    else:
        start, end, shards = _run_sharded(schedule, schedule.sharding, costs, hop)
    sent = end[graph.source[graph.receivers]]
    transfers = Transfers(
        graph.receivers, sent, sent + hop[graph.receivers] if arrived is None else arrived[graph.receivers]
    )
    return Timeline(schedule=schedule, start=start, end=end, transfers=transfers, costs=costs, shards=shards)


def durations(schedule: Schedule, costs: Costs) -> Floats:
    """Return the time of each action; for both actions of an overlapped pair, the time of the pair."""
    times = np.stack(costs.times(schedule.stages))
    scale = costs.scales(schedule.microbatches)
    taken = times.take(schedule.action_kinds * np.int32(schedule.stages) + schedule.stage_ids)
    if costs.scale is not None:
        taken *= scale[schedule.microbatch_ids]
    pairs = schedule.pairs
    if len(pairs):
        both = taken[pairs] + taken[pairs + 1]
        if costs.overlap is not None:
            factor = (scale[schedule.microbatch_ids[pairs]] + scale[schedule.microbatch_ids[pairs + 1]]) / 2
            both = per_stage("overlap", costs.overlap, schedule.stages)[schedule.stage_ids[pairs]] * factor
        taken[pairs] = taken[pairs + 1] = both
    return taken


def hop_times(schedule: Schedule, costs: Costs, latency: bool = True) -> Floats:
    """Return the transfer time of the input of each action, or its time beyond the latency; 0 if it has none."""
    source, rank = schedule.graph.source, schedule.graph.rank
    crossing = (source >= 0) & (rank != rank[source])
    size = None
    if costs.bandwidth is not None:
        # The gradient that crosses a boundary is as large as the output that crossed it.
        boundary = np.minimum(schedule.stage_ids, schedule.stage_ids[source])
        size = per_stage("message", costs.message, schedule.stages)[boundary]
        size *= costs.scales(schedule.microbatches)[schedule.microbatch_ids]
    times = costs.hops if latency else costs.byte_times
    return np.where(crossing, times(rank[source], rank, size, schedule.ranks), 0.0)


def _run(graph: Graph, duration: Floats, hop: Floats) -> tuple[Floats, Floats]:
    """Go through the waves: an entry starts when the one before it has ended and its inputs have arrived."""
    inputs = list(zip(graph.sources, graph.by_place(hop), strict=True))
    # Both actions of a pair take the pair's time.
    taken = np.maximum.reduce(graph.by_place(duration))
    end = np.zeros(graph.places)  # fences end at 0
    for wave in graph.waves:
        now = end.take(wave - 1)
        for source, wait in inputs:
            np.maximum(now, end.take(source.take(wave)) + wait.take(wave), out=now)
        now += taken.take(wave)
        end[wave] = now
    # Computing the starts again in one pass is faster than storing them in the loop.
    start = np.concatenate([end[:1], end[:-1]])
    for source, wait in inputs:
        np.maximum(start, end[source] + wait, out=start)
    return graph.by_action(start), graph.by_action(end)


def _run_sharded(
    schedule: Schedule, sharding: Sharding, costs: Costs, hop: Floats
) -> tuple[Floats, Floats, ShardTimes]:
    """Go through the waves as `_run` does, with the shard actions between the entries.

    A gather or reduction starts when the entry before it has ended, and the one before it on its rank. An entry that
    needs parameters waits for their gather.
    """
    graph = schedule.graph
    length = {UNSHARD: per_stage("gather", costs.gather, schedule.stages)}
    length[REDUCE_GRAD] = per_stage("reduce", costs.reduce, schedule.stages)
    inputs = list(zip(graph.sources, graph.by_place(hop), strict=True))
    taken = np.maximum.reduce(graph.by_place(durations(schedule, costs)))
    needs = [part.tolist() for part in graph.by_place(np.where(schedule.action_kinds == W, 0, schedule.stage_ids + 1))]
    places = _shard_places(schedule, sharding)
    end, start = np.zeros(graph.places), np.zeros(graph.places)
    shard_start, shard_end = np.zeros(len(sharding)), np.zeros(len(sharding))
    queue = np.zeros(schedule.ranks)
    ready = np.zeros((schedule.ranks, schedule.stages + 1))  # column 0: nothing needed

    def run_shards(place: int, rank: int, now: float) -> None:
        for index in places.get(place, ()):
            kind, stage = int(sharding.kinds[index]), int(sharding.stage_ids[index])
            shard_start[index] = shard_end[index] = now
            if kind != RESHARD:
                shard_start[index] = max(now, queue[rank])
                queue[rank] = shard_end[index] = shard_start[index] + length[kind][stage]
            if kind == UNSHARD:
                ready[rank, stage + 1] = shard_end[index]

    rank_of = np.repeat(np.arange(schedule.ranks), np.diff(graph.fences)).tolist()
    for wave in graph.waves:
        for place in wave.tolist():
            rank, now = rank_of[place], float(end[place - 1])
            run_shards(place, rank, now)
            for source, wait in inputs:
                now = max(now, float(end[source[place]] + wait[place]))
            start[place] = max(now, *(float(ready[rank, stages[place]]) for stages in needs))
            end[place] = start[place] + taken[place]
    for rank, fence in enumerate(graph.fences[1:].tolist()):
        run_shards(fence, rank, float(end[fence - 1]))
    return graph.by_action(start), graph.by_action(end), ShardTimes(shard_start, shard_end)


def _shard_places(schedule: Schedule, sharding: Sharding) -> dict[int, list[int]]:
    """Return the shard actions before each place of the walk; those after a rank's last entry are at its fence."""
    graph, places = schedule.graph, dict[int, list[int]]()
    fences = graph.fences.tolist()
    for rank in range(schedule.ranks):
        for index in sharding.of_rank(rank):
            at = int(sharding.places[index])
            last = at == schedule.bounds[rank + 1]
            place = fences[rank + 1] if last else int(graph.place(np.array([at]))[0])
            places.setdefault(place, []).append(index)
    return places
