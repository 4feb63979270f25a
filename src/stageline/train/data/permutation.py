"""The order of an epoch: a permutation of 0 … n-1 that is computed, not stored."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


def shuffled(places: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """What stands at some places of the order that `seed` and `epoch` give to 0 … size-1.

    Over all places it is a permutation, and it takes no memory but for the places asked for. Only integers are
    involved, so it is the same on every platform.

    >>> shuffled(np.arange(8), 8, seed=1, epoch=0).tolist()
    [2, 7, 1, 0, 4, 5, 3, 6]
    >>> shuffled(np.array([2_999_999_999]), 3_000_000_000, seed=1, epoch=0).tolist()
    [1092807310]
    """
    # A number below columns * rows is a pair (row, column). Each round moves one half by an amount that the other half
    # and a key say, which can be undone, so all rounds together are a permutation of the rectangle. Numbers of it that
    # are not below size are sent on until they are: the walk goes along a cycle and so ends, and meets no other.
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    words = hashlib.blake2b(f"{seed}/{epoch}/{size}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(words, "<u8").astype(np.uint64)
    found = _rounds(places.astype(np.uint64), np.uint64(rows), np.uint64(columns), keys)
    while (outside := np.flatnonzero(found >= np.uint64(size))).size:
        found[outside] = _rounds(found[outside], np.uint64(rows), np.uint64(columns), keys)
    return found.astype(np.int64)


def _rounds(
    numbers: NDArray[np.uint64], rows: np.uint64, columns: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    row, column = numbers // columns, numbers % columns
    for turn in range(0, ROUNDS, 2):
        row = (row + _mixed(column, keys[turn]) % rows) % rows
        column = (column + _mixed(row, keys[turn + 1]) % columns) % columns
    return row * columns + column


def _mixed(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Numbers of 64 bits in which every bit of the given ones and of the key has a say; they wrap around."""
    found = numbers ^ key
    for _ in range(2):
        found = (found ^ (found >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return found ^ (found >> np.uint64(32))
