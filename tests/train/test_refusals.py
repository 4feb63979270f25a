"""What a training job must refuse: options without effect, damage, silent restarts, losses of other samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import stageline as sl
from stageline.common.errors import StagelineError
from stageline.faults.flight_recorder import read_flight
from stageline.train.checkpoint.shards import write_tensors
from stageline.train.config.config import Config
from stageline.train.data import Bytes, Loader
from stageline.train.data.source import Items
from stageline.train.events import MetricsFile
from stageline.train.run_folder import RunFolder
from stageline.train.step import TrainingStep
from stageline.train.task import Task, find_loss
from stageline.train.trainer import Result, Trainer
from stageline.train.validation import Validation, validation_batches

TINY = (
    "training.steps=4",
    "training.seq_len=8",
    "training.local_batch_size=4",
    "model.dim=8",
    "model.n_layers=2",
    "model.n_heads=2",
    "sample.tokens=3",
    "validation.freq=2",
    "validation.steps=1",
    "parallelism.pipeline_parallel_degree=2",
    "parallelism.pipeline_parallel_schedule=1f1b",
    "parallelism.pipeline_parallel_split=layers",
    "checkpoint.interval=2",
    "training.dataset=text",
    "training.dataset_path=text.txt",
    "job.dump_folder=run",
)


@pytest.fixture(autouse=True)
def text(empty_folder: None) -> None:
    Path("text.txt").write_text("one two three four five six seven\n" * 40)


def train(*more: str, **arguments: Any) -> Result:
    return Trainer(Config.read(None, *TINY, *more), **arguments).run()


def refused(match: str, *more: str, **arguments: Any) -> None:
    with pytest.raises(StagelineError, match=match):
        train(*more, **arguments)


def events(kind: str, run: str = "run") -> list[dict[str, Any]]:
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == kind]


def flip_a_bit(step: int) -> str:
    weights = next(Path(f"run/checkpoint/step-{step:08}").glob("model-*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    return weights.name


def test_a_step_that_is_asked_for_must_be_there_and_whole() -> None:
    refused("has no checkpoint of step 2; it has none", "checkpoint.load_step=2")
    train()
    refused("has no checkpoint of step 3; it has 2, 4", "checkpoint.load_step=3")
    name = flip_a_bit(2)
    refused(f"{name}: checksum mismatch", "checkpoint.load_step=2", "training.steps=6")
    assert train("checkpoint.load_step=4", "training.steps=6").step == 6


def test_weights_to_begin_with_are_those_of_a_whole_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    name = flip_a_bit(4)
    damaged = "checkpoint.initial_load_path=run/checkpoint/step-00000004"
    refused(f"initial_load_path.*{name}: checksum mismatch", damaged, "job.dump_folder=b")
    other = ("checkpoint.initial_load_path=run/checkpoint/step-00000002", "model.n_layers=9", "job.dump_folder=a")
    refused(r"^checkpoint.initial_load_path is '.*tensors missing in .*; it must have exactly the tensors of", *other)
    # A folder of checkpoints stands for its newest intact one.
    train("checkpoint.initial_load_path=run/checkpoint", "job.dump_folder=b")
    train("checkpoint.initial_load_path=run/checkpoint/step-00000002", "job.dump_folder=c")
    assert name in capsys.readouterr().err
    assert [row["loss"] for row in events("step", "b")] == [row["loss"] for row in events("step", "c")]
    assert events("step", "b")[0]["loss"] < events("step")[0]["loss"]


def fail_from(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no tensors be written from the checkpoint of a step on, and every step wait for the checkpoint before it."""
    step_of = TrainingStep.train

    def refuse(path: Path, *rest: Any) -> Any:
        if int(path.parent.name[5:13]) >= step:
            raise OSError(28, "No space left on device")
        return write_tensors(path, *rest)

    def after_the_checkpoint(self: TrainingStep, *arguments: Any) -> Any:
        for thread in threading.enumerate():
            if thread.name == "stageline-checkpoint":
                thread.join()
        return step_of(self, *arguments)

    monkeypatch.setattr("stageline.train.checkpoint.writer.write_tensors", refuse)
    monkeypatch.setattr(TrainingStep, "train", after_the_checkpoint)


@pytest.mark.parametrize(
    ("step", "left"),
    [(4, "the last intact one is run/checkpoint/step-00000002"), (2, "run/checkpoint has no other checkpoint")],
)
def test_a_checkpoint_that_could_not_be_written_ends_the_job_at_the_next_step(
    step: int, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        fail_from(step, patched)
        refused(f"^the checkpoint of step {step} was not saved: No space left on device; {left}$", "training.steps=40")
    assert [row["step"] for row in events("end")] == [step + 1]
    assert train("training.steps=6").why == "finished"


def test_metrics_that_cannot_be_written_end_the_job_with_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = MetricsFile.write

    def refuse(self: MetricsFile, row: dict[str, Any]) -> None:
        if row["step"] >= 2:
            raise StagelineError(f"cannot write the row of {row['event']}")
        write(self, row)

    monkeypatch.setattr(MetricsFile, "write", refuse)
    refused("^cannot write the row of step$")
    assert "ended after 2 of 4 steps: failed: StagelineError: cannot write the row of step" in capsys.readouterr().out


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(x))


SAMPLES = [(torch.full((4,), float(number)), torch.tensor([float(number)])) for number in range(40)]


def far(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).mean() + 1000.0


@pytest.mark.parametrize("named", ["cross_entropy", "mse", "own"])
def test_a_loss_from_python_stands_in_place_of_any_that_is_named(named: str) -> None:
    result = train(f"training.loss={named}", model=Small, loss_fn=far, data=SAMPLES)
    assert result.loss is not None
    assert result.loss > 1000


def test_the_models_own_loss_is_the_one_that_came_with_it() -> None:
    assert find_loss("own", model_loss=far).function is far
    assert find_loss("mse", model_loss=far).function is not far


def test_squares_of_different_shapes_are_refused() -> None:
    loss = find_loss("mse").function
    with pytest.raises(StagelineError, match=r"returns shape \(2, 1\) and the targets have \(2,\)"):
        loss(torch.zeros(2, 1), torch.zeros(2))
    refused(r"training.loss is mse", "training.loss=mse", model=Small, data=[(x, y[0]) for x, y in SAMPLES])


def test_every_class_needs_a_weight() -> None:
    refused(
        "loss_weights has 2 numbers, but the vocabulary has 256", "training.loss=weighted_cross_entropy",
        "training.loss_weights=1.0,2.0",
    )  # fmt: skip
    assert not Path("run").exists()
    count = find_loss("weighted_cross_entropy", (1.0, 2.0)).count
    assert count is not None
    assert count(torch.tensor([0, 1, 1, -100])) == 5.0
    with pytest.raises(StagelineError, match="targets range from 0 to 7"):
        count(torch.tensor([0, 7]))


def test_a_model_that_shifts_by_itself_is_given_the_targets_of_the_data() -> None:
    task = Task("mine", Small, "own")
    row = torch.arange(10)[None]
    inputs, _ = task.batch(row[:, :-1], row[:, 1:])
    assert torch.equal(inputs["labels"], row[:, :-1])
    padded = row[:, 1:].clone()
    padded[:, 4:] = -100
    inputs, _ = task.batch(row[:, :-1], padded)
    assert inputs["labels"].tolist() == [[0, 1, 2, 3, 4, -100, -100, -100, -100]]
    labels = torch.tensor([3])
    assert task.batch(row, labels)[0]["labels"] is labels


def test_a_folder_where_nothing_was_made_can_be_used_for_another_configuration() -> None:
    refused("does not exist", "checkpoint.initial_load_path=nowhere")
    assert Path("run/config.toml").exists()
    assert train("model.dim=16").step == 4
    refused("model.dim is 8 but was 16")


def test_a_start_that_is_refused_late_leaves_the_config_of_the_run() -> None:
    train()
    before = Path("run/config.toml").read_bytes()
    late = ("training.steps=6", "checkpoint.load_step=3")
    refused("has no checkpoint of step 3", *late)
    refused("training.global_batch_size to 4", "training.steps=6", "training.global_batch_size=8")
    assert Path("run/config.toml").read_bytes() == before
    assert train("training.steps=6").step == 6
    assert Config.read("run/config.toml").training.steps == 6


def test_a_run_that_failed_at_its_very_end_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    from stageline.train.output import Output

    def fail(self: Output) -> str:
        raise ValueError("no sample today")

    with monkeypatch.context() as patched:
        patched.setattr(Output, "_sample", fail)
        with pytest.raises(ValueError, match="no sample today"):
            train()
    assert not Path("run/sample.txt").exists()
    assert train().why == "finished"
    assert Path("run/sample.txt").exists()
    Path("run/metrics.jsonl").unlink()
    assert train().why == "finished"


def test_a_model_may_know_more_words_than_there_are_bytes() -> None:
    assert Bytes().decode([72, 105, 255, 2999]) == "Hi�"
    train("model.vocab_size=3000", "sample.tokens=12")
    assert Path("run/sample.txt").exists()


def test_a_note_says_that_a_run_starts_again(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("checkpoint.enable=false", "lr_scheduler.warmup_steps=1")
    train(*more)
    assert "note:" not in capsys.readouterr().out
    train(*more)
    assert "so training starts from step 0; the earlier events are kept in metrics.1.jsonl" in capsys.readouterr().out


def test_a_run_that_stopped_early_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("validation.patience=1", "validation.freq=1", "optimizer.lr=1e-12", "training.steps=20")
    first = train(*more)
    capsys.readouterr()
    again = train(*more)
    assert (again.step, again.why) == (first.step, "early stop")
    assert "increase validation.patience to resume" in capsys.readouterr().out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
@pytest.mark.parametrize("reader", ["gone", "full"])
def test_a_job_continues_when_its_output_cannot_be_written(reader: str) -> None:
    words = [f"--{option}" for option in TINY]
    if reader == "gone":
        ours, theirs = os.pipe()
        os.close(ours)
    else:
        theirs = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "stageline", "train", *words]
    try:
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=300, check=False)
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")
    assert events("end")[-1]["why"] == "finished"
    assert Path("run/report.html").exists()


def test_folders_of_a_run_are_inside_of_it() -> None:
    refused("checkpoint.folder is .* inside job.dump_folder", "checkpoint.folder=/tmp/elsewhere")
    refused("metrics.save_tb_folder is .* inside job.dump_folder", "metrics.save_tb_folder=../elsewhere")
    refused("job.dump_folder is empty", "job.dump_folder=")


def stream() -> Iterator[list[int]]:
    for number in range(100):
        yield list(range(number, number + 9))


def test_patience_needs_something_to_wait_for() -> None:
    refused("validation.enable is false", "validation.patience=1", "validation.enable=false")
    more = (f"training.dataset={__name__}:stream", "training.dataset_path=", "validation.patience=1")
    refused("there is no validation data", *more)
    assert not Path("run").exists()


def test_a_choice_that_cannot_be_is_made_again() -> None:
    train()
    file = Path("run/plan.json")
    kept = json.loads(file.read_text())
    for wrong in (["a", None], [1], [-1, 3]):
        file.write_text(json.dumps({**kept, "layers_per_stage": wrong}))
        assert train("training.steps=5").step == 5
        assert len(json.loads(file.read_text())["layers_per_stage"]) == 2


def test_a_schedule_file_that_changed_is_read_again() -> None:
    more = ("parallelism.pipeline_parallel_schedule=auto", "parallelism.pipeline_parallel_schedule_csv=plan.json")
    for name, steps in (("gpipe", 4), ("1f1b", 6)):
        sl.schedule(name, ranks=2, microbatches=2).write("plan.json")
        train(*more, f"training.steps={steps}")
        assert sl.read_plan("run/plan.json").schedule == sl.read_schedule("plan.json")


def test_a_job_leaves_the_process_as_it_was() -> None:
    torch.set_num_threads(2)
    train("training.deterministic=true", "training.steps=1")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 2


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left() -> None:
    folder = RunFolder("run")
    Path("run/config.toml").mkdir(parents=True)
    with pytest.raises(StagelineError, match=r"cannot write run/config.toml: "):
        folder.write("config.toml", "x")
    assert [path.name for path in Path("run").iterdir()] == ["config.toml"]


def test_samples_that_are_no_tokens_count_as_one_each() -> None:
    train("training.loss=mse", model=Small, data=SAMPLES)
    assert [row["tokens"] for row in events("step")] == [4] * 4
    train("job.dump_folder=b")
    assert [row["tokens"] for row in events("step", "b")] == [4 * 8] * 4


def pictures() -> list[tuple[Tensor, int]]:
    return [(x, number % 2) for number, (x, _) in enumerate(SAMPLES)]


def test_what_is_no_language_model_writes_nothing() -> None:
    more = (f"training.dataset={__name__}:pictures", "training.dataset_path=")
    result = train(*more, model=lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    assert result.why == "finished"
    assert not Path("run/sample.txt").exists()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_is_frozen_stays_so_after_a_validation() -> None:
    data = [(x, x) for x, _ in SAMPLES]
    trainer = Trainer(Config.read(None, *TINY, "training.loss=mse"), model=Frozen, data=data)
    trainer.run()
    assert len(events("validation")) == 2
    assert trainer.pipe.state_dict()["norm.running_mean"].tolist() == [0.0] * 4


def test_rows_of_tokens_from_python_need_a_vocabulary() -> None:
    rows = [list(range(9))] * 40
    refused("set model.vocab_size", data=rows)
    assert train("model.vocab_size=16", data=rows).step == 4


def test_a_note_says_that_a_model_sees_the_tokens_it_is_to_predict(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import BertConfig, GPT2Config

    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertConfig(**sizes, intermediate_size=8, architectures=["BertForMaskedLM"]).save_pretrained("bert")
    GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained("gpt2")
    for name, expected in (("bert", True), ("gpt2", False)):
        for loss in ("cross_entropy", "own"):
            more = (f"model.name={name}", f"training.loss={loss}", f"job.dump_folder={name}-{loss}", "training.steps=1")
            train(*more)
            assert ("sees the tokens that it has to predict" in capsys.readouterr().out) == expected
    GPT2Config(**{**sizes, "vocab_size": 100}, architectures=["GPT2LMHeadModel"]).save_pretrained("few")
    refused("vocab_size of 100, but the vocabulary of the data has 256 tokens", "model.name=few")


def test_rows_longer_than_a_model_has_positions_for_are_refused_at_the_start() -> None:
    from transformers import GPT2Config, LlamaConfig, OPTConfig

    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    GPT2Config(**sizes, n_positions=6).save_pretrained("gpt2")
    OPTConfig(**sizes, ffn_dim=8, word_embed_proj_dim=8, max_position_embeddings=6).save_pretrained("opt")
    LlamaConfig(**sizes, intermediate_size=8, max_position_embeddings=6).save_pretrained("llama")
    refused(
        "^training.seq_len is 8, but n_positions in gpt2/config.json is 6, which leaves positions for only 6 tokens; "
        "use at most 6 for training.seq_len, or increase n_positions in that file$",
        "model.name=gpt2",
    )
    refused("training.seq_len is 8, but max_position_embeddings in opt/config.json is 6", "model.name=opt")
    rows = [list(range(8))] * 40
    refused("the samples have 7 tokens, .* use at most 6 for the samples, or increase", "model.name=gpt2", data=rows)
    assert not Path("run").exists()
    assert train("model.name=llama", "training.steps=1").step == 1
    assert train("model.name=gpt2", "training.seq_len=6", "training.steps=1", "job.dump_folder=b").step == 1


@pytest.mark.parametrize(("warmup", "far"), [(8, "up to 50% of optimizer.lr"), (4, "to optimizer.lr in the last step")])
def test_a_warm_up_that_leaves_no_step_to_the_rest_is_told_of(
    warmup: int, far: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"lr_scheduler.warmup_steps={warmup}")
    note = (
        f"lr_scheduler.warmup_steps is {warmup} and training.steps is 4: the learning rate rises until the end, {far}"
    )
    assert capsys.readouterr().out.count(f"note: {note}\n") == 1
    assert max(row["lr"] for row in events("step")) == events("step")[-1]["lr"]


@pytest.mark.parametrize(("wanted", "used"), [(1, 4), (2, 7), (5, 7)])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_every_validation_sample_counts_at_most_once(loss: str, wanted: int, used: int) -> None:
    """7 of 40 samples are for validation, and a batch has 4; the loss is that of one pass over them."""
    more = ("validation.freq=4", f"validation.steps={wanted}", "validation.fraction=0.175", f"training.loss={loss}")
    data = pictures() if loss == "cross_entropy" else SAMPLES
    trainer = Trainer(Config.read(None, *TINY, *more), model=Small if loss == "mse" else Wide, data=data)
    result = trainer.run()
    held = data[-7:][:used]
    function: Any = getattr(nn.functional, f"{loss}_loss" if loss == "mse" else loss)
    targets = torch.stack([torch.as_tensor(target) for _, target in held])
    with torch.no_grad():
        expected = function(trainer.pipe.model(torch.stack([x for x, _ in held])), targets)
    assert result.validation_loss == pytest.approx(expected.item(), rel=1e-5)
    assert [row["samples"] for row in events("validation")] == [used]


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))


@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 6), st.integers(1, 5))
def test_replicas_share_the_validation_samples(held: int, wanted: int, local: int, replicas: int) -> None:
    batches = validation_batches(held, wanted, local, replicas)
    taken = [number for first, samples in batches for number in range(first, first + samples)]
    assert taken == list(range(len(taken)))
    assert min(held, wanted) - replicas < len(taken) <= min(held, wanted)
    assert all(replicas <= samples <= local * replicas for _, samples in batches)


def test_replicas_that_would_have_nothing_to_validate_on_are_refused() -> None:
    loader = Loader(Items(SAMPLES[:1], name="one"), batch=2)
    with pytest.raises(StagelineError, match="one has 1 for validation, but each of 2 replicas needs at least one"):
        Validation(loader, wanted=2, local=1, replica=0, replicas=2)


def far_from_finite(output: Tensor, targets: Tensor) -> Tensor:
    return output.sum() * float("nan")


def test_what_ranks_did_last_is_kept_with_the_run_and_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StagelineError, match="the loss of microbatch 0 is nan") as failed:
        train(model=Small, loss_fn=far_from_finite, data=SAMPLES)
    assert not Path("stageline-flight").exists()
    (note,) = failed.value.__notes__
    assert note == (
        "the last actions and messages of the ranks are in run/flight/stageline-flight-alone-rank0.json and 1 more "
        "beside it: stageline doctor run/flight"
    )
    assert len(read_flight("run/flight/stageline-flight-alone-rank0.json").actions) > 0
    monkeypatch.setenv("STAGELINE_FLIGHT_DIR", "mine")
    refused("the loss of microbatch 0 is nan", model=Small, loss_fn=far_from_finite, data=SAMPLES)
    assert Path("mine").is_dir()


def test_records_of_a_job_that_never_came_to_be_are_no_run() -> None:
    Path("run/flight").mkdir(parents=True)
    assert train("training.steps=1").step == 1


def test_continuous_steps_are_refused_where_the_results_would_differ() -> None:
    for option in ("training.dtype=bfloat16", "training.mixed_precision_param=float16", "optimizer.name=Muon"):
        name, _, value = option.partition("=")
        refused(f"training.continuous_steps is true, but {name} is {value}", "training.continuous_steps=true", option)
    refused("accumulates gradients of 2 batches", "training.continuous_steps=true", "training.global_batch_size=8")


def test_a_job_that_runs_out_of_memory_is_told_the_flags_that_help() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of")

    schedule = ["parallelism.pipeline_parallel_schedule=gpipe", "training.local_batch_size=16"]
    with pytest.raises(torch.OutOfMemoryError, match="F of stage 1, microbatch 0") as caught:
        train(*schedule, loss_fn=loss)
    text = str(caught.value)
    for flag in ("activation_checkpoint.mode full", "pipeline_parallel_schedule 1f1b", "microbatch_size"):
        assert flag in text, flag
    assert "were planned for rank 1" in text
    assert "sl.plan" not in text


def test_a_model_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any, **options: Any) -> nn.Module:
        raise RuntimeError("[enforce fail] err == 0. can't allocate memory: you tried to allocate 4096 bytes")

    monkeypatch.setattr("stageline.train.schedule_choice.build", build)
    refused("the model gpt does not fit into memory: a tensor of 4 KiB could not be allocated; .* a smaller one")
