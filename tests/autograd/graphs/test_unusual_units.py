"""Compiled units that are hard to capture or to cut: they are right, and what falls back says so once."""

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
from stageline.autograd.graphs.backend import GraphBackend
from stageline.testing import assert_same_bits, one_process_step
from support.gradients import gradients
from support.pipelines import batch

pytestmark = pytest.mark.filterwarnings("ignore:::torch")


class TransposedNorm(nn.Module):
    """The kernel of this norm's backward returns other strides than tracing assumes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.norm(self.inside(x).transpose(1, 2)).transpose(1, 2))


class ChannelsLast(nn.Module):
    """The kernel of this norm's backward crashes if the gradient of its input is not wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inside = nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        image = x[..., None, :].transpose(1, 3).contiguous(memory_format=torch.channels_last)
        return self.inside(x + self.norm(image).transpose(1, 3)[..., 0, :])  # type: ignore[no-any-return]


class ComplexWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + (self.inside(x).to(torch.complex64) @ self.weight).abs())


class UnusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return torch.as_tensor(x + self.inside(x))


class NoGradientOfData(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * 2, torch.ones(8)


class ConstantGradient(nn.Module):
    """The gradient of its weight needs nothing of I."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return NoGradientOfData.apply(x, self.weight) + 0  # type: ignore[no-any-return, no-untyped-call]


UNITS: list[Callable[[], nn.Module]] = [TransposedNorm, ChannelsLast, ComplexWeight, UnusedLayer, ConstantGradient]


@pytest.mark.parametrize("unit", UNITS)
def test_unusual_units_are_split_and_have_the_bits_of_autograd(unit: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(unit() for _ in range(4)))
    plain = copy.deepcopy(model)
    x, y = batch(8)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=4, compile="graphs")
    for _ in range(3):  # what is compiled in the second step is not split there
        pipe.zero_grad()
        plain.zero_grad()
        pipe.step(x, y)
        one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert 0 in [pipe.step(x, y).unsplit for _ in range(6)]  # not in a step that compiles


class Indexed(nn.Module):
    """Torch compiles the forward once for every index, and once for every width."""

    def __init__(self, index: int, width: int) -> None:
        super().__init__()
        self.index, self.up, self.down = index, nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.down(self.up(x).tanh()) / (self.index + 1))


@pytest.mark.parametrize("widths", [[4] * 10, list(range(1, 11))], ids=["equal", "different"])
def test_units_of_more_forms_than_torch_compiles_are_all_compiled(
    widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []
    monkeypatch.setattr(GraphBackend, "add", lambda backend, halves: graphs.append(halves))
    model = nn.Sequential(*(Indexed(index, width) for index, width in enumerate(widths)))
    options: Any = {"schedule": "zb-h1", "ranks": 1, "microbatches": 1, "compile": "graphs"}
    with torch._dynamo.config.patch(recompile_limit=8):
        sl.Pipeline(model, loss_fn=functional.mse_loss, **options).step(*batch(2))
    assert len(graphs) == len(widths) - 1  # the first has no gradient of an input


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("no such backend", "Invalid backend: 'no such backend'"),
        ({"fast": True}, "unexpected keyword argument 'fast'"),
        ({"mode": "fast"}, "Unrecognized mode=fast"),
        ({"options": {"fast": True}}, "Unexpected optimization option fast"),
        ({"backend": "graphs", "fast": True}, "unexpected keyword argument 'fast'"),
    ],
)
def test_what_torch_compile_does_not_take_is_refused_at_once(option: Any, reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(sl.StagelineError, match=f"is not accepted by torch.compile: .*{reason}"):
        sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=1, microbatches=1, compile=option)


class Refused(nn.Module):
    """AOTAutograd cannot trace an operator whose result depends on data; Dynamo can capture it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + torch.ops.stageline_tests.turned(self.inside(x)))


@torch.library.custom_op("stageline_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.clone() if float(x.sum()) > 0 else -x


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _gradient(context: Any, grad: Tensor) -> Tensor:
    return grad if float(grad.sum()) > 0 else -grad


turned.register_autograd(_gradient)


def test_a_unit_that_cannot_be_compiled_says_so_once_and_runs_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Refused() for _ in range(4)))
    plain = copy.deepcopy(model)
    x, y = batch(4)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=2, compile="graphs")
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        pipe.step(x, y)
        one_process_step(plain, functional.mse_loss, x, y, 2)
    assert_same_bits(gradients(model), gradients(plain))
    texts = {str(warning.message) for warning in messages}
    (message,) = {text for text in texts if not text.startswith("Guards may run slower on Python 3.13.0")}
    assert "test_unusual_units.py" in message
    assert "runs without compilation: torch failed with DataDependentOutputException" in message
    assert "_dynamo" not in capfd.readouterr().err


def test_what_dynamo_asks_of_a_backend_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import SkipFrame

    def skip(*arguments: Any) -> Any:
        raise SkipFrame("as a backend may")

    monkeypatch.setattr(GraphBackend, "_compiled", skip)
    with pytest.raises(SkipFrame):
        GraphBackend("graphs", pytest.fail)(torch.fx.symbolic_trace(nn.Linear(2, 2)), [])
