"""The schedule: what every rank runs, in which order. Everything else reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import ScheduleError, shorten
from stageline.schedules.action import (
    KINDS,
    LARGEST_INDEX,
    OUTPUT_STEP,
    SHARD_KINDS,
    Action,
    Entry,
    F,
    Overlap,
    ShardAction,
    W,
    parse_entry,
    parse_shard_action,
)
from stageline.schedules.placement import Placement
from stageline.schedules.runs import PAIRED, ActionRun
from stageline.schedules.sharding import Sharding

if TYPE_CHECKING:
    from stageline.schedules.channels import Channels
    from stageline.schedules.dependencies import Graph


WINDOW = 1 << 22
"""How many actions or messages are copied at a time: schedules may have hundreds of millions."""


@dataclass(frozen=True, eq=False, repr=False)
class Program(Sequence[Entry]):
    """The entries of one rank, in the order in which it runs them: a view that creates them on access."""

    kinds: NDArray[np.uint8]
    stages: NDArray[np.int32]
    microbatches: NDArray[np.int32]
    heads: NDArray[np.int64] | None
    """The index of the first action of each entry; None if no entry is an overlapped pair."""

    def __len__(self) -> int:
        return len(self.kinds) if self.heads is None else len(self.heads)

    def _action(self, index: int) -> Action:
        return Action(KINDS[self.kinds[index] % PAIRED], int(self.stages[index]), int(self.microbatches[index]))

    @overload
    def __getitem__(self, key: int) -> Entry: ...
    @overload
    def __getitem__(self, key: slice) -> list[Entry]: ...
    def __getitem__(self, key: int | slice) -> Entry | list[Entry]:
        if isinstance(key, slice):
            return [self[position] for position in range(*key.indices(len(self)))]
        position = range(len(self))[key]
        index = position if self.heads is None else int(self.heads[position])
        if self.kinds[index] >= PAIRED:
            return Overlap(self._action(index), self._action(index + 1))
        return self._action(index)

    def __iter__(self) -> Iterator[Entry]:
        # Faster than indexing one by one.
        columns = zip(self.kinds.tolist(), self.stages.tolist(), self.microbatches.tolist(), strict=True)
        for kind, stage, microbatch in columns:
            action = Action(KINDS[kind % PAIRED], stage, microbatch)
            if kind >= PAIRED:
                _, stage, microbatch = second = next(columns)
                yield Overlap(action, Action(KINDS[second[0]], stage, microbatch))
            else:
                yield action

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == yours for mine, yours in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = " ".join(str(entry) for entry in self[:12])
        return f"<Program {shown}{' …' if len(self) > 12 else ''} ({len(self)} entries)>"


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """What every rank runs, in which order: data that is verified, simulated, drawn and executed.

    Create one with `stageline.schedule`, `stageline.read_schedule` or `Schedule.from_programs`.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=2, microbatches=3)
    >>> s.ranks, s.stages, s.microbatches
    (2, 2, 3)
    >>> print(" ".join(str(action) for action in s.programs[0]))
    0F0 0F1 0B0 0F2 0B1 0B2
    >>> s.rank_of(stage=1, microbatch=0)
    1

    The arrays `kinds`, `stage_ids` and `microbatch_ids` hold the actions of all ranks, one rank after the other; those
    of rank r are at `bounds[r]` to `bounds[r + 1]`.
    """

    kinds: NDArray[np.uint8]
    """How actions are stored; read `action_kinds` and `pair_starts` instead."""
    stage_ids: NDArray[np.int32]
    microbatch_ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    placement: Placement
    training: bool = True
    """False for inference: every stage runs only F."""
    name: str = "custom"
    options: Mapping[str, Any] = field(default_factory=dict)
    sharding: Sharding | None = None
    """When ranks gather parameters, free them and reduce gradients; None if no stage is sharded."""

    @classmethod
    def from_runs(
        cls,
        runs: Sequence[ActionRun],
        placement: Placement,
        *,
        training: bool = True,
        name: str = "custom",
        options: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """Create a schedule from one run of actions per rank (see `stageline.schedules.runs`)."""
        bounds = np.concatenate([[0], np.cumsum([len(run) for run in runs], dtype=np.int64)])
        kinds, stages, microbatches = (
            np.concatenate([run[:, column] for run in runs], dtype=dtype, casting="unsafe")
            for column, dtype in enumerate((np.uint8, np.int32, np.int32))
        )
        return cls(kinds, stages, microbatches, bounds, placement, training, name, dict(options or {}))

    @classmethod
    def from_programs(
        cls,
        programs: Sequence[Sequence[Entry | ShardAction | str]],
        *,
        placement: Placement | None = None,
        microbatches: int | None = None,
        training: bool | None = None,
        name: str = "custom",
        options: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """Create a schedule from one list of actions (or their text forms) per rank, shard actions included.

        Without a placement, each stage belongs to the rank that runs most of its actions. The schedule is not checked;
        use `stageline.verify`.

        >>> s = Schedule.from_programs([["0F0", "0B0"], ["1F0", "1B0"]])
        >>> s.programs[1][0]
        Action(kind='F', stage=1, microbatch=0)
        """
        if not isinstance(programs, Sequence | np.ndarray) or isinstance(programs, str):
            raise ScheduleError(f"expected one list of actions per rank, got {shorten(programs)}", rule="format")
        if len(programs) == 0:
            raise ScheduleError("a schedule needs at least one rank, got none")
        if not name.isprintable():
            raise ScheduleError(f"the name of a schedule must be printable, got {shorten(name)}", rule="format")
        encoded = [_encode(program, rank) for rank, program in enumerate(programs)]
        runs = [run for run, _ in encoded]
        if sum(map(len, runs)) == 0:
            raise ScheduleError("a schedule needs at least one action, got none", rule="complete")
        if placement is None:
            placement = infer_placement(runs, microbatches)
        if training is None:
            training = any(bool((run[:, 0] % PAIRED).any()) for run in runs)
        schedule = cls.from_runs(runs, placement, training=training, name=name, options=options)
        if not any(shards for _, shards in encoded):
            return schedule
        starts = schedule.bounds.tolist()
        rows = [[(starts[rank] + at, *row) for at, *row in shards] for rank, (_, shards) in enumerate(encoded)]
        return replace(schedule, sharding=Sharding.of(rows))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.bounds) - 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    @property
    def microbatches(self) -> int:
        """The number of microbatches per step."""
        return self.placement.microbatches

    @property
    def chunks(self) -> int:
        """The maximum number of stages of a rank, for one direction."""
        return max(int(np.bincount(row.clip(0)).max()) for row in self.placement.table)

    @property
    def num_actions(self) -> int:
        """The number of actions of all ranks; an overlapped pair counts as two."""
        return len(self.kinds)

    def slices(self) -> Iterator[slice]:
        """Return the range of actions of each rank."""
        return (slice(low, high) for low, high in pairwise(self.bounds.tolist()))

    def windows(self, size: int | None = None) -> Iterator[slice]:
        """Return ranges of actions of whole ranks, with about `size` actions each: what needs copies goes through them.

        >>> import stageline as sl
        >>> s = sl.schedule("1f1b", ranks=4, microbatches=5)
        >>> [(part.start, part.stop) for part in s.windows(size=25)]
        [(0, 20), (20, 40)]
        """
        low = 0
        while low < self.num_actions:
            last = int(np.searchsorted(self.bounds, low + (size or WINDOW), side="right")) - 1
            high = max(int(self.bounds[last]), int(self.bounds[np.searchsorted(self.bounds, low, side="right")]))
            yield slice(low, high)
            low = high

    def where(self, index: int) -> tuple[int, int]:
        """Return the rank that runs an action, and the position in its program."""
        rank = int(np.searchsorted(self.bounds, index, side="right")) - 1
        heads = self.programs[rank].heads
        inside = index - int(self.bounds[rank])
        return rank, inside if heads is None else int(np.searchsorted(heads, inside, side="right")) - 1

    def action(self, index: int) -> Action:
        """Return the action at an index, counted across all ranks."""
        return Action(KINDS[self.action_kinds[index]], int(self.stage_ids[index]), int(self.microbatch_ids[index]))

    @cached_property
    def action_kinds(self) -> NDArray[np.uint8]:
        """The kind of each action: F, B, I or W of `schedules.action`, whether or not it is part of a pair."""
        return self.kinds % np.uint8(PAIRED) if self.has_overlaps else self.kinds

    @cached_property
    def pair_starts(self) -> NDArray[np.bool_]:
        """For each action, whether it is the forward of an overlapped pair; the next action is the backward."""
        return self.kinds >= PAIRED

    @property
    def pairs(self) -> NDArray[np.int64]:
        """The index of the forward of each overlapped pair."""
        return np.flatnonzero(self.pair_starts)

    @property
    def has_overlaps(self) -> bool:
        """Whether any entry is an overlapped pair."""
        return bool(self.pair_starts.any())

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward runs in two halves."""
        return bool((self.action_kinds == W).any())

    def input_stage(self, index: int) -> int | None:
        """Return the stage whose output this action takes, or None.

        >>> import stageline as sl
        >>> s = sl.schedule("1f1b", ranks=2, microbatches=1)
        >>> [(str(s.action(index)), s.input_stage(index), s.output_stage(index)) for index in range(4)]
        [('0F0', None, 1), ('0B0', 1, None), ('1F0', 0, None), ('1B0', None, 0)]
        """
        return self._neighbour(index, -1)

    def output_stage(self, index: int) -> int | None:
        """Return the stage that takes the output of this action, or None."""
        return self._neighbour(index, 1)

    def _neighbour(self, index: int, direction: int) -> int | None:
        step = OUTPUT_STEP[self.action_kinds[index]]
        stage = int(self.stage_ids[index]) + direction * step
        return stage if step and 0 <= stage < self.stages else None

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """One sequence of entries per rank."""
        programs = []
        for part in self.slices():
            starts, heads = self.pair_starts[part], None
            if starts.any():
                heads = np.flatnonzero(~np.concatenate([[False], starts[:-1]]))
            programs.append(Program(self.kinds[part], self.stage_ids[part], self.microbatch_ids[part], heads))
        return tuple(programs)

    def lowered_program(self, rank: int) -> list[Entry | ShardAction]:
        """Return the entries of a rank with the shard actions between them."""
        program = self.programs[rank]
        if self.sharding is None:
            return list(program)
        first = int(self.bounds[rank])
        heads = range(len(program)) if program.heads is None else program.heads.tolist()
        between: dict[int, list[ShardAction]] = {}
        for index in self.sharding.of_rank(rank):
            between.setdefault(int(self.sharding.places[index]) - first, []).append(self.sharding.action(index))
        lowered: list[Entry | ShardAction] = []
        for head, entry in zip(heads, program, strict=True):
            lowered += [*between.get(head, ()), entry]
        return lowered + between.get(int(self.bounds[rank + 1]) - first, [])

    def keys(self, part: slice = slice(None)) -> NDArray[np.integer[Any]]:
        """For each action of a range, the number of its stage and microbatch: stage × microbatches + microbatch."""
        size = (self.stages + 1) * self.microbatches
        keys: NDArray[Any] = self.stage_ids[part].astype(np.int32 if size < 2**31 else np.int64)
        keys *= self.microbatches
        keys += self.microbatch_ids[part]
        return keys

    @cached_property
    def graph(self) -> Graph:
        """The dependencies of a complete schedule; computed once."""
        from stageline.schedules.dependencies import graph_of

        return graph_of(self)

    @cached_property
    def channels(self) -> Channels:
        """The messages between the ranks of a complete schedule; computed once."""
        from stageline.schedules.channels import channels_of

        return channels_of(self)

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """Return the rank that runs this stage for this microbatch."""
        return self.placement.rank_of(stage, microbatch)

    def write(self, path: str | Path) -> None:
        """Write it as JSON or as torch's compute-only CSV, depending on the file name."""
        from stageline.schedules.io import write_schedule

        write_schedule(self, path)

    def __eq__(self, other: object) -> bool:
        # Names, options and sharding do not count.
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, yours = self.placement, other.placement
        return (
            np.array_equal(self.bounds, other.bounds)
            and np.array_equal(self.kinds, other.kinds)
            and np.array_equal(self.stage_ids, other.stage_ids)
            and np.array_equal(self.microbatch_ids, other.microbatch_ids)
            and np.array_equal(mine.table, yours.table)
            and np.array_equal(mine.direction, yours.direction)
            and self.training == other.training
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.ranks} ranks, {self.stages} stages, "
            f"{self.microbatches} microbatches, {self.num_actions} actions>"
        )


def _encode(program: Sequence[Entry | ShardAction | str], rank: int) -> tuple[ActionRun, list[tuple[int, int, int]]]:
    """Convert a list of entries to a run, and shard actions to (place, kind, stage); errors name the position."""
    if not isinstance(program, Iterable) or isinstance(program, str):
        raise ScheduleError(
            f"rank {rank}: expected a list of actions, got {shorten(program)}", rule="format", rank=rank
        )
    rows: list[tuple[int, int, int]] = []
    shards: list[tuple[int, int, int]] = []
    for position, item in enumerate(program):
        try:
            entry = (parse_shard_action(item) or parse_entry(item)) if isinstance(item, str) else item
            if isinstance(entry, ShardAction):
                shards.append((len(rows), SHARD_KINDS.index(entry.kind), entry.stage))
            elif isinstance(entry, Overlap):
                rows.append(_row(entry.forward, PAIRED))
                rows.append(_row(entry.backward))
            else:
                rows.append(_row(entry))
        except ScheduleError as error:
            raise ScheduleError(
                f"rank {rank}, position {position}: {error}", rule=error.rule, rank=rank, position=position
            ) from None
    return np.array(rows, dtype=np.int32).reshape(-1, 3), shards


def _row(action: Action, flag: int = 0) -> tuple[int, int, int]:
    try:
        kind, stage, microbatch = action
        row = (KINDS.index(kind) + flag, int(stage), int(microbatch))
    except (TypeError, ValueError):
        raise ScheduleError(
            f"expected an Action(kind, stage, microbatch) of kind F, B, I or W, got {shorten(action)}",
            rule="format",
        ) from None
    if not (0 <= row[1] <= LARGEST_INDEX and 0 <= row[2] <= LARGEST_INDEX):
        raise ScheduleError(f"stage and microbatch count from 0, got {shorten(action)}", rule="known")
    return row


def only_microbatches(schedule: Schedule, count: int) -> Schedule:
    """Return the same order for the first `count` microbatches, for a batch with fewer samples than microbatches.

    Sharding is left out: its places depend on the actions.
    """
    if count == schedule.microbatches:
        return schedule
    direction = schedule.placement.direction[:count]
    placement = Placement.of(schedule.ranks, schedule.placement.table, direction)
    return replace(_select(schedule, schedule.microbatch_ids < count), placement=placement)


def forwards_of(schedule: Schedule) -> Schedule:
    """Return the schedule for inference: only its forwards, in the same order."""
    forwards = _select(schedule, schedule.action_kinds == F)
    return replace(forwards, training=False, name=f"{schedule.name}, forwards", options={})


def _select(schedule: Schedule, selected: NDArray[np.bool_]) -> Schedule:
    """Return a schedule with only these actions; an overlapped pair stays one if both of its actions are selected."""
    pairs = schedule.pair_starts & np.append(selected[1:], False)
    kinds = schedule.action_kinds + np.uint8(PAIRED) * pairs
    bounds = np.append(0, np.cumsum(selected))[schedule.bounds]
    stages, microbatches = schedule.stage_ids[selected], schedule.microbatch_ids[selected]
    return replace(
        schedule, kinds=kinds[selected], stage_ids=stages, microbatch_ids=microbatches, bounds=bounds, sharding=None
    )


def infer_placement(runs: Sequence[ActionRun], microbatches: int | None = None) -> Placement:
    """Return the placement in one direction that puts each stage on the rank that runs most of its actions."""
    total = sum(len(run) for run in runs)
    num_stages = 1 + max(int(run[:, 1].max(initial=0)) for run in runs)
    num_microbatches = 1 + max(int(run[:, 2].max(initial=0)) for run in runs)
    for count, what in ((num_stages, "stage"), (num_microbatches, "microbatch")):
        if count > total:
            raise ScheduleError(
                f"{what} {count - 1} cannot exist: the schedule has {total} actions, "
                f"and every {what} from 0 on needs one",
                rule="known",
            )
    owner = np.full(num_stages, -1, dtype=np.int32)
    most = np.zeros(num_stages, dtype=np.int64)
    for rank, run in enumerate(runs):
        counts = np.bincount(run[:, 1], minlength=num_stages)
        owner[counts > most] = rank
        most = np.maximum(most, counts)
    return Placement.of(len(runs), owner, np.zeros(microbatches or num_microbatches, dtype=np.int8))
