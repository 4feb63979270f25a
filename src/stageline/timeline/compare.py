"""Comparison of two timelines, action by action: two plans, or a plan and a measured step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stageline.common.errors import ScheduleError
from stageline.schedules.action import KINDS, Action
from stageline.schedules.dependencies import Ints
from stageline.timeline.costs import Floats
from stageline.timeline.timeline import Timeline, share_above


class Difference(NamedTuple):
    """One action: how much later it starts and how much longer it takes in the second timeline."""

    action: Action
    later: float
    longer: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """The differences between two timelines; positive means later or longer in the second.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=2, microbatches=2)
    >>> c = sl.compare(sl.simulate(s), sl.simulate(s, sl.Costs(forward=[1, 2])))
    >>> c.makespan, c.stage_time("F")
    (2.0, (0.0, 1.0))
    >>> c.largest(1)
    [Difference(action=Action(kind='B', stage=0, microbatch=1), later=2.0, longer=0.0)]
    """

    first: Timeline
    second: Timeline
    _match: Ints
    """For each action of the first, the same action in the second."""

    @property
    def makespan(self) -> float:
        """How much longer the step takes."""
        return self.second.makespan - self.first.makespan

    @cached_property
    def later(self) -> Floats:
        """For each action of the first timeline, how much later it starts, relative to the start of its step."""
        mine = self.first.start - self.first.first_start
        yours = self.second.start[self._match] - self.second.first_start
        return np.asarray(yours - mine)

    @cached_property
    def longer(self) -> Floats:
        """For each action of the first timeline, how much longer it takes."""
        mine = self.first.end - self.first.start
        return np.asarray((self.second.end - self.second.start)[self._match] - mine)

    def stage_time(self, kind: str) -> tuple[float, ...]:
        """Return, for each stage, how much longer an action of this kind takes on average; 0 if it has none."""
        schedule = self.first.schedule
        if kind not in KINDS:
            raise ScheduleError(f"kind must be F, B, I or W, got {kind!r}")
        selected = schedule.action_kinds == KINDS.index(kind)
        stage = schedule.stage_ids[selected]
        total = np.bincount(stage, weights=self.longer[selected], minlength=schedule.stages)
        count = np.bincount(stage, minlength=schedule.stages)
        return tuple(float(value) for value in total / np.maximum(count, 1))

    def largest(self, count: int = 10) -> list[Difference]:
        """Return the actions whose start moved most."""
        order = np.argsort(-np.abs(self.later), kind="stable")[:count]
        schedule = self.first.schedule
        return [
            Difference(schedule.action(int(index)), float(self.later[index]), float(self.longer[index]))
            for index in order
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "makespan": self.makespan,
            "span": self.second.span - self.first.span,
            "bubble": share_above(self.second.makespan, self.second.ideal)
            - share_above(self.first.makespan, self.first.ideal),
            "actions": [
                {
                    "action": str(self.first.schedule.action(index)),
                    "later": float(late),
                    "longer": float(long),
                }
                for index, (late, long) in enumerate(zip(self.later, self.longer, strict=True))
            ],
        }


def compare(first: Timeline, second: Timeline) -> Comparison:
    """Compare two timelines of the same actions, in any order."""
    one, two = first.schedule, second.schedule
    keys = [schedule.keys() * np.int64(4) + schedule.action_kinds for schedule in (one, two)]
    orders = [np.argsort(key, kind="stable") for key in keys]
    same_shape = (one.stages, one.microbatches) == (two.stages, two.microbatches)
    if not same_shape or not np.array_equal(keys[0][orders[0]], keys[1][orders[1]]):
        raise ScheduleError(
            f"cannot compare {one!r} with {two!r} action by action, because they do not run the same actions"
        )
    match = np.empty(len(keys[0]), dtype=np.int64)
    match[orders[0]] = orders[1]
    return Comparison(first, second, match)
