"""Load weights from safetensors files: only those a model has in memory, checked completely before any is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.tensors.sharded import is_sharded, local, read_part

NOT_STRICT = "; pass strict=False to ignore them"
"""The end of an error about tensors that are missing, or not in the model."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class LoadedWeights:
    """The result of `load_weights`: names that were loaded, are missing in the files, or are not in the model."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_weights(
    model: nn.Module,
    path: str | Path,
    names: Callable[[str], str | None] | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
) -> LoadedWeights:
    """Load the weights a model has in memory from a safetensors file, or a folder with one or with an index.

    Tensors on the meta device belong to other ranks and are ignored. Of a tensor that is cut over several processes (a
    DTensor), only the slices of this process are read. `names` maps a name in the model to the name in
    the files, or to None to skip it; tied weights may have any of their names in the files. `strict=False` allows
    missing and unexpected tensors; `cast=True` converts dtypes. Nothing is written unless everything matches; otherwise
    raise `StagelineError`.

    >>> from safetensors.torch import save_file
    >>> save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, "model.safetensors")
    >>> layer = nn.Linear(2, 2)
    >>> load_weights(layer, "model.safetensors").loaded
    ('weight', 'bias')
    >>> layer.weight.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    file_of = _find(Path(path))
    entries_to_load, missing, known_names = _match(model, file_of, names or (lambda name: name))
    unexpected = tuple(sorted(set(file_of) - known_names))
    for problem, problem_names in (("missing in", missing), ("not in the model, but in", unexpected)):
        if strict and problem_names:
            names_shown = ", ".join(map(repr, problem_names[:5]))
            rest = f" and {len(problem_names) - 5} more" if len(problem_names) > 5 else ""
            raise StagelineError(f"tensors {problem} {path}: {names_shown}{rest}{NOT_STRICT}")
    by_file: dict[Path, list[tuple[str, str, Tensor]]] = {}
    for name, key, tensor in entries_to_load:
        by_file.setdefault(file_of[key], []).append((name, key, tensor))
    for file, entries in by_file.items():
        with _open(file) as tensors:
            _check(file, tensors, entries, cast)
    for file, entries in by_file.items():
        with _open(file) as tensors, torch.no_grad():
            for _, key, tensor in entries:
                whole = not is_sharded(tensor) or not tensor.dim()
                local(tensor).copy_(tensors.get_tensor(key) if whole else read_part(tensors.get_slice(key), tensor))
    return LoadedWeights(tuple(name for name, _, _ in entries_to_load), missing, unexpected)


def _match(
    model: nn.Module, file_of: dict[str, Path], names: Callable[[str], str | None]
) -> tuple[list[tuple[str, str, Tensor]], tuple[str, ...], set[str]]:
    """Return the entries to load (name in the model, name in the files, tensor), missing names and all known names."""
    tied: dict[int, tuple[Tensor, list[tuple[str, str]]]] = {}
    known_names = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = names(name)
        known_names.add(name if key is None else key)
        if isinstance(tensor, Tensor) and key is not None:
            tied.setdefault(id(tensor), (tensor, []))[1].append((name, key))
    entries, missing = [], []
    for tensor, pairs in tied.values():
        if tensor.is_meta:
            continue
        match = next(((name, key) for name, key in pairs if key in file_of), None)
        if match is None:
            missing.append(pairs[0][0])
        else:
            entries.append((*match, tensor))
    return entries, tuple(missing), known_names


def _check(file: Path, tensors: Any, entries: list[tuple[str, str, Tensor]], cast: bool) -> None:
    """Compare shapes and dtypes, using only the header of the file."""
    names = set(tensors.keys())
    for name, key, tensor in entries:
        if key not in names:
            raise StagelineError(
                f"the index lists {key!r} in {file}, which does not contain it; download the files again"
            )
        part = tensors.get_slice(key)
        shape, dtype = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
        if shape != tuple(tensor.shape):
            raise StagelineError(
                f"{key!r} in {file} has shape {shape}, but {name!r} of the model has {tuple(tensor.shape)}"
            )
        if dtype != tensor.dtype and not (cast and dtype is not None):
            raise StagelineError(
                f"{key!r} in {file} is {dtype or part.get_dtype()}, but {name!r} of the model is {tensor.dtype}; build "
                "the model in that dtype, or pass cast=True"
            )


def _find(path: Path) -> dict[str, Path]:
    """Return the file of every tensor name."""
    if path.is_dir():
        if (path / _INDEX).is_file():
            return _read_index(path / _INDEX)
        path = path / _SINGLE
    if not path.is_file():
        raise StagelineError(
            f"{path} does not exist; expected a .safetensors file, or a folder with {_SINGLE} or {_INDEX}"
        )
    if path.name.endswith(".index.json"):
        return _read_index(path)
    with _open(path) as tensors:
        return dict.fromkeys(tensors.keys(), path)


def _read_index(path: Path) -> dict[str, Path]:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StagelineError(f"{path} is not an index; expected JSON with a weight_map from names to files") from error
    file_of = {}
    for name, file in pairs:
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts or "\\" in file or ":" in file or not relative.parts:
            raise StagelineError(f"{path} refers to {shorten(file)} for {shorten(name)}, which is outside its folder")
        file_of[name] = path.parent / file
        if not file_of[name].is_file():
            raise StagelineError(f"{path} refers to {shorten(file)} for {shorten(name)}, which does not exist")
    return file_of


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise StagelineError(f"{path} is not a safetensors file: {error}") from error
