"""From a user's batch to the microbatches of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from stageline.errors import StagelineError, shorten
from stageline.runtime.tree import batch_size, split_batch
from stageline.runtime.worlds import World, same_batch

Reduction = Literal["mean", "sum", "count"]
Keywords = Mapping[int | str, Mapping[str, Any]]
"""Keyword inputs by the number of their stage; under "all", those of every stage that takes them."""


def check_reduction(given: str) -> None:
    """Refuse what is not a reduction."""
    if given not in ("mean", "sum", "count"):
        raise StagelineError(f"loss_reduction is 'mean', 'sum' or 'count', got {given!r}")


def samples_of(
    world: World, ranks: int, stages: int, inputs: Any, targets: Any, keywords: Keywords | None, *, with_targets: bool
) -> int:
    """Make sure that everything given has as many samples, on every rank; give back how many."""
    named = [(what, part) for what, part in (("inputs", inputs), ("targets", targets)) if part is not None]
    for stage, given in (keywords or {}).items():
        if stage != "all" and not (isinstance(stage, int) and 0 <= stage < stages):
            raise StagelineError(f"stage_kwargs has the key {stage!r}; give a stage from 0 to {stages - 1}, or 'all'")
        if not isinstance(given, Mapping):
            raise StagelineError(f"stage_kwargs[{stage!r}] is {shorten(given)}; give a dict of keyword inputs")
        named += [(f"stage_kwargs[{stage!r}][{name!r}]", part) for name, part in given.items() if _has_samples(part)]
    sizes = [(batch_size(part, f"the {what}"), what) for what, part in named]
    for size, what in sizes[1:]:
        if size != sizes[0][0]:
            raise StagelineError(
                f"there are {sizes[0][0]} samples of {sizes[0][1]} and {size} of {what}; give as many of both"
            )
    batch = [("the inputs", inputs), *([("the targets", targets)] if with_targets else [])]
    batch += [("the keyword inputs of all stages", keywords["all"])] if keywords and "all" in keywords else []
    samples = same_batch(world, ranks, sizes[0][0] if sizes else None, batch)
    if samples == 0:
        raise StagelineError("the batch has no samples")
    return samples


def _has_samples(part: Any) -> bool:
    try:
        batch_size(part, "")
    except StagelineError:
        return False
    return True


def parts_of(tree: Any, parts: int, filled: int) -> list[Any]:
    """The microbatches that are not empty; none for None."""
    return split_batch(tree, parts)[:filled] if tree is not None else []


def keyword_parts(keywords: Keywords | None, stages: int, parts: int, filled: int) -> dict[int, list[dict[str, Any]]]:
    """For each stage that has keyword inputs of its own or shares those of all: them, by microbatch."""
    if not keywords:
        return {}
    found: dict[int, list[dict[str, Any]]] = {}
    for stage in range(stages):
        given = {**keywords.get("all", {}), **keywords.get(stage, {})}
        if given:
            found[stage] = split_batch(given, parts)[:filled]
    return found


def weights(
    reduction: Reduction, samples: int, parts: int, filled: int, count: float | None, predicting: bool
) -> list[float]:
    """What each microbatch's loss is multiplied by.

    >>> weights("mean", samples=5, parts=2, filled=2, count=None, predicting=False)
    [0.6, 0.4]
    """
    if reduction == "count" and predicting:
        return [1.0] * filled
    if reduction == "count":
        if count is None or not count > 0:
            raise StagelineError(f"loss_reduction='count' needs count=, a number of targets above 0, got {count!r}")
        return [1.0 / count] * filled
    if count is not None:
        raise StagelineError(f"count={count!r} is for loss_reduction='count'; this is {reduction!r}")
    if reduction == "sum":
        return [1.0] * filled
    return [(samples // parts + (part < samples % parts)) / samples for part in range(filled)]
