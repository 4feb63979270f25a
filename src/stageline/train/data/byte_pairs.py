"""The built-in tokenizer for Python code: byte pairs that were merged most often in the standard library.

A text is divided into words, and the bytes of a word are merged, pair by pair, in the order in which the merges were
learned. All distinct words of many texts are merged at once, as one array.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

PATTERN = r"\n *| ?[A-Za-z_]+|[0-9]| ?[^ \nA-Za-z0-9_]+| +"
"""Words: the end of a line with the indentation of the next one, a name, a digit, signs, spaces."""
MERGES_FILE = "python_merges.txt"
PYTHON_SIZE = 1024
"""The number of tokens of the built-in tokenizer."""
NUM_BYTES = 256
BORDER = 255
"""Stands between words and between documents; no byte of UTF-8 has this value."""


class BytePairs:
    """A tokenizer whose tokens are the 256 bytes and the results of merges; 255 separates documents.

    >>> tokenizer = BytePairs("mine", [(97, 98), (256, 99)])
    >>> tokenizer.encode("abcab").tolist(), tokenizer.decode([257, 256])
    ([257, 256], 'abcab')
    """

    separator = BORDER

    def __init__(self, name: str, merges: Sequence[tuple[int, int]]) -> None:
        """Merge number n makes the token 256 + n of two earlier tokens."""
        self.name, self.merges = name, list(merges)
        self.size = NUM_BYTES + len(self.merges)
        numbers = np.array(self.merges, np.int64).tobytes()
        self.fingerprint = f"{name}-{self.size}-{hashlib.blake2b(numbers, digest_size=8).hexdigest()}"

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of every token."""
        pieces = [bytes([byte]) for byte in range(NUM_BYTES)]
        for left, right in self.merges:
            pieces.append(pieces[left] + pieces[right])
        return pieces

    def encode(self, text: str) -> NDArray[Any]:
        """Return the tokens of a text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text."""
        words = _Words(texts)
        tokens = words.letters
        for number, (left, right) in enumerate(self.merges):
            tokens, _ = merge(tokens, left, right, NUM_BYTES + number)
        ends = np.flatnonzero(tokens == BORDER)
        starts = np.concatenate([[0], ends[:-1] + 1])
        lengths = ends - starts
        encoded = []
        for numbers in words.texts:
            counts = lengths[numbers]
            first = np.cumsum(counts) - counts
            places = np.repeat(starts[numbers] - first, counts) + np.arange(counts.sum())
            encoded.append(tokens[places].astype(np.uint16))
        return encoded

    def num_bytes(self, tokens: NDArray[Any]) -> int:
        """Return the number of bytes that tokens stand for; a separator counts as one."""
        lengths = np.array([len(piece) for piece in self.pieces])
        return int(lengths[tokens].sum())

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of tokens, without separators; unknown tokens and invalid UTF-8 become �."""
        values = (int(token) for token in tokens if token != self.separator)
        unknown = bytes([BORDER])
        return b"".join(self.pieces[token] if 0 <= token < self.size else unknown for token in values).decode(
            errors="replace"
        )

    def files(self) -> dict[str, bytes]:
        """Return a tokenizer.json with the same tokens, and its config, for transformers."""
        from stageline.train.data.tokenizer import SEPARATORS, byte_letters, tokenizer_files

        letters = byte_letters()
        names = ["".join(letters[byte] for byte in piece) for piece in self.pieces]
        names[BORDER] = SEPARATORS[0]
        pairs = [(names[left], names[right]) for left, right in self.merges]
        return tokenizer_files({name: token for token, name in enumerate(names)}, pairs, PATTERN)


class _Words:
    """The distinct words of texts as one array of bytes, and the texts as numbers of words."""

    def __init__(self, texts: Iterable[str]) -> None:
        known: dict[str, int] = {}
        find = re.compile(PATTERN).findall
        self.texts = [
            np.array([known.setdefault(word, len(known)) for word in find(text)], dtype=np.int64) for text in texts
        ]
        joined = b"".join(word.encode() + bytes([BORDER]) for word in known)
        self.letters: NDArray[np.int32] = np.frombuffer(joined, np.uint8).astype(np.int32)


def merge(tokens: NDArray[np.int32], left: int, right: int, merged: int) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Replace a pair of tokens by one wherever it occurs, from left to right; return the places that were removed.

    >>> merge(np.array([7, 7, 7, 8], np.int32), 7, 7, 9)[0].tolist()
    [9, 7, 8]
    """
    places = np.flatnonzero((tokens[:-1] == left) & (tokens[1:] == right))
    if left == right and len(places) > 1:
        chosen = [int(places[0])]
        for place in places[1:].tolist():
            if place > chosen[-1] + 1:
                chosen.append(place)
        places = np.array(chosen)
    if len(places):
        tokens = tokens.copy()
        tokens[places] = merged
        tokens = np.delete(tokens, places + 1)
    return tokens, places + 1


def learn_merges(texts: Sequence[str], count: int) -> list[tuple[int, int]]:
    """Return the merges that a tokenizer for these texts has: each time, the pair that occurs most often.

    >>> learn_merges(["abcabcd abc"], 2)
    [(97, 98), (256, 99)]
    """
    words = _Words(texts)
    tokens = words.letters
    occurrences = np.bincount(np.concatenate([np.empty(0, np.int64), *words.texts]))
    word_of = np.cumsum(tokens == BORDER) - (tokens == BORDER)
    weights = occurrences[word_of].astype(np.float64)
    size = NUM_BYTES + count
    merges: list[tuple[int, int]] = []
    for number in range(count):
        inside = (tokens[:-1] != BORDER) & (tokens[1:] != BORDER)
        codes = tokens[:-1][inside].astype(np.int64) * size + tokens[1:][inside]
        if not len(codes):
            break
        left, right = divmod(int(np.bincount(codes, weights[:-1][inside]).argmax()), size)
        merges.append((left, right))
        tokens, removed = merge(tokens, left, right, NUM_BYTES + number)
        weights = np.delete(weights, removed)
    return merges


def python_tokenizer() -> BytePairs:
    """Return the built-in tokenizer for Python code.

    >>> tokenizer = python_tokenizer()
    >>> len(tokenizer.encode("    def __init__(self, name):\\n        return None\\n"))
    12
    """
    text = files("stageline.train.data").joinpath(MERGES_FILE).read_text(encoding="ascii")
    numbers = list(map(int, text.split()))
    return BytePairs("python", list(zip(numbers[::2], numbers[1::2], strict=True)))
