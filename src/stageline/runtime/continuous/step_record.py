"""What a rank tells of a step at its end, as one row of numbers that is added up over all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stageline.common.errors import StagelineError
from stageline.distributed.rank_host import Floats
from stageline.runtime.step_report import Outcome
from stageline.schedules.schedule import Schedule

TEXT, BYTES = 256, 6
"""How many numbers a text takes, and how many bytes of it each holds exactly."""


def write_text(text: str) -> Floats:
    """A text as numbers that stay what they are when zeros are added.

    >>> read_text(write_text("über") + write_text(""))
    'über'
    """
    data = text.encode()
    if len(data) > (TEXT - 1) * BYTES:
        raise StagelineError(
            f"the metrics of a microbatch take {len(data)} bytes as JSON, and in a run there is room for "
            f"{(TEXT - 1) * BYTES}; return fewer of them, or use pipe.step"
        )
    found = np.zeros(TEXT)
    found[0] = len(data)
    for place in range(0, len(data), BYTES):
        found[1 + place // BYTES] = int.from_bytes(data[place : place + BYTES].ljust(BYTES, b"\0"), "big")
    return found


def read_text(row: Floats) -> str:
    """The text again."""
    data = b"".join(int(number).to_bytes(BYTES, "big") for number in row[1:].tolist())
    return data[: int(row[0])].decode()


@dataclass(frozen=True)
class Told:
    """What all ranks told of a step."""

    failed: Floats
    """For each rank: when it failed by itself, and when because of another; 0 where it did not."""
    outcome: Outcome
    norms: Floats
    """Of the gradient of each parameter of the model."""
    metrics: dict[str, float]

    @property
    def culprit(self) -> int | None:
        """The rank that failed first; causes before what follows from them."""
        for times in self.failed.T:
            if times.any():
                return int(np.argmin(np.where(times > 0, times, np.inf)))
        return None


@dataclass(frozen=True)
class Sheet:
    """How the row is laid out: failures, outcome, metrics, norms.

    >>> import stageline as sl
    >>> sheet = Sheet(sl.schedule("1f1b", ranks=2, microbatches=2), 3)
    >>> first = sheet.write(0, norms=np.array([1.0, 2.0, 0.0]))
    >>> outcome = np.zeros(Outcome.size(sheet.schedule))
    >>> outcome[:5] = 0.5, 0.25, 0.0, 0.0, 1.0
    >>> second = sheet.write(1, outcome=outcome, metrics={"right": 3})
    >>> told = sheet.read(first + second)
    >>> told.culprit, told.outcome.losses, told.norms.tolist(), told.metrics
    (None, (0.5, 0.25), [1.0, 2.0, 0.0], {'right': 3})
    >>> sheet.read(sheet.write(0, failed=(0.0, 7.0)) + sheet.write(1, failed=(8.0, 0.0))).culprit
    1
    """

    schedule: Schedule
    names: int
    """How many parameters the model has."""
    penalties: int = 0
    """As many where there is a penalty on them, and else 0."""

    def write(
        self,
        rank: int,
        *,
        failed: tuple[float, float] = (0.0, 0.0),
        outcome: Floats | None = None,
        norms: Floats | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Floats:
        """The row of a rank."""
        flags = np.zeros((self.schedule.ranks, 2))
        flags[rank] = failed
        parts = [
            flags.reshape(-1),
            np.zeros(Outcome.size(self.schedule, self.penalties)) if outcome is None else outcome,
            write_text(json.dumps(metrics) if metrics else ""),
            np.zeros(self.names) if norms is None else norms,
        ]
        return np.concatenate(parts)

    def read(self, row: Floats) -> Told:
        """What the rows of all ranks say, added up."""
        flags, size = 2 * self.schedule.ranks, Outcome.size(self.schedule, self.penalties)
        failed, outcome, text, norms = np.split(row, np.cumsum([flags, size, TEXT]))
        said = read_text(text)
        return Told(
            failed.reshape(-1, 2),
            Outcome.read(outcome, self.schedule, self.penalties),
            norms,
            json.loads(said) if said else {},
        )
