"""The errors a user can catch, each with the value found, the value expected and what to do."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path


class StagelineError(ValueError):
    """Every error that Stageline raises for something a user gave it."""

    __module__ = "stageline"


class ScheduleError(StagelineError):
    """A schedule that cannot be made, read or run.

    `rule` names the rule that failed (see `docs/verify.md`), `rank` and `position` say where in the
    schedule, counted from 0, and are None where the fault lies in no single place.

    >>> import stageline as sl
    >>> try:
    ...     sl.verify(sl.Schedule.from_programs([["0F0", "0F0", "0B0"]]))
    ... except sl.ScheduleError as error:
    ...     print(error.rule, error.rank, error.position)
    ...     print(error)
    complete 0 1
    rank 0, position 1: stage 0 runs F of microbatch 0 twice (positions 0 and 1); each must run exactly once
    """

    __module__ = "stageline"

    def __init__(
        self, message: str, *, rule: str = "input", rank: int | None = None, position: int | None = None
    ) -> None:
        """Keep the place of the fault beside the sentence about it."""
        super().__init__(message)
        self.rule = rule
        self.rank = rank
        self.position = position


class UnknownOption(ScheduleError, TypeError):
    """An option that there is not, or not beside the others."""


class CostError(StagelineError):
    """Costs that no step can have: negative, not a number, or not one per stage."""

    __module__ = "stageline"


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant, in brackets, for an error message.

    >>> nearest("zb-vv", ["1f1b", "zb-v"])
    " (did you mean 'zb-v'?)"
    >>> nearest("qqq", ["1f1b", "zb-v"])
    ''
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[found[0]]!r}?)" if found else ""


def shorten(value: object, limit: int = 60) -> str:
    """Show a value in an error without letting a hostile one fill the screen.

    >>> shorten("x" * 100, limit=10)
    "'xxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Say an error about arguments of a function in the words of a command line.

    >>> in_flags("try schedule='auto', or memory='636KiB'", {"schedule": "--schedule", "memory": "--memory"})
    'try --schedule auto, or --memory 636KiB'
    >>> in_flags("memory is a size above 0; give batch= too", {"memory": "--memory", "batch": "--batch"})
    '--memory is a size above 0; give --batch too'
    """
    if not flags:
        return text
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    words = re.compile(rf"(?<![\w.-])({names})=(?:'([^']*)'|([\w.+:-]*\w))?|^({names})(?= (?:is|takes|must|has)\b)")

    def flag(found: re.Match[str]) -> str:
        value = found[2] or found[3]
        return flags[found[1] or found[4]] + (f" {value}" if value else "")

    return words.sub(flag, text)


def place_of(error: BaseException) -> str:
    """Where in a user's code an error was raised: the innermost line that is neither a library's nor ours.

    >>> place_of(ValueError("never raised"))
    ''
    """
    import sysconfig
    import traceback

    if isinstance(error, SyntaxError) and error.filename:
        return f", at {_short(error.filename)}:{error.lineno}"
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    others = (str(Path(__file__).resolve().parent) + os.sep, "<", *libraries)
    inner = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f", at {_short(inner[-1].filename)}:{inner[-1].lineno} in {inner[-1].name}" if inner else ""


def _short(path: str) -> str:
    """A path as it is seen from here."""
    return path.removeprefix(os.getcwd() + os.sep)
