"""Compiled units in a pipeline: split where the schedule splits, and equal to the same units in one process."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import stageline as sl
from stageline.autograd.graphs import backend
from stageline.autograd.graphs.backend import GraphBackend
from stageline.autograd.graphs.backward import compiled_backward
from stageline.autograd.split_backward import SplitBackward
from stageline.runtime.setup.model_stages import compile_units
from stageline.testing import assert_same_bits, one_process_step
from support.gradients import gradients
from support.pipelines import Block, batch, blocks, tied_model

pytestmark = [pytest.mark.filterwarnings("ignore:::torch"), pytest.mark.filterwarnings("ignore:The .grad attribute")]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.inside, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inside(self.norm(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.as_tensor(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))


class Convolution(nn.Module):
    """A convolution and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.norm(self.convolution(x)))


class Pair(nn.Module):
    """Takes and returns two tensors, and scales one by a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return x + functional.silu(self.linear(y)), y * self.scale


class Enter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.as_tensor(self.linear(pair[0] * pair[1]))


class Broken(nn.Module):
    """Has a graph break between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return torch.as_tensor(x + self.second(functional.gelu(y)))


def frozen() -> nn.Sequential:
    model = nn.Sequential(*(Block() for _ in range(4)))
    for parameter in (*model[0].up.parameters(), *model[2].parameters()):  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (lambda: nn.Sequential(*(Attention() for _ in range(4))), (6, 5, 8)),
    "convolution": (lambda: nn.Sequential(*(Convolution() for _ in range(4))), (6, 4, 8)),
    "pairs": (lambda: nn.Sequential(Enter(), Pair(), Pair(), Leave()), (6, 8)),
    "graph breaks": (lambda: nn.Sequential(*(Broken() for _ in range(4))), (6, 8)),
    "frozen": (frozen, (6, 8)),
}


def unsplit_in_steps(pipe: sl.Pipeline, x: Tensor, y: Tensor) -> list[float]:
    """Steps in which something is compiled are not split; what is compiled in which step depends on the threads."""
    return [pipe.step(x, y).unsplit for _ in range(6)]


def assert_as_in_one_process(pipe: sl.Pipeline, plain: nn.Module, model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Run three steps of both; the plain model is compiled where the units of the pipeline are."""
    for _ in range(3):
        pipe.zero_grad()
        plain.zero_grad()
        stats = pipe.step(x, y)
        loss = one_process_step(plain, functional.mse_loss, x, y, pipe.schedule.microbatches)
        assert stats.loss == loss
    assert_same_bits(gradients(model), gradients(plain))
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    return stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "attention"])
def test_plain_graphs_have_the_bits_of_autograd(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    plain = copy.deepcopy(model)
    x, y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=3, compile="graphs")
    assert_as_in_one_process(pipe, plain, model, x, y)
    assert 0 in unsplit_in_steps(pipe, x, y)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_dropout_draws_the_numbers_of_a_pipeline_that_is_not_compiled(recompute: str) -> None:
    make, shape = MODELS["attention"]
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    x, y = torch.randn(shape), torch.randn(shape)
    losses = []
    for part, compile_ in ((model, "graphs"), (eager, False)):
        pipe = sl.Pipeline(
            part, loss_fn=functional.mse_loss, schedule="zb-v", ranks=2, microbatches=3, compile=compile_,
            recompute=recompute, seed=5,
        )  # fmt: skip
        losses.append([pipe.step(x, y).loss for _ in range(2)])
    assert losses[0] == losses[1]
    assert_same_bits(gradients(model), gradients(eager))


@pytest.mark.parametrize("family", ["1f1b", "interleaved-zb", "zb-v", "dualpipe", "hanayo"])
def test_families_of_every_kind_run_plain_graphs(family: str) -> None:
    model = blocks(8)
    plain = copy.deepcopy(model)
    x, y = batch(8)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=family, ranks=2, microbatches=4, compile="graphs")
    pipe.step(x, y)
    directions: Any = pipe.schedule.placement.direction
    one_process_step(plain, functional.mse_loss, x, y, 4, directions=directions)
    assert_same_bits(gradients(model), gradients(plain))
    assert 0 in unsplit_in_steps(pipe, x, y)


def test_tied_weights_have_the_bits_of_a_pipeline_that_is_not_compiled() -> None:
    tokens, target = torch.randint(11, (6, 3)), torch.randn(6, 3, 11)
    models: dict[str | bool, Any] = {"graphs": tied_model(), False: tied_model()}
    for compile_, model in models.items():
        pipe = sl.Pipeline(
            model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=3, compile=compile_
        )
        pipe.step(tokens, target)
    assert_same_bits(gradients(models["graphs"]), gradients(models[False]))


def test_hooks_on_parameters_fire_once_per_microbatch() -> None:
    model = blocks(4)
    counts = [0, 0]

    def count(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[index] += 1

        return hook

    model[3].up.weight.register_hook(count(0))
    model[3].up.bias.register_post_accumulate_grad_hook(count(1))
    plain = copy.deepcopy(model)
    x, y = batch()
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=4, compile="graphs")
    pipe.step(x, y)
    assert counts == [4, 4]
    one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))


def test_a_new_shape_is_compiled_again() -> None:
    model = blocks(4)
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=2, compile="graphs")
    for samples in (4, 8, 6, 5):
        x, y = batch(samples)
        pipe.step(x, y)
        one_process_step(plain, functional.mse_loss, x, y, 2)
        assert_same_bits(gradients(model), gradients(plain))
    assert 0 in unsplit_in_steps(pipe, x, y)


class OwnStrides(nn.Module):
    """Inductor's forward saves the values between these convolutions with other strides than were traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.second(self.first(x).relu()).tanh())


@needs_compiler
@pytest.mark.timeout(300)
def test_halves_take_the_strides_of_a_forward_of_inductor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OwnStrides(), OwnStrides())
    plain = copy.deepcopy(model)
    compile_units([plain], True, split=True)
    x, y = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=1, microbatches=2, compile=True)
    pipe.step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 2)
    assert_same_bits(gradients(model), gradients(plain))


@needs_compiler
@pytest.mark.timeout(300)
def test_inductor_units_equal_the_same_units_in_one_process() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(4)))
    plain = copy.deepcopy(model)
    x, y = batch()
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=4, compile=True)
    compile_units([plain], True, split=True)
    assert_as_in_one_process(pipe, plain, model, x, y)
    assert 0 in unsplit_in_steps(pipe, x, y)


def units_of(compiler: Any, unit: nn.Module, x: Tensor) -> tuple[GraphBackend, Any]:
    graphs = GraphBackend(compiler)
    compiled: Any = torch.compile(unit, backend=graphs)
    return graphs, compiled(x)


@pytest.mark.parametrize("unit", [Block(), Attention(), Convolution()], ids=lambda unit: type(unit).__name__)
def test_no_product_is_computed_twice(unit: nn.Module) -> None:
    x = torch.randn(3, 4, 8, requires_grad=True)
    graphs, output = units_of("graphs", unit.eval(), x)
    assert compiled_backward(output.grad_fn) is not None
    (halves,) = graphs.units
    assert halves.kept_bytes > 0 < halves.saved_bytes
    split = SplitBackward([output], [torch.ones_like(output)], [x])
    whole = unit(x)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(whole, torch.ones_like(whole))
    with FlopCounterMode(display=False) as inputs:
        split.input_gradients()
    with FlopCounterMode(display=False) as weights:
        split.weight_gradients()
    assert inputs.get_total_flops() + weights.get_total_flops() == backward.get_total_flops()
    assert inputs.get_total_flops() > 0 < weights.get_total_flops()


def test_equal_units_are_compiled_once() -> None:
    layers = blocks(6)
    graphs = GraphBackend("graphs")
    x = torch.randn(2, 8, requires_grad=True)
    for layer in layers:
        layer.compile(backend=graphs)
        x = layer(x)
    torch.autograd.backward(x.sum())
    assert len(graphs.units) == 1


def test_only_what_w_needs_is_held_between_the_halves() -> None:
    unit = Block(64)
    x = torch.randn(32, 64, requires_grad=True)
    graphs, output = units_of("graphs", unit, x)
    split = SplitBackward([output], [torch.randn_like(output)], [x])
    (grad,) = split.input_gradients()
    assert grad is not None
    assert all(parameter.grad is None for parameter in unit.parameters())
    parameters = {parameter.untyped_storage().data_ptr() for parameter in unit.parameters()}
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for part in split.retained()
        for tensor in torch.utils._pytree.tree_leaves(part)
        if isinstance(tensor, Tensor)
    }
    total = sum(size for address, size in held.items() if address not in parameters)
    assert total <= graphs.units[0].kept_bytes
    split.weight_gradients()
    assert all(parameter.grad is not None for parameter in unit.parameters())


def test_another_backend_is_not_split_and_is_right() -> None:
    model = blocks(4)
    plain = copy.deepcopy(model)
    x, y = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = sl.Pipeline(
            model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=4, compile="aot_eager"
        )
        assert assert_as_in_one_process(pipe, plain, model, x, y).unsplit > 0


def test_a_profile_of_compiled_units_takes_the_residue_from_their_graphs() -> None:
    model = nn.Sequential(*(Block(16) for _ in range(3)))
    x = torch.randn(8, 16)
    measured = sl.profile(model, x, compile="graphs", repeats=1, warmup=1)
    compiler, _ = units_of("graphs", Block(16), x.requires_grad_())
    (halves,) = compiler.units
    assert [layer.residue for layer in measured.layers[1:]] == [halves.kept_bytes] * 2
    assert all(layer.backward_weight > 0 for layer in measured.layers)
    assert all(module.__dict__.get("_compiled_call_impl") is None for module in model.modules())


def test_a_unit_whose_backward_cannot_be_cut_says_so_and_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_obstacle", lambda *_: "its backward has effects beside gradients")
    model = blocks(4)
    plain = copy.deepcopy(model)
    x, y = batch(8)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=4, compile="graphs")
    with pytest.warns(UserWarning, match="test_compiled_units|pipelines.py.*effects beside gradients"):
        pipe.step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))
    assert pipe.step(x, y).unsplit > 0


def test_an_option_that_is_no_backend_is_refused() -> None:
    with pytest.raises(sl.StagelineError, match="compile is True, the name of a backend"):
        sl.Pipeline(blocks(2), loss_fn=functional.mse_loss, ranks=1, microbatches=1, compile=3)  # type: ignore[arg-type]
