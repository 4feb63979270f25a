"""From a user's batch to the microbatches of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import StagelineError, shorten
from stageline.runtime._torch_private import pytree
from stageline.runtime.batches.block_mask import is_mask
from stageline.runtime.batches.chunk_specs import ChunkSpecs, Rule, cut_of
from stageline.runtime.batches.opaque_objects import is_plain

Reduction = Literal["mean", "sum", "count"]
Keywords = Mapping[int | str, Mapping[str, Any]]
"""Keyword inputs by the number of their stage; under "all", those of every stage that takes them."""


def check_reduction(given: str) -> None:
    """Refuse what is not a reduction."""
    if given not in ("mean", "sum", "count"):
        raise StagelineError(f"loss_reduction is 'mean', 'sum' or 'count', got {given!r}")


class BatchRow(NamedTuple):
    """The batch of this process as numbers that are compared between processes."""

    samples: int | None
    """None where this process has no batch."""
    row: NDArray[np.float64]
    """The number of samples and digests of the parts; 0 for what this process does not have, -1 for what it refused."""


REFUSED = (0.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0)
"""The row of a process that refused its batch."""
NAMES = (
    "the number of samples",
    "the inputs",
    "the targets",
    "the keyword inputs of all stages",
    "scale=",
    "count=",
    "the mode of the model",
)
SCALE, COUNT, MODE = 4, 5, 6
MODES = {1.0: "model.eval()", 2.0: "model.train()"}


def validate_batch(
    stages: int, inputs: Any, targets: Any, keywords: Keywords | None, digests: bool, specs: ChunkSpecs
) -> BatchRow:
    """Refuse parts with different numbers of samples; compute digests if they are to be compared."""
    sizes = _sizes(inputs, _inputs_spec(inputs, specs), "the inputs", "", needed=specs.default)
    option = "so by targets_chunk_spec=, with None in its place"
    # One without dimensions goes to every microbatch.
    needed = specs.default and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(targets))
    sizes += _sizes(targets, _targets_spec(targets, specs), "the targets", option, needed=needed)
    if keywords is not None and not isinstance(keywords, Mapping):
        raise StagelineError(f"stage_kwargs is a dict by stage, got {shorten(keywords)}")
    for stage, given in (keywords or {}).items():
        if stage != "all" and not (isinstance(stage, int) and 0 <= stage < stages):
            raise StagelineError(f"stage_kwargs has the key {stage!r}; give a stage from 0 to {stages - 1}, or 'all'")
        if not isinstance(given, Mapping):
            raise StagelineError(f"stage_kwargs[{stage!r}] is {shorten(given)}; give a dict of keyword inputs")
        for name, part in given.items():
            what, option = f"stage_kwargs[{stage!r}][{name!r}]", f"so: kwargs_chunk_spec={{{name!r}: None}}"
            sizes += _sizes(part, specs.of_keyword(name), what, option)
    for size, what in sizes[1:]:
        if size != sizes[0][0]:
            raise StagelineError(
                f"there are {sizes[0][0]} samples of {sizes[0][1].removeprefix('the ')} and {size} of "
                f"{what.removeprefix('the ')}; give as many of both, or say by a chunk spec what is not cut along its "
                "first dimension (see args_chunk_spec of sl.Pipeline)"
            )
    samples = sizes[0][0] if sizes else None
    if samples == 0:
        raise StagelineError("the batch has no samples")
    parts = (inputs, targets, (keywords or {}).get("all"))
    row = [float(samples or 0), *(float(digest(part)) if digests else 0.0 for part in parts)]
    return BatchRow(samples, np.array(row))


def _inputs_spec(inputs: Any, specs: ChunkSpecs) -> Any:
    return Rule.DEFAULT if specs.default else specs.of_inputs(inputs)


def _targets_spec(targets: Any, specs: ChunkSpecs) -> Any:
    return Rule.DEFAULT if specs.default else specs.of_targets(targets)


def _is_dense(part: Any, spec: Any) -> bool:
    """Whether a part of a batch is one dense tensor, to be cut along its first dimension: the usual case."""
    plain = type(part) is Tensor and spec is Rule.DEFAULT
    return plain and part.layout is torch.strided and not part.is_nested and part.dim() > 0


def _sizes(part: Any, spec: Any, what: str, option: str, needed: bool = False) -> list[tuple[int, str]]:
    """How many samples each tensor has that is cut; `needed` refuses a part without such a tensor."""
    if part is None:
        return []
    if _is_dense(part, spec):
        return [(int(part.shape[0]), what)]
    sizes = cut_of(part, spec, what, option).sizes()
    if not sizes and needed:
        raise StagelineError(
            f"{what} must have tensors with one common first dimension, the samples; found no tensor with a first "
            f"dimension in {shorten(part)}"
        )
    return sizes


def difference(rows: NDArray[np.float64], columns: Sequence[int], names: Sequence[int] | None = None) -> str:
    """Say which rank was given another batch than which; empty where all that was given is the same.

    `names` are what the ranks are called, where that is not their number.

    >>> difference(np.array([[8.0, 5, 0, 0], [0, 0, 0, 0], [8, 6, 0, 0]]), [0, 1])
    'rank 2 was given another batch than rank 0: the inputs differ'
    >>> difference(np.array([[8.0, 5, 0, 0, 1.0], [8, 5, 0, 0, 0.5]]), [0, 4])
    'rank 1 and rank 0 differ in scale=: rank 1 has 0.5 and rank 0 has 1.0; give all ranks the same'
    """
    for column in columns:
        given = {value: int(np.argmax(rows[:, column] == value)) for value in rows[:, column].tolist() if value > 0}
        if len(given) > 1:
            rows_apart = sorted(given.values())[:2]
            first, second = (rank if names is None else names[rank] for rank in rows_apart)
            if column >= SCALE:
                one, two = (_setting(column, float(rows[row, column])) for row in rows_apart)
                return (
                    f"rank {second} and rank {first} differ in {NAMES[column]}: rank {second} has {two} and rank "
                    f"{first} has {one}; give all ranks the same"
                )
            return f"rank {second} was given another batch than rank {first}: {NAMES[column]} differ"
    return ""


def settings_row(scale: float, count: float | None, training: bool) -> list[float]:
    """What all ranks must be given alike beside the batch, as the last columns of a row; 0 for what was not given."""
    return [float(scale), float(count or 0), 2.0 if training else 1.0]


def _setting(column: int, value: float) -> str:
    return MODES[value] if column == MODE else repr(value)


def disagreement(
    rows: NDArray[np.float64],
    columns: Sequence[int],
    needs: Mapping[int, Collection[int]],
    names: Sequence[int] | None = None,
) -> str:
    """Say what is wrong with what the ranks were given: different batches, or nothing where it is needed.

    `needs` says for the inputs and for the targets which ranks read them. Targets may be None, but on all ranks.

    >>> disagreement(np.array([[8.0, 5, 7, 0], [8, 5, 0, 0]]), [0, 1, 2], {1: {0}, 2: {1}})
    'rank 0 was given the targets, and rank 1, which reads them, was given None; give them to rank 1'
    """
    apart = difference(rows, columns, names)
    if apart:
        return apart
    for column in (1, 2):
        if column not in columns or (rows[:, column] < 0).any():  # what was refused is told by who refused it
            continue
        given = np.flatnonzero(rows[:, column] > 0)
        if not len(given):
            if column == 1:
                return f"no rank was given {NAMES[column]}"
            continue
        for rank in sorted(needs[column]):
            if not rows[rank, column]:
                one, two = (int(each) if names is None else names[int(each)] for each in (given[0], rank))
                return (
                    f"rank {one} was given {NAMES[column]}, and rank {two}, which reads them, was given None; give "
                    f"them to rank {two}"
                )
    return ""


def digest(tree: Any) -> int:
    """A number of 52 bits, exact in a float, that tells batches apart; 0 for None."""
    if tree is None:
        return 0
    found = hashlib.blake2b(digest_size=8)
    for leaf in [tree] if type(tree) is Tensor else pytree.tree_leaves(tree, is_leaf=is_mask):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:  # the text of an object may hold its address, which is another one on every rank
            found.update((repr(leaf) if is_plain(leaf) else type(leaf).__qualname__).encode())
    return (int.from_bytes(found.digest(), "big") >> 12) | 1


def keyword_parts(
    keywords: Keywords | None, stages: int, parts: int, filled: int, specs: ChunkSpecs
) -> dict[int, list[dict[str, Any]]]:
    """For each stage that has keyword inputs of its own or shares those of all: them, by microbatch."""
    if not keywords:
        return {}
    found: dict[int, list[dict[str, Any]]] = {}
    for stage in range(stages):
        given = {**keywords.get("all", {}), **keywords.get(stage, {})}
        if given:
            columns = {name: _parts(part, specs.of_keyword(name), name, parts, filled) for name, part in given.items()}
            found[stage] = [{name: column[part] for name, column in columns.items()} for part in range(filled)]
    return found


def input_parts(inputs: Any, parts: int, filled: int, specs: ChunkSpecs) -> list[Any]:
    """The microbatches of the inputs that are not empty; none for None."""
    if inputs is None:
        return []
    return _parts(inputs, _inputs_spec(inputs, specs), "the inputs", parts, filled)


def _parts(value: Any, spec: Any, what: str, parts: int, filled: int) -> list[Any]:
    if _is_dense(value, spec):
        return list(value.tensor_split(parts)[:filled])
    return cut_of(value, spec, what, "", refuse=False).parts(parts, filled)


def target_parts(targets: Any, parts: int, filled: int, specs: ChunkSpecs) -> list[Any]:
    """The targets of the microbatches that are not empty; None for each where there are no targets."""
    if targets is None:
        return [None] * filled
    return _parts(targets, _targets_spec(targets, specs), "the targets", parts, filled)


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
