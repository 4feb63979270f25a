"""What `split` is asked for, looked at before anything is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stageline.common.errors import StagelineError, nearest, shorten
from stageline.model.partition.schedule_cuts import CutConstraints
from stageline.model.profile.profile import Profile

WAYS = ("layers", "parameters", "time", "type:ClassOfBlock", "a list of names", "a profile")


def check_asked(
    stages: Any, by: Any, layers_per_stage: Any, stack: Any, ask: CutConstraints, example: Any
) -> list[str]:
    """Refuse what cannot be, or does not go together; give back the names of the stacks.

    >>> check_asked(2, "layers", None, "blocks", CutConstraints(), None)
    ['blocks']
    """
    whole("stages", stages)
    if ask.ranks is not None:
        whole("ranks", ask.ranks)
    _check_by(by)
    stacks = [stack] if isinstance(stack, str) and stack else list(stack) if _is_list(stack) or stack == "" else None
    if stacks is None or not all(isinstance(name, str) for name in stacks):
        raise StagelineError(f"stack is the name of the list of blocks, or a list of names, got {shorten(stack)}")
    by_cost = isinstance(by, Profile) or by in ("parameters", "time")
    if layers_per_stage is not None:
        _check_counts(layers_per_stage)
        if by != "layers" and not (isinstance(by, str) and by.startswith("type:")):
            raise StagelineError(f"layers_per_stage says where to cut, and so does by={shorten(by)}; give one of them")
    given = [name for name, value in ask._asdict().items() if value is not None and value != {}]
    if given and not by_cost:
        raise StagelineError(
            f"{', '.join(f'{name}=' for name in given)} {'needs' if len(given) == 1 else 'need'} costs: give "
            "by='parameters', 'time' or a profile"
        )
    if by == "time" and example is None:
        raise StagelineError(
            "by='time' measures the model, and needs a batch to run it on: example=batch, a tuple of the model's "
            "arguments, a dict of its keywords, or its only argument; as large as a microbatch of yours"
        )
    return stacks


def whole(name: str, value: Any) -> None:
    """Refuse what is no whole number from 1.

    >>> whole("stages", 2.5)
    Traceback (most recent call last):
    stageline.StagelineError: stages is a whole number of at least 1, got 2.5
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StagelineError(f"{name} is a whole number of at least 1, got {shorten(value)}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_by(by: Any) -> None:
    if isinstance(by, Profile) or (_is_list(by) and all(isinstance(name, str) for name in by)):
        return
    if not isinstance(by, str) or not (by in WAYS[:3] or by.startswith("type:")):
        near = nearest(by, WAYS) if isinstance(by, str) else ""
        raise StagelineError(f"by is one of {', '.join(WAYS)}, got {shorten(by)}{near}")


def _check_counts(counts: Any) -> None:
    if not _is_list(counts):
        raise StagelineError(
            f"layers_per_stage is a list, how many blocks each stage has, such as [2, 3, 3]; got {shorten(counts)}"
        )
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise StagelineError(
                f"layers_per_stage is {shorten(counts)}, and {shorten(count)} is not a number of layers: every stage "
                "needs at least one"
            )
