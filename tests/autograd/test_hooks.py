"""Hooks on tensors, nodes, modules and parameters run once for every microbatch, as in one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.autograd.engine import registered_hooks
from stageline.autograd.split_backward import SplitBackward
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients

FAMILIES = ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-zb", "dualpipe", "dualpipe-v", "chimera"]
MICROBATCHES = 8
CALLS: Counter[str] = Counter()


def times(grads: Any, factor: int) -> tuple[Tensor | None, ...]:
    return tuple(grad if grad is None else grad * factor for grad in grads)


class Hooked(nn.Module):
    """A layer whose forward registers hooks on its tensors."""

    def __init__(self, layer: nn.Module, where: str) -> None:
        super().__init__()
        self.layer, self.where = layer, where
        self.retained: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "input" and x.requires_grad:
            x.register_hook(self.times(7))  # type: ignore[no-untyped-call]
        y: Any = self.layer(x)
        if not torch.is_grad_enabled():
            return torch.tanh(y)
        if self.where == "output":
            y.register_hook(self.times(5))
        elif self.where == "silent":
            y.register_hook(lambda grad: CALLS.update(["silent"]))
        elif self.where == "node":
            y.grad_fn.register_hook(lambda grads, _: times(grads, 3))
        elif self.where == "prehook":
            y.grad_fn.register_prehook(lambda grads: times(grads, 3))
        elif self.where == "retained":
            y.retain_grad()
            self.retained.append(y)
        return torch.tanh(y)

    def times(self, factor: int) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            CALLS.update([self.where])
            return grad * factor

        return hook


def layers(where: str) -> nn.Sequential:
    torch.manual_seed(0)
    kinds: list[nn.Module] = [nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)]
    return nn.Sequential(*(Hooked(layer, where) for layer in kinds))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * MICROBATCHES, 8), torch.randn(2 * MICROBATCHES, 8)


def reference(model: nn.Module, schedule: sl.Schedule) -> None:
    directions = schedule.placement.direction.tolist() if schedule.placement.directions > 1 else None
    one_process_step(model, functional.mse_loss, *batch(), MICROBATCHES, directions=directions)


def compare(model: nn.Module, schedule: str, **options: Any) -> sl.Pipeline:
    """Make a step, and the same in one process; every hook is called as often, and gradients are the same."""
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule=schedule, microbatches=MICROBATCHES, ranks=2, **options
    )
    CALLS.clear()
    pipe.step(*batch())
    calls = Counter(CALLS)
    CALLS.clear()
    reference(plain, pipe.schedule)
    assert calls == CALLS
    assert_same_bits(gradients(model), gradients(plain), f"gradients of {schedule}")
    return pipe


@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_on_tensors_and_nodes_act_once(name: str) -> None:
    for where in ("output", "input", "silent", "node", "prehook"):
        compare(layers(where), name)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
@pytest.mark.parametrize("recompute", ["stage", [nn.Linear, nn.RMSNorm], [Hooked]])
def test_what_is_recomputed_has_its_hooks_once(name: str, recompute: Any) -> None:
    for where in ("output", "input"):
        compare(layers(where), name, recompute=recompute)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", FAMILIES)
def test_full_backward_hooks_of_modules_act_once(name: str) -> None:
    model = layers("nowhere")
    for module in model:
        module.register_full_backward_pre_hook(lambda _, grads: times(grads, 3))
        module.register_full_backward_hook(lambda _, grads, __: times(grads, 5))
    compare(model, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_of_parameters_act_once_in_both_directions(name: str) -> None:
    model = layers("nowhere")
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: (CALLS.update(["parameter"]), grad * 5)[1])  # type: ignore[no-untyped-call]
    plain = copy.deepcopy(model)  # without the hooks
    for parameter in plain.parameters():
        parameter.register_hook(lambda grad: (CALLS.update(["parameter"]), grad * 5)[1])  # type: ignore[no-untyped-call]
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, microbatches=MICROBATCHES, ranks=2)
    CALLS.clear()
    for _ in range(2):
        pipe.step(*batch())
    calls = Counter(CALLS)
    CALLS.clear()
    for _ in range(2):
        reference(plain, pipe.schedule)
    assert calls == CALLS
    assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_hooks_on_the_nodes_in_which_gradients_gather_are_called(name: str) -> None:
    counts: Counter[str] = Counter()
    held = []
    models = [layers("nowhere"), layers("nowhere")]
    for model in models:
        for key, parameter in model.named_parameters():
            node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_prehook(lambda grads, key=key: (counts.update([key]), (grads[0] * 3,))[1])
            held.append(node)
    pipe = sl.Pipeline(models[0], loss_fn=functional.mse_loss, schedule=name, microbatches=MICROBATCHES, ranks=2)
    pipe.step(*batch())
    reference(models[1], pipe.schedule)
    assert set(counts.values()) == {2 * MICROBATCHES}
    assert_same_bits(gradients(models[0]), gradients(models[1]))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-zb"])
def test_retained_gradients_are_added_once(name: str) -> None:
    model = layers("retained")
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, microbatches=MICROBATCHES, ranks=2)
    assert pipe.step(*batch()).unsplit == 0.0
    reference(plain, pipe.schedule)
    for mine, other in zip(model.children(), plain.children(), strict=True):
        assert isinstance(mine, Hooked)
        assert isinstance(other, Hooked)
        for first, second in zip(mine.retained, other.retained, strict=True):
            assert torch.equal(torch.as_tensor(first.grad), torch.as_tensor(second.grad))


def test_only_what_may_have_hooks_is_not_split() -> None:
    for where, unsplit in (("nowhere", 0.0), ("output", 1.0), ("nowhere", 0.0)):
        pipe = sl.Pipeline(
            layers(where), loss_fn=functional.mse_loss, schedule="zb-h1", microbatches=MICROBATCHES, ranks=2
        )
        assert pipe.step(*batch()).unsplit == unsplit


def test_a_hook_in_some_microbatches_alone_changes_no_order() -> None:
    """Gradients that come with I are handed out with W, among those of the microbatches that are split."""

    class Sometimes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.requires_grad and float(x.detach().sum()) > 0:
                y.register_hook(lambda grad: grad * 5)  # type: ignore[no-untyped-call]
            return y

    for name in ("zb-h1", "zb-h2", "zb-v"):
        torch.manual_seed(0)
        compare(nn.Sequential(*(Sometimes(8, 8) for _ in range(4))), name)


def test_hooks_of_both_sides_of_a_cut_are_refused_where_their_order_counts() -> None:
    class Both(nn.Linear):
        changes = True

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 7 if self.changes else None)  # type: ignore[no-untyped-call]
            y = super().forward(x)
            y.register_hook(lambda grad: grad * 5)  # type: ignore[no-untyped-call]
            return y

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Both(8, 8) for _ in range(4)))

    for name in ("1f1b", "zb-h1", "zb-v"):
        with pytest.raises(
            sl.PipelineError, match=r"has a hook on its output, and stage . has a hook on the same tensor"
        ):
            compare(build(), name)
    Both.changes = False
    for name in ("1f1b", "zb-h1", "zb-v"):
        compare(build(), name)


def test_hooks_of_parameters_that_several_stages_use_are_refused() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        model[3].weight = model[0].weight
        return model

    model = tied()
    model[0].weight.register_hook(lambda grad: grad.clamp(-1, 1))  # type: ignore[operator]
    with pytest.raises(sl.StagelineError, match=r"the parameter 0\.weight has a hook and is used by stages 0, 1"):
        compare(model, "1f1b")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[0].weight.register_post_accumulate_grad_hook(print)  # type: ignore[operator]
    with pytest.raises(sl.StagelineError, match=r"the parameter 0\.weight has a hook and is used by two ranks"):
        compare(model, "chimera")


def on_processes(rank: int) -> float:
    """Compare steps of this rank with one process; return the share of the first that was not split."""
    shares = []
    for name in ("zb-h1", "zb-v"):
        for where, recompute in (("output", "none"), ("input", "stage"), ("node", "none")):
            model, plain = layers(where), layers(where)
            pipe = sl.Pipeline(
                model,
                loss_fn=functional.mse_loss,
                schedule=name,
                microbatches=MICROBATCHES,
                ranks=2,
                recompute=recompute,
            )
            stats = pipe.step(*batch())
            reference(plain, pipe.schedule)
            expected = gradients(plain)
            mine = dict(pipe.named_gradients())
            assert_same_bits(mine, {key: expected[key] for key in mine})
            shares.append(stats.unsplit)
    return shares[0]


def test_hooks_act_once_on_processes() -> None:
    assert run_ranks(on_processes, 2) == [1.0, 1.0]


def test_what_this_package_registers_is_not_counted() -> None:
    linear = nn.Linear(8, 8)
    x = torch.randn(3, 8, requires_grad=True)
    before = registered_hooks()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            output = linear(x)
        split = SplitBackward([output], [torch.ones_like(output)], [x])
        split.input_gradients()
        split.weight_gradients()
    assert registered_hooks() == before
