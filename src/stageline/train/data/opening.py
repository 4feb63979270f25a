"""All the data of a job, opened as its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stageline.errors import StagelineError, nearest
from stageline.train.config import Config
from stageline.train.data.dataset import dataset_documents, splits
from stageline.train.data.documents import document_tokens, python_documents, text_documents
from stageline.train.data.function import function_data, source_of
from stageline.train.data.memmap import memmap_tokens
from stageline.train.data.source import Indexed, Items, Tokens, split
from stageline.train.data.stream import Stream, say
from stageline.train.data.tokenizer import Tokenizer, find_tokenizer

KINDS = ("python", "text", "memmap", "dataset")


@dataclass(frozen=True)
class Data:
    """What a job trains on, what it is validated on, and what its tokens mean."""

    kind: str
    train: Indexed | Stream
    validation: Indexed | Stream | None
    tokenizer: Tokenizer | None
    """None where nothing says what made the tokens."""
    vocab_size: int
    """How many tokens there can be; 0 where nothing says so and only the model knows."""

    def describe(self) -> str:
        """One line for people."""
        if self.validation is None:
            held = "nothing held back"
        elif self.validation.length is None:
            held = f"{self.validation.describe()} to validate on"
        else:
            held = f"{self.validation.length:,} more to validate on"
        return f"{self.kind}: {self.train.describe()}, {held}"


def open_data(config: Config, *, cache: str | Path | None = None, note: Callable[[str], None] = say) -> Data:
    """Open the data of a job.

    `cache` is a folder that keeps the tokens of texts for the next time; `note` is called with a line for people while
    something takes long.

    >>> config = Config()
    >>> data = open_data(config)
    >>> data.vocab_size, data.train.length > 10 * data.validation.length > 0
    (256, True)
    """
    kind, path, validation = config.training.dataset, config.training.dataset_path, config.validation
    _check_kind(kind, path)
    tokenizer = find_tokenizer(config.model.tokenizer_path)
    opener = _Opener(config, tokenizer, cache, note)
    train = opener.open(kind, path)
    held: Indexed | Stream | None = None
    if validation.enable and validation.dataset_path:
        held = opener.open(_validation_kind(kind, validation.dataset_path), validation.dataset_path)
    elif validation.enable and kind == "dataset" and "validation" in splits(path):
        held = opener.open(kind, path, part="validation")
    elif validation.enable and not isinstance(train, Stream):
        train, held = split(train, validation.fraction)
    known = opener.encoded or tokenizer.name != "bytes" or _are_bytes(config, train)
    vocab_size = _vocabulary(config, tokenizer if known else None, train.name)
    for source in (train, held):
        if isinstance(source, Tokens | Items | Stream):
            source.vocab_size = source.vocab_size or vocab_size
    return Data(kind, train, held, tokenizer if known else None, vocab_size)


def data_of(samples: Iterable[Any], config: Config, *, note: Callable[[str], None] = say) -> Data:
    """Samples of one's own as the data of a job; what has numbered samples is held back from as configured.

    >>> import torch
    >>> data = data_of([(torch.ones(2), torch.ones(1))] * 40, Config())
    >>> data.train.length, data.validation.length
    (38, 2)
    """
    train = source_of(samples, "your data", config, note=note)
    held: Indexed | Stream | None = None
    if config.validation.enable and not isinstance(train, Stream):
        train, held = split(train, config.validation.fraction)
    return Data("your data", train, held, None, config.model.vocab_size)


@dataclass
class _Opener:
    """Opens data for training and for validation alike."""

    config: Config
    tokenizer: Tokenizer
    cache: str | Path | None
    note: Callable[[str], None]
    encoded: bool = False
    """Whether it was text, which the tokenizer made tokens of."""

    def open(self, kind: str, path: str, part: str = "train") -> Indexed | Stream:
        """Open one source of a kind."""
        training = self.config.training
        if kind == "memmap":
            return memmap_tokens(path, training.dataset_dtype, training.seq_len)
        if ":" in kind:
            return function_data(kind, self.config, note=self.note)
        if kind == "dataset":
            documents = dataset_documents(path, training.dataset_column, part)
        else:
            documents = text_documents(path) if kind == "text" else python_documents()
        self.encoded = kind != "dataset" or isinstance(next(iter(documents.read()), ""), str)
        return document_tokens(documents, self.tokenizer, training.seq_len, cache=self.cache)


def _check_kind(kind: str, path: str) -> None:
    if kind not in KINDS and ":" not in kind:
        raise StagelineError(
            f"training.dataset is {kind!r}{nearest(kind, KINDS)}; it is one of {', '.join(KINDS)}, or "
            "package.module:function"
        )
    if kind == "python" and path:
        raise StagelineError(
            f"training.dataset_path is {path!r}, and training.dataset is python, which needs none: set "
            "training.dataset to text, memmap or dataset"
        )


def _validation_kind(kind: str, path: str) -> str:
    """Data to validate on is of the kind that is trained on; beside Python's source it is text."""
    if ":" in kind:
        if ":" not in path:
            raise StagelineError(
                f"validation.dataset_path is {path!r}, and training.dataset is a function: name a function for it too, "
                "as package.module:function"
            )
        return path
    return "text" if kind == "python" else kind


def _are_bytes(config: Config, source: Indexed | Stream) -> bool:
    """Whether tokens that came as such are taken for bytes: in a file by their type, else for the built-in GPT."""
    if config.training.dataset in ("memmap", "dataset"):
        return isinstance(source, Tokens) and np.asarray(source.array[:1]).dtype == np.uint8
    return config.model.name == "gpt" and not config.model.vocab_size


def _vocabulary(config: Config, tokenizer: Tokenizer | None, name: str) -> int:
    said = config.model.vocab_size
    if tokenizer is not None and 0 < said < tokenizer.size:
        raise StagelineError(
            f"model.vocab_size is {said}, and the tokenizer {tokenizer.name} has {tokenizer.size}; 0 takes as many"
        )
    if tokenizer is None and not said and config.model.name == "gpt":
        raise StagelineError(
            f"nothing says how many different tokens {name} has: set model.vocab_size, or model.tokenizer_path to the "
            "tokenizer that made them"
        )
    return said or (tokenizer.size if tokenizer is not None else 0)
