"""The backward in two halves: every product once, in the half where it belongs, with the bits of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.runtime.split import SplitBackward
from stageline.testing import assert_same_bits


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def products(self) -> int:
        return sum(
            count for name, count in self.counts.items() if name in ("mm", "addmm", "bmm", "convolution_backward")
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x).chunk(3, dim=-1)
        return torch.as_tensor(self.out(torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v))


class Scale(nn.Module):
    """A bare parameter, and one that only an added constant depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.exp(self.shift) * 0.1


class Shared(nn.Module):
    """One linear layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(torch.tanh(self.linear(x))))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Custom.calls += 1
        return 2 * x * weight * grads[0], (x * x * grads[0]).sum(dim=(0, 1))


class Custom(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(Square.apply(x, self.weight))  # type: ignore[no-untyped-call]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.norm = nn.GroupNorm(1, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(self.conv(x)))


MODULES: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), 0.0),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)), 0.0),
    "attention": (Attention, 0.0),
    "bare parameters": (Scale, 0.0),
    "convolution": (Convolution, 0.0),
    "a layer used twice": (Shared, 1.0),
    "a custom function": (Custom, 1.0),
    "no parameters": (nn.Tanh, 0.0),
    "all together": (
        lambda: nn.Sequential(nn.Linear(8, 8), Attention(), Scale(), Convolution(), Custom(), Shared()),
        (8 + 72) / (72 + 216 + 64 + 16 + 90 + 8 + 72),
    ),
}


def both_ways(
    build: Callable[[], nn.Module],
) -> tuple[nn.Module, nn.Module, SplitBackward, Tensor, Tensor, Count, Count, Count]:
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(0)
    plain = build()
    x = torch.randn(4, 5, 8)
    grad = torch.randn(4, 5, 8)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with Count() as whole:
        output = plain(other)
        whole.counts.clear()
        output.backward(grad)
    output = model(mine)
    split = SplitBackward([output], [grad], [mine])
    with Count() as first:
        (found,) = split.input_gradients()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(value is None for value in before.values()), "I leaves every parameter alone"
    with Count() as second:
        split.weight_gradients()
    assert found is not None
    assert other.grad is not None
    return model, plain, split, found, other.grad, whole, first, second


@pytest.mark.parametrize("name", MODULES)
def test_the_halves_give_the_bits_of_the_whole(name: str) -> None:
    build, unsplit = MODULES[name]
    model, plain, split, found, expected, _, _, _ = both_ways(build)
    assert torch.equal(found, expected)
    assert_same_bits(
        {key: parameter.grad for key, parameter in model.named_parameters()},
        {key: parameter.grad for key, parameter in plain.named_parameters()},
    )
    share = split.unsplit / split.total if split.total else 0.0
    assert share == pytest.approx(unsplit, abs=0.02)


@pytest.mark.parametrize("name", ["linear", "norm", "attention", "a layer used twice"])
def test_every_matrix_product_runs_once_and_in_its_own_half(name: str) -> None:
    build, unsplit = MODULES[name]
    model, _, _, _, _, whole, first, second = both_ways(build)
    assert first.products() + second.products() == whole.products()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if unsplit == 0:
        assert second.products() == len(linears), "W runs the products of weight gradients and no others"


def test_a_custom_function_runs_its_backward_once() -> None:
    Custom.calls = 0
    both_ways(Custom)
    assert Custom.calls == 2  # once in the plain model, once here


def test_nothing_to_pass_back_leaves_all_to_the_weights() -> None:
    """The first stage: its input wants no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    plain = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    plain.load_state_dict(model.state_dict())
    tokens, grad = torch.randint(0, 10, (3, 4)), torch.randn(3, 4, 8)
    plain(tokens).backward(grad)
    split = SplitBackward([model(tokens)], [grad], [])
    with Count() as first:
        assert split.input_gradients() == []
    assert first.products() == 0
    split.weight_gradients()
    assert_same_bits(
        {key: parameter.grad for key, parameter in model.named_parameters()},
        {key: parameter.grad for key, parameter in plain.named_parameters()},
    )


def test_outputs_of_several_kinds() -> None:
    """One output depends on input and weights, one on weights alone, one on the input alone, one gets no gradient."""
    torch.manual_seed(0)
    weight: Any = torch.randn(8, 8, requires_grad=True)
    other: Any = torch.randn(8, requires_grad=True)
    x = torch.randn(3, 8, requires_grad=True)

    def outputs() -> list[Tensor]:
        return [functional.linear(x, weight), other * 2, x * 3]

    grads = [torch.randn(3, 8), torch.randn(8), torch.randn(3, 8)]
    expected = torch.autograd.grad(outputs(), [x, weight, other], grads)
    split = SplitBackward(outputs(), grads, [x])
    (found,) = split.input_gradients()
    assert found is not None
    assert torch.equal(found, expected[0])
    assert weight.grad is None
    assert other.grad is None
    split.weight_gradients()
    assert_same_bits({"weight": weight.grad, "other": other.grad}, {"weight": expected[1], "other": expected[2]})
