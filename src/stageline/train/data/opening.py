"""Open the data of a job: texts, files of tokens, or the samples of a user's function."""

from __future__ import annotations

import hashlib
import inspect
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stageline.common.errors import StagelineError, shorten
from stageline.common.imports import find_function
from stageline.train.config.config import Config
from stageline.train.config.io import raise_errors
from stageline.train.config.rules import dataset_errors
from stageline.train.data.byte_pairs import PYTHON_SIZE
from stageline.train.data.documents import (
    dataset_documents,
    document_tokens,
    find_files,
    python_tokens,
    splits,
    text_documents,
)
from stageline.train.data.source import Indexed, Items, Tokens, digest, split
from stageline.train.data.stream import Stream
from stageline.train.data.tokenizer import Tokenizer, find_tokenizer


@dataclass(frozen=True)
class Data:
    """The training and validation data of a job, and its tokenizer."""

    kind: str
    train: Indexed | Stream
    validation: Indexed | Stream | None
    tokenizer: Tokenizer | None
    """None if it is unknown what produced the tokens."""
    vocab_size: int
    """Size of the vocabulary; 0 if only the model knows it."""

    def describe(self) -> str:
        """Return a one-line description."""
        if self.validation is None:
            validation = "no validation data"
        elif self.validation.length is None:
            validation = f"{self.validation.describe()} for validation"
        else:
            validation = f"{self.validation.length:,} for validation"
        return f"{self.kind}: {self.train.describe()}, {validation}"

    def collate_with(self, function: Callable[[list[Any]], Any]) -> None:
        """Let a function of the user turn lists of samples into batches."""
        for source in (self.train, self.validation):
            if isinstance(source, Tokens):
                raise StagelineError(
                    f"collate_fn combines samples into batches, but {source.name} is a single row of tokens, which "
                    "is cut into windows; leave out collate_fn, or pass samples as data"
                )
            if source is not None:
                source.collate_fn = function


def open_data(config: Config, *, cache: str | Path | None = None) -> Data:
    """Open the data of a job.

    `cache` is a folder that keeps the tokens of texts for the next run.

    >>> config = Config()
    >>> data = open_data(config)
    >>> data.vocab_size, data.train.length > 10 * data.validation.length > 0
    (1024, True)
    """
    kind, path, options = config.training.dataset, config.training.dataset_path, config.validation
    raise_errors(list(dataset_errors(config)))
    tokenizer = find_tokenizer(tokenizer_name(config))
    opener = _Opener(config, tokenizer, cache)
    train = opener.open(kind, path)
    validation: Indexed | Stream | None = None
    if options.enable and options.dataset_path:
        validation = opener.open(_validation_kind(kind, options.dataset_path), options.dataset_path)
    elif options.enable and kind == "dataset" and "validation" in splits(path):
        validation = opener.open(kind, path, split="validation")
    elif options.enable and not isinstance(train, Stream):
        train, validation = split(train, options.fraction)
    is_known = opener.is_text or tokenizer.name != "bytes" or _are_bytes(config, train)
    vocab_size = _vocabulary(config, tokenizer if is_known else None, train.name)
    for source in (train, validation):
        if isinstance(source, Tokens | Items | Stream):
            source.vocab_size = source.vocab_size or vocab_size
    return Data(kind, train, validation, tokenizer if is_known else None, vocab_size)


def tokenizer_name(config: Config) -> str:
    """Return model.tokenizer_path, or what auto stands for.

    >>> tokenizer_name(Config()), tokenizer_name(Config.read(None, "training.dataset=text"))
    ('python', 'bytes')
    """
    model = config.model
    if model.tokenizer_path != "auto":
        return model.tokenizer_path
    fits = not 0 < model.vocab_size < PYTHON_SIZE
    return "python" if model.name == "gpt" and config.training.dataset == "python" and fits else "bytes"


def data_of(samples: Iterable[Any], config: Config) -> Data:
    """Return the user's samples as the data of a job; part of a sequence is kept for validation as configured.

    >>> import torch
    >>> data = data_of([(torch.ones(2), torch.ones(1))] * 40, Config())
    >>> data.train.length, data.validation.length
    (38, 2)
    """
    train = source_of(samples, "your data", config)
    validation: Indexed | Stream | None = None
    if config.validation.enable and not isinstance(train, Stream):
        train, validation = split(train, config.validation.fraction)
    return Data("your data", train, validation, None, config.model.vocab_size)


@dataclass
class _Opener:
    """Opens training and validation data."""

    config: Config
    tokenizer: Tokenizer
    cache: str | Path | None
    is_text: bool = False
    """Whether the data was text that the tokenizer encoded."""

    def open(self, kind: str, path: str, split: str = "train") -> Indexed | Stream:
        """Open one source of a kind."""
        training = self.config.training
        if kind == "memmap":
            return memmap_tokens(path, training.dataset_dtype, training.seq_len)
        if ":" in kind:
            return function_data(kind, self.config)
        if kind == "python":
            self.is_text = True
            return python_tokens(self.tokenizer, training.seq_len)
        is_dataset = kind == "dataset"
        documents = dataset_documents(path, training.dataset_column, split) if is_dataset else text_documents(path)
        self.is_text = not is_dataset or isinstance(next(iter(documents.read()), ""), str)
        return document_tokens(documents, self.tokenizer, training.seq_len, cache=self.cache)


def _validation_kind(kind: str, path: str) -> str:
    """Return the kind of the validation data: that of the training data, but text instead of python."""
    if ":" in kind:
        if ":" not in path:
            raise StagelineError(
                f"validation.dataset_path is {path!r}, but training.dataset is a function; set "
                "validation.dataset_path to a function too, as package.module:function"
            )
        return path
    return "text" if kind == "python" else kind


def _are_bytes(config: Config, source: Indexed | Stream) -> bool:
    """Whether tokens that need no encoding are bytes: by the dtype of a file, else for the built-in GPT."""
    if config.training.dataset in ("memmap", "dataset"):
        return isinstance(source, Tokens) and np.asarray(source.array[:1]).dtype == np.uint8
    return config.model.name == "gpt" and not config.model.vocab_size


def _vocabulary(config: Config, tokenizer: Tokenizer | None, name: str) -> int:
    configured = config.model.vocab_size
    if tokenizer is not None and 0 < configured < tokenizer.size:
        raise StagelineError(
            f"model.vocab_size is {configured}, but the tokenizer {tokenizer.name} has {tokenizer.size} tokens; "
            "set it to 0 to use that size"
        )
    if tokenizer is None and not configured and config.model.name == "gpt":
        raise StagelineError(
            f"the vocabulary size of {name} is unknown; set model.vocab_size, or model.tokenizer_path to the "
            "tokenizer that produced its tokens"
        )
    return configured or (tokenizer.size if tokenizer is not None else 0)


class Restartable:
    """An iterable that calls a function for a new iterator each time."""

    def __init__(self, make: Callable[[], Iterable[Any]], first: Iterator[Any]) -> None:
        """`first` is an iterator that the function has already returned."""
        self._make, self._first = make, [first]

    def __iter__(self) -> Iterator[Any]:
        return self._first.pop() if self._first else iter(self._make())


def function_data(name: str, config: Config) -> Indexed | Stream:
    """Call a function and return its result as a source; it is passed the config if it takes an argument.

    See `source_of` for what it may return. If it returns an iterator, it is called again for every epoch.
    """
    function = find_function(name)
    make = partial(function, config) if _required_parameters(function) else function
    samples = make()
    return source_of(Restartable(make, samples) if _is_one_shot(samples) else samples, name, config)


def source_of(samples: Any, name: str, config: Config) -> Indexed | Stream:
    """Return samples as a source.

    A one-dimensional array of integers is tokens; a sequence of samples is shuffled; any other iterable is a stream.
    """
    if isinstance(samples, Tokens | Items | Stream):
        return samples
    if isinstance(samples, np.ndarray | torch.Tensor) and samples.ndim == 1:
        array = samples.numpy() if isinstance(samples, torch.Tensor) else samples
        if array.dtype.kind in "iu":
            return Tokens(array, config.training.seq_len, name=name)
    is_sequence = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
    if is_sequence and not isinstance(samples, str | bytes | dict | torch.utils.data.IterableDataset):
        return Items(samples, name=name)
    if not hasattr(samples, "__iter__") or isinstance(samples, str | bytes | dict):
        raise StagelineError(
            f"{name} is {shorten(samples)}, of type {type(samples).__name__}; it must be an iterable of samples, a "
            "sequence of them, or one row of tokens"
        )
    return Stream(samples, name=name)


def _is_one_shot(samples: Any) -> bool:
    """Whether it can be iterated only once and has no way to seek."""
    return isinstance(samples, Iterator) and not any(hasattr(samples, method) for method in ("seek", "load_state_dict"))


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


BLOCKS, BLOCK = 64, 4096
"""The digest of a file covers this many blocks of this many bytes, including the first and the last."""


class ConcatenatedArray:
    """One-dimensional arrays end to end, without copying them."""

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        self.parts = list(parts)
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, where: slice) -> NDArray[Any]:
        start, stop, _ = where.indices(len(self))
        # Only slices without a step are supported.
        pieces, part = [], int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            offset = int(self.ends[part]) - len(self.parts[part])
            pieces.append(self.parts[part][start - offset : stop - offset])
            start, part = int(self.ends[part]), part + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.parts[0].dtype), *pieces])


def memmap_tokens(paths: str, dtype: str, seq_len: int) -> Tokens:
    """Return the tokens of .npy files or raw files of integers, or of all .bin and .npy files of a folder."""
    files = find_files(paths, (".bin", ".npy"))
    parts = [_open(path, dtype) for path in files]
    digests = [_digest(part) for part in parts]
    return Tokens(
        parts[0] if len(parts) == 1 else ConcatenatedArray(parts),
        seq_len,
        name=paths,
        about=f"tokens in {files[0].name if len(files) == 1 else f'{len(files):,} files'}",
        digest=digest(*digests),
    )


def _open(path: Path, dtype: str) -> NDArray[Any]:
    try:
        if path.stat().st_size == 0:
            raise StagelineError(f"{path} is empty: it has no tokens")
        if path.suffix == ".npy":
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            raw_dtype = np.dtype(dtype).newbyteorder("<")
            if excess := path.stat().st_size % raw_dtype.itemsize:
                raise StagelineError(
                    f"{path} has {path.stat().st_size:,} bytes, which is not a multiple of "
                    f"{raw_dtype.itemsize} ({excess} too many): it does not contain {dtype}, or is truncated; set "
                    "training.dataset_dtype to its dtype"
                )
            array = np.memmap(path, raw_dtype, "r")
    except StagelineError:
        raise
    except OSError as error:
        raise StagelineError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise StagelineError(f"{path} is not a .npy file of numbers: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise StagelineError(
            f"{path} contains {array.dtype} of shape {array.shape}; a file of tokens must contain a "
            "one-dimensional array of integers"
        )
    if len(array) == 0:
        raise StagelineError(f"{path} is empty: it has no tokens")
    # Windows are read in random order; disable read-ahead.
    mapped = getattr(array, "_mmap", None)
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_RANDOM)
    return array


def _digest(array: NDArray[Any]) -> str:
    """Return a digest of size, dtype and some blocks, in constant time."""
    hasher = hashlib.blake2b(f"{len(array)} {array.dtype.str}".encode(), digest_size=8)
    block = BLOCK // array.dtype.itemsize
    last = max(len(array) - block, 0)
    for start in sorted({last * index // (BLOCKS - 1) for index in range(BLOCKS)}):
        hasher.update(np.ascontiguousarray(array[start : start + block]).data)
    return hasher.hexdigest()
