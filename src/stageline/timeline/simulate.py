"""Simulation: every action takes the time given by the costs and starts as soon as possible.

Gathers and reductions of sharded stages run beside the actions of their rank, one after the other:

    gathered once a step        U▒▒▒▒         G▒▒▒        an action that needs parameters waits for their gather
                                     ▕F▏▕F▏▕B▏▕B▏

    block by block              U▒ ▒▒▒U▒ ▒▒▒              an action starts with its first block, and gathers the others
                                  ▕ F  ▏ ▕ B  ▏           while it runs; it ends when it has computed the last one

Most entries stand beside no shard action. They are simulated in waves, as in a schedule without sharding.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial, reduce

import numpy as np

from stageline.common.errors import CostError, shorten
from stageline.schedules.action import REDUCE_GRAD, RESHARD, UNSHARD, W
from stageline.schedules.dependencies import Graph
from stageline.schedules.schedule import Schedule
from stageline.schedules.sharding import Sharding
from stageline.schedules.verify import ensure_progress
from stageline.timeline.costs import Costs, Floats, per_stage
from stageline.timeline.sharing import Shared, run_shared
from stageline.timeline.timeline import ComputedTransfers, ShardTimes, Timeline, Transfers


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
        start, end, shards = _run_sharded(schedule, costs, durations(schedule, costs), hop_times(schedule, costs))
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


def _run_sharded(schedule: Schedule, costs: Costs, duration: Floats, hop: Floats) -> tuple[Floats, Floats, ShardTimes]:
    """Return the start and end of every action and of every shard action.

    A gather or reduction starts when the entry before it has ended, and the one before it on its rank.
    """
    assert schedule.sharding is not None
    graph, queues = schedule.graph, _Queues(schedule, schedule.sharding, costs)
    inputs = list(zip(graph.sources, graph.by_entry(hop), strict=True))
    taken = reduce(np.maximum, graph.by_entry(duration))
    end, start = np.zeros(graph.entries + 1), np.zeros(graph.entries)
    free = np.zeros(schedule.ranks)
    has_shards = np.zeros(graph.entries + 1, dtype=bool)
    has_shards[[*(entry for _, entry in queues.before), *queues.uses]] = True
    for ranks, wave in graph.walk():
        before = free.take(ranks)
        now = before.copy()
        for source, wait in inputs:
            np.maximum(now, end.take(source.take(wave)) + wait.take(wave), out=now)
        start[wave] = now
        end[wave] = free[ranks] = now + taken.take(wave)
        for at in np.flatnonzero(has_shards.take(wave)).tolist():
            rank, entry = int(ranks[at]), int(wave[at])
            queues.run(entry, rank, float(before[at]))
            start[entry], end[entry] = queues.use(entry, rank, float(now[at]), float(taken[entry]))
            free[rank] = end[entry]
    for rank, last in enumerate(graph.first[1:].tolist()):
        queues.run(last, rank, float(free[rank]))
    return graph.by_action(start), graph.by_action(end[:-1]), ShardTimes(np.array(queues.start), np.array(queues.end))


@dataclass
class _Queues:
    """The shard actions of every rank, which run one after the other."""

    schedule: Schedule
    sharding: Sharding
    costs: Costs
    before: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """The shard actions before each entry of a rank; those after its last one are at the entry that follows."""
    uses: dict[int, list[int]] = field(default_factory=dict)
    """The gathers that an entry is the first to need."""
    single: set[int] = field(default_factory=set)
    """The gathers that only one action needs: block by block, if blocks have a cost."""

    def __post_init__(self) -> None:
        stages, costs = self.schedule.stages, self.costs
        gather = per_stage("gather", costs.gather, stages)
        first = gather if costs.gather_block is None else per_stage("gather_block", costs.gather_block, stages)
        self._first_block = np.minimum(first, gather).tolist()
        self._length = {UNSHARD: gather.tolist(), RESHARD: [0.0] * stages}
        self._length[REDUCE_GRAD] = per_stage("reduce", costs.reduce, stages).tolist()
        self._kinds, self._stages = self.sharding.kinds.tolist(), self.sharding.stage_ids.tolist()
        self.start, self.end = [0.0] * len(self.sharding), [0.0] * len(self.sharding)
        self._free = [0.0] * self.schedule.ranks
        for rank in range(self.schedule.ranks):
            self._find_entries(rank)

    def _find_entries(self, rank: int) -> None:
        schedule, sharding, graph = self.schedule, self.sharding, self.schedule.graph
        part, own = slice(*schedule.bounds[rank : rank + 2].tolist()), sharding.of_rank(rank)
        entry_of = np.append(graph.entries_of(np.arange(part.start, part.stop)), graph.first[rank + 1]).tolist()
        needs: dict[int, list[int]] = {}
        needing, stage_of = np.flatnonzero(schedule.action_kinds[part] != W), schedule.stage_ids[part]
        for at, stage in zip(needing.tolist(), stage_of[needing].tolist(), strict=True):
            needs.setdefault(stage, []).append(at)
        frees: dict[int, int] = {}
        for index in reversed(own):
            kind, stage = self._kinds[index], self._stages[index]
            at = int(sharding.places[index]) - part.start
            self.before.setdefault((rank, entry_of[at]), []).insert(0, index)
            if kind == RESHARD:
                frees[stage] = at
            elif kind == UNSHARD:
                low = bisect_left(needs[stage], at)
                high = bisect_left(needs[stage], frees.get(stage, part.stop - part.start))
                self.uses.setdefault(entry_of[needs[stage][low]], []).append(index)
                if high - low == 1 and self.costs.gather_block is not None:
                    self.single.add(index)

    def run(self, entry: int, rank: int, now: float) -> None:
        """Start the shard actions before an entry, whose rank is free from `now` on."""
        for index in self.before.get((rank, entry), ()):
            kind, stage = self._kinds[index], self._stages[index]
            self.start[index] = self.end[index] = now
            if kind != RESHARD:
                length = self._first_block if index in self.single else self._length[kind]
                self.start[index] = max(now, self._free[rank])
                self._free[rank] = self.end[index] = self.start[index] + length[stage]

    def use(self, entry: int, rank: int, now: float, taken: float) -> tuple[float, float]:
        """Return the start and end of an entry that waits for its gathers, and gathers the rest while it runs."""
        indices = self.uses.get(entry, ())
        start = max([now, *(self.end[index] for index in indices)])
        end = start + taken
        for index in indices if not self.single.isdisjoint(indices) else ():
            if index in self.single:
                stage = self._stages[index]
                whole, first = self._length[UNSHARD][stage], self._first_block[stage]
                if whole > first:
                    self._free[rank] = self.end[index] = max(start, self._free[rank]) + whole - first
                    end = max(end, self.end[index] + taken * first / whole)
        return start, end
