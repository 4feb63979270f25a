"""Gradients of weights that are used transposed, as complex numbers or through a function of themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.pipelines import assert_steps_equal_loop

BOTH = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


class Turned(nn.Module):
    """A weight that is used transposed, without a product."""

    def __init__(self, how: str, rows: int = 4, columns: int = 4) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(columns, rows))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.t() if self.how == "add" else x * self.weight.t()


@BOTH
@pytest.mark.parametrize("how", ["add", "mul"])
@pytest.mark.parametrize("rows", [4, 1])
def test_a_transposed_weight_that_is_added_or_multiplied(schedule: str, how: str, rows: int) -> None:
    """Its gradient shared memory with the one that went to the stage before, or had the wrong shape."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    assert_steps_equal_loop(lambda: [nn.Linear(4, 4), Turned(how, rows), Turned(how, rows)], x, y, schedule=schedule)


class Rotary(nn.Module):
    """A real weight that is used as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(self.weight))


@BOTH
def test_a_real_weight_used_as_complex_numbers(schedule: str) -> None:
    """By hand, its gradient lacked the conjugate."""
    assert_steps_equal_loop(lambda: [Rotary(), Rotary()], torch.randn(8, 4, 2), torch.randn(8, 4, 2), schedule=schedule)


class Twice(nn.Module):
    """A weight that is used as it is and through a function of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x @ self.weight, self.weight @ self.weight.t())


@BOTH
def test_a_weight_that_is_used_through_a_function_of_itself(schedule: str) -> None:
    """Its parts were added in a different order from autograd's."""
    assert_steps_equal_loop(
        lambda: [nn.Linear(8, 8), Twice(), Twice()], torch.randn(6, 8), torch.randn(6, 8), schedule=schedule
    )
