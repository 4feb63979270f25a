"""How many ranks a job has when its config does not say: one per process, GPU or core."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import stageline as sl
from stageline.train.config import ranks as ranks_module
from stageline.train.config.config import Config
from stageline.train.config.ranks import count_gpus, processes_to_start, ranks_of_job
from stageline.train.config.rules import find_errors
from stageline.train.layout import find_job_layout, note_on_gpus

DEGREE = "parallelism.pipeline_parallel_degree"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine whose number of GPUs the test sets."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def with_gpus(patch: pytest.MonkeyPatch, number: int) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: number > 0)
    patch.setattr(torch.cuda, "device_count", lambda: number)


def started(patch: pytest.MonkeyPatch, processes: int, rank: int) -> None:
    """The environment of a process that torchrun started."""
    names = {"WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
    names["MASTER_PORT"] = 29500
    for name, value in names.items():
        patch.setenv(name, str(value))
    patch.setenv("MASTER_ADDR", "127.0.0.1")


def test_one_gpu_has_one_rank_and_the_job_says_so(gpus: pytest.MonkeyPatch) -> None:
    with_gpus(gpus, 1)
    layout = find_job_layout(Config())
    assert (layout.ranks, str(layout.device), str(layout)) == (1, "cuda:0", "1 rank on cuda:0")
    note = note_on_gpus(Config(), layout)
    assert "one rank uses the only GPU" in note
    assert "parallelism.pipeline_parallel_degree" in note
    assert "\n" not in note


def test_without_a_gpu_up_to_four_threads_share_the_cores(gpus: pytest.MonkeyPatch) -> None:
    with_gpus(gpus, 0)
    gpus.setattr(ranks_module, "cores", lambda: 8)
    layout = find_job_layout(Config())
    assert str(layout) == "4 ranks as threads on cpu"
    assert note_on_gpus(Config(), layout) == ""


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_number_of_ranks_in_the_config_wins(gpus: pytest.MonkeyPatch, number: int) -> None:
    with_gpus(gpus, number)
    config = Config.read(None, f"{DEGREE}=3")
    layout = find_job_layout(config)
    assert layout.ranks == ranks_of_job(config.parallelism) == 3
    assert note_on_gpus(config, layout).startswith("3 ranks share one GPU as threads" if number else "")


def test_of_several_gpus_one_process_uses_one_and_names_the_command_for_all(gpus: pytest.MonkeyPatch) -> None:
    with_gpus(gpus, 8)
    layout = find_job_layout(Config())
    assert layout.ranks == 1
    assert "torchrun --nproc-per-node 8" in note_on_gpus(Config(), layout)


@pytest.mark.parametrize(("degree", "processes"), [(-1, 8), (8, 8), (2, 8), (3, 6), (9, 1)])
def test_the_command_starts_a_process_per_gpu(gpus: pytest.MonkeyPatch, degree: int, processes: int) -> None:
    with_gpus(gpus, 8)
    assert processes_to_start(Config.read(None, f"{DEGREE}={degree}").parallelism) == processes


@pytest.mark.parametrize(("processes", "ranks", "replicas"), [(2, 2, 1), (3, 3, 1), (4, 4, 1), (8, 8, 1)])
def test_processes_have_one_rank_per_gpu(gpus: pytest.MonkeyPatch, processes: int, ranks: int, replicas: int) -> None:
    with_gpus(gpus, processes)
    started(gpus, processes, rank=1)
    layout = find_job_layout(Config())
    assert (layout.ranks, layout.replicas, str(layout.device)) == (ranks, replicas, "cuda:1")
    assert note_on_gpus(Config(), layout) == ""


def test_replicas_divide_the_processes(gpus: pytest.MonkeyPatch) -> None:
    with_gpus(gpus, 0)
    started(gpus, 6, rank=0)
    layout = find_job_layout(Config.read(None, "parallelism.data_parallel_replicate_degree=2"))
    assert (layout.ranks, layout.replicas) == (3, 2)


def test_a_schedule_file_sets_the_number(gpus: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpus(gpus, 0)
    file = tmp_path / "schedule.json"
    sl.schedule("1f1b", 2, 8).write(file)
    config = Config.read(None, f"parallelism.pipeline_parallel_schedule_csv={file}")
    assert find_errors(config) == []
    assert find_job_layout(config).ranks == 2


def test_rules_check_the_number_that_the_machine_gets(gpus: pytest.MonkeyPatch) -> None:
    config = Config.read(None, "model.n_layers=1", "parallelism.pipeline_parallel_schedule=zb-v")  # 8 stages on 4 ranks
    with_gpus(gpus, 1)
    assert find_errors(config) == []
    with_gpus(gpus, 0)
    gpus.setattr(ranks_module, "cores", lambda: 4)
    assert "which makes 8 stages" in find_errors(config)[0]


def test_without_torch_the_driver_lists_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    for name in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(ranks_module, "DRIVER_GPUS", tmp_path)
    environments = [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "-1"}]
    assert [count_gpus(environment) for environment in environments] == [2, 0, 1, 0]
    monkeypatch.setattr(ranks_module, "DRIVER_GPUS", tmp_path / "missing")
    assert count_gpus({}) == 0
