"""Layers that read a parameter of another stage through a plain reference, which no module registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients

Make = Callable[[], nn.Module]


class Reader(nn.Module):
    """A layer that asks something else for a tensor to add to its output."""

    ask: Any

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.__dict__["ask"] = ask

    def forward(self, x: Tensor) -> Tensor:
        other: Tensor = self.ask() if callable(self.ask) else self.ask[0]
        result: Tensor = self.linear(x) + other.sum()
        return result


class Head(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.tied: list[Any] = [embedding]

    def forward(self, x: Tensor) -> Any:
        return functional.linear(self.norm(x), self.tied[0].weight)


class Registered(Head):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__(embedding)
        self.embedding = embedding


class Whole(nn.Module):
    """A whole model; its own forward, or the unit at its end, reads the weight of the first unit."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = Reader(lambda: self.first.weight) if where == "unit" else nn.Linear(4, 4)
        self.plain = [self.first] if where == "frame" else []

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.last(x)
        return x * self.plain[0].weight.detach().sum() if self.plain else x


def chain(last: Callable[[nn.Linear], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Linear(4, 4), nn.Linear(4, 4), last(first))


def in_default(first: nn.Linear) -> nn.Module:
    def ask(weight: Tensor = first.weight) -> Tensor:
        return weight * 2

    return Reader(ask)


READERS: dict[str, Make] = {
    "a module in a list": lambda: chain(Head),
    "a parameter in a list": lambda: chain(lambda first: Reader([first.weight])),
    "a closure": lambda: chain(lambda first: Reader(lambda: first.weight)),
    "a default": lambda: chain(in_default),
    "a bound method": lambda: chain(lambda first: Reader(first.state_dict()["weight"].sum)),
    "detached": lambda: chain(lambda first: Reader(lambda: first.weight.detach())),
    "its data": lambda: chain(lambda first: Reader(lambda: first.weight.data)),
    "without a graph": lambda: chain(lambda first: Reader(torch.no_grad()(lambda: first.weight * 2))),
    "a call of the module": lambda: chain(lambda first: Reader(lambda: first(torch.ones(1, 4)))),
    "a unit of a whole model": lambda: Whole("unit"),
    "the forward of a whole model": lambda: Whole("frame"),
}


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 4), torch.randn(8, 4)


def pipeline(model: nn.Module, schedule: str = "1f1b", **options: Any) -> sl.Pipeline:
    if not isinstance(model, nn.Sequential):
        options["example"] = batch()[0]
    return sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, ranks=2, microbatches=4, **options)


@pytest.mark.parametrize("how", READERS)
def test_a_layer_that_reads_another_stages_parameter_is_refused_at_the_first_step(how: str) -> None:
    pipe = pipeline(READERS[how]())
    name = "first.weight" if "whole" in how else r"0\.weight"
    reader = "the forward of the model, on stage 1" if "forward" in how else r"layer \w+ of stage 1"
    with pytest.raises(sl.PipelineError, match=f"{reader} reads the parameter {name}.* of stage 0 through a plain"):
        pipe.step(*batch())


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_every_family_refuses_it(schedule: str) -> None:
    with pytest.raises(sl.PipelineError, match=r"layer 3 of stage . reads the parameter 0\.weight of stage 0"):
        pipeline(chain(Head), schedule).step(*batch())


def test_recomputed_stages_refuse_it() -> None:
    with pytest.raises(sl.PipelineError, match=r"layer 3 of stage 1 reads the parameter 0\.weight of stage 0"):
        pipeline(chain(Head), recompute="stage").step(*batch())


def parent_of(first: nn.Linear) -> nn.Module:
    layer = Reader(lambda: torch.zeros(1))
    layer.__dict__["parent"] = [first]
    return layer


HARMLESS: dict[str, Make] = {
    "a reference that is not read": lambda: chain(parent_of),
    "a shape": lambda: chain(lambda first: Reader(lambda: torch.ones(first.weight.shape))),
    "a type": lambda: chain(lambda first: Reader(lambda: torch.ones(2, dtype=first.weight.dtype))),
}


@pytest.mark.parametrize("how", HARMLESS)
def test_references_that_do_no_harm_give_the_bits_of_the_loop(how: str) -> None:
    model, plain = HARMLESS[how](), HARMLESS[how]()
    x, y = batch()
    pipeline(model).step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))


def test_a_layer_that_registers_what_it_also_refers_to_is_tied() -> None:
    model, plain = chain(Registered), chain(Registered)
    x, y = batch()
    pipeline(model).step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 4)
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_threads_may_read_what_nobody_trains() -> None:
    model, plain = chain(Head), chain(Head)
    x, y = batch()
    for network in (model, plain):
        network[0].requires_grad_(False)
    pipeline(model).step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))
    assert pipeline(chain(Head)).predict(x).shape == y.shape


def train_on_processes(_rank: int) -> list[str]:
    texts = []
    for how in ("a module in a list", "detached", "a unit of a whole model"):
        try:
            pipeline(READERS[how]()).step(*batch())
            texts.append("")
        except sl.PipelineError as error:
            texts.append(str(error))
    return texts


def test_processes_refuse_it_on_all_ranks() -> None:
    for texts in run_ranks(train_on_processes, 2):
        assert all("of stage 1 reads the parameter" in text for text in texts), texts
