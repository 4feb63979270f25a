"""Files of tokens, which are never read whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stageline.errors import StagelineError
from stageline.train.data.documents import find_files
from stageline.train.data.source import Tokens, digest

BLOCKS, BLOCK = 64, 4096
"""Of each file, so many blocks of so many bytes go into its digest, the first and the last among them."""


class Joined:
    """Arrays end to end, without a copy of them.

    >>> joined = Joined([np.arange(3), np.arange(10, 13)])
    >>> len(joined), joined[2:5].tolist()
    (6, [2, 10, 11])
    """

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        """Take one-dimensional arrays."""
        self.parts = list(parts)
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        """How many all of them hold."""
        return int(self.ends[-1])

    def __getitem__(self, where: slice) -> NDArray[Any]:
        """A slice without a step, of one array or of several."""
        start, stop, _ = where.indices(len(self))
        found, at = [], int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            before = int(self.ends[at]) - len(self.parts[at])
            found.append(self.parts[at][start - before : stop - before])
            start, at = int(self.ends[at]), at + 1
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.parts[0].dtype), *found])


def memmap_tokens(paths: str, dtype: str, seq_len: int, vocab_size: int = 0) -> Tokens:
    """The tokens in a .npy file or in a raw file of integers, in several, or in all .bin and .npy of a folder.

    >>> np.arange(100, dtype="<u2").tofile("tokens.bin")
    >>> memmap_tokens("tokens.bin", "uint16", seq_len=10).length
    9
    """
    files = find_files(paths, (".bin", ".npy"))
    parts = [_open(path, dtype) for path in files]
    digests = [_digest(part) for part in parts]
    return Tokens(
        parts[0] if len(parts) == 1 else Joined(parts),
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
            kind = np.dtype(dtype).newbyteorder("<")
            if over := path.stat().st_size % kind.itemsize:
                raise StagelineError(
                    f"{path} has {path.stat().st_size:,} bytes, {over} more than whole numbers of {kind.itemsize}: it "
                    f"does not hold {dtype}, or is cut off; set training.dataset_dtype to what it holds"
                )
            array = np.memmap(path, kind, "r")
    except StagelineError:
        raise
    except OSError as error:
        raise StagelineError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise StagelineError(f"{path} is not a .npy file of numbers: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise StagelineError(
            f"{path} holds {array.dtype} of shape {array.shape}; a file of tokens holds integers in one row"
        )
    if len(array) == 0:
        raise StagelineError(f"{path} is empty: it has no tokens")
    return array


def _digest(array: NDArray[Any]) -> str:
    """A digest of size, type and some blocks, which takes as long for a large file as for a small one."""
    found = hashlib.blake2b(f"{len(array)} {array.dtype.str}".encode(), digest_size=8)
    block = BLOCK // array.dtype.itemsize
    last = max(len(array) - block, 0)
    for start in sorted({last * at // (BLOCKS - 1) for at in range(BLOCKS)}):
        found.update(np.ascontiguousarray(array[start : start + block]).data)
    return found.hexdigest()
