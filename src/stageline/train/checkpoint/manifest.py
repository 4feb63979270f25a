"""The manifest of a checkpoint: its tensors, files and checksums. See docs/checkpoints.md."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from stageline.common.checked_json import Count, Range, check_format, field, from_json, parse_json
from stageline.common.errors import CheckpointError, JsonError, shorten

FORMAT = "stageline-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
LARGEST = 2**29
"""Maximum bytes of a manifest."""
MOST_STEPS = 10**15

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of dtypes in torch and in safetensors."""

_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its size, its checksum, and the number of its writer."""

    bytes: Count
    sha256: str
    writer: Annotated[int, Range(0, 2**31 - 1)]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file of a checkpoint."""

    file: str
    dtype: str
    shape: tuple[Count, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    >>> files = {"model-00001-of-00001.safetensors": File(88, "0" * 64, 0)}
    >>> model = {"weight": TensorEntry("model-00001-of-00001.safetensors", "float32", (2, 2))}
    >>> manifest = Manifest(100, "a1", 0.0, {"writers": 1}, files, model, {"weight": {}}, {"seen": 6400}, {})
    >>> Manifest.from_bytes(manifest.to_bytes()) == manifest
    True
    >>> manifest.parameters
    4
    """

    step: Annotated[int, Range(0, MOST_STEPS)]
    attempt: str
    written: Annotated[float, Range(0, 2**37)]
    """Seconds since 1970."""
    world: Mapping[str, Any]
    files: Mapping[str, File]
    model: Mapping[str, TensorEntry]
    optimizer: Mapping[str, Mapping[str, TensorEntry]]
    state: Any
    environment: Mapping[str, Any]

    @property
    def size(self) -> int:
        """The bytes of all files, without the manifest."""
        return sum(file.bytes for file in self.files.values())

    @property
    def parameters(self) -> int:
        """The number of elements of the model's tensors."""
        return sum(math.prod(entry.shape) for entry in self.model.values())

    def to_bytes(self) -> bytes:
        """Return the file, whose first line is the checksum of the rest."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            **vars(self),
            "files": {name: vars(file) for name, file in self.files.items()},
            "model": {name: vars(entry) for name, entry in self.model.items()},
            "optimizer": {
                name: {slot: vars(entry) for slot, entry in slots.items()} for name, slots in self.optimizer.items()
            },
        }
        body = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in fields.items()).encode() + b"}\n"
        return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body

    @staticmethod
    def from_bytes(data: bytes, source: str = MANIFEST) -> Manifest:
        """Parse a manifest; raise `CheckpointError`, naming `source`, if it is invalid."""
        try:
            fields = check_format(parse_json(data, allow_nan=True), FORMAT, VERSION, "manifest")
            head = _HEAD.match(data)
            if head is None or hashlib.sha256(data[head.end() :]).hexdigest().encode() != head[1]:
                raise JsonError("it was modified after it was written: its checksum does not match its contents")
            manifest = from_json(Manifest, {"state": None, **fields}, "the manifest", prefix="")
            field(manifest.world, "writers", Annotated[int, Range(0, 2**31 - 1)], "world.writers")
            check_tensors(manifest.files, {"model": manifest.model})
            check_tensors(manifest.files, manifest.optimizer)
        except JsonError as error:
            raise CheckpointError(f"{source}: {error}") from None
        return manifest


def _lines(value: Any) -> str:
    """Return JSON with a line for each item of an object."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "}"


def check_tensors(files: Mapping[str, File], groups: Mapping[str, Mapping[str, TensorEntry]]) -> None:
    """Raise `JsonError` if a file name leads out of the folder, or a tensor's file, dtype or shape is invalid."""
    for name, file in files.items():
        plain_name(name)
        if not re.fullmatch("[0-9a-f]{64}", file.sha256):
            raise JsonError(
                f"the checksum of {shorten(name)} must be 64 hexadecimal digits, got {shorten(file.sha256)}"
            )
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            where = f"{shorten(name)} of {shorten(group)}"
            if tensor.file not in files:
                raise JsonError(f"{where} refers to {shorten(tensor.file)}, which is not a file of this checkpoint")
            if tensor.dtype not in DTYPES:
                raise JsonError(f"{where} has dtype {shorten(tensor.dtype)}, expected one of {', '.join(DTYPES)}")
            if len(tensor.shape) > 64:
                raise JsonError(f"{where} has {len(tensor.shape)} dimensions, expected at most 64")


def plain_name(name: str) -> str:
    """Return a file name; raise if it could lead out of the folder."""
    if not name or name in (".", "..") or any(letter in "/\\:" or not letter.isprintable() for letter in name):
        raise JsonError(f"the file {shorten(name)} is outside its folder; refused")
    return name
