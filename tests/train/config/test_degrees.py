"""The degrees of a job's mesh: torchtitan's names, one rest, and products that are not the number of processes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.train.config import ranks as ranks_module
from stageline.train.config.config import Config, Parallelism
from stageline.train.config.ranks import find_degrees, processes_to_start
from stageline.train.config.rules import find_errors
from stageline.train.layout import ZERO_REPLICAS, JobLayout, find_job_layout
from stageline.train.preflight import preflight

PIPELINE, REPLICAS, SHARDS, TENSOR = (
    f"parallelism.{name}_degree"
    for name in ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def started(patch: pytest.MonkeyPatch, processes: int) -> None:
    """The environment of the first of the processes that torchrun started."""
    environment = {"WORLD_SIZE": processes, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": processes}
    for name, value in {**environment, "MASTER_PORT": 29500, "MASTER_ADDR": "127.0.0.1"}.items():
        patch.setenv(name, str(value))


def test_the_default_is_one_pipeline_over_all_processes() -> None:
    options = Config().parallelism
    assert (options.pipeline_parallel_degree, options.data_parallel_replicate_degree) == (-1, 1)
    assert (options.data_parallel_shard_degree, options.tensor_parallel_degree) == (1, 1)
    assert options.fsdp_reshard_after_forward == "default"
    assert Config.read(None) == Config() == Config.from_dict({})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], (8, 1, 1, 1)),
        ([f"{REPLICAS}=-1"], (4, 2, 1, 1)),
        ([f"{PIPELINE}=2"], (2, 4, 1, 1)),
        ([f"{PIPELINE}=2", f"{REPLICAS}=-1"], (2, 4, 1, 1)),
        ([f"{PIPELINE}=2", f"{REPLICAS}=0"], (2, 4, 1, 1)),
        ([f"{REPLICAS}=1"], (8, 1, 1, 1)),
        ([f"{PIPELINE}=-1"], (8, 1, 1, 1)),
        ([f"{PIPELINE}=-1", f"{REPLICAS}=2"], (4, 2, 1, 1)),
        ([f"{PIPELINE}=-1", f"{SHARDS}=2", f"{TENSOR}=2"], (2, 1, 2, 2)),
        ([f"{PIPELINE}=2", f"{SHARDS}=-1"], (2, 1, 4, 1)),
        ([f"{PIPELINE}=2", f"{SHARDS}=2", f"{TENSOR}=-1"], (2, 1, 2, 2)),
        ([f"{PIPELINE}=2", f"{SHARDS}=2"], (2, 2, 2, 1)),
        ([f"{SHARDS}=-1"], (4, 1, 2, 1)),
        ([f"{SHARDS}=2"], (4, 1, 2, 1)),
        ([f"{SHARDS}=4"], (2, 1, 4, 1)),
        ([f"{REPLICAS}=1", f"{SHARDS}=2", f"{TENSOR}=2"], (2, 1, 2, 2)),
        ([f"{TENSOR}=8"], (1, 1, 1, 8)),
    ],
)  # fmt: skip
def test_the_rest_of_eight_processes(settings: list[str], expected: tuple[int, ...]) -> None:
    config = Config.read(None, "model.n_heads=8", *settings)
    assert find_errors(config) == []
    degrees = find_degrees(config.parallelism, 8, gpus=0)
    assert tuple(degrees) == expected
    assert degrees.processes == 8
    again = Config.from_dict(config.to_dict())
    assert again == config
    assert find_degrees(again.parallelism, 8, gpus=0) == degrees


def test_what_nobody_set_yields_to_another_rest() -> None:
    assert Config.read(None, f"{SHARDS}=-1").parallelism.data_parallel_replicate_degree == 1
    assert (
        Config.from_dict({"parallelism": {"tensor_parallel_degree": -1}}).parallelism.data_parallel_replicate_degree
        == 1
    )
    assert Config.read(None, f"{PIPELINE}=2").parallelism.data_parallel_replicate_degree == -1
    assert Config.read(None, f"{SHARDS}=2").parallelism.pipeline_parallel_degree == -1
    assert Config.read(None, f"{SHARDS}=-1").parallelism.pipeline_parallel_degree == 0


@pytest.mark.parametrize("other", [PIPELINE, SHARDS, TENSOR])
@pytest.mark.parametrize("replicas", [-1, 0])
def test_two_rests_are_refused(other: str, replicas: int) -> None:
    config = Config.read(None, f"{other}=-1", f"{REPLICAS}={replicas}")
    (error,) = find_errors(config)
    assert {f"{REPLICAS} is {replicas}", f"{other} is -1"} <= set(error.partition(" (")[0].split(" and "))
    meaning = "for replicas, 0 means -1, the rest" if replicas == 0 else "the rest"
    assert f"({meaning}), but only one degree can be the rest; set one of them to 1 or more" in error
    with pytest.raises(sl.StagelineError, match="only one degree can be the rest"):
        find_job_layout_quietly(config)


def find_job_layout_quietly(config: Config) -> JobLayout:
    """The layout of a job whose 0 replicas are not the point of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return find_job_layout(config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([f"{TENSOR}=0"], f"{TENSOR} is 0; it must be at least 1, or -1 for the rest"),
        ([f"{SHARDS}=0"], f"{SHARDS} is 0; it must be at least 1, or -1 for the rest"),
        ([f"{TENSOR}=3"], "is 3, which does not divide model.n_heads 4; use 2 or 4 for the degree, or 3 or 6"),
        (["training.global_batch_size=48", f"{SHARDS}=2"], f"16 × 2 shards ({SHARDS}); use 32 or 64"),
    ],
)  # fmt: skip
def test_degrees_that_cannot_be_are_refused(settings: list[str], expected: str) -> None:
    (error,) = find_errors(Config.read(None, *settings))
    assert expected in error


@pytest.mark.parametrize("setting", [f"{TENSOR}=-2", f"{REPLICAS}=-2", f"{SHARDS}=two", f"{PIPELINE}=1.5"])
def test_values_that_are_no_degrees_are_refused(setting: str) -> None:
    with pytest.raises(sl.StagelineError, match="must be an integer >= -1"):
        Config.read(None, setting)


def test_an_unknown_policy_is_refused() -> None:
    assert Config.read(None, "parallelism.fsdp_reshard_after_forward=always")
    with pytest.raises(sl.StagelineError, match=r"must be one of default, always, never, got .*alway"):
        Config.read(None, "parallelism.fsdp_reshard_after_forward=alway")


def test_a_product_that_is_not_the_number_of_processes_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started(monkeypatch, 6)
    config = Config.read(None, f"{PIPELINE}=4", f"{REPLICAS}=2")
    with pytest.raises(sl.StagelineError) as caught:
        find_job_layout(config)
    assert str(caught.value) == (
        f"{PIPELINE} 4 × data_parallel_replicate_degree 2 need 8 processes, but 6 were started; start 8, or set the "
        "degrees so that their product is 6"
    )
    for settings, shown in (
        ([f"{PIPELINE}=4"], "4 × data_parallel_replicate_degree 1 need 4 "),  # no rest fits
        (
            [f"{PIPELINE}=2", f"{SHARDS}=2", f"{TENSOR}=2"],
            "data_parallel_shard_degree 2 × tensor_parallel_degree 2 need 8 ",
        ),
        ([f"{PIPELINE}=-1", f"{REPLICAS}=4"], "pipeline_parallel_degree 1 × data_parallel_replicate_degree 4 need 4 "),
    ):
        with pytest.raises(sl.StagelineError) as caught:
            find_job_layout(Config.read(None, *settings))
        assert shown in str(caught.value)
        assert "but 6 were started" in str(caught.value)


def test_zero_replicas_are_the_rest_and_deprecated(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 6)
    config = Config.read(None, f"{PIPELINE}=2", f"{REPLICAS}=0")
    with pytest.warns(DeprecationWarning, match=ZERO_REPLICAS) as warned:
        layout = find_job_layout(config)
    assert len(warned) == 1
    assert (layout.ranks, layout.replicas) == (2, 3)
    assert find_job_layout(Config.read(None, f"{PIPELINE}=2", f"{REPLICAS}=-1")) == layout  # without a warning


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (2, 2), (64, 4)])
def test_one_process_starts_a_rank_per_core(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int) -> None:
    monkeypatch.setattr(ranks_module, "cores", lambda: cores)
    for settings in ([], [f"{SHARDS}=-1"], [f"{REPLICAS}=-1"]):
        options = Config.read(None, *settings).parallelism
        assert tuple(find_degrees(options, 1, gpus=0)) == (ranks, 1, 1, 1)
        assert processes_to_start(options) == ranks
    assert find_job_layout(Config()).ranks == ranks  # threads
    assert processes_to_start(Config.read(None, f"{REPLICAS}=2").parallelism) == max(2, ranks)
    assert tuple(find_degrees(Parallelism(), 1, gpus=8)) == (8, 1, 1, 1)
    assert tuple(find_degrees(Config.read(None, f"{PIPELINE}=2").parallelism, 1, gpus=8)) == (2, 4, 1, 1)


def test_a_task_of_slurm_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"STEP_ID": 0, "JOB_ID": 7, "PROCID": 3, "LOCALID": 1, "NODEID": 1, "STEP_NUM_TASKS": 4}
    for name, value in {**place, "STEP_TASKS_PER_NODE": "2(x2)", "STEP_NODELIST": "gpu[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
    assert processes_to_start(Parallelism()) == 1
    layout = find_job_layout(Config())
    assert (layout.processes, layout.rank, layout.ranks) == (4, 3, 4)


def no_plan() -> nn.Module:
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256))


def test_tensor_parallel_shares_the_samples_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.read(None, f"{TENSOR}=2", f"{PIPELINE}=2", f"{SHARDS}=2")
    preflight(config)
    with pytest.raises(sl.StagelineError, match=f"{TENSOR} is 2, but parts of a layer must be processes: set "):
        find_job_layout(Config.read(None, f"{TENSOR}=2"))
    started(monkeypatch, 8)
    layout = find_job_layout(config)
    assert str(layout) == "2 ranks × 2 shards × 2 tensor parallel as processes on cpu"
    places = [replace(layout, rank=rank) for rank in range(8)]
    assert [place.replica for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.tensor for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank, place in enumerate(places) if place.first] == [0, 4]


def test_a_model_without_a_plan_cannot_be_cut() -> None:
    config = Config.read(None, f"{TENSOR}=2", f"model.name={__name__}:no_plan")
    with pytest.raises(sl.StagelineError, match=f"{TENSOR} is 2, and Sequential has no tp_plan, .*; add one"):
        preflight(config)


def test_shards_are_replicas_with_samples_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.read(None, f"{PIPELINE}=2", f"{SHARDS}=2")
    with pytest.raises(
        sl.StagelineError, match=r"shards must be processes: .* start 4 with stageline launch or torchrun"
    ):
        find_job_layout(config)
    started(monkeypatch, 8)
    layout = find_job_layout(config)
    assert (layout.ranks, layout.replicas, layout.shards) == (2, 4, 2)
    assert str(layout) == "2 ranks × 2 replicas × 2 shards as processes on cpu"
    assert find_job_layout(Config.read(None, f"{PIPELINE}=2", f"{REPLICAS}=4")).mesh is None


@pytest.mark.parametrize(
    "setting",
    [
        "compile.cuda_graphs=true",
        "training.continuous_steps=true",
        "optimizer.name=Muon",
        "optimizer.name=Adafactor",
        "checkpoint.initial_load_path=weights",
    ],
)
@pytest.mark.parametrize("degree", [SHARDS, TENSOR])
def test_what_sharded_stages_do_not_support_is_refused_by_name(setting: str, degree: str) -> None:
    (error,) = find_errors(Config.read(None, f"{degree}=2", setting))
    key, _, value = setting.partition("=")
    assert f"{degree} is 2, but {key} is {'set' if value == 'weights' else value}, which sharded stages" in error
    assert find_errors(Config.read(None, setting)) == []


def test_a_fused_sgd_is_refused_with_shards() -> None:
    (error,) = find_errors(Config.read(None, f"{SHARDS}=2", "optimizer.name=SGD", "optimizer.implementation=fused"))
    assert "optimizer.implementation is fused and optimizer.name is SGD" in error
    assert find_errors(Config.read(None, f"{SHARDS}=2", "optimizer.name=SGD")) == []
