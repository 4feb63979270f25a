"""Convert the model of a checkpoint to another dtype or to the files of another library, tensor by tensor."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stageline.common.errors import CheckpointError, nearest, shorten
from stageline.train.checkpoint.export_layouts import ADAPTER_CONFIG, Export, huggingface_export
from stageline.train.checkpoint.folder import make_folder, remove_tree, rename, sync_folder, write_file
from stageline.train.checkpoint.manifest import INDEX, MANIFEST, File, Manifest, TensorEntry
from stageline.train.checkpoint.reader import Checkpoint
from stageline.train.checkpoint.shards import TensorSource, cut, dtype_name, shard_name, write_index, write_tensors

FLOATS = ("float64", "float32", "float16", "bfloat16")
Format = Literal["auto", "huggingface", "safetensors", "stageline", "dcp"]


def convert(
    source: Checkpoint | list[TensorSource],
    out: str | Path,
    *,
    dtype: str | None = None,
    format: Format = "safetensors",
    files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = 4 * 2**30,
) -> Path:
    """Write the model of a checkpoint, and its small files, to a new folder or to one `.safetensors` file.

    `source` may also be the tensors of a model, as `dcp_model` returns them, and `files` are more small files.

    `dtype` is the new dtype of floating-point tensors. The format safetensors keeps the names of the parameters, for
    `sl.load_weights`: `model.safetensors`, or several files with an index. The format huggingface is that of
    `from_pretrained`: the same for a model of transformers; the built-in GPT becomes a GPT-2, and a model with an
    adapter of peft becomes the adapter. With auto, these are huggingface, and other models and files safetensors. The
    format stageline adds a manifest with checksums, without an optimizer. The format dcp is that of
    torch.distributed.checkpoint.

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
        raise CheckpointError(f"{target} already exists and is not overwritten; choose another name")
    if target.suffix == ".safetensors" and format not in ("auto", "safetensors"):
        what = "a checkpoint" if format in ("stageline", "dcp") else "a Hugging Face model"
        raise CheckpointError(f"{what} is written as a folder, but {target} is a file name; leave out the suffix")
    if target.suffix == ".safetensors":
        format = "safetensors"
    export, manifest = _export(source, dtype, format, files or {})
    make_folder(target.parent)
    aside = target.with_name(f".{target.name}.{os.urandom(6).hex()}.partial")
    try:
        if target.suffix == ".safetensors":
            write_tensors(aside, export.tensors)
        else:
            make_folder(aside)
            _write_folder(export, aside, format, max_shard_bytes, manifest)
            sync_folder(aside)
        rename(aside, target)
        sync_folder(target.parent)
    finally:
        aside.unlink(missing_ok=True) if aside.is_file() else remove_tree(aside)
    return target


def _export(
    source: Checkpoint | list[TensorSource], dtype: str | None, format: Format, more_files: Mapping[str, bytes]
) -> tuple[Export, Manifest]:
    """Return what to write, and the manifest to base a new one on."""
    if isinstance(source, Checkpoint):
        manifest, name = source.manifest, str(source.path)
        if not manifest.model:
            raise CheckpointError(f"{source.path} contains no model")
        tensors = [_source(source, name, entry) for name, entry in manifest.model.items()]
        small = [name for name in manifest.files if name != INDEX and not name.endswith(".safetensors")]
        files = {name: source.read_asset(name) for name in small} | dict(more_files)
    else:
        manifest = Manifest(0, "", time.time(), {"writers": 1}, {}, {}, {}, None, {})
        tensors, name, files = source, "the checkpoint", dict(more_files)
    tensors = [_in_dtype(tensor, dtype) for tensor in tensors]
    if "config.json" in files:
        files["config.json"] = _config_in_dtype(files["config.json"], dtype)
    if format in ("auto", "huggingface"):
        export = huggingface_export(tensors, files, manifest.state)
        if export is not None:
            return export, manifest
        if format == "huggingface":
            raise CheckpointError(
                f"{name} contains neither a transformers model, nor a peft adapter, nor the built-in GPT, so "
                "from_pretrained cannot open it; use --format safetensors, which keeps the parameter names"
            )
    return Export(tensors, files), manifest


def _source(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> TensorSource:
    return TensorSource(name, getattr(torch, entry.dtype), entry.shape, _reader(checkpoint, name))


def _reader(checkpoint: Checkpoint, name: str) -> Callable[[], Tensor]:
    return lambda: checkpoint.read_model([name])[name]


def _in_dtype(tensor: TensorSource, dtype: str | None) -> TensorSource:
    if dtype is None or dtype_name(tensor.dtype) not in FLOATS:
        return tensor
    other: torch.dtype = getattr(torch, dtype)
    return TensorSource(tensor.key, other, tensor.shape, lambda: tensor.take().to(other))


def _write_folder(export: Export, folder: Path, format: Format, max_shard_bytes: int, manifest: Manifest) -> None:
    files: dict[str, File] = {}
    model: dict[str, TensorEntry] = {}
    if format == "dcp":
        from stageline.train.checkpoint.dcp import write_dcp

        write_dcp(folder, export.tensors)
    else:
        # peft reads an adapter from one file.
        parts = [export.tensors] if ADAPTER_CONFIG in export.files else list(cut(export.tensors, max_shard_bytes))
        alone = len(parts) == 1 and format != "stageline"
        for place, part in enumerate(parts, 1):
            name = f"{export.stem}.safetensors" if alone else shard_name(export.stem, place, len(parts))
            files[name], tensors = write_tensors(folder / name, part)
            model |= tensors
        if not alone:
            files[INDEX] = write_index(folder, model)
    for name, data in export.files.items():
        files[name] = write_file(folder / name, data)
    if format == "stageline":
        converted = replace(manifest, written=time.time(), files=files, model=model, optimizer={})
        write_file(folder / MANIFEST, converted.to_bytes())


def _config_in_dtype(config: bytes, dtype: str | None) -> bytes:
    """Return the config of a Hugging Face model with another dtype."""
    if dtype is None:
        return config
    try:
        fields: Any = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(fields, dict):
        return config
    keys = {"dtype", "torch_dtype"} & set(fields)
    return json.dumps(fields | dict.fromkeys(keys, dtype), indent=2 if b"\n" in config else None).encode()
