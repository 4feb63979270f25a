"""From samples to a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageline.errors import StagelineError, shorten

Batch = tuple[Any, Any]
"""Inputs and targets: tensors with the samples along the first dimension, or trees of such. Of samples that are
dicts the inputs are a dict, and the targets are None."""

KINDS = (
    "a sample is a tuple of inputs and targets, a row of tokens with one more than the inputs (the targets are one "
    "further), or a dict of what the model takes"
)


def collate(samples: Sequence[Any], numbers: Sequence[int], name: str, vocab_size: int = 0) -> Batch:
    """Stack samples of any of the three kinds; `numbers` are what errors call them.

    >>> collate([[1, 2, 3], [4, 5, 6]], [0, 1], "mine")
    (tensor([[1, 2], [4, 5]]), tensor([[2, 3], [5, 6]]))
    >>> collate([{"input_ids": [1, 2], "labels": [1, 2]}], [0], "mine")
    ({'input_ids': tensor([[1, 2]]), 'labels': tensor([[1, 2]])}, None)
    """
    first = samples[0]
    if isinstance(first, Mapping):
        stacked = _stack(samples, numbers, name)
        if isinstance(words := stacked.get("input_ids"), Tensor):
            check_tokens(
                words.cpu().numpy(), vocab_size, name, lambda row, at: f"place {at} of sample {numbers[row]:,}"
            )
        return stacked, None
    if isinstance(first, tuple):
        if len(first) != 2:
            raise StagelineError(f"sample {numbers[0]:,} of {name} is a tuple of {len(first)}; {KINDS}")
        inputs, targets = _stack(samples, numbers, name)
        return inputs, targets
    rows = _stack(samples, numbers, name)
    if rows.dim() != 2 or rows.shape[1] < 2 or rows.is_floating_point() or rows.is_complex():
        raise StagelineError(
            f"sample {numbers[0]:,} of {name} is {rows.dtype} of shape {tuple(rows.shape[1:])}, which is no row of "
            f"tokens; {KINDS}"
        )
    rows = rows.to(torch.int64)
    check_tokens(rows.cpu().numpy(), vocab_size, name, lambda row, at: f"place {at} of sample {numbers[row]:,}")
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def check_tokens(rows: NDArray[Any], vocab_size: int, name: str, place: Callable[[int, int], str]) -> None:
    """Refuse tokens that are not below the size of the vocabulary; 0 is not known, and nothing is checked."""
    if not vocab_size or not rows.size or (int(rows.max()) < vocab_size and int(rows.min()) >= 0):
        return
    row, *at = (int(each) for each in np.argwhere((rows >= vocab_size) | (rows < 0))[0])
    raise StagelineError(
        f"{name} has the token {int(rows[(row, *at)])} at {place(row, at[0] if at else 0)}, and the "
        f"vocabulary ends at {vocab_size - 1}: set model.vocab_size or model.tokenizer_path to what the tokens were "
        "made with, and training.dataset_dtype to what a file of them holds"
    )


def _stack(parts: Sequence[Any], numbers: Sequence[int], name: str) -> Any:
    first = parts[0]
    for number, part in zip(numbers, parts, strict=True):
        if _form(part) != _form(first):
            raise _unlike(name, numbers[0], _form(first), number, _form(part))
    if isinstance(first, Mapping):
        return {key: _stack([part[key] for part in parts], numbers, name) for key in first}
    if isinstance(first, tuple):
        return tuple(_stack([part[at] for part in parts], numbers, name) for at in range(len(first)))
    tensors = [_tensor(part, number, name) for part, number in zip(parts, numbers, strict=True)]
    for tensor, number in zip(tensors, numbers, strict=True):
        if (tensor.shape, tensor.dtype) != (tensors[0].shape, tensors[0].dtype):
            old, new = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (tensors[0], tensor))
            raise _unlike(name, numbers[0], old, number, new)
    return torch.stack(tensors)


def _form(part: Any) -> str:
    if isinstance(part, Mapping):
        return f"a dict of {', '.join(sorted(map(str, part)))}"
    return f"a tuple of {len(part)}" if isinstance(part, tuple) else "neither dict nor tuple"


def _unlike(name: str, first: int, old: str, second: int, new: str) -> StagelineError:
    return StagelineError(
        f"sample {first:,} of {name} is {old} and sample {second:,} is {new}; samples of a batch are alike: cut or pad "
        "them to one length"
    )


def _tensor(value: Any, number: int, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        # torch computes little with unsigned integers, and they are what tokens are kept in.
        if isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.dtype.itemsize > 1:
            value = value.astype(np.int64)
        elif isinstance(value, np.ndarray) and not value.flags.writeable:
            value = value.copy()
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StagelineError(
            f"sample {number:,} of {name} holds a {type(value).__name__}, {shorten(value)}, of which no tensor can be "
            f"made; {KINDS}"
        ) from error
