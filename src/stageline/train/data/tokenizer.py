"""Tokenizers: bytes, byte pairs for Python code, or the tokenizer.json of a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import StagelineError
from stageline.common.imports import require
from stageline.train.data.byte_pairs import BytePairs, python_tokenizer

MAX_CHARACTERS = 4_000_000
"""Characters passed to a tokenizer file at once; a longer document is split at line ends."""

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Separators between documents, used if the tokenizer has them and tokenizer_config.json names no other."""


class Bytes:
    """UTF-8 with one token per byte. The byte 255, which never occurs in UTF-8, separates documents.

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
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8)

    def num_bytes(self, tokens: NDArray[Any]) -> int:
        """Return the number of bytes that tokens stand for."""
        return tokens.size

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of bytes, without separators; invalid bytes and invalid UTF-8 become �."""
        # A model with a larger vocabulary may draw tokens that are not bytes; decode them as invalid.
        values = (int(token) for token in tokens if token != self.separator)
        return bytes(token if 0 <= token < self.size else self.separator for token in values).decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        """Return a tokenizer.json with the same tokens, and its config, for transformers."""
        letters = byte_letters()
        letters[self.separator] = SEPARATORS[0]
        return tokenizer_files({letter: token for token, letter in enumerate(letters)}, [])


class File:
    """A tokenizer.json, as written by the library `tokenizers`.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "stage": 2}, unk_token="[UNK]"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> words.save("tokenizer.json")
    >>> tokenizer = File("tokenizer.json")
    >>> tokenizer.size, tokenizer.encode("a stage").tolist(), tokenizer.decode([1, 2])
    (3, [1, 2], 'a stage')
    """

    def __init__(self, path: str | Path) -> None:
        """Read a tokenizer.json, or the one in a folder."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        library = require("tokenizers", f"the tokenizer {path}")
        try:
            contents = file.read_bytes()
        except OSError as error:
            raise StagelineError(
                f"cannot read the tokenizer {file}: {error.strerror}; model.tokenizer_path must be bytes, or "
                "python, or a tokenizer.json or its folder"
            ) from error
        try:
            self._tokenizer = library.Tokenizer.from_buffer(contents)
        except Exception as error:
            raise StagelineError(f"{file} is not a tokenizer.json that tokenizers can read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = str(path)
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if self.size == 0:
            raise StagelineError(f"the tokenizer {file} has no tokens")
        self.separator = self._find_separator(file.with_name("tokenizer_config.json"))
        self.fingerprint = hashlib.blake2b(contents, digest_size=8).hexdigest()
        self._files = {"tokenizer.json": contents}
        with suppress(OSError):
            self._files["tokenizer_config.json"] = file.with_name("tokenizer_config.json").read_bytes()

    def encode(self, text: str) -> NDArray[Any]:
        """Return the tokens of a text, without special tokens around it."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text, computed on all cores."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, smallest(self.size)) for encoding in encodings]

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self._tokenizer.decode([int(token) for token in tokens])
        return text

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer.json and its config, if there is one."""
        return dict(self._files)

    def _find_separator(self, config_file: Path) -> int | None:
        try:
            end_token = json.loads(config_file.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            end_token = None
        end_token = end_token.get("content") if isinstance(end_token, dict) else end_token
        for name in (end_token, *SEPARATORS):
            if isinstance(name, str) and (token := self._tokenizer.token_to_id(name)) is not None:
                return int(token)
        return None


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a tokenizer.json: itself where it can be printed.

    >>> letters = byte_letters()
    >>> letters[ord("a")], letters[ord(" ")], len(set(letters))
    ('a', 'Ġ', 256)
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def tokenizer_files(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], pattern: str = ""
) -> dict[str, bytes]:
    """Return the tokenizer.json of byte pairs, with their letters, and its config.

    `pattern` divides a text into words, whose bytes are merged; without one, the text is one word.
    """
    end = SEPARATORS[0]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocabulary),
        "merges": [list(pair) for pair in merges],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[end], "content": end, **flags, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, by_bytes]} if pattern else by_bytes,
        "post_processor": None,
        "decoder": by_bytes,
        "model": model,
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode() + b"\n",
    }


Tokenizer = Bytes | BytePairs | File


def find_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that model.tokenizer_path names."""
    if name == "python":
        return python_tokenizer()
    return Bytes() if name == "bytes" else File(name)


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[NDArray[Any]]:
    """Yield the tokens of documents with separators between them, a few million characters at a time."""
    dtype, has_tokens = smallest(tokenizer.size), False
    for group in _groups(documents):
        texts = [text for _, text in group]
        encoded = map(tokenizer.encode, texts) if isinstance(tokenizer, Bytes) else tokenizer.encode_all(texts)
        for (is_start, _), tokens in zip(group, encoded, strict=True):
            if is_start and has_tokens and tokenizer.separator is not None:
                yield np.array([tokenizer.separator], dtype)
            has_tokens = True
            yield np.asarray(tokens).astype(dtype, copy=False)


def _groups(documents: Iterable[str]) -> Iterator[list[tuple[bool, str]]]:
    """Yield lists of limited size of pieces of documents, each with whether it starts a document."""
    group: list[tuple[bool, str]] = []
    length = 0
    for document in documents:
        start = 0
        while start < len(document):
            stop = start + MAX_CHARACTERS
            if stop < len(document):
                stop = (document.rfind("\n", start, stop) + 1) or stop
            group.append((start == 0, document[start:stop]))
            length += stop - start
            start = stop
            if length >= MAX_CHARACTERS:
                yield group
                group, length = [], 0
    yield group


def smallest(size: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer dtype for tokens below a size."""
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.uint32)
