"""Checkpoints: saved values load bit by bit, a kill or a flipped bit loses at most one, and damage is named."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

import stageline as sl
from stageline.cli.app import run
from stageline.testing import ForkServer
from stageline.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    Damage,
    Writer,
    leave_mark,
    newest,
    open_checkpoint,
    published,
    remove_mark,
    sees_mark,
)
from stageline.train.checkpoint.manifest import DTYPES
from support import checkpoint_process as process

Capture = pytest.CaptureFixture[str]
SCRIPT = Path(process.__file__)


def bits(tensor: Tensor) -> list[int]:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).tolist() if tensor.numel() else []


def same(one: Tensor, other: Tensor) -> bool:
    """The same bits in the same shape."""
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def is_step(checkpoint: Checkpoint, step: int) -> bool:
    """All of what `checkpoint_process.save` saved at a step."""
    held, slots = checkpoint.read_model(), checkpoint.read_optimizer()
    return (
        checkpoint.step == step
        and checkpoint.state == {"step": step}
        and held.keys() == process.model(step).keys()
        and all(same(held[name], tensor) for name, tensor in process.model(step).items())
        and all(
            same(slots[name][slot], tensor)
            for name, expected in process.optimizer(step).items()
            for slot, tensor in expected.items()
        )
    )


def whole(folder: Path) -> Checkpoint:
    """The newest, of a folder in which none is damaged."""
    damages: list[Damage] = []
    checkpoint = newest(folder, damages.append)
    assert not damages
    assert checkpoint is not None
    return checkpoint


def save_steps(folder: Path, *steps: int, **options: Any) -> None:
    with Writer(folder, **options) as writer:
        for step in steps:
            process.save(writer, step)


# Saved values load again


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = getattr(torch, draw(st.sampled_from(sorted(DTYPES))))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        tensor = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=dtype).reshape(shape)
    else:
        data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor[..., ::2] if tensor.dim() and draw(st.booleans()) else tensor


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
SLOTS = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=5)


@settings(max_examples=30)
@given(
    model=st.dictionaries(NAMES, tensors(), max_size=6),
    optimizer=st.dictionaries(NAMES, st.dictionaries(SLOTS, tensors(), max_size=3), max_size=4),
    count=st.integers(1, 4),
    most=st.sampled_from([1, 50, 10**9]),
    background=st.booleans(),
    data=st.data(),
)
def test_what_any_writers_wrote_is_read_back_bit_by_bit(
    model: dict[str, Tensor],
    optimizer: dict[str, dict[str, Tensor]],
    count: int,
    most: int,
    background: bool,
    data: st.DataObject,
) -> None:
    owner = {name: data.draw(st.integers(0, count - 1)) for name in sorted({*model, *optimizer})}

    def write(number: int) -> None:
        with Writer(folder, number, count, max_shard_bytes=most, deadline=60.0) as writer:
            writer.save(
                3,
                {name: tensor for name, tensor in model.items() if owner[name] == number},
                {name: tensor for name, tensor in optimizer.items() if owner[name] == number},
                {"number": number},
                attempt="a/strange one",
                background=background,
            )

    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(write, range(count)))
        checkpoint = newest(folder)
        assert checkpoint is not None
        assert checkpoint.state == {"number": 0}
        wanted = data.draw(st.lists(st.sampled_from(sorted(model)), unique=True)) if model else []
        held = checkpoint.read_model(wanted)
        assert list(held) == wanted
        assert all(same(held[name], model[name]) for name in wanted)
        assert all(same(tensor, model[name]) for name, tensor in checkpoint.read_model().items())
        wanted = data.draw(st.lists(st.sampled_from(sorted(optimizer)), unique=True)) if optimizer else []
        slots = checkpoint.read_optimizer(wanted)
        assert list(slots) == wanted
        assert all(slots[name].keys() == optimizer[name].keys() for name in wanted)
        assert all(same(slots[name][slot], tensor) for name in wanted for slot, tensor in optimizer[name].items())
        assert {path.name for path in Path(folder).iterdir()} == {"latest", "step-00000003"}
        checkpoint.close()


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    with Writer(tmp_path) as writer:
        for step in range(4):
            writer.save(step, {"weight": weight}, {"weight": {"sum": weight}})
            weight.add_(1)
    for step, path in enumerate(published(tmp_path), 1):
        with open_checkpoint(path) as checkpoint:
            assert same(checkpoint.read_model()["weight"], torch.full((1000,), 1.0 + step))
            assert same(checkpoint.read_optimizer()["weight"]["sum"], torch.full((1000,), 1.0 + step))


def test_only_one_checkpoint_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (free.wait(60), fsync(handle))[1])
    with Writer(tmp_path) as writer:
        process.save(writer, 1)  # returns, although the disk is blocked
        assert published(tmp_path) == []
        second = threading.Thread(target=process.save, args=(writer, 2))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        free.set()
        second.join()
        assert published(tmp_path)[0].name == "step-00000001"
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert is_step(checkpoint, 2)


def test_a_script_that_ends_finishes_its_checkpoint(tmp_path: Path, fork_server: ForkServer) -> None:
    child = fork_server.start(SCRIPT, "end_at_once", [str(tmp_path / "c")], log=tmp_path / "log")
    assert child.wait(300) == 0, (tmp_path / "log").read_text()
    checkpoint = newest(tmp_path / "c")
    assert checkpoint is not None
    assert is_step(checkpoint, 1)


def test_hugging_face_opens_a_checkpoint_as_it_is(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    with Writer(tmp_path / "c", max_shard_bytes=4000) as writer:
        assets = {"config.json": config.to_json_string().encode()}
        writer.save(1, dict(llama.named_parameters()), assets=assets)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c/step-00000001")
    assert all(same(one, other) for one, other in zip(llama.parameters(), again.parameters(), strict=True))
    fresh = transformers.LlamaForCausalLM(config)
    sl.load_weights(fresh, tmp_path / "c/step-00000001")
    assert all(same(one, other) for one, other in zip(llama.parameters(), fresh.parameters(), strict=True))
    half = llama.to(torch.bfloat16)
    for place, words in enumerate(["", "--max-shard-size 4kB", "--format stageline"]):
        out = tmp_path / f"out-{place}"
        assert run(["checkpoint", "convert", str(tmp_path / "c"), str(out), "--dtype", "bfloat16", *words.split()]) == 0
        assert (out / "model.safetensors").exists() == (place == 0)
        fresh = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        sl.load_weights(fresh, out)
        assert all(same(one, other) for one, other in zip(half.parameters(), fresh.parameters(), strict=True))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out-0")
    assert all(same(one, other) for one, other in zip(half.parameters(), again.parameters(), strict=True))
    with open_checkpoint(tmp_path / "out-2") as converted:
        assert converted.verify() == []
    assert "LlamaForCausalLM" in capsys.readouterr().out + call(["list", str(tmp_path / "c")], capsys)


# Killed at any moment


def test_a_writer_killed_at_random_leaves_what_it_published(tmp_path: Path, fork_server: ForkServer) -> None:
    folder, log, seed = tmp_path / "c", tmp_path / "steps", random.Random(1)
    folder.mkdir()
    log.touch()
    first = expected = 0
    for _ in range(20):
        expected += seed.randrange(3)
        child = fork_server.start(SCRIPT, "save_for_ever", [str(folder), str(log), first], log=tmp_path / "log")
        end = time.monotonic() + 60
        while len(log.read_text().split()) < expected and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(seed.uniform(0.0, 0.05))
        child.signal(9)
        assert child.wait(300) == -9, (tmp_path / "log").read_text()
        steps = [int(line) for line in log.read_text().split()]
        assert len(steps) >= expected
        damages: list[Damage] = []
        checkpoint = newest(folder, damages.append)
        assert not damages
        assert (checkpoint.step if checkpoint else -1) >= max(steps, default=-1)
        if checkpoint is not None:
            assert is_step(checkpoint, checkpoint.step)
            first = seed.choice([checkpoint.step, checkpoint.step + 1])  # a resumed job may save a step again
            checkpoint.close()


def test_a_writer_killed_before_any_change_of_the_disk_leaves_a_whole_one(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    log = tmp_path / "steps"
    save_steps(tmp_path / "before", 1)
    for step in (1, 2):  # the same one again, and a later one, for which the first is pruned
        fatal = 0
        log.unlink(missing_ok=True)
        while not log.exists():
            fatal += 1
            folder = tmp_path / f"{step}-{fatal}"
            shutil.copytree(tmp_path / "before", folder)
            child = fork_server.start(SCRIPT, "die_at", [str(folder), str(log), step, fatal], log=tmp_path / "log")
            code = child.wait(300)
            assert code == (0 if log.exists() else -9), (tmp_path / "log").read_text()
            with whole(folder) as checkpoint:
                assert is_step(checkpoint, checkpoint.step)
                assert checkpoint.step in (1, step)
            save_steps(folder, 3)  # and the next job cleans up after it
            assert {path.name.split("-")[0] for path in folder.iterdir()} == {"latest", "step"}
            assert all("." not in path.name for path in folder.iterdir())
            shutil.rmtree(folder)
        assert fatal > 20


def test_nothing_is_published_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    at_publication: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(handle: int) -> None:
        synced.append(str(os.fstat(handle).st_ino))
        fsync(handle)

    def note_rename(source: Path, target: Path) -> None:
        if Path(target).name == "step-00000001":
            at_publication.extend(synced)
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    save_steps(tmp_path, 1, max_shard_bytes=1000)
    path = tmp_path / "step-00000001"
    assert {str(file.stat().st_ino) for file in (path, *path.iterdir())} <= set(at_publication)
    assert str(tmp_path.stat().st_ino) in synced


def test_a_killed_writer_is_named_by_the_first(tmp_path: Path, fork_server: ForkServer) -> None:
    folder = tmp_path / "c"

    def start(step: int, numbers: tuple[int, ...], deadline: float) -> list[str]:
        logs = [tmp_path / f"{step}-{number}" for number in numbers]
        children = [
            fork_server.start(
                SCRIPT, "write_share", [str(folder), str(log), number, 3, step, deadline], log=tmp_path / "log"
            )
            for number, log in zip(numbers, logs, strict=True)
        ]
        assert [child.wait(300) for child in children] == [0] * len(children), (tmp_path / "log").read_text()
        return [log.read_text().strip() for log in logs]

    assert start(1, (0, 1, 2), 60.0) == ["done"] * 3
    assert start(2, (2,), 60.0) == ["done"]
    outputs = start(2, (0,), 0.3)
    assert outputs[0].startswith("the checkpoint of step 2 was not saved: writer 1 of 3 did not finish")
    assert "shares this folder" in outputs[0]
    assert [path.name for path in published(folder)] == ["step-00000001"]
    assert not list(folder.glob("*.partial"))
    assert start(3, (0, 1, 2), 60.0) == ["done"] * 3
    with whole(folder) as checkpoint:
        assert is_step(checkpoint, 3)
        assert {file.writer for file in checkpoint.manifest.files.values()} == {0, 1, 2}
        assert checkpoint.manifest.world == {"writers": 3}


def test_attempts_never_mix(tmp_path: Path) -> None:
    with Writer(tmp_path, 1, 2) as stale:
        stale.save(5, {"b": torch.zeros(2)}, attempt="first")  # its job was killed before writer 0 started
    with Writer(tmp_path, 0, 2, deadline=60.0) as first, Writer(tmp_path, 1, 2) as second:
        first.save(5, {"a": torch.ones(2)}, attempt="second")
        second.save(5, {"b": torch.ones(2)}, attempt="second")
    with whole(tmp_path) as checkpoint:
        assert checkpoint.read_model()["b"].tolist() == [1.0, 1.0]
    assert not list(tmp_path.glob("*.partial"))
    with Writer(tmp_path, 1, 2) as again:
        again.save(6, {}, attempt="third")
        again.wait()
        again.save(6, {}, attempt="third")
        with pytest.raises(CheckpointError, match="pass a new attempt="):
            again.wait()


def test_one_step_is_replaced_and_a_reader_of_the_old_one_is_told(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    old = open_checkpoint(tmp_path / "step-00000001")
    with Writer(tmp_path) as writer:
        writer.save(1, {name: tensor + 1 for name, tensor in process.model(1).items()})
    with pytest.raises(CheckpointError, match="was replaced while it was being read"):
        old.read_model()
    old.close()
    with whole(tmp_path) as checkpoint:
        assert same(checkpoint.read_model()["head.bias"], process.model(1)["head.bias"] + 1)


# Damage


def flip(path: Path, place: float = 0.9) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def exchange(one: Path, other: Path) -> None:
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


def link(path: Path) -> None:
    shutil.move(path, path.parent.parent / "moved")
    path.symlink_to("../moved")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


MODEL, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str, str]] = {
    "flipped": (MODEL, flip, "checksum", "checksum mismatch"),
    "flipped in the header": (MODEL, lambda path: flip(path, 0.1), "checksum", "checksum mismatch"),
    "flipped in the manifest": ("manifest.json", flip, "manifest", "was modified after it was written"),
    "truncated": (MODEL, truncate, "size", "bytes, expected"),
    "truncated manifest": ("manifest.json", truncate, "manifest", ""),
    "missing": ("config.json", Path.unlink, "missing", "is missing"),
    "missing manifest": ("manifest.json", Path.unlink, "missing", "is missing"),
    "swapped": (MODEL, lambda path: exchange(path, path.with_name(INDEX)), "size", "bytes, expected"),
    "exchanged with an earlier one": (
        MODEL, lambda path: exchange(path, path.parent.parent / "step-00000001" / path.name), "checksum", "mismatch"
    ),
    "another's manifest": (
        "manifest.json", lambda path: shutil.copy(path.parent.parent / "step-00000001" / path.name, path), "manifest",
        "is for step 1, expected 2",
    ),
    "a link": (
        MODEL, link, "refused", "link"
    ),
    "a pipe": ("config.json", pipe, "refused", "not a regular file"),
    "a pipe for a manifest": ("manifest.json", pipe, "manifest", "not a regular"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, name: str, capsys: Capture) -> None:
    save_steps(tmp_path / "c", 1, 2, max_shard_bytes=1500)
    file, do, what, text = DAMAGES[name]
    kept = shutil.copytree(tmp_path / "c/step-00000001", tmp_path / "kept")
    do(tmp_path / "c/step-00000002" / file)
    if name.startswith("exchanged"):  # it damages both: only the kept one is intact
        shutil.rmtree(tmp_path / "c/step-00000001")
        shutil.copytree(kept, tmp_path / "c/step-00000001")
    damages: list[Damage] = []
    checkpoint = newest(tmp_path / "c", damages.append)
    assert checkpoint is not None
    assert is_step(checkpoint, 1)
    assert (file, what) in [(damage.file, damage.what) for damage in damages]
    assert text in str(damages[[damage.file for damage in damages].index(file)])
    out = call(["verify", str(tmp_path / "c")], capsys, code=1)
    assert f"step-00000002/{file}: " in out
    assert "1 of 2 checkpoints are intact" in out
    report = json.loads(call(["verify", str(tmp_path / "c"), "--json"], capsys, code=1))
    assert [row["whole"] for row in report["checkpoints"]] == [True, False]
    assert [path.name for path in published(tmp_path / "c")] == ["step-00000001", "step-00000002"]


def test_damaged_checkpoints_do_not_count_among_those_that_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    truncate(tmp_path / "step-00000003/model-00001-of-00001.safetensors")
    save_steps(tmp_path, 4, keep=2)
    assert [path.name for path in published(tmp_path)] == ["step-00000002", "step-00000003", "step-00000004"]


@settings(max_examples=40)
@given(place=st.floats(0, 1), bit=st.integers(0, 7), data=st.data())
def test_no_flipped_bit_goes_unnoticed(place: float, bit: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_steps(Path(folder), 1)
        path = data.draw(st.sampled_from(sorted(Path(str(published(folder)[0])).iterdir())))
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1 << bit
        path.write_bytes(content)
        damages: list[Damage] = []
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
            newest(folder, damages.append)
        assert [damage.file for damage in damages] == [path.name]


def signed(text: str) -> bytes:
    body = text.encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A hostile manifest has the right checksum."""
    data = json.loads(path.read_bytes())
    del data["sha256"]
    change(data)
    path.write_bytes(signed(json.dumps(data)[1:]))


def point_at(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["files"].update({name: data["files"]["config.json"]})


HOSTILE: dict[str, tuple[Any, str]] = {
    "empty": (b"", "not JSON"),
    "binary": (b"\x00\xff", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "digits": (b"1" * 10_000, "not JSON"),
    "a list": (b"[]", "expected an object, got []"),
    "another": (b'{"format": "x"}', "'format' is 'x'"),
    "newer": (lambda data: data.update(version=2), "version 2 of the manifest format is not supported"),
    "absolute": (point_at("/etc/passwd"), "'/etc/passwd' is outside its folder; refused"),
    "above": (point_at("../latest"), "outside its folder"),
    "dots": (point_at(".."), "outside its folder"),
    "backslash": (point_at("..\\latest"), "outside its folder"),
    "nul": (point_at("a\0b"), "outside its folder"),
    "no files": (lambda data: data.update(files=[]), "'files' must be an object, got []"),
    "no file": (lambda data: data["files"].update({"config.json": 3}), "must be an object"),
    "bytes": (lambda data: data["files"]["config.json"].update(bytes=-1), "must be an integer from 0"),
    "more bytes": (lambda data: data["files"]["config.json"].update(bytes=10**30), "must be an integer"),
    "half bytes": (lambda data: data["files"]["config.json"].update(bytes=1.5), "must be an integer"),
    "sum": (lambda data: data["files"]["config.json"].update(sha256="x"), "must be 64 hexadecimal digits"),
    "step": (lambda data: data.update(step=True), "'step' must be an integer, got True"),
    "large step": (lambda data: data.update(step=10**40), "must be an integer"),
    "time": (lambda data: data.update(written=1e300), "'written' must be a number from 0"),
    "no time": (lambda data: data.update(written=float("nan")), "'written' must be a number"),
    "writers": (lambda data: data["world"].update(writers="many"), "world.writers must be an integer, got 'many'"),
    "tensor": (lambda data: data["model"].update(x=None), "must be an object"),
    "no such file": (lambda data: data["model"]["head.bias"].update(file="x"), "not a file of this checkpoint"),
    "dtype": (lambda data: data["model"]["head.bias"].update(dtype="x"), "expected one of float64"),
    "shape": (lambda data: data["model"]["head.bias"].update(shape=[-1]), "must be an integer"),
    "dimensions": (lambda data: data["model"]["head.bias"].update(shape=[1] * 99), "at most 64"),
    "slots": (lambda data: data["optimizer"].update({"head.bias": 3}), "must be an object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_one_clear_error(tmp_path: Path, name: str, capsys: Capture) -> None:
    save_steps(tmp_path, 1)
    path = tmp_path / "step-00000001/manifest.json"
    change, text = HOSTILE[name]
    path.write_bytes(change) if isinstance(change, bytes) else changed(path, change)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path.parent)
    assert text in str(error.value)
    assert len(str(error.value)) < 500
    verified = call(["verify", str(tmp_path)], capsys, code=1)
    assert f"{path}: " in verified
    assert f"{path}: {path}" not in verified
    assert "step-00000001/manifest.json: " in call(["list", str(tmp_path)], capsys)


def test_a_manifest_that_lies_about_its_tensors_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    path = tmp_path / "step-00000001/manifest.json"
    changed(path, lambda data: data["model"]["head.bias"].update(shape=[9, 17]))
    with pytest.raises(CheckpointError, match=r"stores 'head.bias' as float32 of \(17, 9\), but its manifest says"):
        open_checkpoint(path.parent).read_model(["head.bias"])
    changed(path, lambda data: data["model"].update(x=data["model"]["head.bias"]))
    with pytest.raises(CheckpointError, match=r"cannot read .*safetensors: .*x"):
        open_checkpoint(path.parent).read_model(["x"])


# When it cannot be written


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path, fork_server: ForkServer) -> None:
    folder, log = tmp_path / "c", tmp_path / "error"
    save_steps(folder, 1)
    child = fork_server.start(SCRIPT, "meet_a_limit", [str(folder), str(log), 20_000], log=tmp_path / "log")
    assert child.wait(300) == 0, (tmp_path / "log").read_text()
    assert "the checkpoint of step 2 was not saved: cannot write " in log.read_text()
    assert ".partial/model-00000-00000.safetensors: File too large" in log.read_text()
    assert {path.name for path in folder.iterdir()} == {"latest", "step-00000001", "step-00000004"}
    for path in published(folder):
        with open_checkpoint(path) as checkpoint:
            assert is_step(checkpoint, int(path.name[5:]))


def test_no_space_is_said_with_the_space_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with Writer(tmp_path) as writer:
        process.save(writer, 1)
        writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            process.save(writer, 2)
            with pytest.raises(
                CheckpointError, match=r"No space left on device \([0-9,]+ bytes are free\); free space"
            ):
                process.save(writer, 3)
        assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000001"}
        process.save(writer, 3)  # raised once, and training may continue
    assert [path.name for path in published(tmp_path)] == ["step-00000001", "step-00000003"]


def test_a_writer_that_fails_tells_the_first_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Writer(tmp_path, 0, 2, deadline=1000.0) as first, Writer(tmp_path, 1, 2) as second:
        with monkeypatch.context() as patch:
            patch.setattr("stageline.train.checkpoint.writer.write_tensors", lambda *arguments: 1 / 0)
            second.save(1, {"b": torch.ones(2)}, attempt="x")
            with pytest.raises(CheckpointError, match="ZeroDivisionError"):
                second.wait()
        first.save(1, {"a": torch.ones(2)}, attempt="x")
        with pytest.raises(CheckpointError, match="writer 1 of 2 failed: ZeroDivisionError"):
            first.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot create the folder .*/file: a file has that name"):
        Writer(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot create the folder .*: Not a directory"):
        Writer(tmp_path / "file" / "below")


def test_a_folder_that_goes_away_is_said(tmp_path: Path) -> None:
    with Writer(tmp_path / "c") as writer:
        process.save(writer, 1)
        writer.wait()
        shutil.rmtree(tmp_path / "c")
        (tmp_path / "c").write_text("")
        with pytest.raises(CheckpointError, match=r"cannot read the folder .*/c: Not a directory"):
            process.save(writer, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": -1}, "a step must be an integer >= 0, got -1"),
        ({"step": 1.0}, "a step must be an integer"),
        ({"model": {"w": 3}}, "'w' is 3, expected a tensor"),
        ({"model": {"w": torch.ones(2, device="meta")}}, "'w' is on the meta device and has no data"),
        ({"model": {"w": torch.ones(2).to_sparse()}}, "which safetensors cannot store"),
        ({"model": {"w": torch.ones(2, dtype=torch.complex128)}}, "torch.complex128, which safetensors cannot store"),
        ({"model": {"__metadata__": torch.ones(2)}}, "the name of a parameter is '__metadata__'"),
        ({"optimizer": {"w": {"a/b": torch.ones(2)}}}, "expected a name without a /"),
        ({"state": {"seed": torch.ones(2)}}, r"state\['seed'\] is tensor"),
        ({"state": {1: 2}}, "state is {1: 2}, which JSON cannot represent"),
        ({"assets": {"../config.json": b""}}, "outside its folder"),
        ({"assets": {"manifest.json": b""}}, "reserved for the checkpoint itself"),
        ({"assets": {"config.json": "{}"}}, "expected its bytes"),
    ],
)
def test_what_cannot_be_saved_is_an_error_of_the_call(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with Writer(tmp_path) as writer:
        with pytest.raises(CheckpointError, match=text):
            writer.save(**{"step": 1, "model": {}, **arguments})
        assert list(tmp_path.iterdir()) == []


def test_several_writers_must_agree(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got 2 of 2"):
        Writer(tmp_path, 2, 2)
    with Writer(tmp_path, 0, 2) as first, Writer(tmp_path, 1, 2) as second:
        with pytest.raises(CheckpointError, match="needs attempt="):
            first.save(1, {})
        second.save(1, {"w": torch.ones(2)}, attempt="x")
        first.save(1, {"w": torch.ones(2)}, attempt="x")
        with pytest.raises(CheckpointError, match="the parameter 'w' was passed to writers 0 and 1"):
            first.wait()
    assert published(tmp_path) == []


# Reading


def test_names_that_are_not_there_are_said_with_the_nearest(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match=r"no parameter 'layers.0.wieght' \(did you mean 'layers.0.weight'"):
        checkpoint.read_model(["layers.0.wieght"])
    with pytest.raises(CheckpointError, match=r"no optimizer state of 'head.bais' \(did you mean 'head.bias'"):
        checkpoint.read_optimizer(["head.bais"])


def test_no_checkpoint_is_none_and_none_whole_is_an_error(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    (tmp_path / "step-00000005.x.partial").mkdir()
    assert newest(tmp_path) is None
    (tmp_path / "step-00000005").mkdir()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* is intact: .*manifest.json: is missing"):
        newest(tmp_path)


def test_sizes_alone_are_asked_for(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    flip(tmp_path / "step-00000001/config.json")
    checkpoint = newest(tmp_path, deep=False)
    assert checkpoint is not None
    assert [damage.what for damage in checkpoint.verify()] == ["checksum"]


def test_weights_are_read_although_the_optimizer_is_damaged(tmp_path: Path, capsys: Capture) -> None:
    save_steps(tmp_path / "c", 1)
    checkpoint = tmp_path / "c" / "step-00000001"
    flip(next(checkpoint.glob("optimizer-*")))
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* is intact: .*/optimizer-.*: checksum"):
        newest(tmp_path / "c")
    intact = newest(tmp_path / "c", weights_only=True)
    assert intact is not None
    assert intact.read_model()
    for number, path in enumerate((tmp_path / "c", checkpoint)):
        assert "wrote the model of" in call(["convert", str(path), str(tmp_path / f"out-{number}")], capsys)
    flip(next(checkpoint.glob("model-*")))
    assert "is intact" in call(["convert", str(tmp_path / "c"), str(tmp_path / "out-2")], capsys, code=2)


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    held = checkpoint.read_model()
    for path in Path(str(checkpoint.path)).iterdir():
        os.truncate(path, 0)
    assert all(same(held[name], tensor) for name, tensor in process.model(1).items())


def test_a_checkpoint_that_is_open_is_not_pruned(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    save_steps(tmp_path, 2, 3, keep=1)
    assert [path.name for path in published(tmp_path)] == ["step-00000001", "step-00000003"]
    assert is_step(checkpoint, 1)
    checkpoint.close()
    save_steps(tmp_path, 4, keep=1)
    assert [path.name for path in published(tmp_path)] == ["step-00000004"]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"


def test_a_checkpoint_of_an_earlier_step_stays_when_it_is_the_last_saved(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    save_steps(tmp_path, 5, keep=1)
    assert [path.name for path in published(tmp_path)] == ["step-00000005", "step-00000020"]


def test_ranks_find_out_whether_they_share_a_folder(tmp_path: Path) -> None:
    nonce = leave_mark(tmp_path / "a")
    (tmp_path / "b").mkdir()
    assert sees_mark(tmp_path / "a", nonce)
    assert not sees_mark(tmp_path / "b", nonce, within=0)
    assert newest(tmp_path / "a") is None
    remove_mark(tmp_path / "a", nonce)
    remove_mark(tmp_path / "a", nonce)
    assert list((tmp_path / "a").iterdir()) == []


# The command


def call(words: list[str], capsys: Capture, code: int = 0) -> str:
    assert run(["checkpoint", *words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return out if code < 2 else err


@pytest.mark.parametrize("verb", ["verify", "list", "convert"])
def test_help_of_every_verb_has_an_example(verb: str, capsys: Capture) -> None:
    assert f"stageline checkpoint {verb} " in call([verb, "--help"], capsys).split("Usage:")[1].split("\n", 1)[1]
    assert verb in call(["--help"], capsys)


def test_checkpoints_are_listed_verified_and_converted(tmp_path: Path, capsys: Capture) -> None:
    save_steps(tmp_path / "c", 1, 2)
    rows = json.loads(call(["list", str(tmp_path / "c"), "--json"], capsys))
    assert [(row["step"], row["model"], row["writers"], row["whole"]) for row in rows] == [
        (1, "test", 1, True),
        (2, "test", 1, True),
    ]
    assert rows[0]["parameters"] == 4 * 17 * 9
    assert "2 of 2 checkpoints are intact" in call(["verify", str(tmp_path / "c")], capsys)
    assert "intact, step 1, 4 files" in call(["verify", str(tmp_path / "c/step-00000001")], capsys)
    out = tmp_path / "one.safetensors"
    assert "step-00000002" in call(["convert", str(tmp_path / "c"), str(out)], capsys)
    with safe_open(out, framework="pt") as opened:
        assert all(same(opened.get_tensor(name), tensor) for name, tensor in process.model(2).items())
    assert "is not overwritten" in call(["convert", str(tmp_path / "c"), str(out)], capsys, code=2)
    assert sorted(os.listdir(tmp_path)) == ["c", "one.safetensors"]


def test_the_folder_of_a_run_stands_for_its_checkpoints(tmp_path: Path, capsys: Capture) -> None:
    save_steps(tmp_path / "run/saved", 1, 2)
    (tmp_path / "run/config.toml").write_text('[checkpoint]\nfolder = "saved"\n')
    assert "2 of 2 checkpoints are intact" in call(["verify", str(tmp_path / "run")], capsys)
    assert len(json.loads(call(["list", str(tmp_path / "run"), "--json"], capsys))) == 2
    assert "saved/step-00000002" in call(["convert", str(tmp_path / "run"), str(tmp_path / "model")], capsys)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("verify nowhere", "nowhere does not exist"),
        ("verify step-00000001", "step-00000001 is not a checkpoint: it does not exist"),
        ("list .", "has no checkpoints"),
        ("convert c out --dtype bfloat", "did you mean 'bfloat16'"),
        ("convert c out --max-shard-size lots", "must be a size, like 24GiB or 10G; got 'lots'"),
        ("convert c out --format zip", "zip"),
        ("convert c c", "c already exists and is not overwritten"),
        ("convert c a.safetensors --format stageline", "a checkpoint is written as a folder"),
        ("convert d/step-00000001 out", "config.json: is missing; see stageline checkpoint verify"),
    ],
)
def test_mistakes_are_one_clear_error(tmp_path: Path, words: str, text: str, capsys: Capture) -> None:
    save_steps(tmp_path / "c", 1)
    save_steps(tmp_path / "d", 1)
    (tmp_path / "d/step-00000001/config.json").unlink()
    assert text in " ".join(call(words.split(), capsys, code=2).split())
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


def test_looking_at_checkpoints_leaves_torch_alone(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    code = (
        "import sys; from stageline.cli.app import run\n"
        "print([run(['checkpoint', verb, sys.argv[1]]) for verb in ('list', 'verify')], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.endswith("[0, 0] False\n"), done.stderr
