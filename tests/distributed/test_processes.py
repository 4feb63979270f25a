"""One rank per process: the same bits as in one process, and the same script."""

from __future__ import annotations

import copy
import gc
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.distributed.process_groups import own_groups
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients
from support.pipelines import Block, batch, blocks, noisy, sizes, tied_model, token_loss, train_beside_the_loop
from support.threads import JOB, left_over

TRAINING = [name for name in sl.families() if name != "forward-only"]


def owned(pipe: sl.Pipeline, plain: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    mine = dict(pipe.named_gradients())
    return mine, {name: grad for name, grad in gradients(plain).items() if name in mine}


def chosen_sizes(name: str, ranks: int) -> list[tuple[int, int]]:
    layouts = list(sizes(name, [ranks]))
    return layouts if os.environ.get("STAGELINE_SWEEP") == "full" else layouts[ranks % 2 :: 2]


def train(rank: int, ranks: int, names: list[str]) -> int:
    """Train families beside the plain loop, for 1 to 9 microbatches, float32 and bfloat16 in turns.

    Every second size, another half for each number of ranks; all of them if the environment says STAGELINE_SWEEP=full.
    """
    runs = 0
    for name in names:
        for count, microbatches in chosen_sizes(name, ranks):
            dtype = torch.bfloat16 if (microbatches // 2 + len(name)) % 2 else torch.float32
            train_beside_the_loop(name, count, microbatches, dtype, here=rank)
            runs += 1
    return runs


@pytest.mark.parametrize("ranks", [2, 3, 4] if os.environ.get("STAGELINE_SWEEP") == "full" else [2, 3])
def test_every_family_gives_the_bits_of_one_process_on_processes(ranks: int) -> None:
    runs = run_ranks(train, ranks, ranks, TRAINING, timeout=280)
    assert runs == [sum(len(chosen_sizes(name, ranks)) for name in TRAINING)] * ranks
    assert runs[0] > 2 * len(TRAINING)


def tied(rank: int) -> tuple[dict[str, Tensor | None], float]:
    model = tied_model()
    tokens = torch.randint(0, 11, (6, 5))
    pipe = sl.Pipeline(model, loss_fn=token_loss, schedule="zb-h1", ranks=2, microbatches=3)
    for _ in range(2):
        pipe.step(tokens, tokens)
    norm = float(pipe.clip_grad_norm_(0.5))
    return dict(pipe.named_gradients()), norm


def test_tied_weights_and_clipping_match_ranks_on_threads() -> None:
    """Both processes that use a tied weight hold the same gradient, and the norm is over all of them."""
    (first, norm), (second, other) = run_ranks(tied, 2)
    together, expected = tied(0)
    assert_same_bits({"tied": first["0.weight"]}, {"tied": second["0.weight"]})
    assert_same_bits({**first, **second}, together)
    assert first["0.weight"] is not None
    assert norm == other == expected


def outcome(call: Callable[[], object]) -> str:
    """The message of the error that a call raises, or "nothing"."""
    try:
        call()
    except sl.StagelineError as error:
        return str(error)
    return "nothing"


def mistakes(rank: int) -> list[str]:
    """A mistake between ranks is reported on all of them."""
    errors: list[str] = []
    x, y = batch()

    def attempt(call: Callable[[], object]) -> None:
        errors.append(outcome(call))

    def make(**options: Any) -> sl.Pipeline:
        return sl.Pipeline(blocks(), loss_fn=functional.mse_loss, **{"ranks": 2, "microbatches": 4, **options})

    attempt(lambda: make(schedule="1f1b" if rank == 0 else "gpipe"))
    attempt(lambda: make(schedule="1f1b", ranks=4))
    attempt(lambda: make(loss_reduction="mean" if rank == 0 else "sum"))
    attempt(lambda: make(seed=rank))
    pipe = make(schedule="1f1b")
    attempt(lambda: pipe.step(x + rank, y))
    attempt(lambda: pipe.step(None, None))
    attempt(lambda: pipe.step(x[: 10 - rank], y[: 10 - rank]))
    pipe.step(x, y)
    evaluation = pipe.evaluate(x, y, outputs=True)
    errors.append(f"{evaluation.loss is not None} {evaluation.outputs is not None}")
    return errors


def test_differences_between_ranks_are_named() -> None:
    first, second = run_ranks(mistakes, 2)
    for answer in (first, second):
        assert "rank 1 and rank 0 differ in the schedule" in answer[0]
        assert "the schedule has 4 ranks, but 2 processes were started" in answer[1]
        assert "differ in loss_reduction" in answer[2]
        assert "differ in the seed that was passed" in answer.pop(3)
        assert answer[3] == "rank 1 received a different batch from rank 0: the inputs differ"
        assert "no rank received" in answer[4]
        assert "rank 1 received a different batch from rank 0: the number of samples differ" in answer[5]
    assert first[6] == "True False"
    assert second[6] == "True True"


class Odd(nn.Linear):
    """A linear layer by another name."""


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def doubled_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target) * 2


def unlike(rank: int) -> list[str]:
    """Ranks whose models, losses or weights differ, though names and shapes do not."""
    errors: list[str] = []
    x, y = batch()

    def attempt(call: Any) -> None:
        errors.append(outcome(call))

    def make(model: nn.Module, loss_fn: Any = mean_loss, **options: Any) -> sl.Pipeline:
        return sl.Pipeline(model, loss_fn=loss_fn, ranks=2, microbatches=4, **options)

    def layers(middle: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8))

    attempt(lambda: make(blocks().double() if rank else blocks()))
    attempt(lambda: make(layers(nn.Dropout(0.2 if rank else 0.1))))
    attempt(lambda: make(layers(Odd(8, 8) if rank else nn.Linear(8, 8))))
    attempt(lambda: make(blocks(), doubled_loss if rank else mean_loss))
    attempt(lambda: make(blocks(), (lambda o, t: (o - t).abs().mean()) if rank else (lambda o, t: (o - t).norm())))
    for options in ({}, {"compare_weights": False}):
        model = blocks()
        pipe = make(model, schedule="dualpipe", **options)
        with torch.no_grad():
            model[3].up.weight += rank
        attempt(lambda pipe=pipe: pipe.step(x, y))
    model = tied_model()
    pipe = make(model, token_loss)
    tokens = torch.randint(0, 11, (4, 5))
    with torch.no_grad():
        model[0].weight += rank
    attempt(lambda: pipe.step(tokens, tokens))
    with torch.no_grad():
        model[0].weight.fill_(0.1)
    attempt(lambda: pipe.step(tokens, tokens))
    return errors


def test_models_losses_and_weights_that_differ_between_ranks_are_named_with_both_values() -> None:
    for errors in run_ranks(unlike, 2):
        for part in (
            "differ in the types of the parameters and buffers: rank 1 has '0.norm.weight torch.float64' and rank 0",
            "differ in the modules of the model: rank 1 has '1: torch.nn.modules.dropout.Dropout(p=0.2",
            "differ in the modules of the model: rank 1 has '1: tests.distributed.test_processes.Odd' and rank 0 has ",
            "differ in loss_fn: rank 1 has 'tests.distributed.test_processes.doubled_loss, code",
            "differ in loss_fn: rank 1 has 'tests.distributed.test_processes.unlike.<locals>.<lambda>",
            "rank 1 and rank 0 hold different values of 3.up.weight, which both use: rank 1 has [",
            "nothing",
            "rank 1 and rank 0 hold different values of 0.weight, which both use: rank 1 has [",
            "nothing",
        ):
            assert part in errors.pop(0)


def differing_options(rank: int) -> list[str]:
    """Ranks whose options, modes or arguments of a step differ."""
    errors: list[str] = []
    x, y = batch()

    def attempt(call: Callable[[], object]) -> None:
        errors.append(outcome(call))

    def make(model: Any = None, **options: Any) -> sl.Pipeline:
        return sl.Pipeline(model or blocks(), loss_fn=mean_loss, ranks=2, microbatches=4, **options)

    attempt(lambda: make(check_finite=not rank))
    attempt(lambda: make(recompute="stage" if rank else "none"))
    attempt(lambda: make(blocks().train(not rank)))
    attempt(lambda: make(blocks().requires_grad_(not rank)))
    pipe = make(penalty=lambda name, parameter: parameter.pow(2).sum())
    attempt(lambda: pipe.step(x, y, scale=0.5 if rank else 1.0))
    counted = make(loss_reduction="count")
    attempt(lambda: counted.step(x, y, count=4 + rank))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    attempt(lambda: list(pipe.run([{"inputs": x, "targets": y, "scale": 0.5 if rank else 1.0}], optimizer=optimizer)))
    pipe.model.train(not rank)
    attempt(lambda: pipe.step(x, y))
    attempt(lambda: pipe.predict(x))
    pipe.model.train()
    for parameter in pipe.parameters():  # each rank's own
        parameter.requires_grad_(rank > 0)
    attempt(lambda: pipe.step(x, y, scale=0.5))
    return errors


def test_options_modes_and_arguments_that_differ_between_ranks_are_named_with_both_values() -> None:
    for errors in run_ranks(differing_options, 2):
        for part in (
            "differ in check_finite: rank 1 has 'False' and rank 0 has 'True'",
            "differ in recompute: rank 1 has 'stages True' and rank 0 has 'stages False'",
            "differ in the modes of the modules (train or eval): rank 1 has 'the model itself training=False'",
            "differ in requires_grad of the parameters: rank 1 has '0.norm.weight requires_grad=False'",
            "rank 1 and rank 0 differ in scale=: rank 1 has 0.5 and rank 0 has 1.0",
            "rank 1 and rank 0 differ in count=: rank 1 has 5.0 and rank 0 has 4.0",
            "rank 1 and rank 0 differ in scale=: rank 1 has 0.5 and rank 0 has 1.0",
            "rank 1 and rank 0 differ in the mode of the model: rank 1 has model.eval() and rank 0 has model.train()",
            "rank 1 and rank 0 differ in the mode of the model: rank 1 has model.eval() and rank 0 has model.train()",
            "nothing",
        ):
            assert part in errors[0], errors
            errors.pop(0)


STRUCTURES = {
    "a pair": "(float32 of shape (2, 4), float32 of shape (2, 4))",
    "a list": "[float32 of shape (2, 4)]",
    "a dict": "{'h': float32 of shape (2, 4)}",
    "nothing": "None",
}


class Changing(nn.Linear):
    """A layer that passes on another type from its second step on, one more feature, or another structure."""

    change = ""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if self.change in STRUCTURES:
            return {"a pair": (y, y + 0), "a list": [y], "a dict": {"h": y}, "nothing": None}[self.change]
        if self.change == "type":
            return y.double()
        return torch.cat([y, y[..., :1]], -1) if self.change == "shape" else y


def changing(rank: int) -> list[str]:
    """A stage that changes its output is named, although a later stage fails on it."""
    errors = []
    for change in ("type", "shape", *STRUCTURES):
        layers = [Changing(4, 4), nn.Tanh(), nn.Linear(4, 4)]
        pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, schedule="1f1b", ranks=3, microbatches=3)
        x = torch.ones(6, 4)
        pipe.step(x, x)
        layers[0].change = change  # type: ignore[assignment]
        with pytest.raises(sl.PipelineError) as caught:
            pipe.step(x, x)
        errors.append(str(caught.value))
        layers[0].change = ""  # type: ignore[assignment]
        pipe.step(x, x)
    return errors


@pytest.mark.parametrize("processes", [False, True])
def test_a_type_shape_or_structure_that_changes_is_blamed_on_the_stage_that_passes_it_on(processes: bool) -> None:
    for errors in run_ranks(changing, 3) if processes else [changing(0)]:
        for text, kind in zip(errors[:2], ("float64 of shape (2, 4)", "float32 of shape (2, 5)"), strict=True):
            assert text.startswith("rank 0 failed in F of stage 0, microbatch 0: "), text
            assert f"returned [{kind}] for microbatch 0 of step 1, but returned [float32 of shape (2, 4)]" in text
            assert "stage 2 on rank 2 failed on it: RuntimeError: mat1" in text, text
        for text, kind in zip(errors[2:], STRUCTURES.values(), strict=True):
            assert text.startswith("rank 0 failed in F of stage 0, microbatch 0: "), text
            assert f"returned {kind} for microbatch 0 of step 1, but returned one tensor, float32 of shape" in text
            assert "stage 1 on rank 1 failed on it: TypeError: tanh()" in text, text


class Fragile(Block):
    broken = True

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise ArithmeticError("planted")
        return super().forward(x)


def fails(rank: int, stage: int, name: str) -> tuple[str, list[str]]:
    """Fail once, and then train as if nothing had happened."""
    torch.manual_seed(1)
    layers: list[Any] = [Fragile() if index == stage else Block() for index in range(3)]
    plain: Any = copy.deepcopy(nn.Sequential(*layers))
    pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, schedule=name, microbatches=4, deadline=30)
    message = "nothing"
    try:
        pipe.step(*batch())
    except sl.PipelineError as error:
        message = str(error)
    layers[stage].broken = plain[stage].broken = False
    pipe.zero_grad()
    pipe.step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(*owned(pipe, plain))
    return message, left_over(allowed=JOB)


@pytest.mark.parametrize(("stage", "name"), [(0, "1f1b"), (1, "zb-h1"), (2, "gpipe")])
def test_all_ranks_report_an_exception_and_the_next_step_is_correct(stage: int, name: str) -> None:
    for message, threads in run_ranks(fails, 3, stage, name):
        assert message.startswith(f"rank {stage} failed in F of stage {stage}, microbatch 0: ArithmeticError: planted")
        assert threads == [], "no other is left behind"


def last_loss_fails(rank: int) -> str:
    """The last microbatch's loss fails when the other rank waits for little else, or nothing."""
    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise ArithmeticError("planted")
        return functional.mse_loss(output, target)

    pipe = sl.Pipeline(blocks(2), loss_fn=loss_fn, schedule="gpipe", ranks=2, microbatches=4, deadline=30)
    with pytest.raises(sl.PipelineError) as caught:
        pipe.evaluate(*batch())
    return str(caught.value)


def test_a_rank_that_waits_for_nobody_also_learns_of_a_failure() -> None:
    for message in run_ranks(last_loss_fails, 2):
        assert message.startswith("rank 1 failed in F of stage 1, microbatch 3: ArithmeticError: planted")


def noisy_step(rank: int) -> tuple[list[float], dict[str, float]]:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return functional.mse_loss(output, target), {"mean": output.detach().mean()}

    pipe = sl.Pipeline(noisy(), loss_fn=loss_fn, schedule="zb-v", ranks=2, microbatches=4, seed=7)
    stats = pipe.step(*batch())
    return list(stats.losses), stats.metrics


def test_dropout_and_metrics_match_ranks_on_threads() -> None:
    expected = noisy_step(0)
    assert run_ranks(noisy_step, 2) == [expected, expected]


class Remembering(Block):
    """A layer with a state that is not a tensor."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Normed(nn.Module):
    """Batch statistics over tokens: buffers that change in training, one of them a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(x.transpose(1, 2)).transpose(1, 2))


def rich_model(state: Any) -> Any:
    """Tied weights on two stages, buffers, and a state that is not a tensor."""
    tied = tied_model()
    remembering = Remembering()
    remembering.kept = state
    return nn.Sequential(tied[0], tied[1], Normed(), remembering, Normed(), tied[3])


def gathers(rank: int, ranks: int, schedule: str) -> dict[str, Any]:
    """Train for some steps, gather the state, load it into another pipeline, and gather again."""
    torch.manual_seed(4)
    tokens = torch.randint(0, 11, (6, 5))
    options: dict[str, Any] = {"loss_fn": token_loss, "schedule": schedule, "ranks": ranks, "microbatches": 3}
    pipe = sl.Pipeline(rich_model({"seen": [1, 2.5, None]}), **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    for _ in range(2):
        pipe.step(tokens, tokens)
        optimizer.step()
        optimizer.zero_grad()
    state = pipe.state_dict(gather=True)
    own = pipe.state_dict()
    assert set(own) <= set(state)
    assert list(state) == list(pipe.model.state_dict())
    other = sl.Pipeline(rich_model(None), **options)
    other.load_state_dict(state)
    again = other.state_dict(gather=True)
    assert_same_bits(tensors(state), tensors(again))
    assert again["3._extra_state"] == state["3._extra_state"]
    before = other.evaluate(tokens, tokens).loss
    assert before == pipe.evaluate(tokens, tokens).loss
    for tensor in tensors(state).values():
        assert tensor is not None
        tensor.zero_()  # a copy: nothing of the model's
    assert pipe.evaluate(tokens, tokens).loss == before
    return again


def tensors(state: dict[str, Any]) -> dict[str, Tensor | None]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (3, "zb-h1")])
def test_every_rank_gathers_the_state_of_one_process(ranks: int, schedule: str) -> None:
    answers = run_ranks(gathers, ranks, ranks, schedule)
    expected = gathers(0, ranks, schedule)
    assert {"0.weight", "5.weight", "2.norm.running_mean", "4.norm.num_batches_tracked"} <= set(expected)
    assert int(expected["4.norm.num_batches_tracked"]) == 6
    for state in answers:
        assert list(state) == list(expected)
        assert_same_bits(tensors(state), tensors(expected))
        assert state["3._extra_state"] == {"seen": [1, 2.5, None]}


def gathers_two_directions(rank: int) -> dict[str, Any]:
    pipe = sl.Pipeline(blocks(4), loss_fn=functional.mse_loss, schedule="dualpipe", ranks=2, microbatches=4)
    return pipe.state_dict(gather=True)


def test_a_stage_on_two_ranks_is_gathered_once() -> None:
    first, second = run_ranks(gathers_two_directions, 2)
    for state in (first, second):
        assert_same_bits(state, blocks(4).state_dict())


def cannot_gather(rank: int, state: Any) -> str:
    pipe = sl.Pipeline(rich_model(state), loss_fn=token_loss, schedule="1f1b", ranks=2, microbatches=3)
    with pytest.raises(sl.StagelineError) as caught:
        pipe.state_dict(gather=True)
    return str(caught.value)


@pytest.mark.parametrize("state", [{1, 2}, (1, 2), {1: 2}])
def test_a_state_that_cannot_be_sent_is_an_error_on_all_ranks(state: Any) -> None:
    first, second = run_ranks(cannot_gather, 2, state)
    assert first == second
    assert first.startswith(f"the state '3._extra_state' is {state}, which is neither a tensor nor a value that JSON")


def clips(rank: int) -> list[str]:
    """Which uses of the parameters warn, in processes that hold a part of them each."""
    pipe = sl.Pipeline(blocks(2), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    pipe.step(*batch())
    uses: dict[str, Any] = {
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0),
        "a filter": lambda: nn.utils.clip_grad_norm_(
            (parameter for parameter in pipe.parameters() if parameter.requires_grad), 1.0
        ),
        "get_total_norm": lambda: nn.utils.get_total_norm(parameter.grad for parameter in pipe.parameters()),  # type: ignore[misc]
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(pipe.parameters(), 1.0),
        "an optimizer": lambda: torch.optim.SGD(pipe.parameters(), lr=0.1),
        "a list": lambda: list(pipe.parameters()),
        "its own": lambda: pipe.clip_grad_norm_(1.0),
    }
    warned = []
    for name, use in uses.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use()
        for warning in caught:
            assert "use pipe.clip_grad_norm_(max_norm)" in str(warning.message)
            assert warning.filename == __file__
        warned += [name] * len(caught)
    return warned


def test_a_norm_over_the_parameters_of_one_process_warns() -> None:
    assert run_ranks(clips, 2) == [["clip_grad_norm_", "a filter", "get_total_norm"]] * 2


def test_clipping_does_not_warn_if_one_process_holds_all_parameters() -> None:
    pipe = sl.Pipeline(blocks(2), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    pipe.step(*batch())
    nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)  # a warning would be an error


HERE = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is not an integer"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, but at least 1 process is needed"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2, but the rank must be at least 0 and below 2"),
        ({"RANK": ""}, "WORLD_SIZE is 2, but the environment has no RANK"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "has no MASTER_ADDR and no MASTER_PORT"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1 and LOCAL_WORLD_SIZE is 1"),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is 4, which exceeds WORLD_SIZE, 2"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], expected: str
) -> None:
    for name in (*HERE, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**HERE, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(sl.StagelineError, match=re.escape(expected)):
        sl.Pipeline(blocks(2), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)


def is_slow(rank: int) -> None:
    """Rank 2 takes longer for its first action than the deadline, as a compiler would; rank 1 loads slowly."""

    class Slow(Block):
        slept = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.slept:
                time.sleep(5.0)
                self.slept = True
            return super().forward(x)

    torch.manual_seed(1)
    layers = [Block(), Block(), Slow()]
    plain: Any = copy.deepcopy(nn.Sequential(*layers))
    plain[2].slept = True
    sl.Pipeline(
        blocks(3), loss_fn=functional.mse_loss, microbatches=4, deadline=60.0
    )  # all have connected, sooner or later
    pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, schedule="1f1b", microbatches=4, deadline=4.0)
    for step in range(2):
        if step == 1 and rank == 1:
            time.sleep(5.0)
        pipe.step(*batch())
        one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(*owned(pipe, plain))


def test_a_rank_that_is_slow_but_lives_is_waited_for() -> None:
    run_ranks(is_slow, 3, timeout=200)


DEATH = """
import os, sys, torch
import torch.distributed as dist
from torch.nn import functional
import stageline as sl
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
torch.set_num_threads(1)
layers = [torch.nn.Linear(4, 4) for _ in range(3)]
if rank == 2:
    layers[2].forward = lambda x: os._exit(3)
pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, schedule="1f1b", microbatches=4, deadline=1000)
try:
    pipe.step(torch.ones(8, 4), torch.ones(8, 4))
except sl.PipelineError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_death_is_an_error_on_all_other_ranks_long_before_their_deadline(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DEATH)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(3)
    ]
    try:
        answers = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0, 3], answers
    for message, _ in answers[:2]:
        assert message.startswith("rank 2 died (its process exited without reporting an error)"), answers
        assert "restart it" in message
    assert "rank 2" in answers[1][0]


def foreign_default(rank: int, folder: str) -> list[str]:
    """Train under a default group that moves nothing: the pipeline must use its own groups."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (it registers the backend)

    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    pipe, plain = (
        sl.Pipeline(blocks(4), loss_fn=functional.mse_loss, schedule="zb-v", ranks=2, microbatches=4),
        blocks(4),
    )
    loss = pipe.step(*batch()).loss
    assert loss == one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(*owned(pipe, plain))
    assert_same_bits(pipe.state_dict(gather=True), plain.state_dict())
    another = sl.Pipeline(blocks(4), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4)
    assert another.step(*batch()).loss == loss
    return [dist.get_backend(), dist.get_backend(another.runner.host.layout_groups.replica)]  # type: ignore[attr-defined]


def test_the_users_default_group_is_not_used(tmp_path: Path) -> None:
    assert run_ranks(foreign_default, 2, str(tmp_path)) == [["fake", "gloo"]] * 2


SCRIPT = """
import os, pathlib, torch
from torch.nn import functional
import stageline as sl
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-v", ranks=2, microbatches=4)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
x, y = torch.randn(8, 6), torch.randn(8, 6)
for _ in range(3):
    stats = pipe.step(x, y)
    optimizer.step()
    optimizer.zero_grad()
pathlib.Path("loss-" + os.environ.get("RANK", "alone")).write_text(stats.loss.hex())
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(900)
def test_the_same_script_runs_alone_and_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(path)], timeout=300, check=True, env=environment, cwd=tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "stageline", str(path)]
    many = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment, cwd=tmp_path
    )
    assert many.returncode == 0, many.stderr
    losses = {name: (tmp_path / f"loss-{name}").read_text() for name in ("alone", "0", "1")}
    assert len(set(losses.values())) == 1, losses


def in_another_order(rank: int) -> str:
    first, second = (
        sl.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=functional.mse_loss, microbatches=2, deadline=10)
        for _ in range(2)
    )
    x = torch.ones(4, 4)
    with pytest.raises(sl.PipelineError) as caught:
        (first if rank == 0 else second).step(x, x)
    return str(caught.value)


def test_running_pipelines_in_different_orders_is_refused() -> None:
    errors = run_ranks(in_another_order, 2)
    assert any("the ranks run their pipelines in different orders" in error for error in errors), errors


def one_evaluates(rank: int) -> str:
    pipe = sl.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=functional.mse_loss, microbatches=2, deadline=10)
    x = torch.ones(4, 4)
    pipe.step(x, x)
    with pytest.raises(sl.PipelineError) as caught:
        (pipe.evaluate if rank == 0 else pipe.step)(x, x)
    return str(caught.value)


def test_evaluating_on_one_rank_while_others_train_is_refused() -> None:
    errors = run_ranks(one_evaluates, 2)
    assert any("evaluates while the other trains" in error for error in errors), errors


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return [self.linear(x) * number for number in range(1100)]


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, parts: Any) -> Any:
        return self.linear(torch.stack(parts).sum(0))


def very_many(rank: int) -> float:
    torch.manual_seed(0)
    pipe = sl.Pipeline([Many(), Added()], loss_fn=functional.mse_loss, microbatches=2)
    return pipe.step(torch.ones(4, 4), torch.ones(4, 4)).loss


def test_very_many_tensors_in_one_message() -> None:
    losses = run_ranks(very_many, 2)
    assert losses == [very_many(0)] * 2


def over_and_over(rank: int) -> list[int]:
    counts = []
    for _ in range(4):
        pipe = sl.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=functional.mse_loss, microbatches=2)
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
        del pipe
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_deleted_pipelines_leave_no_file_open() -> None:
    for counts in run_ranks(over_and_over, 2):
        assert counts[-1] == counts[1], counts


def asks_from_several_threads(rank: int) -> list[str]:
    pipe = sl.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=functional.mse_loss, microbatches=2)
    assert pipe.runner.host.layout.replicas == 1
    groups = own_groups(pipe.runner.host.deadline, pipe.runner.host.layout)
    failures: list[str] = []

    def ask() -> None:
        try:
            for _ in range(300):
                assert groups.lost() == ""
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_several_threads_may_ask_at_once_whether_a_rank_was_lost() -> None:
    """The rank itself asks, and so does the client of the failure monitor when it hears a verdict."""
    assert run_ranks(asks_from_several_threads, 2) == [[], []]


def interrupted(rank: int) -> str:
    pipe = sl.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=functional.mse_loss, microbatches=2, deadline=20)
    x = torch.ones(4, 4)
    pipe.step(x, x)
    if rank == 1:
        pipe.runner.batches.request = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt if rank == 1 else sl.PipelineError) as caught:
        pipe.step(x, x)
    if rank == 1:
        time.sleep(3.0)  # it stays alive, and the other does not wait for it
    return str(caught.value)


def test_all_ranks_learn_of_an_interrupt_before_the_first_action() -> None:
    assert "rank 1" in run_ranks(interrupted, 2)[0]


def tied_v(rank: int) -> Tensor:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 30, bias=False))
    model[3].weight = model[0].weight
    pipe = sl.Pipeline(model, loss_fn=functional.cross_entropy, schedule="zb-v", ranks=2, microbatches=4)
    tokens = torch.randint(0, 30, (8,))
    pipe.step(tokens, tokens)
    gradients = dict(pipe.named_gradients())
    return torch.as_tensor(gradients["0.weight"]) if "0.weight" in gradients else torch.zeros(0)


def test_a_tied_weight_may_be_used_on_one_rank_only() -> None:
    """That rank found nobody to tell, and the others waited for it."""
    (first, second), expected = run_ranks(tied_v, 2), tied_v(0)
    assert torch.equal(first, expected)
    assert len(second) == 0
