"""Sharding as part of a schedule: when a rank gathers the parameters of a stage, frees them and reduces its gradients.

Shard actions stand between the entries of a program. `lower_sharding` puts them there; the rule "sharding" checks them;
memory, simulation, drawings and the executor read them. On a rank with one stage of 1F1B:

    default, never    U F0 F1 B0 F2 B1 B2 R G        gathered once a step, reduced as soon as the gradients are complete
    always            U F0 R U F1 R U B0 R … B2 R G  gathered for one action at a time, and block by block

UNSHARD (U) starts a gather and returns: the first action that needs the parameters waits for them. With a prefetch of
1, it stands one entry before that action. Parameters that are gathered for a single action are gathered block by block
while it runs: each block before it is needed, and freed after it.

F, B and I need the parameters of their stage. W needs none: it reads what I kept for it, which never includes
parameters (see `autograd.split_backward`).

All processes that share the shards of a stage run the same program, so they gather and reduce in the same order, and a
schedule that is free of deadlocks stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import ScheduleError, nearest, shorten
from stageline.schedules import action as kinds
from stageline.schedules.action import REDUCE_GRAD, RESHARD, SHARD_KINDS, UNSHARD, ShardAction

if TYPE_CHECKING:
    from stageline.schedules.schedule import Schedule

ReshardAfterForward: TypeAlias = Literal["default", "always", "never"]

RESHARD_AFTER_FORWARD = ("default", "always", "never")
"""When gathered parameters are freed: after their last use in a step, after every use; "never" is the default here, as
the next optimizer step changes them."""

_ORDER = {RESHARD: 0, UNSHARD: 1, REDUCE_GRAD: 2}
"""Of shard actions at one place: memory first, then what the next entry waits for."""


@dataclass(frozen=True, eq=False)
class Sharding:
    """The shard actions of all ranks, one rank after the other, each in the order in which the rank runs them."""

    kinds: NDArray[np.uint8]
    stage_ids: NDArray[np.int32]
    places: NDArray[np.int64]
    """For each, the action of the schedule that comes next; after the last one, the end of the rank's program."""
    bounds: NDArray[np.int64]
    """Those of rank r are at bounds[r] to bounds[r + 1]."""

    @classmethod
    def of(cls, by_rank: Sequence[Iterable[tuple[int, int, int]]]) -> Sharding:
        """Create it from (place, kind, stage) of each rank's shard actions."""
        rows = [np.array(list(rank), dtype=np.int64).reshape(-1, 3) for rank in by_rank]
        bounds = np.concatenate([[0], np.cumsum([len(part) for part in rows], dtype=np.int64)])
        places, numbers, stages = np.concatenate(rows).T
        return cls(numbers.astype(np.uint8), stages.astype(np.int32), places, bounds)

    def __len__(self) -> int:
        return len(self.kinds)

    def action(self, index: int) -> ShardAction:
        """Return the shard action at an index, counted across all ranks."""
        return ShardAction(SHARD_KINDS[self.kinds[index]], int(self.stage_ids[index]))

    def of_rank(self, rank: int) -> range:
        """Return the indices of the shard actions of a rank."""
        return range(int(self.bounds[rank]), int(self.bounds[rank + 1]))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that are sharded."""
        return tuple(np.flatnonzero(np.bincount(self.stage_ids)).tolist())

    def count(self, kind: str, rank: int | None = None) -> int:
        """Return how many shard actions of a kind a rank has, or all ranks have.

        >>> import stageline as sl
        >>> s = lower_sharding(sl.schedule("zb-v", ranks=2, microbatches=4))
        >>> s.sharding.count("UNSHARD"), s.sharding.count("REDUCE_GRAD", rank=0)
        (4, 2)
        """
        own = slice(None) if rank is None else slice(self.bounds[rank], self.bounds[rank + 1])
        return int((self.kinds[own] == SHARD_KINDS.index(kind)).sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sharding):
            return NotImplemented
        names = ("kinds", "stage_ids", "places", "bounds")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def check_option(name: str, value: Any) -> ReshardAfterForward:
    """Check that a value is one of the three options.

    >>> check_option("when", "alway")
    Traceback (most recent call last):
    stageline.ScheduleError: when must be default, always or never, got 'alway' (did you mean 'always'?)
    """
    if value not in RESHARD_AFTER_FORWARD:
        meant = nearest(str(value), RESHARD_AFTER_FORWARD)
        raise ScheduleError(f"{name} must be default, always or never, got {shorten(value)}{meant}")
    choice: ReshardAfterForward = value
    return choice


def lower_sharding(
    schedule: Schedule,
    stages: Iterable[int] | None = None,
    *,
    reshard_after_forward: ReshardAfterForward = "default",
    prefetch: int = 1,
    gathers: bool = True,
) -> Schedule:
    """Return the schedule with the shard actions of some of its stages, by default of all of them.

    `prefetch` is how many entries before its first use a gather starts. Without `gathers`, replicas hold the parameters
    whole, and only reduce the gradients.

    >>> import stageline as sl
    >>> s = lower_sharding(sl.schedule("interleaved", ranks=1, microbatches=1, chunks=2))
    >>> print(" ".join(map(str, s.lowered_program(0))))
    0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD
    >>> print(" ".join(map(str, lower_sharding(s, gathers=False).lowered_program(0))))
    0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD
    """
    always = check_option("reshard_after_forward", reshard_after_forward) == "always"
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ScheduleError(f"prefetch must be an integer >= 0, got {shorten(prefetch)}")
    sharded = set(range(schedule.stages)) if stages is None else set(stages)
    for stage in sharded:
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(f"stage {stage} does not exist; there are {schedule.stages}, counted from 0")
    by_rank = []
    for part in schedule.slices():
        own = sharded.intersection(schedule.stage_ids[part].tolist())
        heads = _heads(schedule, part)
        rows = [row for stage in sorted(own) for row in _of_stage(schedule, part, heads, stage, always, prefetch)]
        rows = rows if gathers else [row for row in rows if row[1] == REDUCE_GRAD]
        by_rank.append(sorted(rows, key=lambda row: (row[0], _ORDER[row[1]])))
    return replace(schedule, sharding=Sharding.of(by_rank) if sharded else None)


def _heads(schedule: Schedule, part: slice) -> NDArray[np.int64]:
    """The first action of each entry of a rank, and the end of its program."""
    second = np.concatenate([[False], schedule.pair_starts[part][:-1]])[: part.stop - part.start]
    return np.append(np.flatnonzero(~second) + part.start, part.stop)


def _of_stage(
    schedule: Schedule, part: slice, heads: NDArray[np.int64], stage: int, always: bool, prefetch: int
) -> list[tuple[int, int, int]]:
    """The shard actions of one stage on one rank."""
    own = np.flatnonzero(schedule.stage_ids[part] == stage) + part.start
    kind = schedule.action_kinds[own]
    entry_of = np.searchsorted(heads, own, side="right") - 1
    uses = np.flatnonzero(np.bincount(entry_of[kind != kinds.W])).tolist()
    spans = [(use, use) for use in uses] if always else [(uses[0], uses[-1])]
    rows: list[tuple[int, int, int]] = []
    freed = 0
    for first, last in spans:
        rows.append((int(heads[max(first - prefetch, freed)]), UNSHARD, stage))
        freed = last + 1
        rows.append((int(heads[freed]), RESHARD, stage))
    backwards = entry_of[kind != kinds.F]
    if len(backwards):
        rows.append((int(heads[backwards.max() + 1]), REDUCE_GRAD, stage))
    return rows


def single_use(schedule: Schedule, rank: int, index: int) -> int | None:
    """Return the only action that needs what an UNSHARD gathers; None if there are several.

    >>> import stageline as sl
    >>> s = lower_sharding(sl.schedule("1f1b", ranks=1, microbatches=1), reshard_after_forward="always")
    >>> [single_use(s, 0, index) for index in (0, 2)], single_use(lower_sharding(s), 0, 0)
    ([0, 1], None)
    """
    sharding = schedule.sharding
    assert sharding is not None
    stage, after = sharding.stage_ids[index], range(index + 1, int(sharding.bounds[rank + 1]))
    frees = (int(sharding.places[i]) for i in after if (sharding.kinds[i], sharding.stage_ids[i]) == (RESHARD, stage))
    place, end = int(sharding.places[index]), next(frees, int(schedule.bounds[rank + 1]))
    needs = (schedule.stage_ids[place:end] == stage) & (schedule.action_kinds[place:end] != kinds.W)
    return place + int(np.argmax(needs)) if needs.sum() == 1 else None


def most_gathered(sharding: Sharding) -> tuple[int, ...]:
    """Return for each rank the largest number of stages that are gathered at the same time."""
    change = np.array([1, -1, 0])[sharding.kinds]
    parts = (change[sharding.bounds[rank] : sharding.bounds[rank + 1]] for rank in range(len(sharding.bounds) - 1))
    return tuple(int(np.cumsum(part).max(initial=0)) for part in parts)
