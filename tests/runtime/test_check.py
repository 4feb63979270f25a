"""The verdict of a check: equal, reordered where only the order of additions differs, or different."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import models
import stageline as sl
from stageline.cli.app import run
from stageline.runtime import shared_parameters
from stageline.runtime import step as runner
from stageline.testing import run_ranks


class Wrong(torch.autograd.Function):
    """Multiplies gradients by 1.01 on any thread but the first: a mistake that only a pipeline makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (1.0 if threading.current_thread() is threading.main_thread() else 1.01)


class Outside(models.Outside):
    """Residuals outside of the blocks: every stage uses the outputs of all blocks before it."""

    def __init__(self, wrong_at: int | None = None) -> None:
        super().__init__()
        self.wrong_at = wrong_at

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for number, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x)) * self.scale
            if number == self.wrong_at:
                x = Wrong.apply(x)  # type: ignore[no-untyped-call]
        return torch.as_tensor(self.head(x))


def words() -> Any:
    return models.words(8, 16)


def check(model: nn.Module, **options: Any) -> Any:
    dtype = next(model.parameters()).dtype
    batch = (torch.randn(8, 5, dtype=dtype), torch.randn(8, 2, dtype=dtype))
    return sl.check(model, batch, **{"ranks": 2, "loss_fn": functional.mse_loss, **options})


def check_before_and_after_training(rank: int) -> str:
    """A process trains only its own stages, so that its copy of the model is no longer that of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    batch = torch.randn(8, 4), torch.randn(8, 4)
    assert sl.check(model, batch, ranks=2, loss_fn=functional.mse_loss).verdict == "equal"
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4)
    pipe.step(*batch)
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    with pytest.raises(sl.errors.StagelineError) as caught:
        sl.check(model, batch, ranks=2, loss_fn=functional.mse_loss)
    model.load_state_dict(pipe.state_dict(gather=True))
    assert sl.check(model, batch, ranks=2, loss_fn=functional.mse_loss).verdict == "equal"
    return str(caught.value)


def test_models_that_differ_between_processes_are_an_error() -> None:
    for error in run_ranks(check_before_and_after_training, 2):
        assert error.startswith(
            "check needs the same model in all processes, but they hold different values of 0.weight;"
        )


def test_a_small_batch_has_fewer_microbatches() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    report = check(model, schedule="1f1b", microbatches=16)
    assert report.equal
    assert "1f1b on 2 ranks, 2 stages, 8 microbatches" in str(report)


def test_equal_bits_are_equal() -> None:
    report = check(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), schedule="zb-h1")
    assert (report.verdict, report.equal, bool(report), report.reordered) == ("equal", True, True, ())
    assert "verdict    equal" in str(report)


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_tied_weights_are_reordered(schedule: str, drop: float) -> None:
    """Also where the reference is one rank, because the model draws random numbers."""
    model = models.GPT(tied=True, drop=drop)
    report = sl.check(model, (words(), words()), ranks=2, loss_fn=models.next_words, schedule=schedule)
    assert report.verdict == "reordered"
    assert not report
    assert not report.equal
    (tensor,) = report.reordered
    assert tensor.name == "transformer.wte.weight"
    assert 0 < tensor.largest < 1e-6
    assert "use it, and it is summed stage by stage" in tensor.why
    assert "verdict    reordered: the same sums" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_that_several_stages_use_are_reordered(dtype: torch.dtype) -> None:
    report = check(Outside().to(dtype), schedule="zb-h1", ranks=2)
    assert report.verdict == "reordered"
    assert {tensor.name for tensor in report.reordered} == {tensor.name for tensor in report.differing}
    assert any("several stages use a value of stage 0 or an earlier one" in tensor.why for tensor in report.reordered)


def test_two_directions_are_reordered() -> None:
    report = check(nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)), nn.Linear(5, 2)), schedule="chimera")
    assert report.verdict == "reordered"
    assert "each direction" in report.reordered[0].why


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_is_wrong_by_one_percent_is_different(at: int, dtype: torch.dtype) -> None:
    """Upstream of a shared value and beside it."""
    report = check(Outside(wrong_at=at).to(dtype), ranks=2)
    assert report.verdict == "different"
    assert report.unexplained
    assert "verdict    different" in str(report)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_wrong_gradient_of_a_tied_weight_is_different(monkeypatch: pytest.MonkeyPatch, drop: float) -> None:
    sum_shared_gradients = shared_parameters.sum_shared_gradients

    def wrong(placed: Any, *args: Any) -> None:
        sum_shared_gradients(placed, *args)
        for parameter in placed.uses:
            parameter.grad.mul_(1 + 1e-4)

    monkeypatch.setattr(runner, "sum_shared_gradients", wrong)
    report = sl.check(
        models.GPT(tied=True, drop=drop), (words(), words()), ranks=2, loss_fn=models.next_words, schedule="zb-h1"
    )
    assert report.verdict == "different"
    assert [tensor.name for tensor in report.unexplained] == ["transformer.wte.weight"]


def test_a_use_that_is_lost_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """One single row of a tied weight that lacks one use."""
    sum_shared_gradients = shared_parameters.sum_shared_gradients

    def wrong(placed: Any, *args: Any) -> None:
        for uses in placed.uses.values():
            if len(uses) > 1 and uses[1].own is not None and uses[1].own.grad is not None:
                uses[1].own.grad[0].zero_()
        sum_shared_gradients(placed, *args)

    monkeypatch.setattr(runner, "sum_shared_gradients", wrong)
    report = sl.check(models.GPT(tied=True), (words(), words()), ranks=2, loss_fn=models.next_words)
    assert report.verdict == "different"


def test_a_buffer_that_differs_is_different() -> None:
    class Counts(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.calls += 1
            return self.linear(x)

    report = check(nn.Sequential(nn.Linear(5, 5), Counts()))
    assert report.verdict == "different"
    assert report.loss == report.alone


MAKES = """
import threading, torch
from torch import nn
import models

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return grad * (1.0 if threading.current_thread() is threading.main_thread() else 1.01)

class Layer(nn.Linear):
    def forward(self, x):
        return Wrong.apply(super().forward(x))

def tied():
    return models.GPT(tied=True), models.words(8, 16), models.words(8, 16), models.next_words

def wrong():
    return nn.Sequential(nn.Linear(4, 4), Layer(4, 2)), torch.ones(4, 4), torch.ones(4, 2), nn.functional.mse_loss
"""


def test_the_command_ends_with_0_unless_something_is_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checked_for_a_verdict.py").write_text(MAKES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for function, verdict, code in (("tied", "reordered", 0), ("wrong", "different", 1)):
        assert run(["check", f"checked_for_a_verdict:{function}"]) == code
        assert f"verdict    {verdict}" in capsys.readouterr().out
        assert run(["check", f"checked_for_a_verdict:{function}", "--json"]) == code
        printed = json.loads(capsys.readouterr().out)
        assert printed["verdict"] == verdict
        assert printed["equal"] is False
