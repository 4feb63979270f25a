"""Changed outputs: stages whose output changes its type, shape or structure in the middle of training.

Such an output makes a later stage fail. The rank to blame is the one whose output changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from stageline.distributed.failures import Change
from stageline.tensors.pytree import TENSOR, unflatten
from stageline.tensors.sharded import describe_parts
from stageline.transport.protocol import Message


class OutputForms:
    """The last outputs of the stages of a rank.

    >>> from stageline.transport.protocol import Header, kinds_of
    >>> import torch
    >>> outputs = OutputForms()
    >>> for step, dtype in enumerate((torch.float32, torch.float64)):
    ...     header = Header(0, 1, "forward", 0, 0, step)
    ...     leaves = [torch.ones(2, dtype=dtype)]
    ...     outputs.note(Message(header, leaves, "tensor", [True], kinds_of(leaves)))
    >>> print(outputs.changes[0])
    stage 0 returned [float64 of shape (2,)] for microbatch 0 of step 1, but returned [float32 of shape (2,)] before
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
    if with_tree and (parts := describe_parts(tree)):
        return parts
    if with_tree and tree == TENSOR:
        return f"one tensor, {kinds[0]}"
    if with_tree and len(kinds) <= 4:
        with suppress(Exception):  # a user's container may not accept text
            return repr(unflatten([_Unquoted(kind) for kind in kinds], tree))
    return _listed(kinds)


class _Unquoted(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
