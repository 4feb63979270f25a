"""Checkpoints of pipelines: any layout reads, bit for bit, what another one wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stageline as sl
from stageline.testing import run_ranks
from stageline.train.checkpoint import open_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.meshes import both, data, loss_fn, mesh_of, pipeline, quiet, sequential, sharded


def trainer(pipe: sl.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def train(pipe: sl.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    pipe.step(*data(pipe.replica))
    optimizer.step()


def copy_through(pipe: sl.Pipeline, folder: str, source: str, target: str) -> None:
    """Load into other weights and an optimizer that has stepped, save again, and train on."""
    optimizer = trainer(pipe)
    train(pipe, optimizer)
    checkpoint = sl.load_checkpoint(Path(folder) / source, pipe, optimizer)
    assert (checkpoint.step, checkpoint.state) == (2, {"epoch": 1})
    sl.save_checkpoint(Path(folder) / target, 2, pipe, optimizer, state=checkpoint.state)
    train(pipe, optimizer)


def on_eight(rank: int, folder: str) -> None:
    quiet()
    pipe = pipeline(sequential(), mesh_of((2, 2, 2), "pp", "dp_shard", "tp"), both)
    optimizer = trainer(pipe)
    for _ in range(2):
        train(pipe, optimizer)
    sl.save_checkpoint(Path(folder) / "eight", 2, pipe, optimizer, state={"epoch": 1})


def on_four(rank: int, folder: str) -> str:
    quiet()
    copy_through(pipeline(sequential(), mesh_of((4,), "pp")), folder, "one", "ranks")
    copy_through(pipeline(sequential(), mesh_of((2, 2), "pp", "dp_shard"), sharded), folder, "ranks", "shards")
    replicas = pipeline(sequential(), mesh_of((2, 2), "dp", "pp"), shard_optimizer=True)
    copy_through(replicas, folder, "shards", "replicas")
    with pytest.raises(sl.StagelineError) as error:
        sl.save_checkpoint(Path(folder) / "file", 3, replicas)
    return str(error.value)


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with open_checkpoint(folder / "step-00000002") as checkpoint:
        return checkpoint.read_model(), checkpoint.read_optimizer()


def test_any_layout_reads_what_another_wrote(tmp_path: Path) -> None:
    """Stages × FSDP2 × tensor parallel, one process, four ranks, stages × FSDP2, replicas that share the optimizer."""
    run_ranks(on_eight, 8, str(tmp_path), timeout=150)
    with open_checkpoint(tmp_path / "eight" / "step-00000002") as checkpoint:
        files = checkpoint.manifest.files.values()
        written = [sum(file.bytes for file in files if file.writer == writer) for writer in range(8)]
    assert 0 < min(written) <= max(written) < 0.3 * sum(written)  # every process writes its share
    alone = sl.Pipeline(sequential(), loss_fn=loss_fn, ranks=1, microbatches=2)
    copy_through(alone, str(tmp_path), "eight", "one")
    (tmp_path / "file").touch()
    texts = run_ranks(on_four, 4, str(tmp_path), timeout=150)
    assert len(set(texts)) == 1, texts
    assert "a file has that name" in texts[0]
    weights, states = contents(tmp_path / "eight")
    assert set(states["1.up.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    for layout in ("one", "ranks", "shards", "replicas"):
        other_weights, other_states = contents(tmp_path / layout)
        assert other_weights.keys() == weights.keys()
        assert other_states.keys() == states.keys()
        for name, weight in weights.items():
            assert torch.equal(other_weights[name], weight), (layout, name)
            for slot, value in states[name].items():
                assert torch.equal(other_states[name][slot], value), (layout, name, slot)
