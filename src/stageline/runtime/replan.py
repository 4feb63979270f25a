"""Closing the loop: measured steps against the plan, and another order where stages drift from it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stageline.common.checked_json import parse_json
from stageline.common.errors import StagelineError, nearest, shorten
from stageline.distributed.decision import decide
from stageline.planning.reorder import reorder, splits
from stageline.schedules.io import schedule_from, schedule_lines
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Costs, Floats
from stageline.timeline.drift import Drift, deviations, drift_of, typical_of
from stageline.timeline.explain import typical_costs
from stageline.timeline.simulate import simulate
from stageline.timeline.timeline import Timeline

if TYPE_CHECKING:
    from stageline.distributed.rank_host import World
    from stageline.planning.plan import Plan

Replan = Literal["off", "warn", "auto"]
MODES = ("off", "warn", "auto")
WINDOW = 3
"""Of how many steps, the last of every period, the median counts."""
TIME_LIMIT = 1.0
"""Seconds that the search for another order may take; all ranks wait for it."""
logger = logging.getLogger("stageline")


@dataclass(frozen=True)
class Replanned:
    """An order that was changed: after which step, why, and what a step was expected to take before and after."""

    step: int
    drift: Drift
    before: float
    after: float
    schedule: Schedule

    @property
    def timeline(self) -> Timeline:
        """The step that is expected from now on."""
        return simulate(self.schedule, self.drift.costs)

    def __str__(self) -> str:
        """Say what was done."""
        return (
            f"after step {self.step}, {self.drift}; re-planned: the step should take "
            f"{1 - self.after / self.before:.1%} less"
        )


def check_replan(mode: Any, every: Any) -> None:
    """Refuse what is no way to re-plan."""
    if mode not in MODES:
        raise StagelineError(f"replan is 'off', 'warn' or 'auto', got {shorten(mode)}{nearest(str(mode), MODES)}")
    if not isinstance(every, int) or isinstance(every, bool) or every < 2:
        raise StagelineError(f"replan_every is a number of steps from 2 on, got {shorten(every)}")


class Watch:
    """Looks at the last steps of every period, and says at its end which stages drift and what to do about it.

    All ranks have measured the same times; what is decided from them is decided by the first process and told to all.
    """

    def __init__(self, mode: Replan, every: int, planned: Costs | None, room: Sequence[float] | None) -> None:
        """`planned` is what stages should take: what the first period measures unless given. `room` is what ranks may
        hold of activations."""
        self.mode, self._every, self._planned, self._room = mode, every, planned, room
        self._knows_halves = planned is not None
        self._count = 0
        self._seen: list[Costs] = []
        self._noise: deque[Floats] = deque(maxlen=20 * WINDOW)
        self.drift: Drift | None = None
        """What the last period showed; None before it ended."""

    def wants(self) -> bool:
        """Whether the step that was just made is to be looked at."""
        position = self._count % self._every
        return self._count > 0 and position >= self._every - min(WINDOW, self._every - 1)

    def after(self, step: int, measured: Timeline | None, schedule: Schedule, world: World) -> Replanned | None:
        """Take note of a step; at the end of a period, compare with the plan, and give back a better order, if any.

        `measured` is None where the step is not to be looked at, or had fewer microbatches than the schedule. One whose
        ranks' clocks were not aligned is left out: what its transfers took is not known.
        """
        if measured is not None and measured.is_aligned:
            self._seen.append(typical_costs(measured))
        self._count += 1
        if self._count % self._every or not self._seen:
            return None
        costs = self._over_replicas(typical_of(self._seen), schedule, world)
        steps = self._seen if world.layout.replicas == 1 else []  # the costs of others are known only in all
        self._seen = []
        if self._planned is None:
            self._planned = costs
        noise = self._note_noise(schedule, steps, costs)
        self.drift = drift_of(schedule, self._planned, costs, steps=steps, noise=noise)
        changed = self._decide(step, schedule, world)
        if self.drift.stages:
            self._planned = self.drift.costs  # it is said once, and again only if it changes once more
        return changed

    def _note_noise(self, schedule: Schedule, steps: Sequence[Costs], costs: Costs) -> Floats:
        """How much every stage varies from step to step by itself, in the periods so far."""
        rows = [np.log(np.maximum(deviations(schedule, costs, step), 1e-9)) for step in steps]
        # Differences of neighbours: the middle of three steps is no measure for the other two.
        self._noise.extend(later - earlier for earlier, later in pairwise(rows))
        if not self._noise:
            return np.zeros(schedule.stages)
        spread: Floats = 1.4826 * np.median(np.abs(np.stack(self._noise)), axis=0) / np.sqrt(2)
        return spread

    def _over_replicas(self, costs: Costs, schedule: Schedule, world: World) -> Costs:
        """What stages take in the slowest replica, which the others wait for."""
        if world.layout.replicas == 1:
            return costs
        row = np.concatenate(
            [np.asarray(each) for each in costs.times(schedule.stages)] + [[float(np.max(costs.transfer))]]
        )
        known: Floats = world.all_gather(row).max(axis=(0, 1))
        *times, transfer = np.split(known, [schedule.stages * (each + 1) for each in range(4)])
        forward, backward, first, second = (each.tolist() for each in times)
        return Costs(
            forward=forward,
            backward=backward,
            backward_input=first,
            backward_weight=second,
            transfer=float(transfer[0]),
        )

    def _decide(self, step: int, schedule: Schedule, world: World) -> Replanned | None:
        """The first process says what drifts; with "auto" it looks for another order, and all take that."""
        assert self.drift is not None
        first = world.replica == 0 and 0 in world.here
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
                logger.warning("%s", f"after step {step}, {self.drift}; no order found is much better")
                return None
            lines = "".join(schedule_lines(better.schedule))
            return {"schedule": lines, "before": better.before, "after": better.after}

        choice = decide(world, choose)
        if choice is None:
            return None
        order = schedule_from(parse_json(choice["schedule"]))
        changed = Replanned(step, self.drift, float(choice["before"]), float(choice["after"]), order)
        if first:
            logger.warning("%s", changed)
        return changed


def watch_for(
    mode: Replan, every: int, planned: Costs | Plan | None, plan: Plan | None, schedule: Schedule
) -> Watch | None:
    """What watches a pipeline; None where nothing is to be done."""
    check_replan(mode, every)
    known = plan if planned is None else planned
    costs = known if known is None or isinstance(known, Costs) else getattr(known, "costs", None)
    if known is not None and not isinstance(costs, Costs):
        raise StagelineError(f"planned is sl.Costs, what the stages should take, or a plan, got {shorten(planned)}")
    if mode == "off" or not schedule.training:
        return None
    if costs is not None:
        costs.check_lengths(schedule.stages, schedule.microbatches)
    room = None
    if known is not None and not isinstance(known, Costs) and known.caps is not None:
        room = [cap - rank.total + rank.activations for cap, rank in zip(known.caps, known.memory, strict=True)]
    return Watch(mode, every, costs, room)
