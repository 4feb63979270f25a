"""Tensors of classes derived from torch.Tensor: stages receive them as in one process, or they are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.runtime.step_report import add_up
from stageline.testing import assert_same_bits, run_ranks
from support.gradients import gradients


class Tagged(Tensor):
    """A class with an attribute that its functions do not carry along."""

    factor: Any


def tagged(tensor: Tensor, factor: Any) -> Tagged:
    result = tensor.as_subclass(Tagged)
    result.factor = factor
    return result


class Tags(nn.Module):
    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.inner, self.several = nn.Linear(8, 8), several

    def forward(self, x: Tensor) -> Any:
        hidden = tagged(self.inner(x), 3.0)
        return (hidden, hidden.as_subclass(Tensor) * 2) if self.several else hidden


class ReadsTag(nn.Module):
    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.inner, self.several = nn.Linear(8, 8), several

    def forward(self, x: Any) -> Any:
        hidden = x[0] if self.several else x
        assert type(hidden) is Tagged
        scaled = self.inner(hidden) * hidden.factor
        return scaled + x[1] if self.several else scaled


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def same_as_a_loop(model: nn.Module, x: Tensor, **options: Any) -> None:
    plain, y = copy.deepcopy(model), torch.randn(8, 8)
    losses = []
    for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        loss = functional.mse_loss(plain(part), target) / 4
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4, **options)
    assert pipe.step(x, y).loss == add_up(losses)
    assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize("recompute", ["none", "stage", ["1"]])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_inputs_of_a_derived_class_give_the_bits_of_a_loop(schedule: str, recompute: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8).as_subclass(Tagged)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    same_as_a_loop(model, x, schedule=schedule, recompute=recompute)
    if isinstance(recompute, str):
        same_as_a_loop(Whole(), x, schedule=schedule, recompute=recompute)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("recompute", ["none", "stage", ["1"]])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_next_stage_is_given_the_class_and_its_attributes(schedule: str, recompute: Any, several: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Tags(several), ReadsTag(several))
    same_as_a_loop(model, torch.randn(8, 8), schedule=schedule, recompute=recompute)


def test_a_check_copies_tensors_of_a_derived_class_and_of_a_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = tagged(torch.randn(8, 8, requires_grad=True) * 2, 1.0)
    target = (torch.randn(8, 8, requires_grad=True) * 2).as_subclass(Tagged)
    assert sl.check(model, (x, target), ranks=2, loss_fn=functional.mse_loss).equal


class TagsWithGraph(Tags):
    def forward(self, x: Tensor) -> Any:
        return tagged(self.inner(x), self.inner.bias * 2)


def test_an_attribute_that_requires_grad_is_refused_by_name() -> None:
    model = nn.Sequential(TagsWithGraph(), ReadsTag())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    with pytest.raises(sl.StagelineError, match=r"stage 0 passes on a Tagged whose attribute factor requires grad"):
        pipe.step(torch.ones(4, 8), torch.ones(4, 8))


def refusal(rank: int) -> str:
    torch.manual_seed(0)
    pipe = sl.Pipeline(nn.Sequential(Tags(), ReadsTag()), loss_fn=functional.mse_loss, schedule="1f1b", microbatches=2)
    with pytest.raises(sl.StagelineError) as refused:
        pipe.step(torch.ones(4, 8), torch.ones(4, 8))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    return str(refused.value)


def test_processes_refuse_a_derived_class_by_name() -> None:
    for message in run_ranks(refusal, 2):
        assert "stage 0 passes on a Tagged in microbatch 0" in message
        assert "x.as_subclass(torch.Tensor)" in message
