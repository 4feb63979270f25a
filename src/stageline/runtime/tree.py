"""What stages pass to each other: any tree of tensors, numbers, strings and None, flat on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError, shorten
from stageline.transport.protocol import Leaf

TENSOR = "tensor"
"""The text of the commonest shape of all: one tensor and nothing around it."""


def flatten(tree: Any, where: str) -> tuple[list[Leaf], str]:
    """Turn a tree into its leaves and the text of its shape; refuse a leaf that no message can hold."""
    if isinstance(tree, Tensor):
        return [tree], TENSOR
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor | int | float | str | bool | None):
            raise StagelineError(
                f"{where} passes on a {type(leaf).__name__}, {shorten(leaf)}; stages can pass tensors, numbers, "
                "strings and None, in tuples, lists and dicts"
            )
    try:
        return leaves, _text_of(spec)
    except NotImplementedError as error:
        raise StagelineError(
            f"{where} passes on a {type(tree).__name__} or something in it that cannot be told to another process; "
            "stages can pass tuples, lists and dicts"
        ) from error


def unflatten(leaves: Sequence[Any], text: str) -> Any:
    """Build the tree again."""
    if text == TENSOR:
        return leaves[0]
    return pytree.tree_unflatten(list(leaves), _spec_of(text))


@lru_cache(maxsize=1024)
def _text_of(spec: pytree.TreeSpec) -> str:
    return pytree.treespec_dumps(spec)


@lru_cache(maxsize=1024)
def _spec_of(text: str) -> pytree.TreeSpec:
    return pytree.treespec_loads(text)


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """The leaves that are tensors."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def batch_size(tree: Any, what: str) -> int:
    """How many samples a batch has: the first dimension of its tensors, which must agree."""
    sizes = {int(tensor.shape[0]) for tensor in tensors_of(pytree.tree_leaves(tree)) if tensor.dim() > 0}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no tensor with a first dimension"
        raise StagelineError(f"{what} must have tensors with one common first dimension, the samples; found {found}")
    return sizes.pop()


def split_batch(tree: Any, parts: int) -> list[Any]:
    """Cut every tensor along its first dimension, sizes differing by at most one, larger first.

    >>> [part.tolist() for part in split_batch(torch.arange(5), 2)]
    [[0, 1, 2], [3, 4]]
    """
    leaves, spec = pytree.tree_flatten(tree)
    cut = [
        list(torch.tensor_split(leaf, parts)) if isinstance(leaf, Tensor) and leaf.dim() > 0 else [leaf] * parts
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[part] for column in cut], spec) for part in range(parts)]


def join_batch(parts: Sequence[Any]) -> Any:
    """Put microbatches together again along the first dimension; what has none becomes a list.

    >>> join_batch([torch.tensor([0, 1, 2]), torch.tensor([3, 4])]).tolist()
    [0, 1, 2, 3, 4]
    """
    columns = [pytree.tree_flatten(part) for part in parts]
    joined = [
        torch.cat(list(leaves)) if isinstance(leaves[0], Tensor) and leaves[0].dim() > 0 else list(leaves)
        for leaves in zip(*(leaves for leaves, _ in columns), strict=True)
    ]
    return pytree.tree_unflatten(joined, columns[0][1])
