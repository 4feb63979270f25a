"""Colours and labels shared by all renderers.

The colours are distinguishable for colour-blind readers: hues from the Okabe-Ito set, with brightness that falls from F
to W in even steps, so the kinds also differ in greyscale. Every renderer writes the letter of the kind as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stageline.schedules.action import KINDS
from stageline.schedules.schedule import Schedule

if TYPE_CHECKING:
    from stageline.timeline.timeline import Timeline


@dataclass(frozen=True)
class Look:
    """The style of one kind of action; `pale` is the fill on every second chunk of a rank."""

    meaning: str
    fill: str
    pale: str
    ink: str
    line: str
    """The character that fills the duration in plain text."""


LOOKS: dict[str, Look] = {
    "F": Look("forward", "#9fd3f5", "#d3ebfb", "#000000", "-"),
    "I": Look("gradient of the input", "#e69f00", "#f3cf80", "#000000", "~"),
    "B": Look("whole backward", "#c4540a", "#dd9a6c", "#ffffff", "="),
    "W": Look("gradient of the weights", "#00533c", "#5f9484", "#ffffff", ":"),
    "&": Look("forward and backward overlapped", "#7b4b94", "#b193c0", "#ffffff", "*"),
}
SHARD_LOOKS: dict[str, Look] = {
    "U": Look("gather of parameters", "#0072b2", "#0072b2", "#ffffff", ">"),
    "R": Look("free parameters", "#222222", "#222222", "#ffffff", "|"),
    "G": Look("reduction of gradients", "#cc79a7", "#cc79a7", "#000000", "+"),
}
"""The styles of shard actions, which are drawn beside the actions of their rank."""
IDLE = "#f4f4f4"


@dataclass(frozen=True)
class Boxes:
    """The boxes of a timeline, one per entry of a program."""

    rank: NDArray[np.int64]
    first: NDArray[np.int64]
    """The first action of each box."""
    letter: NDArray[np.str_]
    odd: NDArray[np.bool_]
    """Whether the box belongs to every second chunk of its rank."""


def boxes_of(schedule: Schedule) -> Boxes:
    """Return the boxes of a schedule; an overlapped pair is one box."""
    first = np.flatnonzero(~np.concatenate([[False], schedule.pair_starts[:-1]]))
    letter = np.array(KINDS)[schedule.action_kinds[first]]
    letter[schedule.pair_starts[first]] = "&"
    rank = np.repeat(np.arange(schedule.ranks), np.diff(schedule.bounds))[first]
    return Boxes(rank, first, letter, _odd_chunks(schedule)[rank, schedule.stage_ids[first]])


def _odd_chunks(schedule: Schedule) -> NDArray[np.bool_]:
    """Return, per rank and stage, whether the stage is the second, fourth, … of the rank."""
    odd = np.zeros((schedule.ranks, schedule.stages), dtype=bool)
    for rank in range(schedule.ranks):
        odd[rank, schedule.placement.stages_of(rank)[1::2]] = True
    return odd


def label_of(schedule: Schedule, first: int, letter: str) -> str:
    """Return the label of a box: kind and microbatch."""
    microbatch = int(schedule.microbatch_ids[first])
    if letter == "&":
        return f"F{microbatch}&B{int(schedule.microbatch_ids[first + 1])}"
    return f"{letter}{microbatch}"


@dataclass(frozen=True)
class ShardBox:
    """A shard action to draw."""

    rank: int
    letter: str
    stage: int
    start: float
    end: float

    @property
    def text(self) -> str:
        """What it does, and when."""
        times = f"{number(self.start)} to {number(self.end)}"
        return f"{SHARD_LOOKS[self.letter].meaning}, stage {self.stage}: {times}"


def shard_boxes(timeline: Timeline) -> list[ShardBox]:
    """Return the shard actions of a timeline; frees, which take no time, too."""
    letters = {"UNSHARD": "U", "RESHARD": "R", "REDUCE_GRAD": "G"}
    return [
        ShardBox(rank, letters[action.kind], action.stage, start, end)
        for rank, action, start, end in timeline.shard_actions()
    ]


def number(value: float) -> str:
    """Format a number with few digits and without a needless fraction.

    >>> number(51.0), number(0.123456), number(1234567.0)
    ('51', '0.1235', '1234567')
    """
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def summary(values: tuple[float, ...]) -> str:
    """Format one value per rank briefly.

    >>> summary((4.0, 3.0, 2.0)), summary((2.0, 2.0))
    ('4 3 2', '2 on every rank')
    """
    if len(set(values)) == 1:
        return f"{number(values[0])} on every rank"
    if len(values) <= 16:
        return " ".join(number(value) for value in values)
    return f"{number(min(values))} to {number(max(values))}"
