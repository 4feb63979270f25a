"""Checkpoints in object stores."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stageline as sl
from stageline.cli.app import run
from stageline.common.errors import CheckpointError
from stageline.train.checkpoint import Writer, newest, open_checkpoint, published
from stageline.train.checkpoint.remote import RemotePath

fsspec = pytest.importorskip("fsspec")

from support.object_store import ObjectStore, train  # noqa: E402

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty object store."""
    ObjectStore.writes, ObjectStore.fail_at = 0, -1
    yield f"objects://{tmp_path}/store"
    ObjectStore.fail_at = -1


def save(folder: str, *steps: int, keep: int = 2, value: float = 0.0) -> None:
    with Writer(folder, keep=keep) as writer:
        for step in steps:
            tensor = torch.full((3,), float(step) + value)
            writer.save(
                step, {"weight": tensor}, {"weight": {"momentum": tensor / 2}}, {"seen": step}, {"a.json": b"{}"}
            )


@pytest.mark.parametrize("protocol", ["objects", "memory"])
def test_the_newest_are_kept_and_read_back(protocol: str, store: str) -> None:
    folder = store if protocol == "objects" else "memory://kept"
    save(folder, 1, 2, 3)
    assert [path.name for path in published(folder)] == ["step-00000002", "step-00000003"]
    with open_checkpoint(published(folder)[-1]) as checkpoint:
        assert torch.equal(checkpoint.read_model()["weight"], torch.full((3,), 3.0))
        assert torch.equal(checkpoint.read_optimizer()["weight"]["momentum"], torch.full((3,), 1.5))
        assert (checkpoint.state, checkpoint.read_asset("a.json"), checkpoint.verify()) == ({"seen": 3}, b"{}", [])
    save(folder, 3, value=0.5)  # replaces the one of its step, and leaves nothing of it
    last = newest(folder)
    assert last is not None
    assert last.read_model()["weight"][0] == 3.5
    assert len((RemotePath(folder) / "step-00000003").folders()) == 1


def failure_of(store: str) -> str:
    try:
        save(store, 2, keep=1)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_save_that_fails_anywhere_leaves_the_last_checkpoint(store: str) -> None:
    save(store, 1)
    failures = 0
    for fail_at in range(40):
        ObjectStore.writes, ObjectStore.fail_at = 0, fail_at
        text = failure_of(store)
        ObjectStore.fail_at = -1
        if not text:
            break
        failures += 1
        assert "the store does not answer" in text
        intact = newest(store)  # reads every byte
        assert intact is not None
        assert intact.step in (1, 2)
        assert torch.equal(intact.read_model()["weight"], torch.full((3,), float(intact.step)))
    assert failures > 5
    assert [path.name for path in published(store)] == ["step-00000002"]
    assert len((RemotePath(store) / "step-00000002").folders()) == 1


def test_damage_is_noticed(store: str, tmp_path: Path) -> None:
    save(store, 1, 2)
    file = next((tmp_path / "store" / "step-00000002").glob("*/model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    damages: list[str] = []
    intact = newest(store, on_damage=lambda damage: damages.append(damage.what))
    assert intact is not None
    assert (intact.step, damages) == (1, ["checksum"])
    file.unlink()
    assert run(["checkpoint", "verify", store]) == 1


def test_the_verbs_read_an_object_store(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(store, 1, 2)
    assert run(["checkpoint", "list", store]) == 0
    assert "step-00000002" in capsys.readouterr().out
    assert run(["checkpoint", "verify", f"{store}/step-00000002"]) == 0
    assert f"{store}/step-00000002: intact" in capsys.readouterr().out.replace("\n", "")
    assert run(["checkpoint", "convert", store, "model"]) == 0
    assert Path("model/model.safetensors").is_file()


def test_stores_that_cannot_be_opened_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"cannot open nowhere://run: Protocol not known"):
        Writer("nowhere://run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(sl.StagelineError, match=r"s3://run needs fsspec.*pip install 'stageline\[fsspec\]'"):
        newest("s3://run")


SETTINGS = [
    "training.local_batch_size=8", "training.loss=mse", "checkpoint.interval=2", "validation.enable=false",
    "parallelism.pipeline_parallel_degree=2", "comm.train_timeout_seconds=30",
    "parallelism.pipeline_parallel_schedule=1f1b", "parallelism.pipeline_parallel_split=layers",
]  # fmt: skip


def test_hosts_without_a_shared_folder_train_and_resume(store: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, f"checkpoint.folder={store}"]
    whole = train([*SETTINGS, "training.steps=4"], str(tmp_path / "whole"))
    first = sl.launch(train, [*settings, "training.steps=2"], str(tmp_path / "hosts"), processes=2)
    assert first[0][0] == 2
    assert not (tmp_path / "hosts" / "1" / "checkpoint").exists()
    # Others take over: nothing but the store is left of the first start.
    second = sl.launch(train, [*settings, "training.steps=4"], str(tmp_path / "spares"), processes=2)
    assert second[0] == whole
    with pytest.raises(sl.StagelineError, match=r"belongs to a run with another configuration: training.seed"):
        train([*settings, "training.steps=4", "training.seed=7"], str(tmp_path / "other"))
