"""Weights from safetensors files: only what a model holds for real, checked as a whole before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stageline.errors import StagelineError, shorten

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
class Loaded:
    """What `load_weights` found: tensors that were loaded, that the files lack, and that the model does not know."""

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
) -> Loaded:
    """Read the weights that the model holds for real from a safetensors file, or a folder with one or with an index.

    What is on the meta device belongs to other ranks and is neither read nor missed. `names` gives the name in the
    files for a name in the model, or None for what is not loaded; tied weights are found under any of their names.
    `strict=False` lets tensors be missing or unexpected, `cast=True` converts other dtypes. Nothing is written before
    everything fits.

    >>> from safetensors.torch import save_file
    >>> save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, "model.safetensors")
    >>> layer = nn.Linear(2, 2)
    >>> load_weights(layer, "model.safetensors").loaded
    ('weight', 'bias')
    >>> layer.weight.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    where = _find(Path(path))
    wanted, missing, known = _match(model, where, names or (lambda name: name))
    unexpected = tuple(sorted(set(where) - known))
    for what, found in (("are missing in", missing), ("are not of the model, but in", unexpected)):
        if strict and found:
            raise StagelineError(f"{_listed(found)} {what} {path}; pass strict=False to go on without them")
    by_file: dict[Path, list[tuple[str, str, Tensor]]] = {}
    for name, key, tensor in wanted:
        by_file.setdefault(where[key], []).append((name, key, tensor))
    for file, entries in by_file.items():
        with _opened(file) as opened:
            _check(file, opened, entries, cast)
    for file, entries in by_file.items():
        with _opened(file) as opened, torch.no_grad():
            for _, key, tensor in entries:
                tensor.copy_(opened.get_tensor(key))
    return Loaded(tuple(name for name, _, _ in wanted), missing, unexpected)


def _match(
    model: nn.Module, where: dict[str, Path], names: Callable[[str], str | None]
) -> tuple[list[tuple[str, str, Tensor]], tuple[str, ...], set[str]]:
    """What to read: names in the model, names in the files, tensors; then what is missing, and every name known."""
    tied: dict[int, tuple[Tensor, list[tuple[str, str]]]] = {}
    known = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = names(name)
        known.add(name if key is None else key)
        if isinstance(tensor, Tensor) and key is not None:
            tied.setdefault(id(tensor), (tensor, []))[1].append((name, key))
    wanted, missing = [], []
    for tensor, pairs in tied.values():
        if tensor.is_meta:
            continue
        found = next(((name, key) for name, key in pairs if key in where), None)
        if found is None:
            missing.append(pairs[0][0])
        else:
            wanted.append((*found, tensor))
    return wanted, tuple(missing), known


def _check(file: Path, opened: Any, entries: list[tuple[str, str, Tensor]], cast: bool) -> None:
    """Compare shapes and dtypes by the file's header alone."""
    held = set(opened.keys())
    for name, key, tensor in entries:
        if key not in held:
            raise StagelineError(f"the index says that {file} holds {key!r}, which it does not; download it again")
        part = opened.get_slice(key)
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
    """Every tensor's name in the files, and its file."""
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
    with _opened(path) as opened:
        return dict.fromkeys(opened.keys(), path)


def _read_index(path: Path) -> dict[str, Path]:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StagelineError(f"{path} is no index: expected JSON with a weight_map of names to files") from error
    found = {}
    for name, file in pairs:
        pure = PurePosixPath(file)
        if pure.is_absolute() or ".." in pure.parts or "\\" in file or ":" in file or not pure.parts:
            raise StagelineError(f"{path} looks for {shorten(name)} in {shorten(file)}, outside of its folder; refused")
        found[name] = path.parent / file
        if not found[name].is_file():
            raise StagelineError(f"{path} looks for {shorten(name)} in {shorten(file)}, which does not exist")
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise StagelineError(f"{path} is no safetensors file: {error}") from error


def _listed(names: tuple[str, ...]) -> str:
    """The first of many names.

    >>> _listed(("a", "b"))
    "'a', 'b'"
    """
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
