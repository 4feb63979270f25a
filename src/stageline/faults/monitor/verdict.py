"""Verdicts, which the failure monitor sends to all ranks, and the reports of failures that ranks send to it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from stageline.common.checked_json import from_json
from stageline.faults.monitor.blame import EVERYONE

Kind: TypeAlias = Literal["died", "frozen", "raised", "absent", "left"]

LONGEST_TRACEBACK = 32_000
"""Characters of a traceback that are sent; its end says most, so its beginning is cut."""


@dataclass(frozen=True)
class Failure:
    """A rank's report of an exception; `secondary` if another rank's failure may have caused it.

    >>> try:
    ...     1 / 0
    ... except ZeroDivisionError as error:
    ...     failure = Failure.of(error, "F of stage 1, microbatch 3")
    >>> failure.text, failure.secondary, failure.traceback.splitlines()[-1]
    ('ZeroDivisionError: division by zero', False, 'ZeroDivisionError: division by zero')
    """

    text: str
    doing: str = ""
    traceback: str = ""
    action: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    secondary: bool = False
    origin: int | None = None
    """The rank whose failure caused this one, if known."""
    final: bool = False
    """Whether the rank leaves the job, as after a KeyboardInterrupt."""

    @classmethod
    def of(cls, error: BaseException, doing: object = "", *, secondary: bool = False) -> Failure:
        """Describe an exception raised while a rank was doing something: text, or (letter, stage, microbatch)."""
        message = str(error)
        action: dict[str, Any] = {}
        if isinstance(doing, tuple) and len(doing) == 3:
            action = {"action": str(doing[0]), "stage": int(doing[1]), "microbatch": int(doing[2])}
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
        return cls(text[:4000], describe(doing), trace, secondary=secondary, **action)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def verdict(self, culprit: int, **details: Any) -> Verdict:
        """Return the verdict that this failure of one rank made the step fail."""
        own = {name: getattr(self, name) for name in ("doing", "text", "traceback", "action", "stage", "microbatch")}
        return Verdict(culprit, "raised", final=False, **own, **details)


def describe(doing: object) -> str:
    """Return what a rank is doing as text; ranks note an action as (letter, stage, microbatch), which is cheap.

    >>> describe(("F", 1, 3)), describe("saving a checkpoint"), describe(None)
    ('F of stage 1, microbatch 3', 'saving a checkpoint', '')
    """
    if isinstance(doing, tuple) and len(doing) == 3:
        return f"{doing[0]} of stage {doing[1]}, microbatch {doing[2]}"
    return "" if doing is None else str(doing)[:400]


def located(doing: str) -> object:
    """Parse an action that `describe` formatted; return other text unchanged.

    >>> located("F of stage 1, microbatch 3"), located("saving a checkpoint")
    (('F', 1, 3), 'saving a checkpoint')
    """
    match = re.fullmatch(r"([FBIW]) of stage (\d+), microbatch (\d+)", doing)
    return doing if match is None else (match[1], int(match[2]), int(match[3]))


@dataclass(frozen=True)
class RankSnapshot:
    """What the monitor knew about one rank at the time of the verdict."""

    rank: int
    state: str
    """`absent`, `here`, `left` or `died`."""
    doing: str
    waits: int | None
    """The rank it waited for; `EVERYONE` in a collective; None if it waited for nobody."""
    silence: float
    """Seconds since it was last heard."""
    done: int
    """How many actions it had finished."""


@dataclass(frozen=True)
class Verdict:
    """Which rank failed first, and how; `str` returns the sentence that a user sees.

    >>> print(Verdict(culprit=2, kind="died", doing="B of stage 2, microbatch 5", silence=0.1))
    rank 2 died (its process exited without reporting an error) while it was in B of stage 2, microbatch 5
    (heard 0.1 s before)
    """

    culprit: int
    kind: Kind
    where: str = ""
    """Its process and its machine."""
    doing: str = ""
    text: str = ""
    traceback: str = ""
    silence: float = 0.0
    deadline: float = 0.0
    round: int = 0
    final: bool = True
    """Whether the job has ended; False after an exception, when the next step may succeed."""
    waiter: int | None = None
    """A rank that waited for the one that left."""
    action: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    ranks: tuple[RankSnapshot, ...] = ()
    """The ranks nearest to the culprit."""
    replica: int | None = None
    """The culprit's replica, if there are several."""
    name: str = ""
    """The culprit's name, if the job is a larger mesh."""
    host: str = ""
    """The machine of which no rank was heard any more; empty if some was."""
    lost: tuple[int, ...] = ()
    """The ranks on that machine."""
    also: tuple[int, ...] = ()
    """The ranks that reported a lost connection at the same time, if no rank is known to have caused it."""

    @property
    def explained(self) -> bool:
        """Whether the traceback explains the failure: code raised, and neither a rank nor a message was lost.

        >>> Verdict(1, "raised", text="ValueError: no", final=False).explained
        True
        """
        transport = self.text.partition(":")[0] in ("TransportError", "PeerFailed")
        return self.kind == "raised" and not self.final and bool(self.text) and not transport

    def __str__(self) -> str:
        who = f"rank {self.culprit}" + ("" if self.replica is None else f" (replica {self.replica})")
        who = self.name or who
        where = place_in_words(self.doing) if self.doing else ""
        while_where = where and f" while it was {where}"
        match self.kind:
            case "died":
                heard = where and f" (heard {self.silence:.1f} s before)"
                return f"{who} died (its process exited without reporting an error){while_where}{heard}"
            case "frozen":
                silent = _first_eight([f"rank {rank}" for rank in self.lost if rank != self.culprit])
                machine = self.host and f"; its machine {self.host} is not reached{silent and f', nor is {silent}'}"
                waits = waiting(self.ranks)
                return (
                    f"{who} froze: no sign of life for {self.silence:.1f} s (the deadline is {self.deadline:g} s)"
                    f"{while_where}{machine}{'; ' + waits if waits else ''}"
                )
            case "raised":
                others = _first_eight([f"rank {rank}" for rank in self.also])
                also = others and f"; at the same time, {others} lost a connection, too: perhaps the one between them"
                return f"{who} failed{where and f' {where}'}: {self.text}{also}"
            case "absent":
                absent = [rank.rank for rank in self.ranks if rank.state == "absent"]
                missing = [str(rank) for rank in absent if rank != self.culprit]
                also = f" (nor did rank{'s' if len(missing) > 1 else ''} {_first_eight(missing)})" if missing else ""
                return f"{who} never started: it did not connect within {self.deadline:g} s{also}"
            case "left":
                waiter = "" if self.waiter is None else f" while rank {self.waiter} waits for it"
                return f"{who} left ({self.text or 'its script ended'}){waiter}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Read what `to_json` returned; raise `JsonError` for anything else.

        >>> verdict = Verdict(1, "left", text="exit", ranks=(RankSnapshot(0, "here", "", 1, 0.0, 3),))
        >>> Verdict.from_json(verdict.to_json()) == verdict
        True
        """
        return from_json(cls, data, "verdict")


def waiting(ranks: tuple[RankSnapshot, ...]) -> str:
    """Return who waits for whom.

    >>> waiting((RankSnapshot(0, "here", "", 1, 0.0, 3), RankSnapshot(1, "here", "", -1, 0.0, 3)))
    'rank 0 waits for rank 1, rank 1 waits for all ranks'
    """
    waits = [
        f"rank {status.rank} waits for {'all ranks' if status.waits == EVERYONE else f'rank {status.waits}'}"
        for status in ranks
        if status.waits is not None and status.state == "here"
    ]
    return _first_eight(waits)


def place_in_words(doing: str) -> str:
    """Return what a rank was doing as a part of a sentence.

    >>> place_in_words("F of stage 1, microbatch 3"), place_in_words("after its last action")
    ('in F of stage 1, microbatch 3', 'after its last action')
    """
    return doing if doing.startswith(("before its", "after its", "starting")) else f"in {doing}"


def _first_eight(texts: list[str]) -> str:
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")
