"""Every error that a user can catch. Messages state the value found, the value expected and what to do."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class StagelineError(ValueError):
    """Base class of all errors that Stageline raises."""


class ScheduleError(StagelineError):
    """A schedule that cannot be built, read or run.

    `rule` is the rule that failed (see `docs/verify.md`). `rank` and `position` are the place in the schedule, counted
    from 0, or None if the error has no single place.

    >>> import stageline as sl
    >>> try:
    ...     sl.verify(sl.Schedule.from_programs([["0F0", "0F0", "0B0"]]))
    ... except sl.ScheduleError as error:
    ...     print(error.rule, error.rank, error.position)
    ...     print(error)
    complete 0 1
    rank 0, position 1: stage 0 runs F of microbatch 0 twice (positions 0 and 1); each must run exactly once
    """

    def __init__(
        self, message: str, *, rule: str = "input", rank: int | None = None, position: int | None = None
    ) -> None:
        super().__init__(message)
        self.rule = rule
        self.rank = rank
        self.position = position


class UnknownOption(ScheduleError, TypeError):
    """An option that does not exist, or cannot be combined with the others."""


class CostError(StagelineError):
    """Invalid costs: negative, not a number, or not one per stage."""


class MemoryCapError(StagelineError):
    """No schedule fits the memory cap.

    `rank` is the first rank that needs more; `least` holds the minimum of every rank.

    >>> import stageline as sl
    >>> try:
    ...     sl.synthesize(sl.Costs(activation=[1, 3]), ranks=2, microbatches=4, memory=2)
    ... except sl.MemoryCapError as error:
    ...     print(error.rank, error.least)
    ...     print(error)
    1 (1.0, 3.0)
    no schedule fits: rank 1 needs a memory of 3 for a single microbatch; the cap is 2; the smallest cap that works is 3
    """

    def __init__(self, message: str, *, rank: int, least: tuple[float, ...]) -> None:
        super().__init__(message)
        self.rank = rank
        self.least = least


class NothingFits(StagelineError):
    """No plan fits the memory of the ranks.

    `rank` and `needs` describe the closest plan: the rank that needs too much memory, and how many bytes. Each of
    `changes` holds arguments of `sl.plan` with which a plan fits.
    """

    def __init__(self, message: str, *, rank: int, needs: float, changes: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.rank, self.needs, self.changes = rank, needs, changes


class PipelineError(StagelineError, RuntimeError):
    """A step that failed. The message names the rank, stage, microbatch and action, and the state of the gradients."""


class LaunchError(StagelineError, RuntimeError):
    """A rank that `sl.launch` started failed. `rank` is the one that failed first; its exception is the cause."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class TransportError(StagelineError, RuntimeError):
    """A message that did not arrive, arrived at the wrong place, or is not the expected one."""


class PeerFailed(TransportError):
    """Another rank failed first; `origin` is that rank."""

    def __init__(self, message: str, origin: int) -> None:
        super().__init__(message)
        self.origin = origin


class TrustError(StagelineError, RuntimeError):
    """A rank cannot read the secret of its job, or cannot trust what it read."""


class ControlError(StagelineError, RuntimeError):
    """The connection to the failure monitor could not be opened."""


class FlightError(StagelineError):
    """A flight record that cannot be read."""


class CheckpointError(StagelineError):
    """A checkpoint that cannot be written or read."""


class JsonError(StagelineError):
    """JSON data that does not have the form that its format requires."""


for _error in (StagelineError, ScheduleError, CostError, LaunchError, MemoryCapError, NothingFits, PipelineError):
    _error.__module__ = "stageline"  # where users import it from


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant, in brackets, for an error message.

    >>> nearest("zb-vv", ["1f1b", "zb-v"])
    " (did you mean 'zb-v'?)"
    >>> nearest("qqq", ["1f1b", "zb-v"])
    ''
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""


def shorten(value: object, limit: int = 60) -> str:
    """Return the repr of a value, cut to `limit` characters, for an error message.

    >>> shorten("x" * 100, limit=10)
    "'xxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Rewrite an error about arguments of a function in terms of command-line flags.

    >>> in_flags("try schedule='auto', or memory='636KiB'", {"schedule": "--schedule", "memory": "--memory"})
    'try --schedule auto, or --memory 636KiB'
    >>> in_flags("memory is a size above 0; pass batch= too", {"memory": "--memory", "batch": "--batch"})
    '--memory is a size above 0; pass --batch too'
    """
    if not flags:
        return text
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    words = re.compile(rf"(?<![\w.-])({names})=(?:'([^']*)'|([\w.+:-]*\w))?|^({names})(?= (?:is|takes|must|has)\b)")

    def flag(match: re.Match[str]) -> str:
        value = match[2] or match[3]
        return flags[match[1] or match[4]] + (f" {value}" if value else "")

    return words.sub(flag, text)


def place_of(error: BaseException) -> str:
    """Return where in the user's code an error was raised: the innermost line outside of libraries and Stageline.

    >>> place_of(ValueError("never raised"))
    ''
    """
    import traceback

    from stageline.common.imports import library_folders

    if isinstance(error, SyntaxError) and error.filename:
        return f", at {_short(error.filename)}:{error.lineno}"
    others = (str(Path(__file__).resolve().parents[1]) + os.sep, "<", *library_folders())
    inner = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f", at {_short(inner[-1].filename)}:{inner[-1].lineno} in {inner[-1].name}" if inner else ""


def _short(path: str) -> str:
    """Return a path relative to the current folder."""
    return path.removeprefix(os.getcwd() + os.sep)
