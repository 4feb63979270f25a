"""From text to tokens and back: bytes, or the tokenizer.json of a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stageline.errors import StagelineError

PIECE = 4_000_000
"""Characters that a tokenizer from a file is given at once; a longer document is cut at the ends of lines."""

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""What stands between documents, if the tokenizer has it and no tokenizer_config.json beside it says another."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def size(self) -> int:
        """One more than the largest token."""

    @property
    def separator(self) -> int | None:
        """The token between two documents; None puts nothing there."""

    @property
    def fingerprint(self) -> str:
        """A digest that tells it from others."""

    def encode(self, text: str) -> NDArray[Any]:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """The text of tokens."""


class Bytes:
    """UTF-8, a token a byte. The byte 255, which occurs in no UTF-8, stands between documents.

    >>> Bytes().encode("né").tolist()
    [110, 195, 169]
    >>> Bytes().decode([110, 195, 169, 255])
    'né'
    """

    name = "bytes"
    size = 256
    separator = 255
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[np.uint8]:
        """The bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """The text of bytes; separators are left out, and what is no byte or no UTF-8 is shown as �."""
        # A byte that no UTF-8 has stands for what a model with more words than bytes may draw.
        kept = (int(token) for token in tokens if token != self.separator)
        return bytes(token if 0 <= token < self.size else self.separator for token in kept).decode(errors="replace")


class File:
    """A tokenizer.json, as the library `tokenizers` writes it.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "stage": 2}, unk_token="[UNK]"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> words.save("tokenizer.json")
    >>> tokenizer = File("tokenizer.json")
    >>> tokenizer.size, tokenizer.encode("a stage").tolist(), tokenizer.decode([1, 2])
    (3, [1, 2], 'a stage')
    """

    def __init__(self, path: str | Path) -> None:
        """Read it; of a folder, the tokenizer.json in it."""
        found = Path(path)
        found = found / "tokenizer.json" if found.is_dir() else found
        library = needed("tokenizers", f"the tokenizer {path}")
        try:
            written = found.read_bytes()
        except OSError as error:
            raise StagelineError(
                f"cannot read the tokenizer {found}: {error.strerror}; model.tokenizer_path is bytes, or a "
                "tokenizer.json or its folder"
            ) from error
        try:
            self._tokenizer = library.Tokenizer.from_buffer(written)
        except Exception as error:
            raise StagelineError(f"{found} is not a tokenizer.json that tokenizers can read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = str(path)
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if self.size == 0:
            raise StagelineError(f"the tokenizer {found} has no tokens")
        self.separator = self._find_separator(found.with_name("tokenizer_config.json"))
        self.fingerprint = hashlib.blake2b(written, digest_size=8).hexdigest()

    def encode(self, text: str) -> NDArray[Any]:
        """The tokens of a text, without special ones around it."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of each of some texts, on all cores."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(each.ids, smallest(self.size)) for each in found]

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """The text of tokens, without special ones."""
        text: str = self._tokenizer.decode([int(token) for token in tokens])
        return text

    def _find_separator(self, beside: Path) -> int | None:
        try:
            said = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            said = None
        said = said.get("content") if isinstance(said, dict) else said
        for name in (said, *SEPARATORS):
            if isinstance(name, str) and (token := self._tokenizer.token_to_id(name)) is not None:
                return int(token)
        return None


def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that model.tokenizer_path means.

    >>> find_tokenizer("bytes").size
    256
    """
    return Bytes() if name == "bytes" else File(name)


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[NDArray[Any]]:
    """The tokens of documents one after the other, with separators between; a few million characters at a time.

    >>> np.concatenate(list(encode_documents(Bytes(), ["ab", "", "c"]))).tolist()
    [97, 98, 255, 99]
    """
    dtype, begun = smallest(tokenizer.size), False
    for group in _groups(documents):
        texts = [text for _, text in group]
        encoded = tokenizer.encode_all(texts) if isinstance(tokenizer, File) else map(tokenizer.encode, texts)
        for (first, _), tokens in zip(group, encoded, strict=True):
            if first and begun and tokenizer.separator is not None:
                yield np.array([tokenizer.separator], dtype)
            begun = True
            yield np.asarray(tokens).astype(dtype, copy=False)


def _groups(documents: Iterable[str]) -> Iterator[list[tuple[bool, str]]]:
    """Pieces of documents, each with whether it is the first of its document, in lists that are not too long."""
    group: list[tuple[bool, str]] = []
    length = 0
    for document in documents:
        start = 0
        while start < len(document):
            stop = start + PIECE
            if stop < len(document):
                stop = (document.rfind("\n", start, stop) + 1) or stop
            group.append((start == 0, document[start:stop]))
            length += stop - start
            start = stop
            if length >= PIECE:
                yield group
                group, length = [], 0
    yield group


def smallest(size: int) -> np.dtype[Any]:
    """The smallest unsigned integers that hold tokens below a size.

    >>> smallest(256), smallest(50_257)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.uint32)


def needed(library: str, what: str, install: str = "") -> Any:
    """Import a library that only some data needs, or say what to install.

    >>> needed("no_such_library", "this data")
    Traceback (most recent call last):
    stageline.errors.StagelineError: this data needs no_such_library, which ...: pip install no_such_library
    """
    try:
        return import_module(library)
    except ImportError as error:
        raise StagelineError(
            f"{what} needs {library}, which cannot be imported ({error}): pip install {install or library}"
        ) from error
