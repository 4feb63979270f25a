"""Checkpoints of torch.distributed.checkpoint (DCP): read and written in one process.

Their metadata is a pickle, so reading one can run code of whoever wrote it. Tensors are read without pickle.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stageline.common.errors import CheckpointError, shorten
from stageline.train.checkpoint.folder import reason
from stageline.train.checkpoint.manifest import DTYPES
from stageline.train.checkpoint.shards import TensorSource, dtype_name

METADATA = ".metadata"
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizers")
MODEL_KEYS = ("model", "app")


class _Reader(FileSystemReader):
    """A reader that unpickles the metadata once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata: Metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that was read."""
        return self.metadata


def dcp_model(path: str | Path, *, trust_pickle: bool) -> list[TensorSource]:
    """Return the tensors of a model, which are read when they are taken; those of its optimizer are left out.

    `model.` is removed where all names begin with it, as in a state dict such as `{"model": …, "optimizer": …}`.
    """
    folder = Path(path)
    if not trust_pickle:
        raise CheckpointError(
            f"{folder} is a checkpoint of torch.distributed.checkpoint, whose {METADATA} is a pickle, and reading a "
            "pickle can execute arbitrary code; if you trust its source, pass --trust-pickle"
        )
    try:
        reader = _Reader(folder)
        entries = reader.metadata.state_dict_metadata
    except Exception as error:  # unpickling may raise anything
        raise CheckpointError(f"cannot read {folder / METADATA}: {reason(error)}") from error
    tensors = {
        key: entry
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and key.partition(".")[0] not in OPTIMIZER_KEYS
    }
    heads = {key.partition(".")[0] for key in tensors}
    prefix = f"{heads.pop()}." if len(heads) == 1 and heads <= set(MODEL_KEYS) else ""
    if not tensors:
        raise CheckpointError(f"{folder} contains no model; it has {shorten(', '.join(entries) or 'nothing')}")
    for key, entry in tensors.items():
        if dtype_name(entry.properties.dtype) not in DTYPES:
            raise CheckpointError(
                f"{shorten(key)} in {folder} has dtype {entry.properties.dtype}, which cannot be written"
            )
    return [_source(reader, key, key.removeprefix(prefix), entry) for key, entry in tensors.items()]


def _source(reader: _Reader, key: str, name: str, entry: TensorStorageMetadata) -> TensorSource:
    dtype, shape = entry.properties.dtype, tuple(entry.size)

    def take() -> Tensor:
        state = {key: torch.empty(shape, dtype=dtype)}
        try:
            with _one_process():
                load(state, storage_reader=reader, no_dist=True)
        except Exception as error:  # DCP wraps errors in its own
            raise CheckpointError(f"cannot read {key!r} of {reader.path}: {reason(error)}") from error
        return state[key]

    return TensorSource(name, dtype, shape, take)


def write_dcp(folder: Path, tensors: Sequence[TensorSource]) -> None:
    """Write a model as a checkpoint of torch.distributed.checkpoint; all of it is in memory meanwhile."""
    state = {tensor.key: tensor.take() for tensor in tensors}
    with _one_process():
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


@contextmanager
def _one_process() -> Iterator[None]:
    """Silence the warning that there is only one process, as there should be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
