"""Runs of actions, and functions that combine them: the vocabulary in which families are written.

A run is an array with one row per action: kind, stage, microbatch. Families combine runs instead of appending actions
one by one, which keeps them short and fast for millions of actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stageline.schedules import action as kinds

ActionRun: TypeAlias = NDArray[np.int32]

PAIRED = 8
"""Added to the kind of a forward that forms an overlapped pair with the backward in the next row."""


def _run(kind: int, stage: ArrayLike, microbatches: ArrayLike) -> ActionRun:
    column = np.asarray(microbatches, dtype=np.int32)
    rows = np.empty((column.size, 3), dtype=np.int32)
    rows[:, 0] = kind
    rows[:, 1] = stage
    rows[:, 2] = column
    return rows


def forward(stage: ArrayLike, microbatches: ArrayLike) -> ActionRun:
    """Return F of these microbatches, on one stage or on one stage each.

    >>> forward(2, range(3)).tolist()
    [[0, 2, 0], [0, 2, 1], [0, 2, 2]]
    """
    return _run(kinds.F, stage, microbatches)


def backward(stage: ArrayLike, microbatches: ArrayLike) -> ActionRun:
    """Return B of these microbatches."""
    return _run(kinds.B, stage, microbatches)


def backward_input(stage: ArrayLike, microbatches: ArrayLike) -> ActionRun:
    """Return I of these microbatches."""
    return _run(kinds.I, stage, microbatches)


def backward_weight(stage: ArrayLike, microbatches: ArrayLike) -> ActionRun:
    """Return W of these microbatches."""
    return _run(kinds.W, stage, microbatches)


def delayed_backwards(
    stage: ArrayLike, microbatches: ArrayLike, delay: int, defer: int | None
) -> list[tuple[ActionRun, int]]:
    """Return runs for `weave`: B with a delay; with `defer`, I with that delay, and W that many turns after I."""
    if defer is None:
        return [(backward(stage, microbatches), delay)]
    return [(backward_input(stage, microbatches), delay), (backward_weight(stage, microbatches), delay + defer)]


def join(*runs: ActionRun) -> ActionRun:
    """Concatenate runs."""
    return np.concatenate(runs)


def take_turns(*runs: ActionRun) -> ActionRun:
    """Alternate between runs of equal length: a0 b0 c0 a1 b1 c1 …

    >>> take_turns(forward(0, [4, 5]), backward(0, [1, 2])).tolist()
    [[0, 0, 4], [1, 0, 1], [0, 0, 5], [1, 0, 2]]
    """
    return np.stack(runs, axis=1).reshape(-1, 3)


def weave(*delayed: tuple[ActionRun, int]) -> ActionRun:
    """Alternate between runs with delays: turn i has action i − delay of each run, where it exists.

    Most families are built on it. 1F1B on a rank with two warm-up forwards:

    >>> order = weave((forward(0, range(4)), 0), (backward(0, range(4)), 2))
    >>> " ".join("FBIW"[kind] + str(microbatch) for kind, _, microbatch in order.tolist())
    'F0 F1 F2 B0 F3 B1 B2 B3'
    """
    turns = np.concatenate([np.arange(len(run)) + delay for run, delay in delayed])
    return join(*(run for run, _ in delayed))[np.argsort(turns, kind="stable")]


def by_slot(timed: Iterable[tuple[ActionRun, NDArray[np.int64]]]) -> ActionRun:
    """Sort actions by time slot."""
    runs, slots = zip(*timed, strict=True)
    return join(*runs)[np.argsort(np.concatenate(slots), kind="stable")]
