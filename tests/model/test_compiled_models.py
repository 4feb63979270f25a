"""Models that torch.compile wrapped or compiled."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body: Any = Body()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_twice(module: nn.Module) -> Any:
    return compiled(compiled(module))


def sequential() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4)))


def wrapped_blocks(model: Any) -> Any:
    blocks = model.body.blocks if isinstance(model, Model) else model
    for index in range(4):
        blocks[index] = compiled(blocks[index])
    return model


def wrapped_body(model: Any) -> Any:
    model.body = compiled(model.body)
    return model


def blocks_in_place(model: Any) -> Any:
    for block in model.body.blocks if isinstance(model, Model) else model:
        block.compile(backend="eager")
    return model


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


CASES: list[tuple[Callable[[], nn.Module], Callable[[Any], Any], bool]] = [
    (Model, compiled, True),
    (Model, compiled_twice, True),
    (sequential, compiled_twice, True),
    (Model, wrapped_blocks, True),
    (Model, wrapped_body, True),
    (Model, in_place, False),
    (Model, blocks_in_place, False),
    (sequential, compiled, True),
    (sequential, wrapped_blocks, False),
    (sequential, in_place, False),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "how", "warns"), CASES)
def test_a_compiled_model_is_cut_as_the_one_inside_of_it(make: Any, how: Any, warns: bool) -> None:
    torch.manual_seed(0)
    model = make()
    alone, compiled = copy.deepcopy(model), how(model)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    for some, wanted in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
        (functional.mse_loss(alone(some), wanted) / 4).backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = sl.Pipeline(compiled, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=4)
    assert any("pass compile=True to Pipeline" in str(warning.message) for warning in caught) == warns
    pipe.step(inputs, targets)
    grads = {name.replace("_orig_mod.", ""): grad for name, grad in pipe.named_gradients()}
    assert_same_bits(grads, expected)
    assert set(pipe.state_dict()) == set(model.state_dict())
    assert len(sl.split(compiled, stages=2)) == 2
    assert len(sl.profile(compiled, inputs[:2], repeats=1, warmup=0).layers) == len(sl.split(compiled, stages=2).units)
    assert sl.check(compiled, (inputs, targets), ranks=2, loss_fn=functional.mse_loss).equal


@pytest.mark.filterwarnings("ignore")
def test_second_copies_of_a_stage_run_wrapped_parts_of_their_own() -> None:
    torch.manual_seed(0)
    model = wrapped_body(Model())
    alone = copy.deepcopy(model)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    for some, wanted in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
        (functional.mse_loss(alone(some), wanted) / 4).backward()  # type: ignore[no-untyped-call]
    sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="chimera", ranks=2, microbatches=4).step(inputs, targets)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.filterwarnings("ignore")
def test_a_function_may_build_a_compiled_model() -> None:
    pipe = sl.Pipeline(lambda: compiled(Model()), loss_fn=functional.mse_loss, ranks=2, microbatches=2, seed=1)
    pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    assert set(pipe.state_dict()) == set(Model().state_dict())
