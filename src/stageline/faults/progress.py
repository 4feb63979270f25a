"""What a rank is doing right now, in plain attributes that are cheap enough to set for every action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stageline.faults.monitor.blame import EVERYONE


class RankProgress(Protocol):
    """The state of a rank; others read it at any time."""

    doing: object
    """(letter, stage, microbatch), or text; None outside of a step."""
    waits: int | None
    """The rank that it waits for; None while it waits for nobody."""
    done: int
    """How many actions it has finished."""


class ThreadProgress:
    """The progress of a rank that is a thread of this process."""

    def __init__(self) -> None:
        self.doing: object = None
        self.waits: int | None = None
        self.done = 0


def busy(rank: int, ranks: Mapping[int, RankProgress]) -> bool:
    """Whether it makes sense to keep waiting for a rank: it works, or a rank that it waits for works.

    >>> first, second = ThreadProgress(), ThreadProgress()
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
        progress = ranks[rank]
        if progress.doing is None:
            return False  # it has finished the step
        if progress.waits is None:
            return True
        if progress.waits == EVERYONE:
            return False
        rank = progress.waits
    return False
