"""Read checkpoints: find the newest undamaged one, verify files, and read single tensors. Imports torch only then."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from stageline.common.errors import CheckpointError, JsonError, nearest, shorten
from stageline.train.checkpoint.folder import (
    FOLDER,
    file_checksum,
    hold,
    published,
    reason,
    stat_regular,
    step_name,
    step_of,
)
from stageline.train.checkpoint.manifest import (
    DTYPES,
    INDEX,
    LARGEST,
    MANIFEST,
    File,
    Manifest,
    TensorEntry,
    plain_name,
)
from stageline.train.checkpoint.remote import Location, Mirror, RemotePath, location

if TYPE_CHECKING:
    from torch import Tensor


Identity = tuple[int, int] | None


@dataclass(frozen=True)
class Damage:
    """A damaged file of a checkpoint.

    >>> print(Damage(Path("step-00000100"), "model-00001-of-00001.safetensors", "size", "has 10 bytes, expected 96"))
    step-00000100/model-00001-of-00001.safetensors: has 10 bytes, expected 96
    """

    checkpoint: Location
    file: str
    what: Literal["missing", "size", "checksum", "manifest", "refused", "unreadable"]
    text: str

    def __str__(self) -> str:
        return f"{self.checkpoint / self.file}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        return {"checkpoint": str(self.checkpoint), "file": self.file, "what": self.what, "text": self.text}


class Checkpoint:
    """A checkpoint on disk; while it is open, no writer removes it.

    >>> import torch
    >>> from stageline.train.checkpoint import Writer, open_checkpoint
    >>> with Writer("checkpoint") as writer:
    ...     writer.save(7, {"weight": torch.ones(2)}, {"weight": {"momentum": torch.zeros(2)}}, {"seen": 448})
    >>> with open_checkpoint("checkpoint/step-00000007") as found:
    ...     found.step, found.state, found.read_optimizer(["weight"])
    (7, {'seen': 448}, {'weight': {'momentum': tensor([0., 0.])}})
    """

    def __init__(self, path: Location, manifest: Manifest, identity: Identity, handle: int | None = None) -> None:
        """See `open_checkpoint` and `newest`."""
        self.path = path
        self._mirror = Mirror(files_of(path, manifest)) if isinstance(path, RemotePath) else None
        self.manifest = manifest
        self._identity = identity
        self._release = weakref.finalize(self, os.close, handle) if handle is not None else None

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def state(self) -> Any:
        """The JSON data that was saved with it."""
        return self.manifest.state

    def read_model(
        self, names: Iterable[str] | None = None, like: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return tensors of the model by name; all of them by default.

        `like` has tensors by name. Where one is cut over several processes (a DTensor), only the slices of this process
        are read, and the result is cut in the same way.
        """
        wanted = self._pick(names, self.manifest.model, "no parameter")
        tensors = self._read({name: self.manifest.model[name] for name in wanted}, like or {})
        return {name: tensors[name] for name in wanted}

    def read_optimizer(
        self, names: Iterable[str] | None = None, like: Mapping[str, Tensor] | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state of parameters, by slot; of all of them by default.

        With `like`, which has the parameters by name, states of the shape of their parameter are cut as it is.
        """
        saved = self.manifest.optimizer
        wanted = self._pick(names, saved, "no optimizer state of")
        entries = {f"{name}/{slot}": entry for name in wanted for slot, entry in saved[name].items()}
        cut_like = {f"{name}/{slot}": like[name] for name in wanted for slot in saved[name] if like and name in like}
        tensors = self._read(entries, cut_like)
        return {name: {slot: tensors[f"{name}/{slot}"] for slot in saved[name]} for name in wanted}

    def read_asset(self, name: str) -> bytes:
        """Return one of the small files that were saved with it."""
        self._pick([name], self.manifest.files, "no file")
        damage = self._check(name, self.manifest.files[name])
        if damage is not None or self.manifest.files[name].bytes > LARGEST:
            raise CheckpointError(f"cannot read {damage or f'{self.path / name}: it is too large'}")
        try:
            return self.local_file(name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path / name}: {reason(error)}") from error

    def verify(self, deep: bool = True, *, weights_only: bool = False) -> list[Damage]:
        """Return what is damaged: check presence and size of every file, and its checksum if `deep`.

        `weights_only` leaves out the files of the optimizer.
        """
        slots = self.manifest.optimizer.values() if weights_only else ()
        unused = {entry.file for slot in slots for entry in slot.values()}
        files = {name: file for name, file in self.manifest.files.items() if name not in unused}
        damages = [self._check(name, file) for name, file in files.items()]
        if deep:
            sound = [name for name, damage in zip(files, damages, strict=True) if damage is None]
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                damages += pool.map(self._check_sum, sound)
        return [damage for damage in damages if damage is not None]

    def local_file(self, name: str) -> Path:
        """Return the path of a file on this machine; one of an object store is copied first."""
        return Path(str(self.path)) / name if self._mirror is None else self._mirror.fetch(name)

    def local_model(self) -> Path:
        """Return a folder of this machine with the files of the model."""
        for entry in self.manifest.model.values():
            self.local_file(entry.file)
        return self.local_file(INDEX).parent

    def close(self) -> None:
        """Allow writers to remove it, and remove local copies."""
        if self._mirror is not None:
            self._mirror.close()
        if self._release is not None:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: step {self.step}, {self.manifest.size:,} bytes>"

    def _pick(self, names: Iterable[str] | None, known: Mapping[str, Any], what: str) -> list[str]:
        wanted = list(known) if names is None else list(names)
        for name in wanted:
            if name not in known:
                raise CheckpointError(f"{self.path} has {what} {shorten(name)}{nearest(str(name), known)}")
        return wanted

    def _read(self, wanted: Mapping[str, TensorEntry], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read tensors by key, file by file."""
        from safetensors import SafetensorError, safe_open

        from stageline.tensors.sharded import is_sharded, read_part, with_part

        by_file: dict[str, list[tuple[str, TensorEntry]]] = {}
        for key, entry in wanted.items():
            by_file.setdefault(entry.file, []).append((key, entry))
        tensors: dict[str, Tensor] = {}
        for name, entries in by_file.items():
            damage = self._check(name, self.manifest.files[name])
            if damage is not None:
                raise CheckpointError(f"cannot read {damage}")
            try:
                with safe_open(str(self.local_file(name)), framework="pt", device="cpu") as opened:
                    for key, entry in entries:
                        self._check_tensor(name, key, entry, opened)
                        target = like.get(key)
                        if target is not None and is_sharded(target) and entry.shape == tuple(target.shape) != ():
                            tensors[key] = with_part(read_part(opened.get_slice(key), target), target)
                        else:
                            # A copy, because reading a mapped file that was truncated kills the process.
                            tensors[key] = opened.get_tensor(key).clone()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {self.path / name}: {reason(error)}") from error
        if _identity(self.path) != self._identity:
            raise CheckpointError(f"{self.path} was replaced while it was being read; open it again")
        return tensors

    def _check_tensor(self, file: str, key: str, entry: TensorEntry, opened: Any) -> None:
        header = opened.get_slice(key)
        dtype, shape = header.get_dtype(), tuple(header.get_shape())
        if (dtype, shape) != (DTYPES[entry.dtype], entry.shape):
            names = {short: name for name, short in DTYPES.items()}
            raise CheckpointError(
                f"{self.path / file} stores {key!r} as {names.get(dtype, dtype)} of {shape}, but its manifest says "
                f"{entry.dtype} of {entry.shape}"
            )

    def _check(self, name: str, file: File) -> Damage | None:
        try:
            size = self._size(name)
        except FileNotFoundError:
            return Damage(self.path, name, "missing", "is missing")
        except OSError as error:
            return Damage(self.path, name, "unreadable", f"cannot be read: {reason(error)}")
        if size is None:
            return Damage(self.path, name, "refused", "is a link or not a regular file; refused")
        if size != file.bytes:
            return Damage(self.path, name, "size", f"has {size:,} bytes, expected {file.bytes:,}")
        return None

    def _size(self, name: str) -> int | None:
        """The bytes of a file; None if it is not a regular one."""
        if self._mirror is not None:
            if name not in self._mirror.sizes:
                raise FileNotFoundError(name)
            return self._mirror.sizes[name]
        status = stat_regular(self.local_file(name))
        return None if status is None else status.st_size

    def _check_sum(self, name: str) -> Damage | None:
        try:
            here = self._mirror
            checksum = file_checksum(self.local_file(name)) if here is None else (here.folder / name).checksum()
        except (OSError, CheckpointError) as error:
            return Damage(self.path, name, "unreadable", f"cannot be read: {reason(error)}")
        expected = self.manifest.files[name].sha256
        if checksum != expected:
            text = f"checksum mismatch: sha256 {checksum[:12]}…, expected {expected[:12]}…"
            return Damage(self.path, name, "checksum", text)
        return None


def _identity(path: Location) -> Identity:
    """Return what changes when another folder gets this name."""
    if isinstance(path, RemotePath):
        try:
            return int.from_bytes(hashlib.sha256((path / MANIFEST).read_bytes()).digest()[:8]), 0
        except (CheckpointError, FileNotFoundError):
            return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def files_of(path: RemotePath, manifest: Manifest) -> RemotePath:
    """The folder with the files of a checkpoint in an object store."""
    try:
        return path / plain_name(str(manifest.world.get(FOLDER, "")))
    except JsonError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from None


def open_checkpoint(path: str | Location) -> Checkpoint:
    """Open a checkpoint by its folder; only the manifest is read.

    >>> from stageline.train.checkpoint import Writer
    >>> with Writer("checkpoint") as writer:
    ...     writer.save(7, {})
    >>> open_checkpoint("checkpoint/step-00000007")
    <Checkpoint checkpoint/step-00000007: step 7, 0 bytes>
    """
    where = location(path)
    if not where.is_dir():
        why = "it is a file" if where.exists() else "it does not exist"
        raise CheckpointError(f"{where} is not a checkpoint: {why}")
    file = where / MANIFEST
    handle = None
    identity = _identity(where)
    try:
        if isinstance(where, Path):
            status = stat_regular(where / MANIFEST)
            if status is None or status.st_size > LARGEST:
                why = "is a link or not a regular file" if status is None else f"has {status.st_size:,} bytes"
                raise CheckpointError(f"{file} {why}; refused")
            handle = hold(where)
        manifest = Manifest.from_bytes(file.read_bytes(), str(file))
        named = step_of(where.name)
        if named is not None and named != manifest.step:
            raise CheckpointError(
                f"{file} is for step {manifest.step}, expected {named}: it belongs to another checkpoint"
            )
    except BaseException as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, FileNotFoundError):
            raise CheckpointError(f"{file} is missing") from None
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot read {file}: {reason(error)}") from error
        raise
    return Checkpoint(where, manifest, identity, handle)


def inspect(path: Location, *, deep: bool = True, weights_only: bool = False) -> tuple[Checkpoint | None, list[Damage]]:
    """Return a checkpoint, or None if its manifest cannot be read, and all its damages (see `Checkpoint.verify`)."""
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        what = str(error)
        for start in (f"{path / MANIFEST} ", f"{path / MANIFEST}: ", f"cannot read {path / MANIFEST}: "):
            what = what.removeprefix(start)
        return None, [Damage(path, MANIFEST, "missing" if what == "is missing" else "manifest", what)]
    return checkpoint, checkpoint.verify(deep, weights_only=weights_only)


def newest(
    folder: str | Location,
    on_damage: Callable[[Damage], object] | None = None,
    *,
    deep: bool = True,
    weights_only: bool = False,
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a folder, or None if the folder has none at all.

    `on_damage` is called with each damage of newer ones. `deep=False` checks only presence and sizes of files, and
    `weights_only=True` no files of the optimizer. If there are checkpoints and all are damaged, raise: starting again
    would be wrong.

    >>> from stageline.train.checkpoint import Writer
    >>> with Writer("checkpoint") as writer:
    ...     writer.save(1, {}, assets={"config.json": b"{}"})
    ...     writer.save(2, {}, assets={"config.json": b"{}"})
    >>> _ = Path("checkpoint/step-00000002/config.json").write_bytes(b"")
    >>> newest("checkpoint", on_damage=print).step
    checkpoint/step-00000002/config.json: has 0 bytes, expected 2
    1
    """
    reported: list[Damage] = []
    for _ in range(100):
        paths = published(folder)
        for path in reversed(paths):
            before = _identity(path)
            checkpoint, damages = inspect(path, deep=deep, weights_only=weights_only)
            if not damages:
                return checkpoint
            if checkpoint is not None:
                checkpoint.close()
            if before is None or before != _identity(path):
                break  # removed or replaced meanwhile: list the folder again
            for damage in damages:
                if damage not in reported:
                    reported.append(damage)
                    if on_damage is not None:
                        on_damage(damage)
        else:
            break
    if not paths:
        return None
    names = "; ".join(map(str, reported[:5])) + (f"; and {len(reported) - 5} more" if len(reported) > 5 else "")
    raise CheckpointError(
        f"none of the {len(paths)} checkpoints in {folder} is intact: {names}; repair or remove them, or use another "
        "folder"
    )


def at_step(folder: str | Location, step: int) -> Location:
    """Return the checkpoint of a step; raise an error that lists the steps if there is none."""
    step_name(step)
    paths = published(folder)
    for path in reversed(paths):
        if step_of(path.name) == step:
            return path
    steps = ", ".join(str(step_of(path.name)) for path in paths) or "none"
    raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has {steps}")
