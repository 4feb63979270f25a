"""A rank's record of a step: one row of numbers that is added up over all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stageline.common.errors import StagelineError
from stageline.distributed.rank_host import Floats
from stageline.runtime.step_report import Outcome, StepRecordLayout
from stageline.schedules.schedule import Schedule

TEXT, BYTES = 256, 6
"""How many numbers encode a text, and how many bytes of it each number holds."""


def text_to_row(text: str) -> Floats:
    """A text as numbers that adding zeros does not change.

    >>> row_to_text(text_to_row("über") + text_to_row(""))
    'über'
    """
    data = text.encode()
    if len(data) > (TEXT - 1) * BYTES:
        raise StagelineError(
            f"the metrics of a microbatch take {len(data)} bytes as JSON, and in a run there is room for "
            f"{(TEXT - 1) * BYTES}; return fewer of them, or use pipe.step"
        )
    row = np.zeros(TEXT)
    row[0] = len(data)
    for place in range(0, len(data), BYTES):
        row[1 + place // BYTES] = int.from_bytes(data[place : place + BYTES].ljust(BYTES, b"\0"), "big")
    return row


def row_to_text(row: Floats) -> str:
    """The text of a row."""
    data = b"".join(int(number).to_bytes(BYTES, "big") for number in row[1:].tolist())
    return data[: int(row[0])].decode()


@dataclass(frozen=True)
class StepTotals:
    """The step records of all ranks, added up."""

    failed: Floats
    """For each rank: when it failed by itself, and when because of another rank; 0 if it did not."""
    outcome: Outcome
    norms: Floats
    """The norm of the gradient of each parameter of the model."""
    metrics: dict[str, float]

    @property
    def culprit(self) -> int | None:
        """The rank that failed first; causes come before their effects."""
        for times in self.failed.T:
            if times.any():
                return int(np.argmin(np.where(times > 0, times, np.inf)))
        return None


class ContinuousRecordLayout:
    """The layout of a record of a continuous step: failures, step record, metrics, norms.

    >>> import stageline as sl
    >>> layout = ContinuousRecordLayout(sl.schedule("1f1b", ranks=2, microbatches=2), 3)
    >>> first = layout.write(0, norms=np.array([1.0, 2.0, 0.0]))
    >>> step_record = np.zeros(layout.step_record.size)
    >>> step_record[:5] = 0.5, 0.25, 0.0, 0.0, 1.0
    >>> second = layout.write(1, outcome=step_record, metrics={"right": 3})
    >>> totals = layout.read(first + second)
    >>> totals.culprit, totals.outcome.losses, totals.norms.tolist(), totals.metrics
    (None, (0.5, 0.25), [1.0, 2.0, 0.0], {'right': 3})
    >>> layout.read(layout.write(0, failed=(0.0, 7.0)) + layout.write(1, failed=(8.0, 0.0))).culprit
    1
    """

    def __init__(self, schedule: Schedule, parameters: int, penalties: int = 0) -> None:
        """`parameters` is how many the model has, `penalties` the same number if there is a penalty, else 0."""
        self.step_record = StepRecordLayout(schedule, penalties=penalties)
        self._ranks, self._parameters = schedule.ranks, parameters
        self._ends = np.cumsum([2 * schedule.ranks, self.step_record.size, TEXT]).tolist()

    def write(
        self,
        rank: int,
        *,
        failed: tuple[float, float] = (0.0, 0.0),
        outcome: Floats | None = None,
        norms: Floats | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Floats:
        """The record of a rank."""
        flags = np.zeros((self._ranks, 2))
        flags[rank] = failed
        parts = [
            flags.reshape(-1),
            np.zeros(self.step_record.size) if outcome is None else outcome,
            text_to_row(json.dumps(metrics) if metrics else ""),
            np.zeros(self._parameters) if norms is None else norms,
        ]
        return np.concatenate(parts)

    def read(self, row: Floats) -> StepTotals:
        """The records of all ranks, added up."""
        failed, outcome, text, norms = np.split(row, self._ends)
        metrics = row_to_text(text)
        return StepTotals(
            failed.reshape(-1, 2), self.step_record.read(outcome), norms, json.loads(metrics) if metrics else {}
        )
