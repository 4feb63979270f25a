"""Replanning: compare measured steps with the plan, and change the order if stages drift from it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stageline.common.checked_json import parse_json
from stageline.common.errors import StagelineError, shorten
from stageline.distributed.rank_host import decide_together
from stageline.schedules.io import schedule_from, schedule_lines
from stageline.schedules.schedule import Schedule
from stageline.synthesis.synthesize import reorder, splits
from stageline.timeline.costs import Costs, Floats
from stageline.timeline.drift import Drift, Stragglers, deviations, drift_of, typical_of
from stageline.timeline.explain import typical_costs
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

if TYPE_CHECKING:
    from stageline.distributed.rank_host import RankHost
    from stageline.planning.plan import Plan

Replan = Literal["off", "warn", "auto"]
MODES = ("off", "warn", "auto")
WINDOW = 3
"""How many steps at the end of every period count; their median does."""
TIME_LIMIT = 1.0
"""Time limit of the search for another order, in seconds; all ranks wait for it."""
LOOK_EVERY = 3
"""How many steps are searched for stragglers at a time."""
logger = logging.getLogger("stageline")


@dataclass(frozen=True)
class Replanned:
    """A change of the order: after which step, why, and the expected length of a step before and after."""

    step: int
    drift: Drift
    before: float
    after: float
    schedule: Schedule

    @property
    def timeline(self) -> Timeline:
        """The expected step from now on."""
        return simulate(self.schedule, self.drift.costs)

    def __str__(self) -> str:
        return (
            f"after step {self.step}, {self.drift}; re-planned: the step should take "
            f"{1 - self.after / self.before:.1%} less"
        )


class Watch:
    """Compares the last steps of every period with the plan, and takes a better order if there is one.

    All ranks have measured the same times; the first process decides, and broadcasts its decision.
    """

    def __init__(self, mode: Replan, every: int, planned: Costs | None, room: Sequence[float] | None) -> None:
        """`planned` are the costs of the stages, by default those of the first period; `room` is the memory of each
        rank for activations."""
        self.mode, self._every, self._planned, self._room = mode, every, planned, room
        self._knows_halves = planned is not None
        self._count = 0
        self._seen: list[Costs] = []
        self._noise: deque[Floats] = deque(maxlen=20 * WINDOW)
        self.drift: Drift | None = None
        """The result of the last period; None before its end."""

    def wants(self) -> bool:
        """Whether the last step counts."""
        position = self._count % self._every
        return self._count > 0 and position >= self._every - min(WINDOW, self._every - 1)

    def after(self, step: int, measured: Timeline | None, schedule: Schedule, host: RankHost) -> Replanned | None:
        """Add a step; at the end of a period, compare with the plan, and return a better order, if any.

        `measured` is None if the step does not count, or had fewer microbatches than the schedule. A step whose
        clocks were not aligned is left out: the length of its transfers is unknown.
        """
        if measured is not None and measured.is_aligned:
            self._seen.append(typical_costs(measured))
        self._count += 1
        if self._count % self._every or not self._seen:
            return None
        costs = self._over_replicas(typical_of(self._seen), schedule, host)
        steps = self._seen if host.layout.replicas == 1 else []  # of other replicas, only the totals are known
        self._seen = []
        if self._planned is None:
            self._planned = costs
        noise = self._note_noise(schedule, steps, costs)
        self.drift = drift_of(schedule, self._planned, costs, steps=steps, noise=noise)
        changed = self._decide(step, schedule, host)
        if self.drift.stages:
            self._planned = self.drift.costs  # warn once, and again only after another change
        return changed

    def _note_noise(self, schedule: Schedule, steps: Sequence[Costs], costs: Costs) -> Floats:
        """The noise of every stage from step to step, in the periods so far."""
        rows = [np.log(np.maximum(deviations(schedule, costs, step), 1e-9)) for step in steps]
        # Differences of neighbours: the median of three steps says little about the other two.
        self._noise.extend(later - earlier for earlier, later in pairwise(rows))
        if not self._noise:
            return np.zeros(schedule.stages)
        spread: Floats = 1.4826 * np.median(np.abs(np.stack(self._noise)), axis=0) / np.sqrt(2)
        return spread

    def _over_replicas(self, costs: Costs, schedule: Schedule, host: RankHost) -> Costs:
        """The costs of the slowest replica, for which the others wait."""
        if host.layout.replicas == 1:
            return costs
        row = np.concatenate([*map(np.asarray, costs.times(schedule.stages)), [float(np.max(costs.transfer))]])
        known: Floats = host.all_gather(row).max(axis=(0, 1))
        *times, transfer = np.split(known, [schedule.stages * (kind + 1) for kind in range(4)])
        forward, backward, first, second = (seconds.tolist() for seconds in times)
        return Costs(
            forward=forward,
            backward=backward,
            backward_input=first,
            backward_weight=second,
            transfer=float(transfer[0]),
        )

    def _decide(self, step: int, schedule: Schedule, host: RankHost) -> Replanned | None:
        """The first process warns of drift; with "auto" it searches for another order, which all processes take."""
        assert self.drift is not None
        first = host.replica == 0 and 0 in host.here
        if self.mode == "warn":
            if first and self.drift.stages:
                logger.warning("%s", f"after step {step}, {self.drift}; replan='auto' looks for a better order")
            return None

        def choose() -> dict[str, Any] | None:
            assert self.drift is not None
            if not self.drift.stages:
                return None
            known = None if self._knows_halves or splits(schedule) else False
            better = reorder(schedule, self.drift.costs, memory=self._room, split=known, time_limit=TIME_LIMIT)
            if better is None:
                logger.warning("%s", f"after step {step}, {self.drift}; no much better order was found")
                return None
            lines = "".join(schedule_lines(better.schedule))
            return {"schedule": lines, "before": better.before, "after": better.after}

        choice = decide_together(host, choose)
        if choice is None:
            return None
        order = schedule_from(parse_json(choice["schedule"]))
        changed = Replanned(step, self.drift, float(choice["before"]), float(choice["after"]), order)
        if first:
            logger.warning("%s", changed)
        return changed


class StepWatch:
    """Watches every training step for stages that become slower, and for stages that drift from the plan."""

    def __init__(self, stragglers: Stragglers | None, plan: Watch | None) -> None:
        self.stragglers, self.plan = stragglers, plan
        self.replans: list[Replanned] = []
        """The changes of the order so far."""
        self.lengths: list[tuple[int, Schedule, Floats]] = []
        """Steps that have not been searched for stragglers yet: their numbers, schedules and lengths of actions."""

    def find_stragglers(self, host: RankHost) -> None:
        """Log the stages that became slower and stay so."""
        for step, schedule, lengths in self.lengths:
            if self.stragglers is None or self.stragglers.schedule is not schedule:  # a new order starts from scratch
                self.stragglers = Stragglers(schedule)
            stragglers = self.stragglers.after(lengths)
            if stragglers:
                first, *others = stragglers
                more = f" (and {len(others)} more)" if others else ""
                where = f"replica {host.replica}, " if host.layout.replicas > 1 else ""
                logger.warning(
                    "%s", f"after step {step}, {where}{first}{more}; pass stragglers=False to turn this warning off"
                )
        self.lengths.clear()

    def compare(
        self, step: int, measured: Callable[[], Timeline] | None, schedule: Schedule, host: RankHost
    ) -> Schedule | None:
        """Compare the step with the plan; return the order to use from now on, if there is a better one."""
        assert self.plan is not None
        timeline = measured() if measured is not None and self.plan.wants() else None
        changed = self.plan.after(step, timeline, schedule, host)
        if changed is None:
            return None
        self.replans.append(changed)
        return changed.schedule


def watch_for(
    mode: Replan, every: int, planned: Costs | Plan | None, plan: Plan | None, schedule: Schedule
) -> Watch | None:
    """What compares the steps of a pipeline with their plan; None if nothing is to be done."""
    known = plan if planned is None else planned
    costs = known if known is None or isinstance(known, Costs) else getattr(known, "costs", None)
    if known is not None and not isinstance(costs, Costs):
        raise StagelineError(
            f"planned must be sl.Costs, the expected times of the stages, or a plan, got {shorten(planned)}"
        )
    if mode == "off" or not schedule.training:
        return None
    if costs is not None:
        costs.check_lengths(schedule.stages, schedule.microbatches)
    room = None
    if known is not None and not isinstance(known, Costs) and known.caps is not None:
        room = [cap - rank.total + rank.activations for cap, rank in zip(known.caps, known.memory, strict=True)]
    return Watch(mode, every, costs, room)
