"""Why a step took longer than planned: a breakdown of the time of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stageline.common.errors import ScheduleError
from stageline.schedules.action import KINDS
from stageline.schedules.dependencies import Ints
from stageline.timeline.costs import LARGEST_COST, Costs, Floats
from stageline.timeline.idle import entry_times, leads_of, waits_of
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline


class Parts(NamedTuple):
    """The time of one rank over a step, by what it was spent on; the parts add up to the step."""

    compute: float
    slow: float
    transfer: float
    host: float
    late: float
    bubble: float

    @property
    def total(self) -> float:
        """The sum: the length of the step."""
        return sum(self)


MEANINGS = {
    "compute": "computing, within the plan",
    "slow": "computing, beyond the plan",
    "transfer": "waiting for an input in transit",
    "host": "not starting, although the input had arrived",
    "late": "waiting for other ranks, beyond the plan",
    "bubble": "waiting for other ranks, within the plan",
}
"""The meaning of each part."""


class Slow(NamedTuple):
    """The actions of one kind, stage and rank that took longer than planned."""

    kind: str
    """F, B, I or W, or & for overlapped pairs, by the stage of their forward."""
    stage: int
    rank: int
    actions: int
    """Their number."""
    planned: float
    """The average planned time of one."""
    measured: float
    """The average measured time of one."""

    @property
    def extra(self) -> float:
        """The total time beyond the plan."""
        return self.actions * (self.measured - self.planned)


@dataclass(frozen=True, eq=False)
class Explanation:
    """How every rank spent the time of a measured step, compared with a plan of the same schedule.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=2, microbatches=3)
    >>> explanation = sl.explain(sl.simulate(s), sl.simulate(s, sl.Costs(forward=[1, 2], transfer=0.5)))
    >>> explanation.ranks[1]
    Parts(compute=9.0, slow=3.0, transfer=0.5, host=0.0, late=0.5, bubble=3.0)
    >>> explanation.ranks[1].total, explanation.measured.makespan, explanation.planned.makespan
    (16.0, 16.0, 12.0)
    >>> explanation.slow[0].kind, explanation.slow[0].stage, explanation.slow[0].extra
    ('F', 1, 3.0)
    """

    planned: Timeline
    measured: Timeline
    ranks: tuple[Parts, ...]
    """The measured step of each rank."""
    planned_ranks: tuple[Parts, ...]
    """The planned step of each rank, where nothing is slow or late."""
    slow: tuple[Slow, ...]
    """The kinds of action that took longer than planned, the most expensive first."""
    has_plan: bool = True
    """Whether a plan was passed; else "planned" is what the step would do if every action took its typical time."""

    @cached_property
    def mean(self) -> Parts:
        """The average over the ranks; it also adds up to the step."""
        return Parts(*np.mean(self.ranks, axis=0).tolist())

    @cached_property
    def planned_mean(self) -> Parts:
        """The average of the plan over the ranks."""
        return Parts(*np.mean(self.planned_ranks, axis=0).tolist())

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schedule": self.measured.schedule.name,
            "has_plan": self.has_plan,
            "planned_makespan": self.planned.makespan,
            "measured_makespan": self.measured.makespan,
            "planned_utilisation": self.planned.utilisation,
            "measured_utilisation": self.measured.utilisation,
            "planned_imbalance": self.planned.imbalance,
            "measured_imbalance": self.measured.imbalance,
            "uncertainty": self.measured.uncertainty,
            "ranks": [parts._asdict() for parts in self.ranks],
            "mean": self.mean._asdict(),
            "planned_ranks": [parts._asdict() for parts in self.planned_ranks],
            "planned_mean": self.planned_mean._asdict(),
            "slow": [{**group._asdict(), "extra": group.extra} for group in self.slow],
        }


def explain(planned: Timeline | None, measured: Timeline) -> Explanation:
    """Explain how the ranks spent the time of a measured step, compared with a plan of the same schedule.

    Without a plan, one is simulated from the typical times of actions and transfers in the measured step itself.
    Compute and waiting times are compared in sum for each rank and kind of action, so that faster and slower actions
    cancel out.
    """
    has_plan = planned is not None
    if planned is None:
        planned = simulate(measured.schedule, typical_costs(measured))
    if planned.schedule != measured.schedule:
        raise ScheduleError(
            f"the plan uses {planned.schedule!r}, but the measured step {measured.schedule!r}; simulate the "
            "schedule that ran"
        )
    if not measured.is_aligned:
        raise ScheduleError(
            "the clocks of the ranks of the measured step were not aligned, so what its ranks waited for is unknown; "
            "typical_costs(measured) still returns the times of its actions"
        )
    groups = _groups(measured)
    plan, real = groups.total(planned), groups.total(measured)
    as_planned = np.minimum(plan, real)
    peer, transfer, host = _waits(measured)
    planned_peer, planned_transfer, planned_host = _waits(planned)
    bubble = np.minimum(peer, planned_peer)
    compute, slow, planned_compute = (
        _sums(groups.rank, times, measured.schedule.ranks) for times in (as_planned, real - as_planned, plan)
    )
    none = np.zeros(measured.schedule.ranks)
    return Explanation(
        planned=planned,
        measured=measured,
        ranks=_parts(compute, slow, transfer, host, peer - bubble, bubble),
        planned_ranks=_parts(planned_compute, none, planned_transfer, planned_host, none, planned_peer),
        slow=tuple(groups.slow(plan, real)),
        has_plan=has_plan,
    )


def _parts(*columns: Floats) -> tuple[Parts, ...]:
    return tuple(Parts(*row) for row in np.stack(columns, axis=1).tolist())


@dataclass(frozen=True)
class _Groups:
    """Entries grouped by kind, stage and rank."""

    member: Ints
    """For each entry, its group."""
    rank: Ints
    stage: Ints
    letter: list[str]
    count: Ints

    def total(self, timeline: Timeline) -> Floats:
        """Return the total time of the entries of each group."""
        start, end = entry_times(timeline)
        return _sums(self.member, end - start, len(self.rank))

    def slow(self, plan: Floats, real: Floats) -> list[Slow]:
        order = np.argsort(plan - real, kind="stable")
        return [
            Slow(
                self.letter[at],
                int(self.stage[at]),
                int(self.rank[at]),
                int(self.count[at]),
                float(plan[at] / self.count[at]),
                float(real[at] / self.count[at]),
            )
            for at in order.tolist()
            if real[at] > plan[at]
        ]


def _groups(timeline: Timeline) -> _Groups:
    schedule, graph = timeline.schedule, timeline.schedule.graph
    entries = graph.actions_of_entries()
    lead = leads_of(timeline)
    kind = schedule.action_kinds[lead].astype(np.int64)
    stage = schedule.stage_ids[lead].astype(np.int64)
    if len(entries) == 2:
        pairs = np.flatnonzero((entries[0] >= 0) & (entries[1] >= 0))
        kind[pairs] = len(KINDS)
        stage[pairs] = schedule.stage_ids[entries[0][pairs]]
    key = (graph.rank[lead].astype(np.int64) * (len(KINDS) + 1) + kind) * schedule.stages + stage
    keys, member, count = np.unique(key, return_inverse=True, return_counts=True)
    letters = [*KINDS, "&"]
    codes = keys // schedule.stages
    return _Groups(
        member.reshape(-1),
        codes // len(letters),
        keys % schedule.stages,
        [letters[code] for code in (codes % len(letters)).tolist()],
        count,
    )


def _sums(member: Ints, values: Floats, groups: int) -> Floats:
    return np.asarray(np.bincount(member, values, groups), dtype=np.float64)


def _waits(timeline: Timeline) -> tuple[Floats, Floats, Floats]:
    """Return how long each rank waited for peers (also at the end of the step), for transfers and for its host."""
    waits, graph = waits_of(timeline), timeline.schedule.graph
    ranks = timeline.schedule.ranks
    rank = np.repeat(np.arange(ranks), np.diff(graph.first))
    _, end = entry_times(timeline)
    last = np.full(ranks, timeline.first_start)
    runs = np.flatnonzero(np.diff(graph.first) > 0)
    last[runs] = end[graph.first[runs + 1] - 1]
    drain = np.maximum(timeline.first_start + timeline.makespan - last, 0.0)
    return (
        _sums(rank, waits.sent - waits.free, ranks) + drain,
        _sums(rank, waits.arrived - waits.sent, ranks),
        _sums(rank, waits.start - waits.arrived, ranks),
    )


def typical_costs(timeline: Timeline) -> Costs:
    """Return the costs of a measured step: the median time of each kind of action on each stage, and of a transfer.

    The time of a transfer is known only if the receiver was waiting before the message was sent. If there is none of
    these, or the clocks of the ranks were not aligned, transfers cost nothing. If the ranks are on several machines,
    there is a time for each pair of ranks.

    >>> import stageline as sl
    >>> s = sl.schedule("zb-h1", ranks=2, microbatches=4)
    >>> t = sl.simulate(s, sl.Costs(forward=[2, 3], backward_weight=[1, 5], transfer=0.25))
    >>> costs = typical_costs(t)
    >>> costs.forward, costs.backward_weight, costs.transfer
    ([2.0, 3.0], [1.0, 5.0], 0.25)
    """
    schedule = timeline.schedule
    start, end = entry_times(timeline)
    groups = _groups(timeline)
    by_group = np.split((end - start)[np.argsort(groups.member, kind="stable")], np.cumsum(groups.count)[:-1])
    taken: dict[tuple[str, int], list[float]] = {}
    for letter, stage, times in zip(groups.letter, groups.stage.tolist(), by_group, strict=True):
        taken.setdefault((letter, stage), []).extend(times.tolist())
    middle = {key: min(LARGEST_COST, float(np.median(times))) for key, times in taken.items()}

    def of(letter: str, others: list[float]) -> list[float]:
        """Return the time of this kind of action on each stage, or the other one if the stage never runs it."""
        return [middle.get((letter, stage), other) for stage, other in enumerate(others)]

    nothing = [0.0] * schedule.stages  # for actions that a stage never runs
    half = [whole / 2 for whole in of("B", nothing)]
    forward, inputs, weights = of("F", nothing), of("I", half), of("W", half)
    # A sum may exceed the maximum of a cost.
    backward = of("B", [min(LARGEST_COST, sum(halves)) for halves in zip(inputs, weights, strict=True)])
    pair = of("&", [min(LARGEST_COST, sum(both)) for both in zip(forward, backward, strict=True)])
    return Costs(
        forward=forward,
        backward_input=inputs,
        backward_weight=weights,
        backward=backward,
        overlap=pair if schedule.has_overlaps else None,
        transfer=_typical_transfer(timeline),
        in_seconds=timeline.in_seconds,
    )


def slowest_transfers(timeline: Timeline, shown: Callable[[float], str], most: int = 8) -> str:
    """Return the pairs of ranks with the slowest messages, as text; empty if the ranks are on one machine.

    >>> import stageline as sl
    >>> from dataclasses import replace
    >>> t = sl.simulate(sl.schedule("1f1b", ranks=2, microbatches=2), sl.Costs(transfer=[[0, 0.5], [0.25, 0]]))
    >>> slowest_transfers(replace(t, hosts=("a", "b")), "{:g}".format)
    'rank 0 to 1: 0.5, rank 1 to 0: 0.25'
    """
    if not timeline.ranks_by_host:
        return ""
    times = sorted(timeline.transfer_times.items(), key=lambda entry: -entry[1])
    texts = [f"rank {source} to {target}: {shown(time)}" for (source, target), time in times[:most]]
    return ", ".join(texts) + (f", and {len(times) - most} faster pairs" if len(times) > most else "")


def _typical_transfer(timeline: Timeline) -> float | list[list[float]]:
    usual, ranks = _median_transfer(timeline), range(timeline.schedule.ranks)
    if not timeline.ranks_by_host:
        return usual
    known = timeline.transfer_times
    return [
        [0.0 if source == target else min(LARGEST_COST, known.get((source, target), usual)) for target in ranks]
        for source in ranks
    ]


def _median_transfer(timeline: Timeline) -> float:
    graph, moved = timeline.schedule.graph, timeline.transfers
    entry = moved.receivers if graph.pairs is None else graph.pairs.entry_of[moved.receivers]
    waited = waits_of(timeline).free[entry] <= moved.sent
    waited &= timeline.is_aligned
    took = float(np.median(moved.arrived[waited] - moved.sent[waited])) if waited.any() else 0.0
    return min(LARGEST_COST, took)
