"""Convert the model of a checkpoint to another dtype or to other files, tensor by tensor."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from stageline.common.errors import CheckpointError, nearest, shorten
from stageline.train.checkpoint.folder import make_folder, remove_tree, rename, sync_folder, write_file
from stageline.train.checkpoint.manifest import INDEX, MANIFEST, File, TensorEntry
from stageline.train.checkpoint.reader import Checkpoint
from stageline.train.checkpoint.shards import TensorSource, cut, shard_name, write_index, write_tensors

FLOATS = ("float64", "float32", "float16", "bfloat16")


def convert(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    dtype: str | None = None,
    format: Literal["stageline", "safetensors"] = "safetensors",
    max_shard_bytes: int = 4 * 2**30,
) -> Path:
    """Write the model of a checkpoint, and its small files, to a new folder or to one `.safetensors` file.

    `dtype` is the new dtype of floating-point tensors. The format safetensors is that of Hugging Face and
    `sl.load_weights`: `model.safetensors`, or several files with an index. The format stageline adds a manifest with
    checksums, without an optimizer.

    >>> import torch
    >>> from stageline.train.checkpoint import Writer, open_checkpoint
    >>> with Writer("checkpoint") as writer:
    ...     writer.save(7, {"weight": torch.ones(2)}, assets={"config.json": b'{"dtype": "float32"}'})
    >>> out = convert(open_checkpoint("checkpoint/step-00000007"), "half", dtype="bfloat16")
    >>> sorted(os.listdir(out)), (out / "config.json").read_text()
    (['config.json', 'model.safetensors'], '{"dtype": "bfloat16"}')
    """
    target = Path(out)
    if dtype is not None and dtype not in FLOATS:
        raise CheckpointError(f"dtype must be one of {', '.join(FLOATS)}, got {shorten(dtype)}{nearest(dtype, FLOATS)}")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists and is not overwritten; choose another name")
    if not checkpoint.manifest.model:
        raise CheckpointError(f"{checkpoint.path} contains no model")
    sources = [_source(checkpoint, name, entry, dtype) for name, entry in checkpoint.manifest.model.items()]
    make_folder(target.parent)
    aside = target.with_name(f".{target.name}.{os.urandom(6).hex()}.partial")
    try:
        if target.suffix == ".safetensors":
            if format == "stageline":
                raise CheckpointError(
                    f"a checkpoint is a folder, but {target} is the name of a file; leave out the suffix"
                )
            write_tensors(aside, sources)
        else:
            make_folder(aside)
            _write_folder(checkpoint, aside, sources, dtype, format == "stageline", max_shard_bytes)
            sync_folder(aside)
        rename(aside, target)
        sync_folder(target.parent)
    finally:
        aside.unlink(missing_ok=True) if aside.is_file() else remove_tree(aside)
    return target


def _source(checkpoint: Checkpoint, name: str, entry: TensorEntry, dtype: str | None) -> TensorSource:
    kind: torch.dtype = getattr(torch, dtype if dtype is not None and entry.dtype in FLOATS else entry.dtype)
    return TensorSource(name, kind, entry.shape, _reader(checkpoint, name, kind))


def _reader(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: checkpoint.read_model([name])[name].to(dtype)


def _write_folder(
    checkpoint: Checkpoint, folder: Path, sources: list[TensorSource], dtype: str | None, manifest: bool, most: int
) -> None:
    files: dict[str, File] = {}
    model: dict[str, TensorEntry] = {}
    parts = list(cut(sources, most))
    alone = len(parts) == 1 and not manifest
    for place, part in enumerate(parts, 1):
        name = "model.safetensors" if alone else shard_name("model", place, len(parts))
        files[name], tensors = write_tensors(folder / name, part)
        model |= tensors
    if not alone:
        files[INDEX] = write_index(folder, model)
    for name in checkpoint.manifest.files:
        if name != INDEX and not name.endswith(".safetensors"):
            data = _in_dtype(checkpoint.read_asset(name), dtype if name == "config.json" else None)
            files[name] = write_file(folder / name, data)
    if manifest:
        converted = replace(checkpoint.manifest, written=time.time(), files=files, model=model, optimizer={})
        write_file(folder / MANIFEST, converted.to_bytes())


def _in_dtype(config: bytes, dtype: str | None) -> bytes:
    """Return the config of a Hugging Face model with another dtype."""
    if dtype is None:
        return config
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(fields, dict):
        return config
    keys = {"dtype", "torch_dtype"} & set(fields)
    return json.dumps(fields | dict.fromkeys(keys, dtype), indent=2 if b"\n" in config else None).encode()
