"""Actions: a forward, a backward, one half of a split backward, or an overlapped pair of a forward and a backward; and
what a rank does with the shards of a stage."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias, cast

from stageline.common.errors import ScheduleError, shorten

Kind: TypeAlias = Literal["F", "B", "I", "W"]

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
"""F forward, B whole backward, I input gradient, W weight gradient."""

F, B, I, W = range(4)
"""The same as the numbers in arrays."""
OUTPUT_STEP = (1, -1, -1, 0)
"""For each kind, the distance from its stage to the stage that takes its output: F passes it on to the next stage, B
and I to the previous one, W to none."""

LARGEST_INDEX = 2**31 - 1

_ACTION = re.compile(r"([0-9]{1,12})([FBIW])([0-9]{1,12})")
_OVERLAP = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One computation of one stage for one microbatch.

    >>> action = Action("F", stage=2, microbatch=5)
    >>> str(action), action.kind
    ('2F5', 'F')
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        # As in torch.distributed.pipelining: stage, kind, microbatch.
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward that run together, so that the transfers of one hide behind the compute of the other.

    >>> str(Overlap(Action("F", 0, 4), Action("B", 3, 1)))
    '(0F4;3B1)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Entry: TypeAlias = Action | Overlap
"""One entry of a rank's program."""

ShardKind: TypeAlias = Literal["UNSHARD", "RESHARD", "REDUCE_GRAD"]

SHARD_KINDS: tuple[ShardKind, ...] = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""UNSHARD gathers the parameters of a stage, RESHARD frees them, REDUCE_GRAD reduces its gradients; torch's names."""

UNSHARD, RESHARD, REDUCE_GRAD = range(3)
"""The same as the numbers in arrays."""

_SHARD_ACTION = re.compile(r"([0-9]{1,12})(UNSHARD|RESHARD|REDUCE_GRAD)")


class ShardAction(NamedTuple):
    """What a rank does with the shards of one of its stages, between two entries.

    >>> str(ShardAction("UNSHARD", 2))
    '2UNSHARD'
    """

    kind: ShardKind
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


def parse_shard_action(text: str) -> ShardAction | None:
    """Parse the text form of a shard action; None for any other text.

    >>> parse_shard_action("2UNSHARD"), parse_shard_action("2F5")
    (ShardAction(kind='UNSHARD', stage=2), None)
    """
    match = _SHARD_ACTION.fullmatch(text)
    if match is None or int(match[1]) > LARGEST_INDEX:
        return None
    return ShardAction(cast(ShardKind, match[2]), int(match[1]))


def parse_entry(text: str) -> Entry:
    """Parse the text form of an action or of an overlapped pair.

    >>> parse_entry("2F5")
    Action(kind='F', stage=2, microbatch=5)
    >>> parse_entry("(0F4;3B1)OVERLAP_F_B").backward
    Action(kind='B', stage=3, microbatch=1)
    """
    if match := _ACTION.fullmatch(text):
        stage, kind, microbatch = match.groups()
        if max(int(stage), int(microbatch)) > LARGEST_INDEX:
            raise ScheduleError(
                f"{text} has a stage or microbatch index above the maximum, {LARGEST_INDEX}",
                rule="format",
            )
        return Action(cast(Kind, kind), int(stage), int(microbatch))
    if match := _OVERLAP.fullmatch(text):
        forward, backward = (parse_entry(part.strip()) for part in match.groups())
        if isinstance(forward, Action) and isinstance(backward, Action):
            return Overlap(forward, backward)
    raise ScheduleError(
        f"cannot read {shorten(text)} as an action; expected a stage, one of F, B, I or W, and a microbatch, "
        "like 2F5, or an overlapped pair like (0F4;3B1)OVERLAP_F_B",
        rule="format",
    )
