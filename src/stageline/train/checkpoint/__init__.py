"""Checkpoints: atomic, independent of the number of ranks, in safetensors and JSON.

Read in order: `writer`, `shards` (files of tensors, of one writer or several), `folder` (names, publishing,
synced files), `remote` (object stores), `manifest`, `reader`, `convert`,
`export_layouts` (GPT-2, adapters), `dcp` (checkpoints of torch). Nothing here knows a job:
`train/checkpoint_state.py` decides what is saved.
"""

from typing import TYPE_CHECKING, Any

from stageline.common.errors import CheckpointError
from stageline.train.checkpoint.folder import leave_mark, published, remove_mark, sees_mark, step_name
from stageline.train.checkpoint.manifest import Manifest
from stageline.train.checkpoint.reader import Checkpoint, Damage, newest, open_checkpoint

if TYPE_CHECKING:
    from stageline.train.checkpoint.writer import Saved, Writer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Damage",
    "Manifest",
    "Saved",
    "Writer",
    "leave_mark",
    "newest",
    "open_checkpoint",
    "published",
    "remove_mark",
    "sees_mark",
    "step_name",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use, so that listing checkpoints is fast."""
    if name not in ("Writer", "Saved"):
        raise AttributeError(f"module 'stageline.train.checkpoint' has no attribute {name!r}")
    from stageline.train.checkpoint import writer

    return getattr(writer, name)
