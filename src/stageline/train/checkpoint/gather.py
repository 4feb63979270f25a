"""What several writers wrote becomes one checkpoint: each reports, the first waits for all and writes the manifest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stageline.common.checked_json import from_json, parse_json
from stageline.common.errors import CheckpointError, JsonError
from stageline.train.checkpoint.disk import reason, rename, replace_file, write_file
from stageline.train.checkpoint.manifest import INDEX, File, Held, check_tensors


@dataclass(frozen=True)
class Report:
    """What one writer wrote: its files in order, and the tensors in them; or why it could not."""

    model_files: Mapping[str, File] = field(default_factory=dict)
    model: Mapping[str, Held] = field(default_factory=dict)
    optimizer_files: Mapping[str, File] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Held]] = field(default_factory=dict)
    error: str = ""

    def write(self, partial: Path, number: int) -> None:
        """Leave it for the first writer, after what it speaks of is on the disk."""
        replace_file(partial / report_name(number), json.dumps(asdict(self)).encode())

    @staticmethod
    def read(path: Path) -> Report:
        """Read what another writer left."""
        try:
            report = from_json(Report, parse_json(path.read_bytes()), "the report", prefix="")
            check_tensors(report.model_files, {"model": report.model})
            check_tensors(report.optimizer_files, report.optimizer)
            return report
        except (OSError, JsonError) as error:
            raise CheckpointError(f"cannot read what a writer left in {path}: {reason(error)}") from error


def report_name(number: int) -> str:
    """The file in which a writer says what it wrote.

    >>> report_name(3)
    'writer-00003.json'
    """
    return f"writer-{number:05d}.json"


def gather(
    partial: Path, own: Report, count: int, deadline: float, check: Callable[[], object] = lambda: None
) -> list[Report]:
    """Wait for the reports of all writers; one that is heard of no more for the deadline is named.

    `check` is called meanwhile, and raises if there is nothing to wait for any more.
    """
    reports = {0: own}
    seen: object = None
    heard = time.monotonic()
    pause = 0.005
    while len(reports) < count:
        sizes = _sizes(partial)
        for number in range(1, count):
            if number not in reports and report_name(number) in sizes:
                reports[number] = report = Report.read(partial / report_name(number))
                if report.error:
                    raise CheckpointError(f"writer {number} of {count} failed: {report.error}")
        if len(reports) == count:
            break
        check()
        if sizes != seen:  # somebody still writes: slow is not dead
            seen, heard = sizes, time.monotonic()
        if time.monotonic() - heard > deadline:
            raise _late([number for number in range(count) if number not in reports], count, deadline, partial)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return [reports[number] for number in range(count)]


def _sizes(partial: Path) -> dict[str, int]:
    try:
        with os.scandir(partial) as found:
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in found}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {partial}: {reason(error)}") from error


def _late(missing: Sequence[int], count: int, deadline: float, partial: Path) -> CheckpointError:
    names = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
    who = f"writer {names}" if len(missing) == 1 else f"writers {names}"
    return CheckpointError(
        f"{who} of {count} did not finish, and wrote nothing for {deadline:g} s, in {partial}; see whether the process "
        "lives and whether its machine shares this folder"
    )


def assemble(
    partial: Path, reports: Sequence[Report]
) -> tuple[dict[str, File], dict[str, Held], dict[str, dict[str, Held]]]:
    """Number the files of all writers, write the index, and say what there is: files, model, optimizer."""
    files: dict[str, File] = {}
    model: dict[str, Held] = {}
    optimizer: dict[str, dict[str, Held]] = {}
    _check_once("parameter", [report.model for report in reports])
    _check_once("optimizer state of", [report.optimizer for report in reports])
    names = {
        **_number(partial, "model", [report.model_files for report in reports], files),
        **_number(partial, "optimizer", [report.optimizer_files for report in reports], files),
    }
    for report in reports:
        model |= {name: _renamed(held, names) for name, held in report.model.items()}
        for name, slots in report.optimizer.items():
            optimizer[name] = {slot: _renamed(held, names) for slot, held in slots.items()}
    if model:
        files[INDEX] = write_index(partial, model)
    for number in range(len(reports)):
        (partial / report_name(number)).unlink(missing_ok=True)
    return files, model, optimizer


def write_index(folder: Path, model: Mapping[str, Held]) -> File:
    """The index by which Hugging Face and `sl.load_weights` find the tensors of several files."""
    size = sum((folder / name).stat().st_size - _head(folder / name) for name in {held.file for held in model.values()})
    index = {"metadata": {"total_size": size}, "weight_map": {name: held.file for name, held in model.items()}}
    done = write_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
    return File(done.bytes, done.sha256, 0)


def _head(path: Path) -> int:
    """Bytes before the tensors of a safetensors file."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _check_once(what: str, given: Sequence[Mapping[str, object]]) -> None:
    first: dict[str, int] = {}
    for number, names in enumerate(given):
        for name in names:
            if name in first:
                raise CheckpointError(
                    f"the {what} {name!r} comes from writers {first[name]} and {number}: give it once"
                )
            first[name] = number


def _number(partial: Path, kind: str, written: Sequence[Mapping[str, File]], files: dict[str, File]) -> dict[str, str]:
    """Give the files of a kind their final names, in the order of the writers; returns old names and new ones."""
    listed = [(name, file) for each in written for name, file in each.items()]
    names = {}
    sizes = _sizes(partial)
    for place, (name, file) in enumerate(listed, 1):
        names[name] = shard_name(kind, place, len(listed))
        if sizes.get(name) != file.bytes:
            raise CheckpointError(
                f"{partial / name} has {sizes.get(name, 'no')} bytes here, and writer {file.writer} wrote {file.bytes}"
                "; see whether its machine shares this folder"
            )
        rename(partial / name, partial / names[name])
        files[names[name]] = file
    return names


def shard_name(kind: str, place: int, count: int) -> str:
    """The name of one of several files, as Hugging Face has them.

    >>> shard_name("model", 1, 4)
    'model-00001-of-00004.safetensors'
    """
    return f"{kind}-{place:05d}-of-{count:05d}.safetensors"


def _renamed(held: Held, names: Mapping[str, str]) -> Held:
    return Held(names[held.file], held.dtype, held.shape)
