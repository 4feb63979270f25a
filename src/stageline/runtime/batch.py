"""From a user's batch to the microbatches of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError, shorten
from stageline.runtime.tree import batch_size, split_batch

Reduction = Literal["mean", "sum", "count"]
Keywords = Mapping[int | str, Mapping[str, Any]]
"""Keyword inputs by the number of their stage; under "all", those of every stage that takes them."""


def check_reduction(given: str) -> None:
    """Refuse what is not a reduction."""
    if given not in ("mean", "sum", "count"):
        raise StagelineError(f"loss_reduction is 'mean', 'sum' or 'count', got {given!r}")


class Given(NamedTuple):
    """What this process knows of a step's batch."""

    samples: int | None
    """None where it was given nothing."""
    row: NDArray[np.float64]
    """The samples and digests, to be compared between processes; 0 for what was not given here."""


NAMES = ("the number of samples", "the inputs", "the targets", "the keyword inputs of all stages")


def look_at(stages: int, inputs: Any, targets: Any, keywords: Keywords | None, digests: bool) -> Given:
    """Make sure that everything given has as many samples; take digests of it if they are to be compared."""
    named = [(what, part) for what, part in (("inputs", inputs), ("targets", targets)) if part is not None]
    if keywords is not None and not isinstance(keywords, Mapping):
        raise StagelineError(f"stage_kwargs is a dict by stage, got {shorten(keywords)}")
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
    samples = sizes[0][0] if sizes else None
    if samples == 0:
        raise StagelineError("the batch has no samples")
    parts = (inputs, targets, (keywords or {}).get("all"))
    row = [float(samples or 0), *(float(digest(part)) if digests else 0.0 for part in parts)]
    return Given(samples, np.array(row))


def difference(rows: NDArray[np.float64], columns: Sequence[int], names: Sequence[int] | None = None) -> str:
    """Say which rank was given another batch than which; empty where all that was given is the same.

    `names` are what the ranks are called, where that is not their number.

    >>> difference(np.array([[8.0, 5, 0, 0], [0, 0, 0, 0], [8, 6, 0, 0]]), [0, 1])
    'rank 2 was given another batch than rank 0: the inputs differ'
    """
    for column in columns:
        given = {value: int(np.argmax(rows[:, column] == value)) for value in rows[:, column].tolist() if value}
        if len(given) > 1:
            first, second = (rank if names is None else names[rank] for rank in sorted(given.values())[:2])
            return f"rank {second} was given another batch than rank {first}: {NAMES[column]} differ"
    return ""


def digest(tree: Any) -> int:
    """A number of 52 bits, exact in a float, that tells batches apart; 0 for None."""
    if tree is None:
        return 0
    found = hashlib.blake2b(digest_size=8)
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return (int.from_bytes(found.digest(), "big") >> 12) | 1


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
    reduction: Reduction,
    samples: int,
    parts: int,
    filled: int,
    count: float | None,
    predicting: bool,
    total: int | None = None,
) -> list[float]:
    """What each microbatch's loss is multiplied by; `total` is the samples of all replicas, where there are several.

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
    return [(samples // parts + (part < samples % parts)) / (total or samples) for part in range(filled)]
