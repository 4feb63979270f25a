"""What a rank is doing right now, and what it did last: plain attributes and rings, cheap enough for every action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stageline.faults.monitor.blame import EVERYONE


class Progress(Protocol):
    """What a rank says of itself; others read it at any time."""

    doing: object
    """What it is in: (letter, stage, microbatch), or text; None outside of a step."""
    waits: int | None
    """The rank it waits for; None while it waits for nobody."""
    done: int
    """Actions finished so far."""


class Notes:
    """The progress of a rank that is a thread of this process."""

    def __init__(self) -> None:
        """Outside of a step."""
        self.doing: object = None
        self.waits: int | None = None
        self.done = 0


def busy(rank: int, ranks: Mapping[int, Progress]) -> bool:
    """Whether who waits for a rank has reason to go on: it, or the one it waits for in turn, is at work.

    >>> first, second = Notes(), Notes()
    >>> first.doing = second.doing = "B of stage 0, microbatch 0"
    >>> first.waits = 1
    >>> busy(0, {0: first, 1: second})
    True
    >>> second.waits = 0
    >>> busy(0, {0: first, 1: second})
    False
    """
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        found = ranks[rank]
        if found.doing is None:
            return False  # it has come to its end
        if found.waits is None:
            return True
        if found.waits == EVERYONE:
            return False
        rank = found.waits
    return False
