"""Stages that became slower and stay so, told apart from the noise of a busy machine.

What is looked at is the fastest microbatch of a stage in every step. Whatever else a machine does hits some actions and
not others, so the fastest of several hardly moves; a stage that has become slower is slower in all of them. A stage is
named when its fastest times of several steps in a row are above all that its own past explains, and above what all
stages have in common. The noise is the stage's own: the median deviation of its past steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stageline.schedules import action as kinds
from stageline.schedules.schedule import Schedule
from stageline.timeline.costs import Floats

WARM_UP = 2
"""Steps at the beginning that tell nothing: memory is allocated, kernels are chosen."""
WINDOW = 7
"""Steps in a row that have to be slow."""
LEAST_PAST = 4
"""Steps before them that are needed to know what is normal."""
PAST = 60
"""Steps before them that are compared with, at most."""
SLOWER = (math.log(1.6), math.log(1.8))
"""How much slower a stage has to be, forward and backward together, or forward alone; as logarithms."""
GLANCE = math.log(1.25)
"""How far apart a stage has to be to be looked at closely."""
NOISE = 3.0
"""How many standard deviations of its own noise a stage has to be above its past."""
RARE = 0.9
"""The share of its past steps that it has to be above as well: some stages are slow now and then."""
QUIET = 100
"""Steps in which a stage is not named again."""


class Straggler(NamedTuple):
    """A stage that became slower."""

    stage: int
    rank: int
    before: float
    """Seconds that its fastest microbatch of a step used to take, forward and backward."""
    now: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes."""
        return self.now / self.before

    def __str__(self) -> str:
        """Say which stage, and by how much."""
        return (
            f"stage {self.stage} on rank {self.rank} became slower than the other stages and stays so: a microbatch "
            f"takes {self.ratio:.3g} times what it did ({1e3 * self.now:.3g} ms instead of {1e3 * self.before:.3g} ms)"
        )


class Stragglers:
    """Takes note of every step, and names the stages that became slower.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=2, microbatches=2)
    >>> watch = Stragglers(s)
    >>> steps = [watch.add([[3.0, 3.0], [1.0, 1.0]]) for _ in range(20)]
    >>> steps += [watch.add([[3.0, 6.0], [1.0, 2.0]]) for _ in range(20)]
    >>> [(step, stragglers[0].stage) for step, stragglers in enumerate(steps) if stragglers]
    [(26, 1)]
    """

    def __init__(self, schedule: Schedule) -> None:
        """Watch over the stages of a schedule."""
        self.schedule = schedule
        self._ranks = schedule.placement.table[0].tolist()
        self._groups = _Groups(schedule)
        self._steps = 0
        self._rows: deque[Floats] = deque(maxlen=PAST + WINDOW)
        """Logarithms of what stages took, in all and forward: one row a step."""
        self._named = [-QUIET] * schedule.stages
        self._normal: Floats | None = None
        """What is normal, of a few steps ago."""
        self._apart_for = np.zeros(schedule.stages, dtype=np.int64)
        """For how many steps in a row each stage has been apart from that."""

    def after(self, seconds: Floats) -> list[Straggler]:
        """Take note of a step, of which these are the lengths of all actions; see `add`."""
        return self.add(self._groups.fastest(seconds))

    def add(self, fastest: Floats | Sequence[Sequence[float]]) -> list[Straggler]:
        """Take note of what the fastest microbatch of a step took on every stage, in all and forward alone.

        Gives the stages that have just become stragglers, the worst first: mostly none.
        """
        self._steps += 1
        if self._steps <= WARM_UP:
            return []
        row: Floats = np.log(np.maximum(np.asarray(fastest, dtype=np.float64), 1e-9))
        self._rows.append(row)
        return self._test() if self._stands_out(row) else []

    def _stands_out(self, row: Floats) -> bool:
        """Whether a stage has been apart from the others for long enough to look closely; costs next to nothing."""
        count = len(self._rows)
        if self._normal is None or count < 4 * WINDOW or not self._steps % (4 * WINDOW):
            if count <= LEAST_PAST:
                return False
            self._normal = np.median(np.stack(self._rows)[: max(LEAST_PAST, count - WINDOW)], axis=0)
        above = np.abs(_apart((row - self._normal)[None])[0]).max(axis=0)
        self._apart_for = np.where(above > GLANCE, self._apart_for + 1, 0)
        return bool(count >= LEAST_PAST + WINDOW and self._apart_for.max() >= WINDOW)

    def _test(self) -> list[Straggler]:
        rows = np.stack(self._rows)
        past, last = rows[:-WINDOW], rows[-WINDOW:]
        normal = np.median(past, axis=0)
        above = _apart(last - normal)
        before = _apart(past - normal)
        noise = np.maximum(NOISE * 1.4826 * np.median(np.abs(before), axis=0), np.quantile(before, RARE, axis=0))
        limit = np.maximum(np.array(SLOWER)[:, None], noise)
        slower = (above.min(axis=0) > limit).any(axis=0)
        faster = above[:, 0].max(axis=0) < -limit[0]
        if not (slower | faster).any():
            return []
        return self._take_for_normal(np.flatnonzero(slower | faster), slower, normal[0], np.median(above, axis=0))

    def _take_for_normal(
        self, changed: np.ndarray[Any, np.dtype[np.int64]], slower: Any, normal: Floats, shift: Floats
    ) -> list[Straggler]:
        """From now on, compare with what these stages take now; tell of those that are slower."""
        for row in list(self._rows)[:-WINDOW]:
            row[:, changed] += shift[:, changed]
        self._normal = None
        self._apart_for[:] = 0
        told = [stage for stage in changed.tolist() if slower[stage] and self._steps - self._named[stage] >= QUIET]
        for stage in told:
            self._named[stage] = self._steps
        stragglers = [
            Straggler(stage, self._ranks[stage], math.exp(normal[stage]), math.exp(normal[stage] + shift[0, stage]))
            for stage in told
        ]
        return sorted(stragglers, key=lambda straggler: -straggler.ratio)


def _apart(rows: Floats) -> Floats:
    """What is left of deviations, by step, row and stage, without what all stages have in common in a step.

    The lower of two in the middle is what they have in common: one slow stage of two is what is slow.
    """
    middle = (rows.shape[2] - 1) // 2
    return rows - np.sort(rows[:, :1], axis=2)[:, :, middle : middle + 1]


class _Groups:
    """Which actions of a schedule are of one kind and stage."""

    def __init__(self, schedule: Schedule) -> None:
        key = schedule.action_kinds.astype(np.int64) * schedule.stages + schedule.stage_ids
        self._order = np.argsort(key, kind="stable")
        self._keys, self._starts = np.unique(key[self._order], return_index=True)
        self._stages = schedule.stages

    def fastest(self, seconds: Floats) -> Floats:
        """The shortest action of every kind: added up by stage, and of the forwards."""
        shortest = np.zeros(4 * self._stages)
        shortest[self._keys] = np.minimum.reduceat(seconds[self._order], self._starts)
        table = shortest.reshape(4, self._stages)
        return np.stack([table.sum(axis=0), table[kinds.F]])
