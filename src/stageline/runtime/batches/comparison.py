"""Comparing the batches of all ranks and replicas: each process sends a row of numbers, and all see who differs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stageline.common.errors import PipelineError
from stageline.distributed.layout import Layout
from stageline.distributed.rank_host import Floats, RankHost


class BatchRow(NamedTuple):
    """What this process knows of a step's batch."""

    samples: int | None
    """None if it received nothing."""
    row: Floats
    """The numbers of `NAMES`, to be compared between processes; 0 for what this process did not receive, -1 for
    what it refused."""
    digests: Callable[[], Sequence[float]] | None = None
    """Computes the numbers of the inputs, targets and keyword inputs, if a GPU has to send them first."""

    def complete(self) -> Floats:
        """The numbers, with all digests."""
        if self.digests is not None:
            self.row[1:4] = self.digests()
        return self.row


REFUSED = (0.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0)
"""The row of a process that refused its batch."""
NAMES = (
    "the number of samples",
    "the inputs",
    "the targets",
    "the keyword inputs of all stages",
    "scale=",
    "count=",
    "the mode of the model",
)
SCALE, COUNT, MODE = 4, 5, 6
MODES = {1.0: "model.eval()", 2.0: "model.train()"}


def difference(rows: Floats, columns: Collection[int], names: Sequence[str] | None = None) -> str:
    """Say which ranks received different batches; empty if there is no difference.

    `names` are those of the processes, if they are not rank 0, rank 1, and so on.

    >>> difference(np.array([[8.0, 5, 0, 0], [0, 0, 0, 0], [8, 6, 0, 0]]), [0, 1])
    'rank 2 received a different batch from rank 0: the inputs differ'
    >>> difference(np.array([[8.0, 5, 0, 0, 1.0], [8, 5, 0, 0, 0.5]]), [0, 4])
    'rank 1 and rank 0 differ in scale=: rank 1 has 0.5 and rank 0 has 1.0; pass the same on all ranks'
    """
    for column in columns:
        first_rows = {
            value: int(np.argmax(rows[:, column] == value)) for value in rows[:, column].tolist() if value > 0
        }
        if len(first_rows) > 1:
            rows_apart = sorted(first_rows.values())[:2]
            first, second = (f"rank {rank}" if names is None else names[rank] for rank in rows_apart)
            if column >= SCALE:
                values = (float(rows[row, column]) for row in rows_apart)
                one, two = (MODES[value] if column == MODE else repr(value) for value in values)
                return (
                    f"{second} and {first} differ in {NAMES[column]}: {second} has {two} and {first} has {one}; pass "
                    "the same on all ranks"
                )
            return f"{second} received a different batch from {first}: {NAMES[column]} differ"
    return ""


def disagreement(
    rows: Floats,
    columns: Collection[int],
    needs: Mapping[int, Collection[int]],
    names: Sequence[str] | None = None,
) -> str:
    """Say what is wrong with the batches of the ranks: they differ, or a rank that reads them received none.

    `needs` says for the inputs and for the targets which ranks read them. Targets may be None, but on all ranks.

    >>> disagreement(np.array([[8.0, 5, 7, 0], [8, 5, 0, 0]]), [0, 1, 2], {1: {0}, 2: {1}})
    'rank 0 received the targets, but rank 1, which reads them, received None; pass them to rank 1'
    """
    apart = difference(rows, columns, names)
    if apart:
        return apart
    for column in (1, 2):
        if column not in columns or (rows[:, column] < 0).any():  # the rank that refused it reports why
            continue
        holders = np.flatnonzero(rows[:, column] > 0)
        if not len(holders):
            if column == 1:
                return f"no rank received {NAMES[column]}"
            continue
        for rank in sorted(needs[column]):
            if not rows[rank, column]:
                one, two = (f"rank {int(row)}" if names is None else names[int(row)] for row in (holders[0], rank))
                return f"{one} received {NAMES[column]}, but {two}, which reads them, received None; pass them to {two}"
    return ""


# Replicas, and rows of a larger mesh.

RUN, TARGETS, ELEMENTS, FAILED = range(len(NAMES), len(NAMES) + 4)
"""Columns of the row that a process of a replica sends, after the columns of its batch."""
COMMON = {RUN: "the call", TARGETS: "count=", SCALE: "scale="}
REMEDIES = {
    RUN: "make the same call in all processes",
    TARGETS: "pass the number of targets of all replicas together",
    SCALE: "pass the same everywhere",
}


def call_number(training: bool, with_targets: bool, sync: bool) -> int:
    """What a process calls, as a number.

    >>> [call_text(call_number(training, True, False)) for training in (True, False)]
    ['step(…, sync=False)', 'evaluate']
    """
    return 1 + training + 2 * with_targets + 4 * sync


def call_text(number: float) -> str:
    """What a process calls, from its number."""
    training, with_targets, sync = (bool((int(number) - 1) & bit) for bit in (1, 2, 4))
    if training:
        return "step" if sync else "step(…, sync=False)"
    return "evaluate" if with_targets else "predict"


def agree_replicas(
    host: RankHost,
    known: Floats,
    columns: Collection[int],
    needs: Mapping[int, Collection[int]],
    refused: Exception | None,
) -> list[int]:
    """The samples of every row, by the numbers of all processes; if these do not agree, all raise the same error."""
    layout = host.layout
    if known[..., FAILED].any():
        replica, rank = np.argwhere(known[..., FAILED])[0]
        culprit = layout.rows[int(replica)][int(rank)]
        reason = host.broadcast_to_all(f"{type(refused).__name__}: {refused}", culprit)
        raise refused or PipelineError(f"{layout.name(culprit)} cannot run this batch: {reason}")
    for replica, rows in enumerate(known):
        apart = disagreement(rows, columns, needs, [layout.place_name(process) for process in layout.rows[replica]])
        if apart:
            raise PipelineError(apart if layout.by_place else f"replica {replica}: {apart}")
    refuse_different_samples(layout, known)
    for column, what in COMMON.items():
        flat = known[..., column].reshape(-1)
        if (flat != flat[0]).any():
            odd = int(np.argmax(flat != flat[0]))
            one, other = (layout.name([process for row in layout.rows for process in row][at]) for at in (odd, 0))
            first, second = (call_text(value) if column == RUN else str(float(value)) for value in flat[[odd, 0]])
            verb = "calls" if column == RUN else "has"
            raise PipelineError(
                f"{one} and {other} differ in {what}: {one} {verb} {first} and {other} {verb} {second}; "
                f"{REMEDIES[column]}"
            )
    sizes = known[..., ELEMENTS]
    if (sizes != sizes[0]).any():
        replica, rank = np.argwhere(sizes != sizes[0])[0]
        raise PipelineError(
            f"replicas 0 and {replica} train different parameters on rank {rank}: {sizes[0, rank]:.0f} and "
            f"{sizes[replica, rank]:.0f} elements; freeze the same parameters in all replicas (requires_grad)"
        )
    return [int(rows[:, 0].max()) for rows in known]


def refuse_different_samples(layout: Layout, known: Floats) -> None:
    """Refuse different batches of processes that differ only in pp or tp: all of them train on the same samples."""
    for first in range(0, layout.replicas if layout.tensors > 1 else 0, layout.tensors):
        rows = slice(first, first + layout.tensors)
        names = [layout.name(process) for row in layout.rows[rows] for process in row]
        apart = difference(known[rows].reshape(len(names), -1), range(len(NAMES)), names)
        if apart:
            raise PipelineError(f"{apart}, and processes that differ only in pp or tp take the same samples")
