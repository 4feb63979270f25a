"""Reading checkpoints: the newest that is whole, and of it only the tensors that are asked for. No torch until then."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from stageline.common.errors import CheckpointError, nearest, shorten
from stageline.train.checkpoint.disk import reason, regular, sum_file
from stageline.train.checkpoint.folder import hold, published, step_name, step_of
from stageline.train.checkpoint.manifest import LARGEST, MANIFEST, File, Held, Manifest

if TYPE_CHECKING:
    from torch import Tensor


Identity = tuple[int, int] | None


@dataclass(frozen=True)
class Damage:
    """One file of a checkpoint that is not as it was written.

    >>> print(Damage(Path("step-00000100"), "model-00001-of-00001.safetensors", "size", "has 10 bytes, expected 96"))
    step-00000100/model-00001-of-00001.safetensors: has 10 bytes, expected 96
    """

    checkpoint: Path
    file: str
    what: Literal["missing", "size", "checksum", "manifest", "refused", "unreadable"]
    text: str

    def __str__(self) -> str:
        """The file, then what is wrong with it."""
        return f"{self.checkpoint / self.file}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"checkpoint": str(self.checkpoint), "file": self.file, "what": self.what, "text": self.text}


class Checkpoint:
    """A checkpoint on disk; as long as it is open, no writer prunes it.

    >>> import torch
    >>> from stageline.train.checkpoint import Writer, open_checkpoint
    >>> with Writer("checkpoint") as writer:
    ...     writer.save(7, {"weight": torch.ones(2)}, {"weight": {"momentum": torch.zeros(2)}}, {"seen": 448})
    >>> with open_checkpoint("checkpoint/step-00000007") as found:
    ...     found.step, found.state, found.read_optimizer(["weight"])
    (7, {'seen': 448}, {'weight': {'momentum': tensor([0., 0.])}})
    """

    def __init__(self, path: Path, manifest: Manifest, identity: Identity, handle: int | None = None) -> None:
        """See `open_checkpoint` and `newest`."""
        self.path = path
        self.manifest = manifest
        self._identity = identity
        self._release = weakref.finalize(self, os.close, handle) if handle is not None else None

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def state(self) -> Any:
        """The JSON that was saved with it."""
        return self.manifest.state

    def read_model(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors of the model that are asked for, or all."""
        wanted = self._pick(names, self.manifest.model, "no parameter")
        found = self._read({name: (name, self.manifest.model[name]) for name in wanted})
        return {name: found[name] for name in wanted}

    def read_optimizer(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Tensor]]:
        """The state of the optimizer for the parameters that are asked for, or all: each slot by its name."""
        held = self.manifest.optimizer
        wanted = self._pick(names, held, "no optimizer state of")
        keys = {f"{name}/{slot}": each for name in wanted for slot, each in held[name].items()}
        found = self._read({key: (key, each) for key, each in keys.items()})
        return {name: {slot: found[f"{name}/{slot}"] for slot in held[name]} for name in wanted}

    def read_asset(self, name: str) -> bytes:
        """One of the small files that were saved with it."""
        self._pick([name], self.manifest.files, "no file")
        damage = self._look(name, self.manifest.files[name])
        if damage is not None or self.manifest.files[name].bytes > LARGEST:
            raise CheckpointError(f"cannot read {damage or f'{self.path / name}: it is too large'}")
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path / name}: {reason(error)}") from error

    def verify(self, deep: bool = True) -> list[Damage]:
        """What is damaged: every file's presence and size, and if deep, the checksum of its bytes."""
        found = [self._look(name, file) for name, file in self.manifest.files.items()]
        if deep:
            sound = [name for name, damage in zip(self.manifest.files, found, strict=True) if damage is None]
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                found += pool.map(self._sum, sound)
        return [damage for damage in found if damage is not None]

    def close(self) -> None:
        """Let it be pruned."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Let it be pruned."""
        self.close()

    def __repr__(self) -> str:
        """Where, which step, how large."""
        return f"<Checkpoint {self.path}: step {self.step}, {self.manifest.size:,} bytes>"

    def _pick(self, names: Iterable[str] | None, known: Mapping[str, Any], what: str) -> list[str]:
        wanted = list(known) if names is None else list(names)
        for name in wanted:
            if name not in known:
                raise CheckpointError(f"{self.path} has {what} {shorten(name)}{nearest(str(name), known)}")
        return wanted

    def _read(self, wanted: Mapping[str, tuple[str, Held]]) -> dict[str, Tensor]:
        """Tensors by key, file by file."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[str, list[tuple[str, Held]]] = {}
        for key, held in wanted.values():
            by_file.setdefault(held.file, []).append((key, held))
        found: dict[str, Tensor] = {}
        for name, entries in by_file.items():
            damage = self._look(name, self.manifest.files[name])
            if damage is not None:
                raise CheckpointError(f"cannot read {damage}")
            try:
                with safe_open(str(self.path / name), framework="pt", device="cpu") as opened:
                    for key, held in entries:
                        # A copy: what is mapped from a file dies with the file, and takes the process along.
                        found[key] = self._fits(name, key, held, opened.get_tensor(key)).clone()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {self.path / name}: {reason(error)}") from error
        if _identity(self.path) != self._identity:
            raise CheckpointError(f"{self.path} was replaced while it was read; open it again")
        return found

    def _fits(self, file: str, key: str, held: Held, tensor: Tensor) -> Tensor:
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if (dtype, shape) != (held.dtype, held.shape):
            raise CheckpointError(
                f"{self.path / file} holds {key!r} as {dtype} of {shape}, and its manifest says {held.dtype} of "
                f"{held.shape}"
            )
        return tensor

    def _look(self, name: str, file: File) -> Damage | None:
        try:
            found = regular(self.path / name)
        except FileNotFoundError:
            return Damage(self.path, name, "missing", "is missing")
        except OSError as error:
            return Damage(self.path, name, "unreadable", f"cannot be read: {reason(error)}")
        if found is None:
            return Damage(self.path, name, "refused", "is a link or no plain file; refused")
        if found.st_size != file.bytes:
            return Damage(self.path, name, "size", f"has {found.st_size:,} bytes, expected {file.bytes:,}")
        return None

    def _sum(self, name: str) -> Damage | None:
        try:
            found = sum_file(self.path / name)
        except OSError as error:
            return Damage(self.path, name, "unreadable", f"cannot be read: {reason(error)}")
        if found != self.manifest.files[name].sha256:
            expected = self.manifest.files[name].sha256
            return Damage(
                self.path, name, "checksum", f"has other bytes than were written: sha256 {found[:12]}…, expected "
                f"{expected[:12]}…",
            )  # fmt: skip
        return None


def _identity(path: Path) -> Identity:
    """What changes when another folder takes the name."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open one checkpoint by its folder; only its manifest is read.

    >>> from stageline.train.checkpoint import Writer
    >>> with Writer("checkpoint") as writer:
    ...     writer.save(7, {})
    >>> open_checkpoint("checkpoint/step-00000007")
    <Checkpoint checkpoint/step-00000007: step 7, 0 bytes>
    """
    where = Path(path)
    if not where.is_dir():
        why = "it is a file" if where.exists() else "it does not exist"
        raise CheckpointError(f"{where} is no checkpoint: {why}")
    file = where / MANIFEST
    handle = None
    identity = _identity(where)
    try:
        found = regular(file)
        if found is None or found.st_size > LARGEST:
            why = "is a link or no plain file; refused" if found is None else f"has {found.st_size:,} bytes; refused"
            raise CheckpointError(f"{file} {why}")
        handle = hold(where)
        manifest = Manifest.from_bytes(file.read_bytes(), str(file))
        named = step_of(where.name)
        if named is not None and named != manifest.step:
            raise CheckpointError(f"{file} is of step {manifest.step}, expected {named}: it is another checkpoint's")
    except BaseException as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, FileNotFoundError):
            raise CheckpointError(f"{file} is missing") from None
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot read {file}: {reason(error)}") from error
        raise
    return Checkpoint(where, manifest, identity, handle)


def inspect(path: Path, *, deep: bool = True) -> tuple[Checkpoint | None, list[Damage]]:
    """A checkpoint, if its manifest can be read, and everything that is wrong with it."""
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        what = str(error).removeprefix(f"{path / MANIFEST} ").removeprefix(f"cannot read {path / MANIFEST}: ")
        return None, [Damage(path, MANIFEST, "missing" if what == "is missing" else "manifest", what)]
    return checkpoint, checkpoint.verify(deep)


def newest(
    folder: str | Path, on_damage: Callable[[Damage], object] | None = None, *, deep: bool = True
) -> Checkpoint | None:
    """The newest whole checkpoint of a folder, or None if none was ever published in it.

    `on_damage` is called with what is wrong with those that are newer. `deep=False` looks at presence and sizes alone.
    If there are checkpoints and none is whole, that is an error: to begin anew would be the wrong answer.

    >>> from stageline.train.checkpoint import Writer
    >>> with Writer("checkpoint") as writer:
    ...     writer.save(1, {}, assets={"config.json": b"{}"})
    ...     writer.save(2, {}, assets={"config.json": b"{}"})
    >>> _ = Path("checkpoint/step-00000002/config.json").write_bytes(b"")
    >>> newest("checkpoint", on_damage=print).step
    checkpoint/step-00000002/config.json: has 0 bytes, expected 2
    1
    """
    told: list[Damage] = []
    for _ in range(100):
        paths = published(folder)
        for path in reversed(paths):
            before = _identity(path)
            checkpoint, damages = inspect(path, deep=deep)
            if not damages:
                return checkpoint
            if checkpoint is not None:
                checkpoint.close()
            if before is None or before != _identity(path):
                break  # pruned, replaced or stepped back meanwhile: look at the folder again
            for damage in damages:
                if damage not in told:
                    told.append(damage)
                    if on_damage is not None:
                        on_damage(damage)
        else:
            break
    if not paths:
        return None
    names = "; ".join(map(str, told[:5])) + (f"; and {len(told) - 5} more" if len(told) > 5 else "")
    raise CheckpointError(
        f"none of the {len(paths)} checkpoints in {folder} is whole: {names}; mend or remove them, or begin in another "
        "folder"
    )


def at_step(folder: str | Path, step: int) -> Path:
    """The folder of a step's checkpoint, or an error with the steps that there are.

    >>> from stageline.train.checkpoint import Writer
    >>> with Writer("checkpoint") as writer:
    ...     writer.save(100, {})
    >>> at_step("checkpoint", 100).name
    'step-00000100'
    >>> at_step("checkpoint", 10)
    Traceback (most recent call last):
    ...
    stageline.common.errors.CheckpointError: checkpoint has no checkpoint of step 10; it has 100
    """
    step_name(step)
    paths = published(folder)
    for path in reversed(paths):
        if step_of(path.name) == step:
            return path
    steps = ", ".join(str(step_of(path.name)) for path in paths) or "none"
    raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has {steps}")
