"""What to change where no plan fits: every advice was tried, and fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from stageline.common.errors import NothingFits, StagelineError
from stageline.common.units import format_size, round_up_size
from stageline.planning.search import Search
from stageline.planning.trial import Asked, Found

PATIENCE = 1.0
"""Seconds that one change is tried for."""


def what_again(again: Any) -> str:
    """What is computed once more, in words.

    >>> what_again("none"), what_again(("a", "b"))
    ('nothing', '2 units')
    """
    if isinstance(again, str):
        return {"none": "nothing", "stage": "whole stages"}.get(again, again)
    return f"{len(again)} unit{'s' if len(again) != 1 else ''}"


def nothing_fits(search: Search, tell: Callable[[str], None]) -> StagelineError:
    """The error, with what to change."""
    asked, closest = search.asked, search.closest
    if closest is None:
        names = f" of {', '.join(asked.names)}" if asked.names else ""
        return StagelineError(
            f"no schedule{names} can be made for {search.units} units on {asked.ranks} ranks with "
            f"{' or '.join(str(count) for count, _ in asked.splits[-3:])} microbatches"
            f"{f' and {asked.chunks} chunks' if asked.chunks else ''}; try schedule='auto', or other sizes"
        )
    if asked.caps is None:
        return StagelineError(
            f"{closest.name} does not add gradients up in the order of the microbatches, so that bits would depend on "
            "it, and nothing else was asked for; try schedule='auto'"
        )
    over = [rank.total - cap for rank, cap in zip(closest.memory, asked.caps, strict=True)]
    worst = max(range(len(over)), key=over.__getitem__)
    parts = ", ".join(
        f"{name} {format_size(value)}" for name, value in closest.memory[worst]._asdict().items() if value
    )
    needs = closest.memory[worst].total
    said = [
        f"nothing fits: the closest, {closest.name} with {closest.microbatches} microbatches and "
        f"{what_again(closest.again)} computed once more, needs {format_size(needs)} on rank {worst} ({parts}), "
        f"and that may hold {format_size(asked.caps[worst])}"
    ]
    changes = []
    for change, found in _changes(search, tell):
        changes.append(dict(change))
        shown = {name: round_up_size(value) if name == "memory" else value for name, value in change.items()}
        words = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        said.append(
            f"{words} brings it to {format_size(found.peak)} ({found.name})" if "memory" not in change else words
        )
    advice = f"; what would fit: {'; '.join(said[1:])}" if changes else "; use a smaller model or a leaner optimizer"
    return NothingFits(said[0] + advice, rank=worst, needs=needs, changes=changes)


def _changes(search: Search, tell: Callable[[str], None]) -> Iterator[tuple[Mapping[str, Any], Found]]:
    """Arguments with which something fits, and what does."""
    asked = replace(search.asked, time_limit=PATIENCE, synthesis=False)
    if asked.again != "auto":
        found = _tried(replace(asked, again="auto"), tell)
        if found is not None:
            yield {"recompute": "auto" if isinstance(found.again, tuple) else found.again}, found
    if asked.names is not None and asked.given is None:
        found = _tried(replace(asked, names=None), tell)
        if found is not None:
            yield {"schedule": "auto"}, found
    (count, samples), *others = asked.splits
    if not others and len(asked.sizes.profiles) + samples > 2 and samples > 1 and asked.given is None:
        for parts in (each for each in range(2, samples + 1) if samples % each == 0):
            found = _tried(replace(asked, splits=((count * parts, samples // parts),)), tell)
            if found is not None:
                yield {"batch": count * samples, "microbatches": count * parts}, found
                break
    if asked.given is None and asked.pinned is None and len(set(asked.caps or ())) == 1:
        most = search.units // (asked.chunks or 1)
        for ranks in (
            each for each in dict.fromkeys([2 * asked.ranks, 4 * asked.ranks, most]) if asked.ranks < each <= most
        ):
            found = _tried(replace(asked, ranks=ranks, caps=(asked.caps or (0.0,))[:1] * ranks), tell)
            if found is not None:
                yield {"ranks": ranks}, found
                break
    least = min(search.found, key=lambda each: each.peak)
    yield {"memory": math.ceil(least.peak)}, least


def _tried(asked: Asked, tell: Callable[[str], None]) -> Found | None:
    search = Search(asked, tell)
    search.run()
    return search.best
