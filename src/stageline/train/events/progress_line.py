"""The line that says where a job stands: what is on it, what goes first where it does not fit, and the time left."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

from stageline.train.events import figures
from stageline.train.events.figures import number_of
from stageline.train.events.metrics_file import Row

WARM_UP, RECENT = 2, 40
BETWEEN = "  "


class Part(NamedTuple):
    """One thing on the line."""

    text: str
    weight: int
    """Where there is no room, the part with the least goes first; the heaviest stays."""
    style: str = ""


class Pace:
    """How long a step takes: the median of the recent ones, without the first steps of a life.

    >>> pace = Pace()
    >>> for step, now in enumerate([0, 30, 40, 41, 42, 43, 99, 100]):
    ...     pace.add({"event": "step", "step": step, "seconds": 1.0, "time": now})
    >>> pace.seconds, pace.left(step=8, total=128)
    (1.0, 120.0)
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._taken: deque[float] = deque(maxlen=RECENT)
        self._steps = 0
        self._before: tuple[int, float] | None = None

    def add(self, row: Row) -> None:
        """Hear of a step; from one to the next counts what its own time does not, like loading data."""
        step, now, own = row["step"], number_of(row.get("time")), number_of(row.get("seconds"))
        taken = own
        if self._before is not None and now is not None and step == self._before[0] + 1:
            taken = max(now - self._before[1], own or 0.0)
        self._before = None if now is None else (step, now)
        self._steps += 1
        if self._steps == WARM_UP + 1:
            self._taken.clear()  # until here the slow first steps were all there was
        if taken is not None and math.isfinite(taken) and taken >= 0:
            self._taken.append(taken)

    @property
    def seconds(self) -> float | None:
        """What one step takes; None as long as nobody knows."""
        return statistics.median(self._taken) if self._taken else None

    def left(self, step: int, total: int) -> float | None:
        """How long the steps after this one will take."""
        return None if self.seconds is None else self.seconds * max(0, total - step)


def parts_of(row: Row, total: int, left: float | None, taken: float | None = None) -> list[Part]:
    """What is on the line for a step, in its order; `left` is the time to go, `taken` the time that a whole run took.

    >>> row = {"event": "step", "step": 12, "loss": 2.31, "tokens_per_s": 15234.0, "bubble": 0.21,
    ...        "planned_bubble": 0.18, "memory": 1288490189}
    >>> fit(parts_of(row, total=300, left=151.0), 80)
    ' 12/300  loss 2.3100  15.2k tok/s  bubble 21% (plan 18%)  1.2 GiB  2:31 left'
    >>> fit(parts_of(row, total=300, left=151.0), 40)
    ' 12/300  loss 2.3100  2:31 left'
    """
    found = [Part(f"{row['step']:>{len(str(total))}}/{total}", 9, "bold")]
    values = {name: number_of(row.get(name)) for name in ("loss", "tokens_per_s", "bubble", "planned_bubble", "memory")}
    if values["loss"] is not None:
        finite = math.isfinite(values["loss"])
        found.append(Part(f"loss {figures.loss(values['loss'])}", 8, "" if finite else "bold red"))
    if row.get("skipped") is True:
        found.append(Part("skipped", 6, "yellow"))
    if values["tokens_per_s"] is not None:
        found.append(Part(f"{figures.count(values['tokens_per_s'])} tok/s", 4))
    if values["bubble"] is not None:
        found.append(Part(f"bubble {figures.share(values['bubble'])}", 5))
    if values["planned_bubble"] is not None:
        plan = f"plan {figures.share(values['planned_bubble'])}"
        found.append(Part(f"({plan})" if values["bubble"] is not None else f"bubble {plan}", 3, "dim"))
    if values["memory"] is not None:
        found.append(Part(figures.size(values["memory"]), 2))
    if taken is not None:
        found.append(Part(f"took {figures.time(taken)}", 7))
    elif left is not None:
        found.append(Part(f"{figures.time(left)} left", 7, "cyan"))
    return found


def choose(parts: list[Part], width: int) -> list[Part]:
    """The parts that have room, in their order."""
    kept = list(parts)
    while len(kept) > 1 and len(joined(kept)) > width:
        kept.remove(min(kept, key=lambda part: part.weight))
    return kept


def joined(parts: list[Part]) -> str:
    """The parts as one line; the plan stands close to what it is the plan of."""
    return "".join(gap + part.text for gap, part in zip(gaps(parts), parts, strict=True))


def gaps(parts: list[Part]) -> list[str]:
    """What stands before each part."""
    return ["" if not at else " " if part.text.startswith("(") else BETWEEN for at, part in enumerate(parts)]


def fit(parts: list[Part], width: int) -> str:
    """Write a line no longer than this, without what has no room."""
    return joined(choose(parts, width))[:width]
