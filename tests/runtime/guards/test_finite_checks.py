"""A loss or gradient that is not finite fails the step, with the stage and microbatch where that began."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.runtime.guards.non_finite import FiniteWatch
from stageline.testing import assert_same_bits, run_ranks
from support.pipelines import TRAINING

MARK, AT = 7.5, 2
"""The mark in the samples of the faulty microbatch, and the index of that microbatch."""


class Scaled(torch.autograd.Function):
    """Multiplies; its backward gives the weight a gradient that is not finite for samples that are marked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, odd: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.odd = odd
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        own = (grad * x).sum(0)
        return grad * weight, own * float("inf") if ctx.odd else own, None


class Layer(nn.Module):
    """A layer that passes a mark on in the first column, and may fail on marked samples."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = value
        odd = bool((mask[:, 0] == MARK).any())
        y = torch.tanh(self.inner(x))
        fault = self.fault if odd else ""
        if fault == "forward":
            y = y * float("nan")
        if fault == "backward":
            y = y + torch.sqrt((x * 0).abs())  # finite, and its gradient is not
        if fault == "mask":
            mask = mask.masked_fill(mask != MARK, -float("inf"))
        scaled: Any = Scaled.apply
        return torch.as_tensor(scaled(y, self.weight, fault == "weight")), mask


class First(Layer):
    """Makes the pair that layers pass on."""

    def forward(self, value: Any) -> tuple[Tensor, Tensor]:
        return super().forward((value[:, 1:], value[:, :1]))


class Last(Layer):
    """Ends it."""

    def forward(self, value: Any) -> Any:
        return super().forward(value)[0]


def layers(fault: str, at: int) -> Any:
    torch.manual_seed(0)
    kinds = [First, Layer, Layer, Layer, Layer, Layer, Layer, Last]
    return nn.Sequential(*(kind(fault if index == at else "") for index, kind in enumerate(kinds)))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(8, 5)
    x[2 * AT : 2 * AT + 2, 0] = MARK
    return x, torch.randn(8, 4)


def pipeline(model: nn.Module, name: str = "1f1b", ranks: int = 2, **options: Any) -> sl.Pipeline:
    return sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=ranks, microbatches=4, **options)


def fails(pipe: sl.Pipeline, model: nn.Module, call: Callable[[], Any]) -> str:
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(sl.PipelineError) as caught:
        call()
    assert_same_bits(before, dict(model.state_dict()))
    return str(caught.value)


def every_fault(name: str, ranks: int = 2) -> None:
    """Faults in the layer in the middle, which is at the start of a stage or inside of it."""
    for fault in ("forward", "backward", "weight"):
        model = layers(fault, 4)
        pipe = pipeline(model, name, ranks)
        per_stage = 8 // pipe.schedule.stages
        stage = 4 // per_stage
        message = fails(pipe, model, functools.partial(pipe.step, *batch()))
        assert f"of stage {stage}, microbatch {AT}: ArithmeticError" in message, message
        assert ("the loss of microbatch 2 is nan" in message) == (fault == "forward"), message
        assert "no parameter was changed" in message
        letter = message.partition(" failed in ")[2][0]
        assert letter in {"forward": "F", "backward": "BI", "weight": "BIW"}[fault], message


@pytest.mark.parametrize("name", TRAINING)
def test_the_stage_and_microbatch_where_it_began_are_named(name: str) -> None:
    every_fault(name)


def on_processes(rank: int) -> list[str]:
    for name in ("1f1b", "zb-v", "chimera"):
        every_fault(name)
    messages = []
    model = layers("backward", 4)
    pipe = pipeline(model, check_finite=False)
    pipe.step(*batch())
    pipe.check_finite = True
    messages.append(fails(pipe, model, lambda: pipe.clip_grad_norm_(1.0)))
    model = layers("backward", 4)
    pipe = pipeline(model)
    run = pipe.run([batch()] * 3, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    messages.append(fails(pipe, model, lambda: list(run)))
    return messages


def test_processes_name_the_same() -> None:
    for clipped, ran in run_ranks(on_processes, 2, timeout=200):
        assert "the norm of the gradients is nan" in clipped or "is inf" in clipped
        assert "0.inner.weight (stage 0)" in clipped
        assert "the gradients of step 0 are not finite" in ran
        assert f"of stage 1, microbatch {AT}" in ran or f"of stage 0, microbatch {AT}" in ran


def test_a_mask_that_crosses_stages_fails_no_step_and_is_not_taken_for_the_origin() -> None:
    model = layers("mask", 1)
    pipe = pipeline(model, ranks=4)
    assert pipe.step(*batch()).loss < 10
    pipe.zero_grad()
    model[5].fault = "forward"
    message = fails(pipe, model, lambda: pipe.step(*batch()))
    assert f"F of stage 2, microbatch {AT}" in message


def test_inputs_that_are_not_finite_are_named() -> None:
    model = layers("", 0)
    x, y = batch()
    x[3, 2] = float("nan")
    message = fails(pipe := pipeline(model), model, lambda: pipe.step(x, y))
    assert "F of stage 0, microbatch 1" in message
    assert "the inputs of microbatch 1 are not finite" in message


def test_a_run_and_clipping_stop_before_any_parameter_changes() -> None:
    for name in ("1f1b", "zb-v"):
        model = layers("backward", 4)
        pipe = pipeline(model, name)
        run = pipe.run([batch()] * 3, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
        assert "the gradients of step 0 are not finite" in fails(pipe, model, run.__next__)
    model = layers("forward", 4)
    pipe = pipeline(model, "zb-v")
    run = pipe.run([batch()] * 3, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    assert f"F of stage 2, microbatch {AT}" in fails(pipe, model, lambda: next(run))
    model = layers("backward", 4)
    pipe = pipeline(model, check_finite=False)
    pipe.step(*batch())
    pipe.check_finite = True
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in pipe.parameters()]
    message = fails(pipe, model, lambda: pipe.clip_grad_norm_(1.0))
    assert "0.inner.weight (stage 0)" in message
    for parameter, grad in zip(pipe.parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert parameter.grad is None or grad is None or parameter.grad.equal(grad) or not grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:steps are not continuous")
def test_a_run_whose_steps_do_not_interlock_fails_alike_or_leaves_the_step_out() -> None:
    for skips in (False, True):
        model = layers("backward", 4)
        pipe = pipeline(model, "dualpipe")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        run = pipe.run([batch()] * 2, optimizer=optimizer, max_norm=1.0, skip_not_finite=skips)
        before = copy.deepcopy(dict(model.state_dict()))
        if skips:
            assert [stats.norm is not None and stats.norm < 1e9 for stats in run] == [False, False]
        else:
            assert "the gradients are not finite though the loss" in fails(pipe, model, run.__next__)
        assert_same_bits(before, dict(model.state_dict()))
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_were_not_finite_before_the_step_are_not_blamed_on_it() -> None:
    model = layers("", 0)
    pipe = pipeline(model)
    pipe.step(*batch())
    model[6].weight.grad.fill_(float("nan"))
    message = fails(pipe, model, lambda: pipe.step(*batch()))
    assert "in a gradient that stage 1 already had before this step; call zero_grad()" in message


def test_a_loss_scale_and_the_option_let_gradients_pass() -> None:
    cases: list[tuple[dict[str, Any], float]] = [({}, 1024.0), ({"check_finite": False}, 1.0)]
    for options, scale in cases:
        model = layers("backward", 4)
        pipe = pipeline(model, **options)
        assert pipe.step(*batch(), scale=scale).loss < 10
        assert not pipe.clip_grad_norm_(1.0).isfinite()
    model = layers("backward", 4)
    pipe = pipeline(model)
    assert "not finite though the loss" in fails(pipe, model, lambda: pipe.step(*batch(), scale=0.5))


def test_large_stages_are_looked_at_once_a_step() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    pipe = pipeline(model)
    x = torch.randn(8, 256)
    pipe.step(x, x)
    pipe.zero_grad()
    handle = model[0].weight.register_hook(lambda grad: grad * float("nan"))
    message = fails(pipe, model, lambda: pipe.step(x, x))
    handle.remove()
    assert "of stage 0" in message
    assert "not finite though the loss" in message


def test_on_a_gpu_sums_are_read_only_when_gradients_are_not_finite() -> None:
    layer = nn.Linear(2, 2)
    watch = FiniteWatch(2, {1: layer}, gradients=True, on_gpu=True)
    for microbatch, factor in enumerate((1.0, float("nan"), 1.0)):
        watch.action(0, 1, microbatch, [torch.ones(2)])
        grad = torch.ones(2, 2) if layer.weight.grad is None else layer.weight.grad
        layer.weight.grad = grad * factor
        watch.action(3, 1, microbatch, None)
    watch.end()
    assert not watch.known
    assert watch.bad() == {1}
    assert [event.place for event in watch.events()] == [("W", 1, 1)]


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gpu_reads_one_flag_per_stage(value: float, dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = nn.Linear(300, 2).to(device, dtype)
    layer.weight.grad = torch.full_like(layer.weight, torch.finfo(dtype).max)  # sums would overflow
    layer.weight.grad[1, 299] = value
    layer.bias.grad = torch.ones_like(layer.bias)
    watch = FiniteWatch(1, {0: layer}, gradients=True, on_gpu=True)
    watch.end()
    assert watch.bad() == (set() if value == 1.0 else {0})


def test_parameters_are_listed_when_the_gpu_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, listed = nn.Linear(2, 2), list[int]()

    def parameters() -> Iterator[Tensor]:
        listed.append(1)
        return iter([layer.weight])

    monkeypatch.setattr(layer, "parameters", parameters)
    watch = FiniteWatch(1, {0: layer}, gradients=True, on_gpu=True)
    watch.action(0, 0, 0, [torch.ones(2)])
    assert not listed
    watch.action(1, 0, 0, None)
    assert listed == [1]
