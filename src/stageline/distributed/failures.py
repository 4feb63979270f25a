"""The error of a step that failed: which rank, in which action, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from stageline.common.errors import PipelineError, StagelineError
from stageline.faults.monitor.verdict import Verdict, describe, place_in_words

GRADIENTS = "no parameter was changed, and gradients may hold part of this step: call zero_grad() before the next one"
_ABOUT_FORM = re.compile(r"dtype|scalar type|shape|size|dimension|channels|same type|Expected", re.IGNORECASE)


class RankFailure(NamedTuple):
    """The failure of one rank in a step."""

    time: float
    """Seconds since the epoch."""
    doing: str
    error: BaseException


class Change(NamedTuple):
    """An output whose form differs from the stage's earlier outputs."""

    step: int
    microbatch: int
    stage: int
    before: str
    now: str
    of_structure: bool = False
    """Whether the number of values or their containers changed, and not only the form of a tensor."""

    @property
    def place(self) -> tuple[str, int, int]:
        """The action that passed it on."""
        return "F", self.stage, self.microbatch

    def __str__(self) -> str:
        return (
            f"stage {self.stage} passes on {self.now} for microbatch {self.microbatch} of step {self.step}, and passed "
            f"on {self.before} before"
        )


class ChangedOutput(TypeError):
    """A stage passed on an output of a new form, and another stage failed on it."""


def failure(who: str, doing: str, error: BaseException, left: str = GRADIENTS) -> PipelineError:
    """The one error that a failed step raises; `left` says what the step left behind."""
    return PipelineError(f"{who} failed {place_in_words(doing)}: {type(error).__name__}: {error}; {left}")


def changed_output(who: str, change: Change, failed: str, text: str, left: str) -> PipelineError:
    """The error of a step in which one stage changed the form of its output, and another one failed on it."""
    return failure(who, describe(change.place), ChangedOutput(f"{change}; {failed} failed on it: {text}"), left)


def note_record(error: PipelineError, paths: Sequence[Path | None]) -> None:
    """Add a note to an error that says where the flight records are."""
    records = sorted(path for path in paths if path is not None)
    if records:
        more = f" and {len(records) - 1} more beside it" if len(records) > 1 else ""
        error.add_note(
            f"the last actions and messages of the ranks are in {records[0]}{more}: stageline doctor "
            f"{records[0].parent}"
        )


def note_missing_value(error: PipelineError, verdict: Verdict) -> None:
    """Add a note to the error of a layer that misses a value: it may be on another rank.

    >>> error = PipelineError("rank 1 failed")
    >>> note_missing_value(error, Verdict(1, "raised", text="KeyError: 'mask'", action="F", stage=2))
    >>> print(error.__notes__[0])
    not all stages before stage 2 run in its process: what their layers or hooks leave beside their outputs, in a global
    or on a module, does not travel between ranks; if it looked for such a value, pass that on among inputs and outputs
    """
    kind, _, text = verdict.text.partition(":")
    missing = kind in ("KeyError", "AttributeError") or (kind == "IndexError" and ("list" in text or "deque" in text))
    if missing and verdict.action == "F" and verdict.stage:
        error.add_note(
            f"not all stages before stage {verdict.stage} run in its process: what their layers or hooks leave beside "
            "their outputs, in a global or on a module, does not travel between ranks; if it looked for such a value, "
            "pass that on among inputs and outputs"
        )


def origin_of(
    error: BaseException, step: int, stage: int | None, microbatch: int | None, changes: Iterable[Change]
) -> Change | None:
    """The first stage whose changed output explains this error; None if no change does."""
    return first_change(step, stage, microbatch, changes, is_about_form(error), is_about_structure(error))


def is_about_structure(error: BaseException) -> bool:
    """Whether an error may come from a value in a different container from before, or from a missing value.

    >>> is_about_structure(TypeError("must be Tensor, not tuple")), is_about_structure(ArithmeticError("nan"))
    (True, False)
    """
    kinds = (TypeError, AttributeError, LookupError, ValueError)
    return isinstance(error, kinds) and not isinstance(error, StagelineError)


def is_about_form(error: BaseException) -> bool:
    """Whether an error may come from a tensor whose dtype or shape changed.

    >>> is_about_form(RuntimeError("mat1 and mat2 must have the same dtype")), is_about_form(KeyError("mask"))
    (True, False)
    """
    return isinstance(error, RuntimeError | ValueError | TypeError) and bool(_ABOUT_FORM.search(str(error)))


def first_change(
    step: int,
    stage: int | None,
    microbatch: int | None,
    changes: Iterable[Change],
    about_form: bool = True,
    about_structure: bool = True,
) -> Change | None:
    """The first stage before this one whose output changed for this microbatch."""
    earlier = [
        change
        for change in changes
        if (change.step, change.microbatch) == (step, microbatch)
        and stage is not None
        and change.stage < stage
        and (about_form or (about_structure and change.of_structure))
    ]
    return min(earlier, key=lambda change: change.stage, default=None)
