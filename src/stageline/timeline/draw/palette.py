"""Colours and labels shared by all renderers.

The colours are distinguishable for colour-blind readers: hues from the Okabe-Ito set, with brightness that falls from F
to W in even steps, so the kinds also differ in greyscale. Every renderer writes the letter of the kind as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stageline.common.units import format_makespan, format_size
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


def summary(values: tuple[float, ...], show: Callable[[float], str] = number) -> str:
    """Format one value per rank briefly.

    >>> summary((4.0, 3.0, 2.0)), summary((2.0, 2.0))
    ('4, 3, 2', '2 on every rank')
    """
    if len(set(values)) == 1:
        return f"{show(values[0])} on every rank"
    if len(values) <= 16:
        return ", ".join(show(value) for value in values)
    return f"{show(min(values))} to {show(max(values))}"


OWN_UNIT = "units of the costs"
"""The unit of times that are not in seconds."""


def time_scale(timelines: Sequence[Timeline]) -> tuple[float, str]:
    """Return the factor and the unit in which times on one axis are shown.

    >>> import stageline as sl
    >>> time_scale([sl.simulate(sl.schedule("1f1b", ranks=1, microbatches=1), sl.Costs(in_seconds=True))])
    (1000.0, 'ms')
    """
    measured = any(timeline.costs is None for timeline in timelines)  # a plan beside it is in seconds, too
    if not timelines or not (measured or all(timeline.in_seconds for timeline in timelines)):
        return 1.0, ""
    longest = max(timeline.makespan if timeline.is_aligned else timeline.span for timeline in timelines)
    return (1.0, "s") if longest >= 10 else (1e3, "ms")


def shown_time(timeline: Timeline, time: float) -> str:
    """Return a time of a timeline with its unit; without one, if it is in units of the costs."""
    return format_makespan(round(time, 12)) if timeline.in_seconds else number(round(time, 9))


def memory_unit(timeline: Timeline) -> str:
    """Return the unit of a timeline's memory; a measured step knows how many microbatches a rank holds.

    >>> import stageline as sl
    >>> memory_unit(sl.simulate(sl.schedule("zb-v", ranks=2, microbatches=4)))
    'microbatches of one stage'
    """
    costs, schedule = timeline.costs, timeline.schedule
    if costs is not None and costs.memory_unit != "microbatches":
        return costs.memory_unit
    activation = 1.0 if costs is None else np.max(costs.activation)
    of_stage = activation * schedule.stages > schedule.ranks  # else the activations of a rank's stages add up to 1
    return "microbatches of one stage" if of_stage else "microbatches"


def shown_memory(timeline: Timeline) -> str:
    """Return the peak memory of all ranks with its unit.

    >>> import stageline as sl
    >>> s = sl.schedule("1f1b", ranks=2, microbatches=2)
    >>> shown_memory(sl.simulate(s)), shown_memory(sl.simulate(s, sl.Costs(activation=3e6, in_seconds=True)))
    ('2, 1 microbatches', '5.72 MiB, 2.86 MiB')
    """
    unit, peak = memory_unit(timeline), timeline.peak_memory
    if unit == "bytes":
        return summary(peak, format_size)
    if unit:
        every = " on every rank" if len(set(peak)) == 1 else ""
        return f"{summary(peak).removesuffix(' on every rank')} {unit}{every}"
    return f"{summary(peak)}, in {OWN_UNIT}"
