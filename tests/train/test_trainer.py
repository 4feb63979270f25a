"""The training job on threads: the same numbers as a loop written by hand, and the same after any interruption."""

from __future__ import annotations

import errno
import fcntl
import html
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.cli.app import run as command
from stageline.common.machine import cores
from stageline.common.units import format_makespan
from stageline.testing import run_ranks
from stageline.train.config.config import Config
from stageline.train.data import Loader, open_data
from stageline.train.optimizers import Optimizer, outer_parameters, rate
from stageline.train.screen import fit, parts_of
from stageline.train.step import LossScale
from stageline.train.trainer import Result, Trainer

TINY = (
    "training.steps=6",
    "training.seq_len=16",
    "training.local_batch_size=8",
    "model.dim=16",
    "model.n_layers=4",
    "model.n_heads=2",
    "sample.tokens=4",
    "validation.freq=3",
    "validation.steps=1",
    "lr_scheduler.warmup_steps=2",
    "optimizer.lr=0.02",
    "parallelism.pipeline_parallel_degree=2",
    "parallelism.pipeline_parallel_schedule=1f1b",
    "parallelism.pipeline_parallel_split=layers",
    "checkpoint.interval=2",
    "training.dataset=memmap",
    "training.dataset_dtype=uint16",
    "model.vocab_size=32",
)

NO_PAUSE = ("validation.freq=100", "checkpoint.interval=100")
"""Lets all steps be continuous ones."""


def make_config(tokens: Path, *more: str, run: str = "run") -> Config:
    return Config.read(None, *TINY, f"training.dataset_path={tokens}", f"job.dump_folder={tokens.parent / run}", *more)


def train(tokens: Path, *more: str, run: str = "run") -> Result:
    return Trainer(make_config(tokens, *more, run=run)).run()


def rows(tokens: Path, run: str = "run", event: str = "step") -> list[dict[str, Any]]:
    lines = (tokens.parent / run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


def losses(tokens: Path, run: str = "run") -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(tokens, run)}


@pytest.fixture
def threads_of_a_rank() -> Iterator[None]:
    """Compute with as many threads as a rank of the job: the bits of sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cores() // 2))
    yield
    torch.set_num_threads(threads)


def by_hand(config: Config, steps: int) -> dict[int, tuple[float, float]]:
    """The same job as a plain loop in one process: no pipeline, no ranks."""
    from stageline.train.task import make_task

    data = open_data(config)
    training = config.training
    model = sl.build(make_task(config, data.vocab_size).make, seed=training.seed)
    whole = training.global_batch_size or training.local_batch_size
    loader = Loader(data.train, batch=whole, seed=training.seed)
    optimizer = Optimizer(config.optimizer, model.named_parameters(), outer=outer_parameters(model))
    scale = LossScale(training.mixed_precision_param == "float16")
    parts = training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    results = {}
    for step in range(steps):
        loss = 0.0
        for turn in range(whole // training.local_batch_size):
            inputs, targets = loader.batch(
                step * whole + turn * training.local_batch_size, 0, 1, training.local_batch_size
            )
            batch_loss = 0.0
            for x, y in zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True):
                mixed = training.mixed_precision_param
                with torch.autocast("cpu", dtype=getattr(torch, mixed), enabled=mixed != "float32"):
                    logits = model(x)
                    summed = functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum")
                    mean = summed * (1.0 / (whole * training.seq_len))
                (mean if scale.value == 1.0 else mean * scale.value).backward()  # type: ignore[no-untyped-call]
                batch_loss += float(mean.detach())
            loss += batch_loss
        gradients = optimizer.gradients()
        norms = torch.stack(
            [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients.values()]
        )
        norm = float(torch.linalg.vector_norm(norms)) / scale.value
        used = scale.value
        if scale.update(math.isfinite(norm)):
            factor = 1.0 / used * min(1.0, training.max_norm / (norm + 1e-6))
            for gradient in gradients.values():
                gradient.mul_(factor)
            optimizer.set_rate(rate(config.lr_scheduler, step, training.steps))
            optimizer.step()
        optimizer.zero_grad()
        results[step + 1] = (loss, norm)
    return results


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("parallelism.pipeline_parallel_schedule=zb-v", "parallelism.pipeline_parallel_split=parameters"),
        ("training.global_batch_size=24",),
        ("training.mixed_precision_param=bfloat16",),
        ("training.dtype=bfloat16", "parallelism.pipeline_parallel_schedule=zb-h1"),
        ("training.mixed_precision_param=float16", "parallelism.pipeline_parallel_schedule=zb-h1"),
        ("activation_checkpoint.mode=full",),
        ("activation_checkpoint.mode=selective", "activation_checkpoint.modules=blocks.*.up"),
        ("compile.enable=true", "compile.backend=eager", "parallelism.pipeline_parallel_schedule=zb-v"),
        ("optimizer.name=Muon",),
        ("optimizer.name=Adafactor",),
        ("training.continuous_steps=true",),
        ("training.continuous_steps=true", "parallelism.pipeline_parallel_schedule=zb-h2", *NO_PAUSE),
        ("training.continuous_steps=true", "training.mixed_precision_param=bfloat16", *NO_PAUSE),
        ("optimizer.name=SGD", "optimizer.lr=0.5", "lr_scheduler.decay_type=linear", "lr_scheduler.decay_ratio=0.5"),
    ],
    ids=lambda more: ",".join(option.split(".")[1] for option in more) or "float32",
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.usefixtures("threads_of_a_rank")
def test_a_job_has_the_losses_and_norms_of_a_loop_by_hand(tokens: Path, more: tuple[str, ...]) -> None:
    result = train(tokens, *more)
    assert result.step == 6
    assert result.why == "finished"
    expected = by_hand(make_config(tokens, *more), 6)
    assert losses(tokens) == expected
    assert min(loss for loss, _ in expected.values()) < expected[1][0]


@pytest.mark.parametrize(
    "change", ["parallelism.pipeline_parallel_degree=4", "parallelism.pipeline_parallel_schedule=zb-v"]
)
def test_a_run_resumes_with_other_ranks_and_another_schedule(tokens: Path, change: str) -> None:
    config = make_config(tokens, "model.dropout=0.1", run="parts")
    trainer = Trainer(config)
    stop_after(trainer, 3)
    assert trainer.run().why == "stopped by SIGTERM"
    assert train(tokens, "model.dropout=0.1", change, run="parts").step == 6
    train(tokens, "model.dropout=0.1", run="whole")
    assert losses(tokens, "parts") == losses(tokens, "whole")
    assert rows(tokens, "parts", "validation")[-1]["loss"] == rows(tokens, "whole", "validation")[-1]["loss"]


def stop_after(trainer: Trainer, step: int) -> None:
    """Send SIGTERM to the job after a step."""
    import signal

    agree = trainer._agree_to_stop

    def heard() -> str:
        if trainer.step == step:
            signal.raise_signal(signal.SIGTERM)
        return agree()

    trainer._agree_to_stop = heard  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "more",
    [
        ("training.mixed_precision_param=float16",),
        ("training.dtype=bfloat16",),
        ("optimizer.name=Muon",),
        ("optimizer.name=Adafactor",),
        ("optimizer.name=SGD",),
    ],
    ids=lambda more: more[0].split("=")[1],
)
def test_every_optimizer_and_precision_resumes_exactly(tokens: Path, more: tuple[str, ...]) -> None:
    trainer = Trainer(make_config(tokens, *more, run="parts"))
    stop_after(trainer, 3)
    trainer.run()
    train(tokens, *more, run="parts")
    train(tokens, *more, run="whole")
    assert losses(tokens, "parts") == losses(tokens, "whole")


def test_a_finished_run_is_left_alone_and_more_steps_go_on(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tokens, "lr_scheduler.decay_type=constant")
    before = (tokens.parent / "run" / "metrics.jsonl").read_bytes()
    again = train(tokens, "lr_scheduler.decay_type=constant")
    assert (again.step, again.why) == (6, "finished")
    assert (tokens.parent / "run" / "metrics.jsonl").read_bytes() == before
    assert "is finished: step 6 of 6" in capsys.readouterr().out
    assert train(tokens, "training.steps=8", "lr_scheduler.decay_type=constant").step == 8
    assert set(losses(tokens)) == set(range(1, 9))


def test_planned_is_one_number_wherever_it_is_shown(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the plan, in what a job prints and logs, in its report and its page, and in `stageline trace`."""
    folder = train(tokens, "metrics.timeline_freq=3").folder
    printed = capsys.readouterr().out
    seconds = sl.read_plan(folder / "plan.json").step_seconds
    text = format_makespan(seconds)
    assert f"plan      makespan {text}, bubble " in printed
    assert {row["planned_makespan"] for row in rows(tokens)} == {seconds}
    assert f"(plan {text})" in fit(parts_of(rows(tokens)[-1], 6, None), 200)
    report = html.unescape((folder / "report.html").read_text())
    assert f"where {text} was planned" in report
    assert f"; planned {text}" in report
    data = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', (folder / "timeline.html").read_text()
    )
    assert data is not None
    page = json.loads(data[1])
    assert (page["seconds"], page["panels"][0]["makespan"]) == (True, seconds)
    assert command(["trace", str(folder / "timeline" / "step-00000006.json"), "--width", "200"]) == 0
    assert f"makespan: planned {text}, measured " in capsys.readouterr().out
    (folder / "timeline" / "planned.json").unlink()
    assert command(["trace", str(folder / "timeline" / "step-00000006.json"), "--width", "200"]) == 0
    out = capsys.readouterr().out
    assert "planned" not in out
    assert "makespan: with typical times " in out
    assert command(["trace", str(folder / "timeline" / "step-00000006.json"), "--plan", str(folder / "plan.json")]) == 0
    assert f"makespan: planned {text}, measured " in capsys.readouterr().out


def test_what_a_run_leaves_behind(tokens: Path) -> None:
    result = train(tokens, "metrics.timeline_freq=2", "checkpoint.keep_latest_k=2")
    folder = result.folder
    assert [path.name for path in sorted((folder / "checkpoint").glob("step-*"))] == ["step-00000004", "step-00000006"]
    assert [path.name for path in sorted((folder / "timeline").iterdir())] == [
        "planned.json", "step-00000002.json", "step-00000004.json", "step-00000006.json",
    ]  # fmt: skip
    measured = sl.read_timeline(folder / "timeline" / "step-00000006.json")
    planned = sl.read_timeline(folder / "timeline" / "planned.json")
    assert measured.schedule == planned.schedule
    page = (folder / "timeline.html").read_text()
    assert "planned" in page
    assert "measured" in page
    assert "<html" in (folder / "report.html").read_text()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["ranks"] == 2
    assert Config.read(folder / "config.toml") == make_config(
        tokens, "metrics.timeline_freq=2", "checkpoint.keep_latest_k=2"
    )
    step = rows(tokens)[-1]
    assert step["tokens"] == 8 * 16
    assert 0 <= step["bubble"] < 1
    assert 0 <= step["planned_bubble"] < 1
    assert [row["step"] for row in rows(tokens, event="validation")] == [3, 6]
    assert rows(tokens, event="end")[-1]["why"] == "finished"


def test_early_stop_and_time_limit_end_with_a_checkpoint(tokens: Path) -> None:
    early = train(tokens, "validation.patience=1", "validation.freq=1", "optimizer.lr=1e-12", "training.steps=50")
    assert early.why == "early stop"
    assert early.step < 50
    assert (early.folder / "checkpoint" / f"step-{early.step:08}").is_dir()
    assert (
        train(tokens, "validation.patience=1", "validation.freq=1", "optimizer.lr=1e-12", "training.steps=50").loss
        is None
    )
    limited = train(tokens, "training.time_limit=1e-6", run="limited")
    assert (limited.why, limited.step) == ("time limit", 1)
    assert (limited.folder / "checkpoint" / "step-00000001").is_dir()


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tokens, "training.steps=4", "lr_scheduler.decay_type=constant")
    weights = next((tokens.parent / "run" / "checkpoint" / "step-00000004").glob("model-*"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    train(tokens, "lr_scheduler.decay_type=constant")
    assert re.search(rf"warning: .*{weights.name}: .*; using step 2 instead", capsys.readouterr().err)
    train(tokens, "lr_scheduler.decay_type=constant", run="whole")
    assert losses(tokens) == losses(tokens, "whole")


def refused(tokens: Path, match: str, *more: str, run: str = "run") -> None:
    with pytest.raises(sl.StagelineError, match=match):
        train(tokens, *more, run=run)


def test_what_does_not_fit_is_refused_before_anything_is_written(tokens: Path) -> None:
    refused(tokens, "pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_microbatch_size=16", run="new")
    refused(tokens, "replicas must be processes", "parallelism.data_parallel_replicate_degree=2", run="new")
    refused(tokens, "which does not exist", "training.dataset_path=/nowhere/x.bin", run="new")
    empty = tokens.parent / "empty.bin"
    empty.write_bytes(b"")
    refused(tokens, "empty", f"training.dataset_path={empty}", run="new")
    assert not (tokens.parent / "new").exists()
    other = tokens.parent / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("important")
    refused(tokens, "contains other files but no run", run="other")
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    (tokens.parent / "file").write_text("")
    refused(tokens, "is a file", run="file")


def test_a_run_of_something_else_is_not_overwritten(tokens: Path) -> None:
    train(tokens, "training.steps=2")
    refused(tokens, "training.seed is 1 but was 0", "training.seed=1")
    refused(tokens, "model.dim is 32 but was 16", "model.dim=32")
    refused(tokens, "16 samples per step|8 samples per step", "training.local_batch_size=16")
    raw = np.fromfile(tokens, dtype=np.uint16)
    raw[5] = (raw[5] + 1) % 32
    raw.tofile(tokens)
    refused(tokens, "data")


def test_two_jobs_do_not_work_in_one_folder(tokens: Path) -> None:
    from stageline.train.run_folder import RunFolder

    config = make_config(tokens)
    held = RunFolder(config.job.dump_folder)
    held.claim(config)
    refused(tokens, "another job is running in")
    held.release()
    assert train(tokens).step == 6


def test_a_file_system_without_locks_is_named_as_such(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    refused(tokens, r"lock' cannot be locked: Function not implemented; mount its file system with locks")


def test_a_recovery_takes_the_folder_over_from_a_process_of_the_same_job(tokens: Path) -> None:
    """A lost host that is frozen, or cut off from a file server, keeps its lock."""
    from stageline.train.run_folder import RunFolder

    config = make_config(tokens)
    frozen, taker, other = (RunFolder(config.job.dump_folder) for _ in range(3))
    job_id = frozen.claim(config)
    for earlier in ("", "the ID of another job"):
        with pytest.raises(sl.StagelineError, match="another job is running in"):
            other.claim(config, earlier)
    assert taker.claim(config, job_id) == job_id
    frozen.release()
    with pytest.raises(sl.StagelineError, match="another job is running in"):
        other.claim(config)
    taker.release()
    assert other.claim(config) not in ("", job_id)
    other.release()


def test_a_child_process_does_not_keep_the_folder(tokens: Path) -> None:
    """As a worker of a data loader, which lives on for seconds after its parent was killed."""
    from stageline.train.run_folder import RunFolder

    config = make_config(tokens)
    folder, other = RunFolder(config.job.dump_folder), RunFolder(config.job.dump_folder)
    folder.claim(config)
    (stopped, stop), (ready, started) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(started, b"1")
        os.read(stopped, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        folder.release()
        other.claim(config)
        other.release()
    finally:
        os.write(stop, b"1")
        os.waitpid(child, 0)
        for handle in (stopped, stop, ready, started):
            os.close(handle)


def test_a_hugging_face_model_trains_and_opens_as_one(tokens: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tokens.parent / "llama"
    LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    result = train(tokens, f"model.name={folder}", "training.steps=4")
    opened: Any = AutoModelForCausalLM.from_pretrained(result.folder / "checkpoint" / "step-00000004")
    data = open_data(make_config(tokens))
    assert data.validation is not None
    inputs, targets = Loader(data.validation, batch=8, shuffle=False).batch(0, 0, 1, 8)
    with torch.no_grad():
        loss = functional.cross_entropy(opened(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    assert float(loss) < losses(tokens)[1][0]
    own = train(tokens, f"model.name={folder}", "training.steps=2", "training.loss=own", run="own")
    assert own.loss is not None


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def squares(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(4, generator=draw)
        yield x, x.flip(0) * 2


def test_a_model_and_data_of_ones_own(tokens: Path) -> None:
    more = ("training.loss=mse", f"training.dataset={__name__}:squares", f"model.name={__name__}:Regression",
            "validation.enable=false", "training.dataset_path=")  # fmt: skip
    train(tokens, *more, "training.steps=20", "optimizer.lr=0.05")
    figures = losses(tokens)
    assert figures[20][0] < figures[1][0] / 2
    trainer = Trainer(
        make_config(tokens, *more, "training.loss=mse", "training.steps=20", "optimizer.lr=0.05", run="b")
    )
    stop_after(trainer, 7)
    trainer.run()
    train(tokens, *more, "training.steps=20", "optimizer.lr=0.05", run="b")
    assert losses(tokens, "b") == figures


def test_a_trainer_takes_a_model_a_loss_and_samples_from_python(tokens: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=draw)
    samples = [(x, x.flip(0)) for x in inputs]
    config = make_config(tokens, "training.steps=20", "optimizer.lr=0.05")
    result = Trainer(config, model=Regression, loss_fn=functional.mse_loss, data=samples).run()
    figures = losses(tokens)
    assert result.step == 20
    assert figures[20][0] < figures[1][0]
    assert result.validation_loss is not None


def train_in_group(rank: int, tokens: str) -> None:
    torch.set_num_threads(1)
    train(Path(tokens), run="group")


def test_a_job_takes_its_place_from_a_group_that_a_script_made(tokens: Path) -> None:
    """Processes that were started without torchrun, and so without its variables in the environment."""
    train(tokens)
    run_ranks(train_in_group, 2, str(tokens), timeout=120)
    assert losses(tokens, "group") == losses(tokens)


def test_the_profile_has_the_precision_of_the_steps_and_the_loss(tokens: Path) -> None:
    heads = {}
    for dtype in ("float32", "bfloat16"):
        train(tokens, "training.steps=1", f"training.mixed_precision_param={dtype}", run=dtype)
        profile = sl.read_profile(tokens.parent / dtype / "profile.json")
        heads[dtype] = profile.layers[-1]
    assert heads["bfloat16"].message == heads["float32"].message // 2
    assert heads["float32"].activation >= heads["float32"].message  # cross-entropy keeps logarithms of probabilities
