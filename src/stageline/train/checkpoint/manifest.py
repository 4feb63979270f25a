"""The manifest of a checkpoint: what it holds, in which files, with which checksums. See docs/checkpoints.md."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stageline.common.errors import CheckpointError, shorten

FORMAT = "stageline-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
LARGEST = 2**29
"""Bytes of a manifest that are read at most."""
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
"""What torch calls a dtype, and what safetensors does."""

_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


@dataclass(frozen=True)
class File:
    """A file of the checkpoint: its bytes, their sum, and which writer wrote it."""

    bytes: int
    sha256: str
    writer: int


@dataclass(frozen=True)
class Held:
    """A tensor that a file of the checkpoint holds."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    >>> files = {"model-00001-of-00001.safetensors": File(88, "0" * 64, 0)}
    >>> model = {"weight": Held("model-00001-of-00001.safetensors", "float32", (2, 2))}
    >>> manifest = Manifest(100, "a1", 0.0, {"writers": 1}, files, model, {"weight": {}}, {"seen": 6400}, {})
    >>> Manifest.from_bytes(manifest.to_bytes()) == manifest
    True
    >>> manifest.parameters
    4
    """

    step: int
    attempt: str
    written: float
    world: Mapping[str, Any]
    files: Mapping[str, File]
    model: Mapping[str, Held]
    optimizer: Mapping[str, Mapping[str, Held]]
    state: Any
    environment: Mapping[str, Any]

    @property
    def size(self) -> int:
        """The bytes of all files together, without the manifest."""
        return sum(file.bytes for file in self.files.values())

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(math.prod(held.shape) for held in self.model.values())

    def to_bytes(self) -> bytes:
        """The file: the first line has the sum of everything after it."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            **vars(self),
            "files": {name: vars(file) for name, file in self.files.items()},
            "model": {name: vars(held) for name, held in self.model.items()},
            "optimizer": {
                name: {slot: vars(held) for slot, held in slots.items()} for name, slots in self.optimizer.items()
            },
        }
        body = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in fields.items()).encode() + b"}\n"
        return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body

    @staticmethod
    def from_bytes(data: bytes, source: str = MANIFEST) -> Manifest:
        """Read it, or raise an error that says what is wrong with it."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{source} is no manifest: it is not JSON: {shorten(str(error), 120)}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            kind = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise CheckpointError(f"{source} is no manifest: its format is {shorten(kind)}, expected {FORMAT!r}")
        if found.get("version") != VERSION or isinstance(found["version"], bool):
            raise CheckpointError(
                f"{source} has version {shorten(found.get('version'))} of the format, and this stageline reads "
                f"{VERSION}: use the version that wrote it"
            )
        head = _HEAD.match(data)
        if head is None or hashlib.sha256(data[head.end() :]).hexdigest().encode() != head[1]:
            raise CheckpointError(
                f"{source} was changed after it was written: its own checksum is not that of its text"
            )
        try:
            return _manifest(found)
        except Wrong as wrong:
            raise CheckpointError(f"{source} is no manifest: {wrong}") from None


def _lines(value: Any) -> str:
    """JSON with a line for each entry of an object, for people."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()) + "}"


class Wrong(Exception):
    """A field that is not what it should be."""


def _manifest(found: dict[str, Any]) -> Manifest:
    files = {plain_name(name): read_file(each, f"files[{name!r}]") for name, each in table(found, "files")}
    model = {name: read_held(each, f"model[{name!r}]", files) for name, each in table(found, "model")}
    optimizer = {
        name: {
            slot: read_held(each, f"optimizer[{name!r}][{slot!r}]", files)
            for slot, each in table({"": slots}, "", f"optimizer[{name!r}]")
        }
        for name, slots in table(found, "optimizer")
    }
    world = dict(table(found, "world"))
    whole_number(world.get("writers"), "world.writers", 2**31)
    return Manifest(
        whole_number(found.get("step"), "step", MOST_STEPS),
        text(found.get("attempt"), "attempt"),
        _number(found.get("written"), "written"),
        world,
        files,
        model,
        optimizer,
        found.get("state"),
        dict(table(found, "environment")),
    )


def read_file(found: Any, where: str) -> File:
    """A file, from plain data."""
    fields = dict(table({"": found}, "", where))
    digest = text(fields.get("sha256"), f"{where}.sha256")
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise Wrong(f"{_cut(where)}.sha256 is {shorten(digest)}, expected 64 hexadecimal digits")
    writer = whole_number(fields.get("writer"), f"{where}.writer", 2**31)
    return File(whole_number(fields.get("bytes"), f"{where}.bytes", 2**63), digest, writer)


def read_held(found: Any, where: str, files: Mapping[str, File]) -> Held:
    """A tensor, from plain data."""
    fields = dict(table({"": found}, "", where))
    file, dtype, shape = text(fields.get("file"), f"{where}.file"), fields.get("dtype"), fields.get("shape")
    if file not in files:
        raise Wrong(f"{_cut(where)}.file is {shorten(file)}, which is not among its files")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Wrong(f"{_cut(where)}.dtype is {shorten(dtype)}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list | tuple) or len(shape) > 64:
        raise Wrong(f"{_cut(where)}.shape is {shorten(shape)}, expected a list of at most 64 whole numbers")
    return Held(file, dtype, tuple(whole_number(each, f"{where}.shape", 2**63) for each in shape))


def table(found: Mapping[str, Any], key: str, where: str = "") -> Iterator[tuple[str, Any]]:
    """The pairs of an object."""
    value = found.get(key)
    if not isinstance(value, dict):
        raise Wrong(f"{_cut(where or key)} is {shorten(value)}, expected an object")
    yield from value.items()


def text(value: Any, where: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise Wrong(f"{_cut(where)} is {shorten(value)}, expected a text")
    return value


def whole_number(value: Any, where: str, below: int) -> int:
    """A whole number from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise Wrong(f"{_cut(where)} is {shorten(value)}, expected a whole number from 0, below {below}")
    return value


def _cut(where: str) -> str:
    return where if len(where) <= 80 else where[:77] + "..."


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**37:
        raise Wrong(f"{where} is {shorten(value)}, expected seconds since 1970")
    return float(value)


def plain_name(name: str) -> str:
    """The name of a file directly in the folder; one that could lead out of it is refused.

    >>> plain_name("config.json")
    'config.json'
    >>> plain_name("../config.json")
    Traceback (most recent call last):
    ...
    stageline.train.checkpoint.manifest.Wrong: the file '../config.json' lies outside of its folder; refused
    """
    if not name or name in (".", "..") or any(letter in "/\\:" or not letter.isprintable() for letter in name):
        raise Wrong(f"the file {shorten(name)} lies outside of its folder; refused")
    return name
