"""Checkpoints: whole or not there, keyed by the names of parameters, in safetensors and JSON.

>>> import torch
>>> from stageline.train.checkpoint import Writer
>>> with Writer("checkpoint") as writer:
...     writer.save(100, {"weight": torch.ones(2)}, {"weight": {"momentum": torch.zeros(2)}}, {"seen": 6400})
>>> found = newest("checkpoint")
>>> found.step, found.state, found.read_model()
(100, {'seen': 6400}, {'weight': tensor([1., 1.])})
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
    """Load what needs torch when it is first touched, so that looking at checkpoints does not wait for it."""
    if name not in ("Writer", "Saved"):
        raise AttributeError(f"module 'stageline.train.checkpoint' has no attribute {name!r}")
    from stageline.train.checkpoint import writer

    return getattr(writer, name)
