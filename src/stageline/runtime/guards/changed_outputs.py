"""Outputs that change their type or form in the middle of training, told from those of the steps before.

A stage that suddenly passes on another type fails the stage that takes it. The rank to name is the one that changed.
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
    """An output that is not what this stage passed on before."""

    step: int
    microbatch: int
    stage: int
    before: str
    now: str
    of_structure: bool = False
    """Whether there are more or fewer values, or values in other containers; not only others of their kind."""

    @property
    def place(self) -> tuple[str, int, int]:
        """The action that passed it on."""
        return "F", self.stage, self.microbatch

    def __str__(self) -> str:
        """Say it as an error would."""
        return (
            f"stage {self.stage} passes on {self.now} for microbatch {self.microbatch} of step {self.step}, and passed "
            f"on {self.before} before"
        )


class Outputs:
    """What the stages of a rank passed on last.

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
        """Nothing was passed on yet."""
        self._last: dict[int, Message] = {}
        self.changes: list[Change] = []

    def note(self, message: Message) -> None:
        """A stage passes this on."""
        header, known = message.header, self._last.get(message.header.stage)
        same_tree = known is not None and known.tree == message.tree
        if header.traffic != "forward" or (known is not None and same_tree and known.kinds == message.kinds):
            return
        self._last[header.stage] = Message(header, [], message.tree, [], message.kinds)
        if known is not None and not (same_tree and _forms(known.kinds) == _forms(message.kinds)):
            before, now = (_described(each.tree, each.kinds, with_tree=not same_tree) for each in (known, message))
            change = Change(header.step, header.microbatch, header.stage, before, now, not same_tree)
            recent = [each for each in self.changes if each.step >= header.step - 1]
            self.changes = [*recent[-100:], change]


def _forms(kinds: Iterable[str]) -> list[str]:
    """Without the first dimension, the samples, of which there may be more or fewer."""
    return [re.sub(r"of shape \(\d+,", "of shape (", kind) for kind in kinds]


def _listed(kinds: Sequence[str]) -> str:
    return f"[{', '.join(kinds[:4])}{', …' if len(kinds) > 4 else ''}]"


def _described(tree: str, kinds: Sequence[str], with_tree: bool) -> str:
    """The values in their containers, where those changed."""
    if with_tree and tree == TENSOR:
        return f"one tensor, {kinds[0]}"
    if with_tree and len(kinds) <= 4:
        with suppress(Exception):  # a user's container may not take text
            return repr(unflatten([_Said(kind) for kind in kinds], tree))
    return _listed(kinds)


class _Said(str):
    """Text that stands for a value, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def origin_of(
    error: BaseException, step: int, stage: int | None, microbatch: int | None, changes: Iterable[Change]
) -> Change | None:
    """The first stage whose output changed before one failed on it; None where that is no reason of the failure."""
    about_form, about_structure = is_about_form(error), is_about_structure(error)
    return first_change(step, stage, microbatch, changes, about_form, about_structure)


def is_about_structure(error: BaseException) -> bool:
    """Whether an error may come from a value in another container than before, or from none at all.

    >>> is_about_structure(TypeError("must be Tensor, not tuple")), is_about_structure(ArithmeticError("nan"))
    (True, False)
    """
    kinds = (TypeError, AttributeError, LookupError, ValueError)
    return isinstance(error, kinds) and not isinstance(error, StagelineError)


def is_about_form(error: BaseException) -> bool:
    """Whether an error may come from a tensor of another type or form than before.

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
    """The first of the stages before this one whose output changed for this microbatch, so that it may have failed."""
    earlier = [
        each
        for each in changes
        if (each.step, each.microbatch) == (step, microbatch)
        and stage is not None
        and each.stage < stage
        and (about_form or (about_structure and each.of_structure))
    ]
    return min(earlier, key=lambda each: each.stage, default=None)


class ChangedOutput(TypeError):
    """A stage passed on what it never did before, and another one failed on it."""
