"""Inputs that require grad: leaves get `.grad`, and the graph of other inputs runs its backward once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients

FAMILIES = ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved", "interleaved-zb", "dualpipe", "chimera"]
MICROBATCHES = 8
SAMPLES = 2 * MICROBATCHES + 3


@dataclass
class Sample:
    """An input that is neither a tuple nor a dict."""

    state: Tensor
    tokens: Tensor


class Mixer(nn.Module):
    """A first layer that takes several tensors in a structure: floats, integers, a single number, one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: Any) -> Tensor:
        sample = batch["sample"]
        mixed = self.linear(sample.state) * batch["scale"] + self.embedding(sample.tokens)
        return torch.as_tensor(mixed + batch["more"][0])


def layers(first: Callable[[], nn.Module] = lambda: nn.Linear(8, 8), frozen: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(first(), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    return model


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 8)


def structure() -> dict[str, Any]:
    torch.manual_seed(2)
    sample = Sample(torch.randn(SAMPLES, 8, requires_grad=True), torch.randint(0, 5, (SAMPLES,)))
    more = (torch.randn(SAMPLES, 8, requires_grad=True), torch.randn(SAMPLES, requires_grad=True))
    return {"sample": sample, "scale": torch.tensor(1.5, requires_grad=True), "more": more}


def of_inputs(tree: Any) -> dict[str, Tensor | None]:
    return {str(index): leaf.grad for index, leaf in enumerate(pytree.tree_leaves(tree)) if isinstance(leaf, Tensor)}


def pipeline(model: nn.Module, name: str, **options: Any) -> sl.Pipeline:
    return sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, microbatches=MICROBATCHES, ranks=2, **options)


def loop(model: nn.Module, pipe: sl.Pipeline, inputs: Any, targets: Tensor) -> None:
    placement = pipe.schedule.placement
    directions = placement.direction.tolist() if placement.directions > 1 else None
    one_process_step(model, functional.mse_loss, inputs, targets, MICROBATCHES, directions=directions)


@pytest.mark.parametrize("name", FAMILIES)
def test_leaves_get_their_gradients_and_add_them_up(name: str) -> None:
    for frozen in (0, 3):
        model, plain = layers(frozen=frozen), layers(frozen=frozen)
        x, y = data()
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        pipe = pipeline(model, name)
        for _ in range(2):
            pipe.step(mine, y)
            loop(plain, pipe, other, y)
        assert mine.grad is not None
        assert_same_bits({"x": mine.grad, **gradients(model)}, {"x": other.grad, **gradients(plain)})


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
@pytest.mark.parametrize("recompute", ["none", "stage", [nn.Linear]])
def test_inputs_of_any_structure(name: str, recompute: Any) -> None:
    model, plain = layers(Mixer), layers(Mixer)
    pipe = pipeline(model, name, recompute=recompute)
    mine, other = structure(), structure()
    pipe.step(mine, data()[1])
    if pipe.schedule.placement.directions == 1:
        loop(plain, pipe, other, data()[1])
    else:  # the gradient of a number shared by all microbatches is summed in their order
        one_process_step(plain, functional.mse_loss, other, data()[1], MICROBATCHES)
    first, second = of_inputs(mine), of_inputs(other)
    assert [grad is None for grad in first.values()] == [False, True, False, False, True]
    assert_same_bits(first, second)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_of_inputs_runs_once(name: str) -> None:
    model, plain, front, other = layers(), layers(), layers(), layers()
    x, y = data()
    calls: list[int] = []
    pipe = pipeline(model, name)
    for step in range(2):
        inputs = front(x)
        inputs.register_hook(lambda grad: calls.append(1))
        pipe.step(inputs, y)
        leaf = other(x).detach().requires_grad_()
        loop(plain, pipe, leaf, y)
        other(x).backward(leaf.grad)
        assert len(calls) == step + 1
    assert all(grad is not None for grad in gradients(front).values())
    assert_same_bits(gradients(front), gradients(other))
    assert_same_bits(gradients(model), gradients(plain))


def test_leaves_and_graphs_together() -> None:
    model, front = layers(lambda: Mixer()), nn.Linear(8, 8)
    tree = structure()
    tree["more"] = (front(tree["more"][0]), tree["more"][1])
    pipeline(model, "zb-h1").step(tree, data()[1])
    assert tree["sample"].state.grad is not None
    assert tree["scale"].grad is not None
    assert front.weight.grad is not None


def test_a_frozen_model_learns_its_input() -> None:
    """As in one process: the loss has a graph through the input alone."""
    for name in ("1f1b", "zb-h1", "zb-v"):
        model, plain = layers(frozen=6), layers(frozen=6)
        x, y = data()
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        pipe = pipeline(model, name)
        pipe.step(mine, y, scale=4.0)
        loop(plain, pipe, other, y)
        assert_same_bits({"x": mine.grad}, {"x": torch.as_tensor(other.grad) * 4})


def test_hooks_of_the_inputs_and_of_what_the_first_stage_makes_of_them() -> None:
    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x.register_hook(lambda grad: grad * 3)  # type: ignore[no-untyped-call]
            return super().forward(x)

    def counted(grad: Tensor) -> Tensor:
        calls.append(1)
        return grad * 5

    calls: list[int] = []
    for name in ("1f1b", "zb-h1"):
        model, plain = layers(lambda: Hooked(8, 8)), layers(lambda: Hooked(8, 8))
        x, y = data()
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        for leaf in (mine, other):
            leaf.register_hook(counted)  # type: ignore[no-untyped-call]
        pipe = pipeline(model, name)
        pipe.step(mine, y)
        assert len(calls) == MICROBATCHES
        loop(plain, pipe, other, y)
        calls.clear()
        assert_same_bits({"x": mine.grad, **gradients(model)}, {"x": other.grad, **gradients(plain)})


def test_whole_models_pass_inputs_on_to_later_stages() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            value = x
            for layer in self.layers:
                value = torch.tanh(layer(value)) + x
            return value

    for name in ("1f1b", "zb-h1", "zb-v"):
        torch.manual_seed(0)
        model = Whole()
        torch.manual_seed(0)
        plain = Whole()
        x, y = data()
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        pipe = pipeline(model, name, example=x[:2])
        pipe.step(mine, y)
        loop(plain, pipe, other, y)
        torch.testing.assert_close(mine.grad, other.grad)
        assert mine.grad is not None


def test_without_training_inputs_get_no_gradient() -> None:
    pipe = pipeline(layers(), "zb-h1")
    x, y = data()
    leaf = x.clone().requires_grad_()
    pipe.evaluate(leaf, y)
    assert not pipe.predict(leaf).requires_grad
    assert leaf.grad is None
    with torch.no_grad():
        pipe.step(leaf, y)
    assert leaf.grad is not None


def test_a_failed_step_leaves_inputs_alone() -> None:
    pipe = pipeline(layers(), "1f1b")
    x, y = data()
    leaf = x.clone().requires_grad_()
    y[-1] = float("nan")
    with pytest.raises(sl.PipelineError):
        pipe.step(leaf, y)
    assert leaf.grad is None


def test_what_cannot_be_computed_is_refused() -> None:
    class Keyed(nn.Linear):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return super().forward(x) if shift is None else super().forward(x) + shift

    model = nn.Sequential(*(Keyed(8, 8) for _ in range(4)))
    pipe = pipeline(model, "zb-h1")
    x, y = data()
    shift = torch.randn(SAMPLES, 8, requires_grad=True)
    with pytest.raises(sl.StagelineError, match=r"\['all'\]\['shift'\] requires grad and goes to several"):
        pipe.step(x, y, stage_kwargs={"all": {"shift": shift}})
    with pytest.raises(sl.StagelineError, match=r"\[0\]\['shift'\] and .*\[1\]\['shift'\] requires grad"):
        pipe.step(x, y, stage_kwargs={0: {"shift": shift}, 1: {"shift": shift}})
    with pytest.raises(sl.StagelineError, match=r"requires grad and comes from a graph"):
        pipe.step(x, y, stage_kwargs={1: {"shift": shift * 2}})
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with pytest.raises(sl.StagelineError, match="the inputs require grad, but a run reads"):
        list(pipe.run([(shift, y)], optimizer=optimizer))


def on_processes(rank: int) -> list[bool]:
    """Compare with one process where stage 0 is; return for each step whether this process got gradients."""
    got = []
    for name in ("1f1b", "zb-h1", "zb-v", "chimera", "dualpipe"):
        model, plain, front, other = layers(), layers(), layers(), layers()
        pipe = pipeline(model, name)
        x, y = data()
        mine, leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
        pipe.step(mine, y)
        loop(plain, pipe, leaf, y)
        pipe.step(front(x), y)
        between = other(x).detach().requires_grad_()
        loop(plain, pipe, between, y)
        other(x).backward(between.grad)
        here = rank in pipe.schedule.placement.table[:, 0].tolist()
        got.append(mine.grad is not None)
        if here:
            assert_same_bits({"x": mine.grad, **gradients(front)}, {"x": leaf.grad, **gradients(other)})
        else:
            assert all(grad is None for grad in gradients(front).values())
        own = dict(pipe.named_gradients())
        expected = gradients(plain)
        assert_same_bits(own, {key: expected[key] for key in own})
    pipe = pipeline(layers(), "chimera")
    x, y = data()
    with pytest.raises(sl.PipelineError, match="both run stage 0, and only one of them received inputs that require"):
        pipe.step(x.requires_grad_(rank == 0), y)
    replicated = sl.Pipeline(
        layers(), loss_fn=functional.mse_loss, schedule="zb-h1", microbatches=4, ranks=1, replicas=2
    )
    leaf = x.detach().requires_grad_()
    replicated.step(leaf, y)
    assert leaf.grad is not None
    with pytest.raises(sl.StagelineError, match="come from a graph, but with 2 replicas"):
        replicated.step(leaf * 2, y)
    return got


def test_processes_that_hold_the_first_stage_give_gradients() -> None:
    assert run_ranks(on_processes, 2, timeout=120) == [[True] * 5, [False, False, False, True, True]]
