"""What samples come from: tokens that are cut into windows, items with numbers, and which data it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stageline.errors import StagelineError, shorten
from stageline.train.data.collate import Batch, check_tokens, collate


class Source(Protocol):
    """What is asked of every source of samples."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def length(self) -> int | None:
        """Samples in an epoch; None where only reading finds it out."""

    @property
    def fingerprint(self) -> str:
        """A digest of which data it is."""

    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps, for `check_same` to compare; JSON can hold it."""

    def describe(self) -> str:
        """How much there is, for people."""


class Indexed(Source, Protocol):
    """A source whose samples have numbers from 0 on, and are read in any order."""

    @property
    def length(self) -> int:
        """Samples in an epoch."""

    def read(self, numbers: NDArray[np.int64]) -> Batch:
        """A batch of the samples with these numbers."""

    def part(self, start: int, stop: int) -> Indexed:
        """The samples from one number to another."""


class Array(Protocol):
    """Tokens in memory or in a file: they have a length, and a slice is an array."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, where: slice, /) -> Any:
        """Some of them."""


class Tokens:
    """Tokens in a row, cut into windows of `seq_len` inputs and the targets one further.

    The next window begins with the last target of the one before, so every token but the first is a target once; what
    is left at the end, less than a window, is not used.

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
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        """Take the tokens from `start` to `stop` of an array.

        `digest` tells the content from other content; without it all of it is read to find one. `tokenizer` is the
        fingerprint of what made the tokens, `about` says what they are, as in "tokens of the Bible". With a
        `vocab_size`, a batch with another token is an error.
        """
        if seq_len < 1:
            raise StagelineError(f"training.seq_len is {seq_len}; a sample has at least 1 token")
        self.array, self.start, self.stop = array, start, len(array) if stop is None else stop
        self.seq_len, self.name, self.about = seq_len, name, about
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._digest = digest or hashlib.blake2b(np.ascontiguousarray(array[:]).data, digest_size=8).hexdigest()
        if self.tokens == 0:
            raise StagelineError(f"{name} has no tokens: it is empty")
        if self.length < 1:
            raise StagelineError(
                f"{name} has {self.tokens:,} tokens, and a sample of training.seq_len {seq_len} needs "
                f"{seq_len + 1:,}: give more data or a shorter training.seq_len"
            )

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.stop - self.start

    @property
    def length(self) -> int:
        """Windows in an epoch."""
        return (self.tokens - 1) // self.seq_len

    @property
    def fingerprint(self) -> str:
        """A digest of the content and of which part of it this is."""
        return digest(self._digest, self.start, self.stop)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "kind": "tokens",
            "name": self.name,
            "tokens": self.tokens,
            "seq_len": self.seq_len,
            "tokenizer": self.tokenizer,
            "fingerprint": self.fingerprint,
        }

    def describe(self) -> str:
        """How much there is."""
        return f"{amount(self.tokens)} {self.about}, {self.length:,} windows of {self.seq_len}"

    def read(self, numbers: NDArray[np.int64]) -> Batch:
        """The windows with these numbers, as inputs and targets."""
        windows = np.empty((len(numbers), self.seq_len + 1), np.int64)
        for window, number in zip(windows, numbers.tolist(), strict=True):
            begin = self.start + number * self.seq_len
            window[:] = self.array[begin : begin + self.seq_len + 1]
        check_tokens(
            windows,
            self.vocab_size,
            self.name,
            lambda row, at: f"position {self.start + int(numbers[row]) * self.seq_len + at:,}",
        )
        whole = torch.from_numpy(windows)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def part(self, start: int, stop: int) -> Tokens:
        """The windows from one number to another: the last target of the first part is an input of the next."""
        return Tokens(
            self.array,
            self.seq_len,
            name=self.name,
            about=self.about,
            digest=self._digest,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            start=self.start + start * self.seq_len,
            stop=self.stop if stop == self.length else self.start + stop * self.seq_len + 1,
        )


class Items:
    """Anything with a length and numbered samples: a list, a data set of torch or of Hugging Face.

    >>> items = Items([(torch.zeros(2), 0), (torch.ones(2), 1), (torch.ones(2), 2)], name="three")
    >>> items.read(np.array([2, 0]))
    (tensor([[1., 1.], [0., 0.]]), tensor([2, 0]))
    """

    def __init__(
        self, items: Any, *, name: str = "items", vocab_size: int = 0, start: int = 0, stop: int | None = None
    ) -> None:
        """Take the items from `start` to `stop`."""
        self.items, self.name, self.vocab_size = items, name, vocab_size
        self.start, self.stop = start, len(items) if stop is None else stop
        if self.length < 1:
            raise StagelineError(f"{name} has no samples: its length is {len(items)}")

    @property
    def length(self) -> int:
        """Samples in an epoch."""
        return self.stop - self.start

    @property
    def fingerprint(self) -> str:
        """The items' own fingerprint, or a digest of their number and name: they are not read for it."""
        return digest(own_fingerprint(self.items) or self.name, len(self.items), self.start, self.stop)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"kind": "items", "name": self.name, "samples": self.length, "fingerprint": self.fingerprint}

    def describe(self) -> str:
        """How much there is."""
        return f"{self.length:,} samples"

    def read(self, numbers: NDArray[np.int64]) -> Batch:
        """The items with these numbers."""
        places = [self.start + number for number in numbers.tolist()]
        return collate([self.items[place] for place in places], places, self.name, self.vocab_size)

    def part(self, start: int, stop: int) -> Items:
        """The items from one number to another."""
        return Items(
            self.items, name=self.name, vocab_size=self.vocab_size, start=self.start + start, stop=self.start + stop
        )


def split(source: Indexed, fraction: float) -> tuple[Indexed, Indexed]:
    """Hold a share of the samples back, at the end and at least one: what is trained on, and what is not.

    >>> train, validation = split(Tokens(np.arange(101), seq_len=10), 0.2)
    >>> train.length, validation.length
    (8, 2)
    """
    if not 0 < fraction < 1:
        raise StagelineError(
            f"validation.fraction is {fraction}; give a share between 0 and 1, or validation.enable = false to hold "
            "nothing back"
        )
    if source.length < 2:
        has = f"{source.length} sample, and 2 are needed"
        if isinstance(source, Tokens):
            length = source.seq_len
            has = (
                f"{source.tokens:,} tokens, and {2 * length + 1:,} are needed: training.seq_len + 1 = {length + 1:,} "
                f"for the first sample and {length:,} for each other"
            )
        raise StagelineError(
            f"{source.name} is too small to hold a part of it back: it has {has}. Give more data, a shorter "
            "training.seq_len, a validation.dataset_path, or validation.enable = false"
        )
    held = min(max(round(source.length * fraction), 1), source.length - 1)
    border = source.length - held
    return source.part(0, border), source.part(border, source.length)


def check_same(saved: Mapping[str, Any], now: Source) -> None:
    """Refuse to go on with other data than a checkpoint was trained on; `saved` is its source's `identity()`.

    Where the data lies and what it is called may have changed.

    >>> saved = Tokens(np.arange(100), seq_len=10, name="mine").identity()
    >>> check_same(saved, Tokens(np.arange(100), seq_len=10, name="moved"))
    >>> check_same(saved, Tokens(np.arange(90), seq_len=10, name="mine"))
    Traceback (most recent call last):
    stageline.errors.StagelineError: mine is not the data of the checkpoint: it had 100 tokens then and has 90 now...
    """
    if not isinstance(saved, Mapping) or "fingerprint" not in saved or "kind" not in saved:
        raise StagelineError(
            f"the checkpoint does not say which data it was trained on: {shorten(saved)} is not what identity() gives"
        )
    new = now.identity()
    if differs := _difference(saved, new):
        raise StagelineError(
            f"{now.name} is not the data of the checkpoint: {differs}. Its place in the data would mean other samples: "
            "give the data and options it was trained with, or begin a new run (another job.dump_folder) from its "
            "weights with checkpoint.initial_load_path"
        )


def _difference(saved: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if saved["kind"] != new["kind"]:
        return f"it was {shorten(saved['kind'])} then and is {new['kind']} now"
    if saved.get("tokenizer") != new.get("tokenizer"):
        return (
            f"it was made with another tokenizer, of fingerprint {saved.get('tokenizer') or 'unknown'} then and "
            f"{new.get('tokenizer') or 'unknown'} now (model.tokenizer_path)"
        )
    for what, words in (("tokens", "tokens"), ("samples", "samples")):
        if saved.get(what) != new.get(what):
            return f"it had {_number(saved.get(what))} {words} then and has {_number(new.get(what))} now"
    if saved.get("seq_len") != new.get("seq_len"):
        return f"training.seq_len was {saved.get('seq_len')} then and is {new.get('seq_len')} now"
    if saved["fingerprint"] != new["fingerprint"]:
        return f"its content is another, of fingerprint {saved['fingerprint']} then and {new['fingerprint']} now"
    return ""


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else shorten(value)


def own_fingerprint(data: Any) -> str:
    """The fingerprint that data brings with it, as data sets of Hugging Face do; empty where it has none."""
    found = getattr(data, "fingerprint", None) or getattr(data, "_fingerprint", None)
    return found if isinstance(found, str) else ""


def digest(*parts: object) -> str:
    """A short digest of a few words and numbers.

    >>> digest("a", 1)
    '2a094f2f3c5033c9'
    """
    return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def amount(number: int) -> str:
    """A large number in few letters.

    >>> amount(812), amount(45_210), amount(3_141_592), amount(2_718_281_828)
    ('812', '45.2 K', '3.1 M', '2.7 B')
    """
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
