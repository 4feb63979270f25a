"""Files of tokens, mapped into memory."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.common.errors import StagelineError
from stageline.train.data.documents import find_files
from stageline.train.data.source import Tokens, digest

BLOCKS, BLOCK = 64, 4096
"""The digest of a file covers this many blocks of this many bytes, including the first and the last."""


class ConcatenatedArray:
    """One-dimensional arrays end to end, without copying them.

    >>> tokens = ConcatenatedArray([np.arange(3), np.arange(10, 13)])
    >>> len(tokens), tokens[2:5].tolist()
    (6, [2, 10, 11])
    """

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


def memmap_tokens(paths: str, dtype: str, seq_len: int, vocab_size: int = 0) -> Tokens:
    """Return the tokens of .npy files or raw files of integers, or of all .bin and .npy files of a folder.

    >>> np.arange(100, dtype="<u2").tofile("tokens.bin")
    >>> memmap_tokens("tokens.bin", "uint16", seq_len=10).length
    9
    """
    files = find_files(paths, (".bin", ".npy"))
    parts = [_open(path, dtype) for path in files]
    digests = [_digest(part) for part in parts]
    return Tokens(
        parts[0] if len(parts) == 1 else ConcatenatedArray(parts),
        seq_len,
        name=paths,
        about=f"tokens in {files[0].name if len(files) == 1 else f'{len(files):,} files'}",
        digest=digest(*digests),
        vocab_size=vocab_size,
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
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
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
