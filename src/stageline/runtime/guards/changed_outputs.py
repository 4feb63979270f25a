"""Changed outputs: stages whose output changes its type, shape or structure in the middle of training.

Such an output makes a later stage fail. The rank to blame is the one whose output changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from stageline.common.errors import StagelineError
from stageline.tensors.pytree import TENSOR, unflatten
from stageline.transport.protocol import Message

_ABOUT_FORM = re.compile(r"dtype|scalar type|shape|size|dimension|channels|same type|Expected", re.IGNORECASE)


class Change(NamedTuple):
    """An output that differs from the stage's earlier ones."""

    step: int
    microbatch: int
    stage: int
    before: str
    now: str
    of_structure: bool = False
    """Whether the number of values or their containers changed, not only their types and shapes."""

    @property
    def place(self) -> tuple[str, int, int]:
        """The action that produced it."""
        return "F", self.stage, self.microbatch

    def __str__(self) -> str:
        return (
            f"stage {self.stage} passes on {self.now} for microbatch {self.microbatch} of step {self.step}, and passed "
            f"on {self.before} before"
        )


class Outputs:
    """The last outputs of the stages of a rank.

    >>> from stageline.transport.protocol import Header
    >>> import torch
    >>> outputs = Outputs()
    >>> for step, dtype in enumerate((torch.float32, torch.float64)):
    ...     header = Header(0, 1, "forward", 0, 0, step)
    ...     outputs.note(Message(header, [torch.ones(2, dtype=dtype)], "tensor", [True]))
    >>> print(outputs.changes[0])
    stage 0 passes on [float64 of shape (2,)] for microbatch 0 of step 1, and passed on [float32 of shape (2,)] before
    """

    def __init__(self) -> None:
        self._last: dict[int, Message] = {}
        self.changes: list[Change] = []

    def note(self, message: Message) -> None:
        """Record the output of a stage, and whether it changed."""
        header, known = message.header, self._last.get(message.header.stage)
        same_tree = known is not None and known.tree == message.tree
        if header.traffic != "forward" or (known is not None and same_tree and known.kinds == message.kinds):
            return
        self._last[header.stage] = Message(header, [], message.tree, [], message.kinds)
        if known is not None and not (same_tree and _forms(known.kinds) == _forms(message.kinds)):
            before, now = (_describe(output.tree, output.kinds, with_tree=not same_tree) for output in (known, message))
            change = Change(header.step, header.microbatch, header.stage, before, now, not same_tree)
            recent = [change for change in self.changes if change.step >= header.step - 1]
            self.changes = [*recent[-100:], change]


def _forms(kinds: Iterable[str]) -> list[str]:
    """The kinds without their first dimension, because the number of samples may vary."""
    return [re.sub(r"of shape \(\d+,", "of shape (", kind) for kind in kinds]


def _listed(kinds: Sequence[str]) -> str:
    return f"[{', '.join(kinds[:4])}{', …' if len(kinds) > 4 else ''}]"


def _describe(tree: str, kinds: Sequence[str], with_tree: bool) -> str:
    """The kinds of an output, in their containers if `with_tree`."""
    if with_tree and tree == TENSOR:
        return f"one tensor, {kinds[0]}"
    if with_tree and len(kinds) <= 4:
        with suppress(Exception):  # a user's container may not accept text
            return repr(unflatten([_Unquoted(kind) for kind in kinds], tree))
    return _listed(kinds)


class _Unquoted(str):
    """Text whose repr has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def origin_of(
    error: BaseException, step: int, stage: int | None, microbatch: int | None, changes: Iterable[Change]
) -> Change | None:
    """The first change that explains the failure of a stage; None if none does."""
    about_form, about_structure = is_about_form(error), is_about_structure(error)
    return first_change(step, stage, microbatch, changes, about_form, about_structure)


def is_about_structure(error: BaseException) -> bool:
    """Whether a changed container or a missing value may be the cause of an error.

    >>> is_about_structure(TypeError("must be Tensor, not tuple")), is_about_structure(ArithmeticError("nan"))
    (True, False)
    """
    kinds = (TypeError, AttributeError, LookupError, ValueError)
    return isinstance(error, kinds) and not isinstance(error, StagelineError)


def is_about_form(error: BaseException) -> bool:
    """Whether a changed type or shape of a tensor may be the cause of an error.

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
    """The change of the first stage before this one, for the same step and microbatch."""
    earlier = [
        change
        for change in changes
        if (change.step, change.microbatch) == (step, microbatch)
        and stage is not None
        and change.stage < stage
        and (about_form or (about_structure and change.of_structure))
    ]
    return min(earlier, key=lambda change: change.stage, default=None)


class ChangedOutput(TypeError):
    """A stage failed because the output of an earlier one changed."""
