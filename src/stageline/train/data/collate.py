"""Collate samples into a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import StagelineError, shorten

Batch = tuple[Any, Any]
"""Inputs and targets: tensors with samples along the first dimension, or pytrees of them.

For samples that are dicts, the inputs are a dict and the targets are None.
"""

KINDS = (
    "a sample is a tuple of inputs and targets, a row of tokens that is one longer than the inputs (the targets are "
    "shifted by one), or a dict of the model's arguments"
)


def collate(samples: Sequence[Any], numbers: Sequence[int], name: str, vocab_size: int = 0) -> Batch:
    """Stack samples of any of the three kinds; `numbers` are the sample numbers for error messages.

    >>> collate([[1, 2, 3], [4, 5, 6]], [0, 1], "mine")
    (tensor([[1, 2], [4, 5]]), tensor([[2, 3], [5, 6]]))
    >>> collate([{"input_ids": [1, 2], "labels": [1, 2]}], [0], "mine")
    ({'input_ids': tensor([[1, 2]]), 'labels': tensor([[1, 2]])}, None)
    """
    first = samples[0]
    if isinstance(first, Mapping):
        stacked = _stack(samples, numbers, name)
        if isinstance(tokens := stacked.get("input_ids"), Tensor):
            check_tokens(
                tokens.cpu().numpy(),
                vocab_size,
                name,
                lambda row, position: f"position {position} of sample {numbers[row]:,}",
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
            f"sample {numbers[0]:,} of {name} is {rows.dtype} of shape {tuple(rows.shape[1:])}, which is not a row "
            f"of tokens; {KINDS}"
        )
    rows = rows.to(torch.int64)
    check_tokens(
        rows.cpu().numpy(), vocab_size, name, lambda row, position: f"position {position} of sample {numbers[row]:,}"
    )
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def check_tokens(rows: NDArray[Any], vocab_size: int, name: str, describe: Callable[[int, int], str]) -> None:
    """Raise `StagelineError` for tokens outside the vocabulary; a `vocab_size` of 0 disables the check."""
    if not vocab_size or not rows.size or (int(rows.max()) < vocab_size and int(rows.min()) >= 0):
        return
    row, *position = (int(index) for index in np.argwhere((rows >= vocab_size) | (rows < 0))[0])
    raise StagelineError(
        f"{name} has the token {int(rows[(row, *position)])} at {describe(row, position[0] if position else 0)}, but "
        f"the largest token of the vocabulary is {vocab_size - 1}; set model.vocab_size or model.tokenizer_path to "
        "those of the tokens, and training.dataset_dtype to the dtype of the file"
    )


def _stack(parts: Sequence[Any], numbers: Sequence[int], name: str) -> Any:
    first = parts[0]
    for number, part in zip(numbers, parts, strict=True):
        if _structure(part) != _structure(first):
            raise _mismatch(name, numbers[0], _structure(first), number, _structure(part))
    if isinstance(first, Mapping):
        return {key: _stack([part[key] for part in parts], numbers, name) for key in first}
    if isinstance(first, tuple):
        return tuple(_stack([part[index] for part in parts], numbers, name) for index in range(len(first)))
    tensors = [_tensor(part, number, name) for part, number in zip(parts, numbers, strict=True)]
    for tensor, number in zip(tensors, numbers, strict=True):
        if (tensor.shape, tensor.dtype) != (tensors[0].shape, tensors[0].dtype):
            old, new = (f"{value.dtype} of shape {tuple(value.shape)}" for value in (tensors[0], tensor))
            raise _mismatch(name, numbers[0], old, number, new)
    return torch.stack(tensors)


def _structure(part: Any) -> str:
    if isinstance(part, Mapping):
        return f"a dict of {', '.join(sorted(map(str, part)))}"
    return f"a tuple of {len(part)}" if isinstance(part, tuple) else "neither dict nor tuple"


def _mismatch(name: str, first: int, old: str, second: int, new: str) -> StagelineError:
    return StagelineError(
        f"sample {first:,} of {name} is {old} and sample {second:,} is {new}; all samples of a batch must have the "
        "same structure, shape and dtype: truncate or pad them to one length"
    )


def _tensor(value: Any, number: int, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        # Tokens are often stored as unsigned integers, which few torch operations support.
        if isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.dtype.itemsize > 1:
            value = value.astype(np.int64)
        elif isinstance(value, np.ndarray) and not value.flags.writeable:
            value = value.copy()
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StagelineError(
            f"sample {number:,} of {name} holds a {type(value).__name__}, {shorten(value)}, which cannot be "
            f"converted to a tensor; {KINDS}"
        ) from error
