"""Simulation: every action takes what it costs and starts as soon as it can."""

from __future__ import annotations

from functools import partial, reduce

import numpy as np

from stageline.common.errors import CostError, shorten
from stageline.schedules.dependencies import Graph
from stageline.schedules.schedule import Schedule
from stageline.schedules.verify import ensure_progress
from stageline.timeline.costs import Costs, Floats, per_stage
from stageline.timeline.sharded import run_sharded
from stageline.timeline.sharing import Shared, run_shared
from stageline.timeline.timeline import ComputedTransfers, Timeline, Transfers


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
    shards, transfers = None, None
    shared = Shared.of(costs, schedule.ranks)
    if shared and schedule.sharding is not None:
        raise CostError(
            "costs with shares or links cannot be simulated with shard actions; simulate the schedule without them"
        )
    if shared:
        hop = hop_times(schedule, costs)
        shared_hop = hop if costs.bandwidth is None else hop_times(schedule, costs, latency=False)
        start, end, arrived = run_shared(graph, durations(schedule, costs), hop, shared_hop, shared)
        transfers = Transfers(graph.receivers, end[graph.source[graph.receivers]], arrived[graph.receivers])
    elif schedule.sharding is None:
        start, end = _run(graph, durations(schedule, costs), hop_times(schedule, costs))
    else:
        start, end, shards = run_sharded(schedule, costs, durations(schedule, costs), hop_times(schedule, costs))
    moved = transfers or ComputedTransfers(partial(_transfers_to, schedule, costs, end), schedule.num_actions)
    return Timeline(schedule=schedule, start=start, end=end, transfers=moved, costs=costs, shards=shards)


def _transfers_to(schedule: Schedule, costs: Costs, end: Floats, part: slice) -> Transfers:
    """Return the messages that a range of actions receives."""
    receivers = schedule.graph.receivers_in(part)
    sent = end[schedule.graph.source[receivers]]
    return Transfers(receivers, sent, sent + _hops_to(schedule, costs, part)[receivers - part.start])


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
    times = np.empty(schedule.num_actions)
    for part in schedule.windows():
        times[part] = _hops_to(schedule, costs, part, latency)
    return times


def _hops_to(schedule: Schedule, costs: Costs, part: slice, latency: bool = True) -> Floats:
    """Return the transfer time of the input of each action of a range."""
    source, rank = schedule.graph.source[part], schedule.graph.rank[part]
    source_rank = schedule.graph.rank[source]
    crossing = (source >= 0) & (rank != source_rank)
    size = None
    if costs.bandwidth is not None:
        # The gradient that crosses a boundary is as large as the output that crossed it.
        boundary = np.minimum(schedule.stage_ids[part], schedule.stage_ids[source])
        size = per_stage("message", costs.message, schedule.stages)[boundary]
        size *= costs.scales(schedule.microbatches)[schedule.microbatch_ids[part]]
    times = costs.hops if latency else costs.byte_times
    return np.where(crossing, times(source_rank, rank, size, schedule.ranks), 0.0)


def _run(graph: Graph, duration: Floats, hop: Floats) -> tuple[Floats, Floats]:
    """Go through the waves: an entry starts when the one before it has ended and its inputs have arrived."""
    waits = graph.by_entry(hop)
    inputs = list(zip(graph.sources, waits, strict=True))
    # Both actions of a pair take the pair's time.
    taken = reduce(np.maximum, graph.by_entry(duration))
    # Without pairs, the start of an entry takes the place of its wait, which is not read again.
    start, end = waits[0] if graph.pairs is None else np.empty(graph.entries), np.zeros(graph.entries + 1)
    free = np.zeros(len(graph.first) - 1)
    for ranks, wave in graph.walk():
        now = free.take(ranks)
        for source, wait in inputs:
            np.maximum(now, end.take(source.take(wave)) + wait.take(wave), out=now)
        start[wave] = now
        now += taken.take(wave)
        end[wave] = free[ranks] = now
    return graph.by_action(start), graph.by_action(end[:-1])
