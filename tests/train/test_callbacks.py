"""What a user can add to a job: callbacks, a collate function, metrics of a validation, trackers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.testing import run_ranks
from stageline.train.config.config import Config
from stageline.train.data import Tokens
from stageline.train.model_flops import peak_flops
from stageline.train.step import StepResult
from stageline.train.trainer import Result, Trainer
from stageline.train.validation import EvalPrediction

SIZES = (
    "training.local_batch_size=4",
    "training.steps=4",
    "checkpoint.interval=2",
    "validation.freq=2",
    "validation.fraction=0.5",
    "training.loss=mse",
    "parallelism.pipeline_parallel_degree=2",
    "parallelism.pipeline_parallel_schedule=1f1b",
    "parallelism.pipeline_parallel_split=layers",
    "lr_scheduler.warmup_steps=0",
)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def samples() -> list[dict[str, Any]]:
    return [{"row": [float(number), 1.0, 2.0][: 2 + number % 2], "target": float(number)} for number in range(16)]


def pad(batch: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    rows = torch.tensor([[*sample["row"], 0.0][:3] for sample in batch])
    return rows / 16, torch.tensor([[sample["target"]] for sample in batch]) / 16


def error_of(predicted: EvalPrediction) -> dict[str, float]:
    predictions, targets = predicted
    assert predictions.shape == targets.shape == (8, 1)
    return {"squared_error": float(np.square(predictions - targets).mean())}


class Recorder(sl.Callback):
    def __init__(self, stop_after: int = 99) -> None:
        self.calls: list[Any] = []
        self.stop_after = stop_after

    def on_train_begin(self, trainer: Trainer) -> None:
        self.calls.append("begin")

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.calls.append(trainer.step)
        if trainer.step == self.stop_after:
            trainer.request_stop()

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        assert metrics["loss"] == pytest.approx(metrics["squared_error"], rel=1e-5)
        self.calls.append("evaluate")

    def on_save(self, trainer: Trainer, step: int, path: str) -> None:
        assert Path(path).is_dir()
        self.calls.append(f"save {step}")

    def on_train_end(self, trainer: Trainer, result: Result) -> None:
        self.calls.append(result.why)


class Rows:
    """Not a subclass: any object with some of the methods."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_log(self, trainer: Trainer, logs: Mapping[str, Any]) -> None:
        self.events.append(logs["event"])


def make_trainer(folder: Path, *settings: str, **options: Any) -> Trainer:
    config = Config.read(None, *SIZES, f"job.dump_folder={folder}", *settings)
    defaults = {"model": make_model, "data": samples(), "collate_fn": pad, "compute_metrics": error_of}
    return Trainer(config, **{**defaults, **options})


def test_callbacks_hear_of_everything_in_order(tmp_path: Path) -> None:
    recorder, rows = Recorder(), Rows()
    make_trainer(tmp_path / "run", "checkpoint.async_mode=disabled", callbacks=[recorder, rows]).run()
    expected = ["begin", 1, 2, "evaluate", "save 2", 3, 4, "evaluate", "save 4", "finished"]
    assert recorder.calls == expected
    assert [event for event in rows.events if event != "timeline"] == [
        "start", "step", "step", "validation", "checkpoint", "step", "step", "validation", "checkpoint", "end",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all("squared_error" in line for line in lines if line["event"] == "validation")


def test_a_callback_can_stop_a_job_that_then_resumes(tmp_path: Path) -> None:
    recorder = Recorder(stop_after=3)
    assert make_trainer(tmp_path, callbacks=[recorder]).run().why == "stopped by a callback"
    assert recorder.calls[-1] == "stopped by a callback"
    again = Recorder()
    assert make_trainer(tmp_path, callbacks=[again]).run().why == "finished"
    assert again.calls[:2] == ["begin", 4]


def metrics_of_rank(_rank: int, folder: str) -> list[Any]:
    recorder = Recorder()
    make_trainer(Path(folder), "training.steps=2", callbacks=[recorder]).run()
    return recorder.calls


def test_metrics_are_the_same_on_every_process(tmp_path: Path) -> None:
    first, second = run_ranks(metrics_of_rank, 2, str(tmp_path / "run"))
    assert first == ["begin", 1, 2, "evaluate", "save 2", "finished"]
    assert second == ["begin", 1, 2, "evaluate", "finished"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"callbacks": [Recorder]}, "which is a class; pass an instance of it"),
        ({"callbacks": [3]}, "callbacks contains 3, which is not a Callback"),
        ({"collate_fn": lambda batch: torch.ones(3)}, "it must return a tuple of inputs and targets, or a dict"),
        ({"compute_metrics": lambda _: {"loss": 1.0}}, "'loss', which is a name that validation itself uses"),
        ({"compute_metrics": lambda _: {"name": "x"}}, "'name', which is 'x', not a number"),
        ({"compute_metrics": lambda _: 1.0}, "it must return a dict of numbers"),
        ({"data": None, "model": None}, "collate_fn combines samples into batches, but"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(sl.StagelineError, match=text.replace("(", r"\(")):
        make_trainer(tmp_path / "run", "training.loss=cross_entropy" if "model" in options else "training.loss=mse",
                     **options).run()  # fmt: skip


def test_wandb_gets_the_numbers_of_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    started: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        started.append(options)
        log = lambda numbers, step: logged.append((step, numbers))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda: logged.append((-1, {})))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    settings = ("training.steps=2", "metrics.enable_wandb=true", "metrics.wandb_project=mine")
    make_trainer(tmp_path / "run", *settings).run()
    assert [(row["project"], row["name"], row["resume"]) for row in started] == [("mine", "run", "allow")]
    assert [step for step, numbers in logged if "train/loss" in numbers] == [1, 2]
    assert any("validation/squared_error" in numbers for _, numbers in logged)
    assert logged[-1] == (-1, {})


def test_wandb_that_is_missing_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(sl.StagelineError, match=r"pip install 'stageline\[wandb\]'"):
        make_trainer(tmp_path / "run", "metrics.enable_wandb=true").run()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 6GB Laptop GPU", None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_whole_name(
    name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), "bfloat16", 0.0) == (None if tflops is None else tflops * 1e12)


def test_mfu_and_bits_per_byte_follow_from_the_steps(tmp_path: Path) -> None:
    settings = (
        "training.steps=2", "training.seq_len=8", "training.local_batch_size=4", "model.dim=8", "model.n_layers=2",
        "model.n_heads=2", "validation.freq=2", "validation.steps=1", "sample.tokens=0", "metrics.peak_tflops=2",
        "parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_schedule=1f1b",
    )  # fmt: skip
    trainer = Trainer(Config.read(None, *settings, f"job.dump_folder={tmp_path / 'run'}"))
    trainer.run()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    block = 3 * 8 * 8 + 8 * 8 + 2 * 4 * 8 * 8 + 5 * 8 + 4 * 8  # weights, biases and norms
    flops = 6 * (2 * block + 2 * 8 + 1024 * 8) + 12 * 2 * 8 * 8
    for row in [line for line in lines if line["event"] == "step"]:
        assert row["mfu"] == pytest.approx(flops * row["tokens"] / row["seconds"] / 2e12, rel=1e-6)
    (validation,) = [line for line in lines if line["event"] == "validation"]
    data = trainer.setup.data
    assert isinstance(data.validation, Tokens)
    assert data.tokenizer is not None
    tokens = data.validation.array[data.validation.start + 1 :][: 4 * 8]
    num_bytes = len(data.tokenizer.decode(tokens).encode())
    assert validation["bits_per_byte"] == pytest.approx(validation["loss"] / math.log(2) * 4 * 8 / num_bytes)
