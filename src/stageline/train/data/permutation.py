"""The order of an epoch: a permutation of 0 … n-1 that is computed, not stored."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


def shuffled(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the elements at some indices of the permutation of 0 … size-1 that `seed` and `epoch` define.

    It needs memory only for the requested indices. It uses only integers, so it is the same on every platform.

    >>> shuffled(np.arange(8), 8, seed=1, epoch=0).tolist()
    [2, 7, 1, 0, 4, 5, 3, 6]
    >>> shuffled(np.array([2_999_999_999]), 3_000_000_000, seed=1, epoch=0).tolist()
    [1092807310]
    """
    # A number below columns * rows is a pair (row, column). Each round shifts one half by an amount that depends on the
    # other half and a key. That is invertible, so all rounds together permute the rectangle. Values that are not below
    # size are permuted again until they are (cycle walking), which ends because it follows a cycle.
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    key_bytes = hashlib.blake2b(f"{seed}/{epoch}/{size}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(key_bytes, "<u8").astype(np.uint64)
    values = _rounds(indices.astype(np.uint64), np.uint64(rows), np.uint64(columns), keys)
    while (outside := np.flatnonzero(values >= np.uint64(size))).size:
        values[outside] = _rounds(values[outside], np.uint64(rows), np.uint64(columns), keys)
    return values.astype(np.int64)


def _rounds(
    numbers: NDArray[np.uint64], rows: np.uint64, columns: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    row, column = numbers // columns, numbers % columns
    for index in range(0, ROUNDS, 2):
        row = (row + _mix(column, keys[index]) % rows) % rows
        column = (column + _mix(row, keys[index + 1]) % columns) % columns
    return row * columns + column


def _mix(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Mix all bits of the numbers and the key into 64-bit hashes; arithmetic wraps around."""
    mixed = numbers ^ key
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))
