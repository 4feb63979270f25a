"""Placements: the rank of every stage."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stageline.common.errors import ScheduleError

Pattern: TypeAlias = Literal["loop", "v"]


@dataclass(frozen=True, eq=False)
class Placement:
    """The rank of every stage, for each direction in which microbatches travel.

    Most schedules have one direction. A schedule with two directions (chimera, dualpipe) holds each stage on two ranks,
    and the direction of a microbatch says which of them runs it.

    `table[d, s]` is the rank of stage `s` for microbatches of direction `d`; `direction[m]` is the direction of
    microbatch `m`.

    >>> Placement.v(ranks=3).table.tolist()
    [[0, 1, 2, 2, 1, 0]]
    """

    ranks: int
    table: NDArray[np.int32]
    direction: NDArray[np.int8]

    @classmethod
    def of(cls, ranks: int, table: ArrayLike, direction: ArrayLike) -> Placement:
        """Return a placement, given one row of ranks per direction and one direction per microbatch."""
        rows = np.atleast_2d(np.asarray(table, dtype=np.int32))
        return cls(ranks, rows, np.asarray(direction, dtype=np.int8))

    @classmethod
    def _one_way(cls, ranks: int, row: NDArray[np.int64], microbatches: int) -> Placement:
        return cls.of(ranks, row, np.zeros(microbatches, dtype=np.int8))

    @classmethod
    def loop(cls, ranks: int, chunks: int = 1, microbatches: int = 1) -> Placement:
        """Place the stages round the ranks: 0 1 2 0 1 2 …"""
        return cls._one_way(ranks, np.tile(np.arange(ranks), chunks), microbatches)

    @classmethod
    def v(cls, ranks: int, chunks: int = 2, microbatches: int = 1) -> Placement:
        """Place the stages down the ranks and up again: 0 1 2 2 1 0, so that a rank holds an early and a late one.

        With more than two chunks, the stages continue down and up.
        """
        down = np.arange(ranks)
        row = np.concatenate([down if chunk % 2 == 0 else down[::-1] for chunk in range(chunks)])
        return cls._one_way(ranks, row, microbatches)

    @classmethod
    def of_pattern(cls, pattern: str, ranks: int, chunks: int, microbatches: int = 1) -> Placement:
        """Place the stages by the name of the pattern: "loop" or "v"."""
        return {"loop": cls.loop, "v": cls.v}[pattern](ranks, chunks, microbatches)

    @classmethod
    def vee(cls, ranks: int, microbatches: int = 1) -> Placement:
        """Deprecated: use `Placement.v`."""
        warnings.warn("Placement.vee is deprecated; use Placement.v", DeprecationWarning, stacklevel=2)
        return cls.v(ranks, 2, microbatches)

    @classmethod
    def snake(cls, ranks: int, sweeps: int, microbatches: int = 1) -> Placement:
        """Deprecated: use `Placement.v`."""
        warnings.warn("Placement.snake is deprecated; use Placement.v", DeprecationWarning, stacklevel=2)
        return cls.v(ranks, sweeps, microbatches)

    @classmethod
    def two_way(cls, ranks: int, direction: ArrayLike) -> Placement:
        """Place stage s on rank s for microbatches of direction 0, and on rank P−1−s for those of direction 1."""
        down = np.arange(ranks)
        return cls.of(ranks, np.stack([down, down[::-1]]), direction)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return int(self.table.shape[1])

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return int(self.direction.shape[0])

    @property
    def directions(self) -> int:
        """The number of directions: 1, or 2 if every stage is on two ranks."""
        return int(self.table.shape[0])

    @property
    def pattern(self) -> Pattern | None:
        """How the stages of the first direction are placed: "loop", "v", or None for any other placement.

        With one chunk or one rank, which are both, it is "loop".

        >>> import stageline as sl
        >>> [sl.schedule(name, 4, 8).placement.pattern for name in ("interleaved", "zb-v")]
        ['loop', 'v']
        """
        chunks, rest = divmod(self.stages, self.ranks)
        patterns: tuple[Pattern, ...] = () if rest or not chunks else ("loop", "v")
        row = self.table[0]
        return next((p for p in patterns if np.array_equal(row, self.of_pattern(p, self.ranks, chunks).table[0])), None)

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """Return the rank that runs this stage for this microbatch.

        >>> Placement.two_way(4, direction=[0, 1]).rank_of(stage=0, microbatch=1)
        3
        """
        if not isinstance(stage, SupportsIndex) or not 0 <= stage < self.stages:
            raise ScheduleError(
                f"stage {stage!r} does not exist; there are {self.stages}, counted from 0", rule="known"
            )
        if not isinstance(microbatch, SupportsIndex) or not 0 <= microbatch < self.microbatches:
            raise ScheduleError(
                f"microbatch {microbatch!r} does not exist; there are {self.microbatches}, counted from 0",
                rule="known",
            )
        return int(self.table[self.direction[microbatch], stage])

    def ranks_of(
        self, stages: NDArray[np.int32], microbatches: NDArray[np.int32] | NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """Return the ranks of many actions."""
        if self.directions == 1:
            return np.asarray(self.table[0][stages])
        return np.asarray(self.table[self.direction[microbatches], stages])

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in model order.

        >>> Placement.v(ranks=4).stages_of(1)
        [1, 6]
        """
        return sorted({int(stage) for _, stage in np.argwhere(self.table == rank)})
