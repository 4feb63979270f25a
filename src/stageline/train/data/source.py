"""Sources of samples: windows of tokens, or indexed items; their identity, and batches of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import StagelineError, shorten


class Array(Protocol):
    """Tokens in memory or in a file, with a length and slices."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def __getitem__(self, where: slice, /) -> Any:
        """Return a slice as an array."""


class Tokens:
    """A row of tokens, cut into windows of `seq_len` inputs and targets shifted by one.

    A window starts with the last target of the previous one, so every token but the first is a target once. An
    incomplete window at the end is not used.

    >>> tokens = Tokens(np.arange(10), seq_len=4, name="counting")
    >>> tokens.length
    2
    >>> inputs, targets = tokens.read(np.array([0, 1]))
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, 4], [5, 6, 7, 8]])
    """

    def __init__(
        self,
        array: Array,
        seq_len: int,
        *,
        name: str = "tokens",
        about: str = "tokens",
        digest: str = "",
        tokenizer: str = "",
        vocab_size: int = 0,
    ) -> None:
        """`digest` identifies the content; without it, the whole array is read to compute one. `tokenizer` is the
        fingerprint of the tokenizer, and `about` says what the tokens are, as in "tokens of the Bible". With a
        `vocab_size`, reading a batch with a token outside it raises `StagelineError`.
        """
        if seq_len < 1:
            raise StagelineError(f"training.seq_len is {seq_len}; it must be at least 1")
        self.array, self.start, self.stop = array, 0, len(array)
        self.seq_len, self.name, self.about = seq_len, name, about
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._digest = digest or hashlib.blake2b(np.ascontiguousarray(array[:]).data, digest_size=8).hexdigest()
        if self.tokens == 0:
            raise StagelineError(f"{name} has no tokens: it is empty")
        if self.length < 1:
            raise StagelineError(
                f"{name} has {self.tokens:,} tokens, but a sample with training.seq_len {seq_len} needs "
                f"{seq_len + 1:,}; use more data or a shorter training.seq_len"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def length(self) -> int:
        """Number of windows per epoch."""
        return (self.tokens - 1) // self.seq_len

    @property
    def fingerprint(self) -> str:
        """A digest of the content and of the part of it."""
        return digest(self._digest, self.start, self.stop)

    def identity(self) -> dict[str, Any]:
        """Return JSON-serialisable data for a checkpoint."""
        return {
            "kind": "tokens",
            "name": self.name,
            "tokens": self.tokens,
            "seq_len": self.seq_len,
            "tokenizer": self.tokenizer,
            "fingerprint": self.fingerprint,
        }

    def describe(self) -> str:
        """Return a short description of the amount of data."""
        return f"{amount(self.tokens)} {self.about}, {self.length:,} windows of {self.seq_len}"

    def read(self, numbers: NDArray[np.int64]) -> Batch:
        """Return the windows with these numbers as inputs and targets."""
        windows = np.empty((len(numbers), self.seq_len + 1), np.int64)
        for window, number in zip(windows, numbers.tolist(), strict=True):
            first = self.start + number * self.seq_len
            window[:] = self.array[first : first + self.seq_len + 1]
        check_tokens(
            windows,
            self.vocab_size,
            self.name,
            lambda row, offset: f"position {self.start + int(numbers[row]) * self.seq_len + offset:,}",
        )
        # Copy with NumPy: torch would use all its threads, which are busy with the step.
        inputs, targets = (np.ascontiguousarray(part) for part in (windows[:, :-1], windows[:, 1:]))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def part(self, start: int, stop: int) -> Tokens:
        """Return the windows from `start` to `stop`; adjacent parts share one token."""
        part = copy(self)
        part.start = self.start + start * self.seq_len
        part.stop = self.stop if stop == self.length else self.start + stop * self.seq_len + 1
        return part


class Items:
    """A sequence of samples: a list, or a map-style dataset of torch or Hugging Face.

    >>> items = Items([(torch.zeros(2), 0), (torch.ones(2), 1), (torch.ones(2), 2)], name="three")
    >>> items.read(np.array([2, 0]))
    (tensor([[1., 1.], [0., 0.]]), tensor([2, 0]))
    """

    def __init__(self, items: Any, *, name: str = "items", vocab_size: int = 0) -> None:
        self.items, self.name, self.vocab_size = items, name, vocab_size
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        """Makes a batch of samples instead of `collate`."""
        self.start, self.stop = 0, len(items)
        if self.length < 1:
            raise StagelineError(f"{name} has no samples: its length is {len(items)}")

    @property
    def length(self) -> int:
        """Number of samples per epoch."""
        return self.stop - self.start

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the items, or a digest of their count and name; the items are not read."""
        return digest(own_fingerprint(self.items) or self.name, len(self.items), self.start, self.stop)

    def identity(self) -> dict[str, Any]:
        """Return JSON-serialisable data for a checkpoint."""
        return {"kind": "items", "name": self.name, "samples": self.length, "fingerprint": self.fingerprint}

    def describe(self) -> str:
        """Return a short description of the amount of data."""
        return f"{self.length:,} samples"

    def read(self, numbers: NDArray[np.int64]) -> Batch:
        """Return the items with these numbers as a batch."""
        indices = [self.start + number for number in numbers.tolist()]
        return collate([self.items[index] for index in indices], indices, self.name, self.vocab_size, self.collate_fn)

    def part(self, start: int, stop: int) -> Items:
        """Return the items from `start` to `stop`."""
        part = copy(self)
        part.start, part.stop = self.start + start, self.start + stop
        return part


Indexed = Tokens | Items
"""A source whose samples are numbered from 0 and can be read in any order."""


class Source(Protocol):
    """What identifies the data of a job."""

    @property
    def name(self) -> str:
        """A name for messages."""

    def identity(self) -> dict[str, Any]:
        """Return JSON-serialisable data for a checkpoint, which `check_same` compares."""


def split(source: Indexed, fraction: float) -> tuple[Indexed, Indexed]:
    """Split off the last fraction of the samples, at least one, for validation; return training and validation data.

    >>> train, validation = split(Tokens(np.arange(101), seq_len=10), 0.2)
    >>> train.length, validation.length
    (8, 2)
    """
    if not 0 < fraction < 1:
        raise StagelineError(
            f"validation.fraction is {fraction}; it must be between 0 and 1; use validation.enable = false for "
            "no validation data"
        )
    if source.length < 2:
        available = f"{source.length} sample, but 2 are needed"
        if isinstance(source, Tokens):
            length = source.seq_len
            available = (
                f"{source.tokens:,} tokens, but {2 * length + 1:,} are needed: training.seq_len + 1 = {length + 1:,} "
                f"for the first sample and {length:,} for each other"
            )
        raise StagelineError(
            f"{source.name} is too small to split off validation data: it has {available}. Use more data, a shorter "
            "training.seq_len, a validation.dataset_path, or validation.enable = false"
        )
    num_validation = min(max(round(source.length * fraction), 1), source.length - 1)
    border = source.length - num_validation
    return source.part(0, border), source.part(border, source.length)


def check_same(saved: Mapping[str, Any], source: Source) -> None:
    """Raise `StagelineError` if data differs from that of a checkpoint; `saved` is the `identity()` of its source.

    The path and the name may differ.

    >>> saved = Tokens(np.arange(100), seq_len=10, name="mine").identity()
    >>> check_same(saved, Tokens(np.arange(100), seq_len=10, name="moved"))
    >>> check_same(saved, Tokens(np.arange(90), seq_len=10, name="mine"))
    Traceback (most recent call last):
    stageline.StagelineError: mine is not the data that the checkpoint was trained on: it had 100 tokens...
    """
    if not isinstance(saved, Mapping) or "fingerprint" not in saved or "kind" not in saved:
        raise StagelineError(
            f"the checkpoint does not identify its data: {shorten(saved)} is not a value that identity() returned"
        )
    new = source.identity()
    if difference := _difference(saved, new):
        raise StagelineError(
            f"{source.name} is not the data that the checkpoint was trained on: {difference}. Its position would "
            "refer to other samples. Use the same data and options, or start a new run (another job.dump_folder) "
            "from its weights with checkpoint.initial_load_path"
        )


def _difference(saved: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if saved["kind"] != new["kind"]:
        return f"it was {shorten(saved['kind'])} and is {new['kind']} now"
    if saved.get("tokenizer") != new.get("tokenizer"):
        return (
            f"its tokenizer had the fingerprint {saved.get('tokenizer') or 'unknown'} and has "
            f"{new.get('tokenizer') or 'unknown'} now (model.tokenizer_path)"
        )
    if saved.get("seq_len") != new.get("seq_len"):
        return f"training.seq_len was {saved.get('seq_len')} and is {new.get('seq_len')} now"
    for unit in ("tokens", "samples"):
        if saved.get(unit) != new.get(unit):
            return f"it had {_number(saved.get(unit))} {unit} and has {_number(new.get(unit))} now"
    if saved["fingerprint"] != new["fingerprint"]:
        return f"its content has changed: its fingerprint was {saved['fingerprint']} and is {new['fingerprint']} now"
    return ""


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else shorten(value)


def own_fingerprint(data: Any) -> str:
    """Return the fingerprint attribute of data, as Hugging Face datasets have; empty if there is none."""
    fingerprint = getattr(data, "fingerprint", None) or getattr(data, "_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else ""


def digest(*parts: object) -> str:
    """Return a short digest of strings and numbers.

    >>> digest("a", 1)
    '2a094f2f3c5033c9'
    """
    return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def amount(number: int) -> str:
    """Format a large number briefly.

    >>> amount(812), amount(45_210), amount(3_141_592), amount(2_718_281_828)
    ('812', '45.2 K', '3.1 M', '2.7 B')
    """
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)


Batch = tuple[Any, Any]
"""Inputs and targets: tensors with samples along the first dimension, or pytrees of them.

For samples that are dicts, the inputs are a dict and the targets are None.
"""

KINDS = (
    "a sample is a tuple of inputs and targets, a row of tokens that is one longer than the inputs (the targets are "
    "shifted by one), or a dict of the model's arguments"
)


def collate(
    samples: Sequence[Any],
    numbers: Sequence[int],
    name: str,
    vocab_size: int = 0,
    function: Callable[[list[Any]], Any] | None = None,
) -> Batch:
    """Stack samples of any of the three kinds; `numbers` are the sample numbers for error messages.

    A `function` of the user makes the batch instead: a tuple of inputs and targets, or a mapping.

    >>> collate([[1, 2, 3], [4, 5, 6]], [0, 1], "mine")
    (tensor([[1, 2], [4, 5]]), tensor([[2, 3], [5, 6]]))
    >>> collate([{"input_ids": [1, 2], "labels": [1, 2]}], [0], "mine")
    ({'input_ids': tensor([[1, 2]]), 'labels': tensor([[1, 2]])}, None)
    """
    if function is not None:
        return _batch_of(function(list(samples)))
    first = samples[0]

    def place(row: int, position: int) -> str:
        return f"position {position} of sample {numbers[row]:,}"

    if isinstance(first, Mapping):
        stacked = _stack(samples, numbers, name)
        if isinstance(tokens := stacked.get("input_ids"), Tensor):
            check_tokens(tokens.cpu().numpy(), vocab_size, name, place)
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
    check_tokens(rows.cpu().numpy(), vocab_size, name, place)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def check_tokens(rows: NDArray[Any], vocab_size: int, name: str, describe: Callable[[int, int], str]) -> None:
    """Raise `StagelineError` for tokens outside the vocabulary; a `vocab_size` of 0 disables the check."""
    if not vocab_size or not rows.size or (int(rows.max()) < vocab_size and int(rows.min()) >= 0):
        return
    row, *position = (int(index) for index in np.argwhere((rows >= vocab_size) | (rows < 0))[0])
    raise StagelineError(
        f"{name} has the token {int(rows[(row, *position)])} at {describe(row, position[0] if position else 0)}, but "
        f"the largest token in the vocabulary is {vocab_size - 1}; set model.vocab_size or model.tokenizer_path to "
        "those of the tokens, and training.dataset_dtype to the dtype of the file"
    )


def _batch_of(batch: Any) -> Batch:
    """Check the result of a user's collate function."""
    if isinstance(batch, Mapping):
        return dict(batch), None  # a BatchEncoding of transformers is a mapping, too
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise StagelineError(
        f"collate_fn returned {shorten(batch)}, of type {type(batch).__name__}; it must return a tuple of inputs and "
        "targets, or a dict"
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
