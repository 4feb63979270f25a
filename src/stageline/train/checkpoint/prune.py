"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

from stageline.common.errors import CheckpointError
from stageline.train.checkpoint.folder import discard, published
from stageline.train.checkpoint.reader import open_checkpoint


def prune(folder: Path, keep: int, spare: Path) -> list[Path]:
    """Remove what is older than the newest `keep` whole ones, and neither spared nor being read; returns what went.

    Whole is meant by sizes. A damaged checkpoint does not count, and goes only when it is older than all that stay.

    >>> from stageline.train.checkpoint import Writer
    >>> with Writer("checkpoint", keep=0) as writer:
    ...     for step in (1, 2, 3):
    ...         writer.save(step, {})
    >>> [path.name for path in prune(Path("checkpoint"), 2, Path("checkpoint/step-00000003"))]
    ['step-00000001']
    """
    whole = 0
    gone = []
    for path in reversed(published(folder)):
        if path.suffix == ".replaced":
            continue  # another of its step is there
        if path != spare and whole >= keep:
            if discard(path):
                gone.append(path)
        elif _is_whole(path):
            whole += 1
    return gone


def _is_whole(path: Path) -> bool:
    try:
        with open_checkpoint(path) as checkpoint:
            return not checkpoint.verify(deep=False)
    except CheckpointError:
        return False
