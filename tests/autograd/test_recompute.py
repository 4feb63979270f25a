"""Recomputed activations: exactly once, for whole stages, chosen modules and chosen operators."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import stageline as sl
from stageline.runtime.microbatches import Batch
from stageline.testing import assert_same_bits, one_process_step
from support.gradients import gradients
from support.pipelines import Average, Block, batch, noisy


class Counting(Block):
    """Counts the runs of its forward."""

    runs: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        Counting.runs[self.name] += 1
        return super().forward(x)


def counting() -> Any:
    torch.manual_seed(8)
    Counting.runs.clear()
    return nn.Sequential(*(Counting(str(index)) for index in range(4)))


CHOICES: list[tuple[Any, set[str]]] = [
    ("stage", {"0", "1", "2", "3"}),
    ("*", {"0", "1", "2", "3"}),
    (Counting, {"0", "1", "2", "3"}),
    (["1", "3"], {"1", "3"}),
    (lambda name, module: name == "2", {"2"}),
]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-zb", "dualpipe-v", "chimera"])
@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_a_chosen_module_runs_once_more_and_no_more(name: str, choice: Any, expected: set[str]) -> None:
    """torch's zero-bubble schedules run a checkpointed block once for every linear layer in it."""
    model = counting()
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=2, microbatches=4, recompute=choice)
    stats = pipe.step(*batch())
    assert dict(Counting.runs) == {str(index): 8 if str(index) in expected else 4 for index in range(4)}
    directions = pipe.schedule.placement.direction.tolist() if name == "chimera" else None
    assert stats.loss == one_process_step(plain, functional.mse_loss, *batch(), microbatches=4, directions=directions)
    assert_same_bits(gradients(model), gradients(plain))
    assert stats.unsplit == 0


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("chosen_policy", [policy, [torch.ops.aten.addmm.default]])
def test_a_policy_says_which_operators_are_not_computed_again(name: str, chosen_policy: Any) -> None:
    def products(**options: Any) -> tuple[int, dict[str, Tensor | None]]:
        model = counting()
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, ranks=1, microbatches=2, **options)
        with Products() as counter:
            executors = pipe.runner.executors_for(2, True)
            request = pipe.runner.batches.request(executors, Batch(*batch(), training=True), 0, 10, 10)
            executors.executors[0].run(request)
        return counter.count, gradients(model)

    none, plain = products()
    some, mine = products(recompute_policy=chosen_policy)
    # Without a policy each block runs its first product again; its last one is not needed for any gradient.
    whole, all_again = products(recompute="*")
    assert (some, whole) == (none, none + 2 * 4)
    assert_same_bits(mine, plain)
    assert_same_bits(all_again, plain)
    assert Counting.runs["0"] == 4


def test_only_the_inputs_of_a_chosen_module_are_kept() -> None:
    """After a forward, none of its intermediate tensors are alive."""
    watched: list[Any] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            inside = torch.exp(self.linear(x))
            watched.append(weakref.ref(inside.untyped_storage()))
            return inside * inside

    model: Any = nn.Sequential(Watched(), nn.Linear(8, 8))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=1, microbatches=1, recompute="0")
    stage = pipe.runner.executors_for(1, True).executors[0].stages[0]
    output = stage.forward(0, 0, [torch.randn(2, 8)], "tensor", [False], True, {})
    gc.collect()
    assert watched[0]() is None
    del output
    stage.forget()


def test_a_recomputed_stage_does_not_keep_its_output() -> None:
    """Its backward starts from the recomputed output."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=1, recompute="stage")
    stage = pipe.runner.executors_for(1, True).executors[0].stages[0]
    output = stage.forward(0, 0, [torch.randn(2, 8)], "tensor", [False], True, {})
    memory = weakref.ref(torch.as_tensor(output.leaves[0]).untyped_storage())
    del output
    gc.collect()
    assert memory() is None
    stage.forget()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_recomputed_stage_frees_all_activations_of_its_first_step(microbatches: int) -> None:
    """Also those that a graph holds as its own outputs."""
    memory: list[Any] = []

    class Exponential(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            value = torch.exp(super().forward(x))
            memory.append(weakref.ref(value.untyped_storage()))
            return value * 2

    pipe = sl.Pipeline(
        nn.Sequential(Exponential(8, 8)), loss_fn=functional.mse_loss, schedule="1f1b", ranks=1,
        microbatches=microbatches, recompute="stage",
    )  # fmt: skip
    pipe.step(torch.randn(4, 8), torch.randn(4, 8))
    gc.collect()
    assert [reference() for reference in memory] == [None] * 2 * microbatches


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_dropout_inside_a_chosen_module_draws_the_same_again(name: str) -> None:
    results = []
    for recompute in ("none", ["*.dropout", "3"], "stage", "*"):
        model = noisy()
        options: dict[str, Any] = {"schedule": name, "ranks": 2, "microbatches": 4, "seed": 7}
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, recompute=recompute, **options)
        results.append((pipe.step(*batch()).losses, gradients(model)))
    for losses, grads in results[1:]:
        assert losses == results[0][0]
        assert_same_bits(grads, results[0][1])


def test_buffers_change_once_a_microbatch() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh())
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"schedule": "zb-h1", "ranks": 2, "microbatches": 4}
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, recompute=nn.BatchNorm1d, **options)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe.step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(dict(pipe.named_buffers()), dict(plain.named_buffers()))
    assert_same_bits(gradients(model), gradients(plain))


def test_outside_of_steps_a_chosen_module_is_as_before() -> None:
    model = counting()
    sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=4, recompute="*")
    torch.autograd.backward(model(batch()[0]).sum())
    assert set(Counting.runs.values()) == {1}


def test_a_module_that_does_not_do_the_same_twice_is_named() -> None:
    class Moody(Block):
        def forward(self, x: Tensor) -> Tensor:
            Counting.runs["moody"] += 1
            return super().forward(x) if Counting.runs["moody"] == 1 else x * 2

    Counting.runs.clear()
    model: Any = nn.Sequential(Block(), Moody())
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=1, recompute=Moody)
    with pytest.raises(sl.PipelineError, match=r"module 1 saved \d+ tensors in its forward and \d+ when"):
        pipe.step(*batch())


def test_a_module_that_raises_leaves_no_trace() -> None:
    class Fragile(Block):
        broken = True

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise ArithmeticError("planted")
            return super().forward(x)

    model: Any = nn.Sequential(Block(), Fragile())
    plain = copy.deepcopy(model)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-h1", ranks=2, microbatches=4, recompute="*")
    with pytest.raises(sl.PipelineError, match="planted"):
        pipe.step(*batch())
    model[1].broken = plain[1].broken = False
    pipe.zero_grad()
    pipe.step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(gradients(model), gradients(plain))


# Forwards that run a backward of their own.


class Energy(nn.Module):
    """It adds the gradient of a function of its input."""

    def __init__(self, create_graph: bool = False) -> None:
        super().__init__()
        self.inner, self.create_graph = nn.Linear(8, 8), create_graph

    def forward(self, x: Tensor) -> Tensor:
        point = x.detach().requires_grad_()
        energy = self.inner(point).pow(2).tanh().sum()
        (slope,) = torch.autograd.grad(energy, point, create_graph=self.create_graph)
        return torch.as_tensor((self.inner(x) + slope).tanh())


class EnergyLater(Energy):
    """It does so from its third forward on."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x) if self.forwards > 2 else self.inner(x)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("recompute", ["none", "stage", ["1", "2"]])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_backward_inside_of_a_forward_gives_the_bits_of_a_loop(
    schedule: str, recompute: Any, create_graph: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Energy(create_graph), Energy(create_graph), nn.Linear(8, 8))
    plain, x, y = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    pipe = sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule=schedule, ranks=2, microbatches=4, recompute=recompute
    )
    for _ in range(2):
        assert pipe.step(x, y).loss == one_process_step(plain, functional.mse_loss, x, y, 4)
        assert_same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize(("recompute", "what"), [("stage", "stage 1"), (["1"], "module 1")])
def test_a_backward_that_comes_later_is_refused(recompute: Any, what: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), EnergyLater())
    pipe = sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule="gpipe", ranks=2, microbatches=4, recompute=recompute
    )
    message = f"{what} runs a backward inside its forward .* but did not do so the first time"
    with pytest.raises(sl.StagelineError, match=message):
        pipe.step(torch.randn(8, 8), torch.randn(8, 8))


BOTH = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


def test_recomputed_stages_of_complex_numbers() -> None:
    """Only floats were marked as requiring a gradient, so the stages before got none."""
    layers = [nn.Linear(4, 4, dtype=torch.cfloat) for _ in range(2)]
    x = torch.randn(8, 4, dtype=torch.cfloat)
    pipe = sl.Pipeline(layers, loss_fn=lambda o, t: (o - t).abs().mean(), microbatches=2, recompute="stage")
    pipe.step(x, x)
    assert all(grad is not None for _, grad in pipe.named_gradients())


@BOTH
@pytest.mark.parametrize("recompute", ["stage", "*"])
def test_buffers_of_a_recomputed_module_are_those_of_its_first_run(schedule: str, recompute: str) -> None:
    """The second run saw, and changed, the values of later microbatches."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(Average(), Average())
    plain: Any = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule=schedule, ranks=2, microbatches=4, recompute=recompute
    )
    for _ in range(2):
        assert pipe.step(x, y).loss == one_process_step(plain, functional.mse_loss, x, y, 4)
    assert_same_bits(gradients(model), gradients(plain))
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))


class Spoils(nn.Module):
    """Changes the input of a module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) * 1
        total = self.inner(hidden + 1) + self.inner(hidden)
        hidden.mul_(2)
        return torch.as_tensor(total + hidden)


def test_an_input_that_changes_before_a_module_runs_again_is_refused() -> None:
    """It was recomputed from the changed input."""
    pipe = sl.Pipeline([Spoils(), nn.Linear(4, 4)], loss_fn=functional.mse_loss, microbatches=2, recompute="*.inner")
    with pytest.raises(sl.PipelineError, match=r"an input of module 0.inner was changed in place"):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def inside(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.linear(x), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.inside, x, use_reentrant=False))


@BOTH
def test_dropout_inside_torchs_checkpointing_on_threads(schedule: str) -> None:
    """Its recomputation set the generator that all threads share, while others drew from it."""
    x = torch.randn(16, 16, 64)
    runs = []
    for ranks in (1, 4, 4, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*(Checkpointed() for _ in range(8)))
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, ranks=ranks, microbatches=8, seed=1)
        pipe.step(x, 0 * x)
        runs.append(gradients(model))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


def test_recompute_of_one_pipeline_does_not_affect_another() -> None:
    """The model kept the choice of the first pipeline."""
    runs: list[int] = []
    model = nn.Sequential(Block(), Block())
    model[0].register_forward_pre_hook(lambda *_: runs.append(1))
    sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4, recompute="*").step(*batch())
    assert len(runs) == 8
    runs.clear()
    sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4).step(*batch())
    assert len(runs) == 4


def test_a_compiled_module_is_not_chosen_and_one_around_it_may_be() -> None:
    """The compiler traced the hooks, and then did not find them as it had seen them."""
    model: Any = nn.Sequential(Block(), Block())
    model[0].compile(backend="eager")
    with pytest.raises(sl.StagelineError, match=r"module 0 is compiled by module.compile\(\)"):
        sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4, recompute="*")
    outer: Any = nn.Sequential(nn.Sequential(model[0]), nn.Sequential(Block()))
    plain = copy.deepcopy(outer)
    sl.Pipeline(outer, loss_fn=functional.mse_loss, ranks=2, microbatches=4, recompute=["0", "1"]).step(*batch())
    one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
    assert_same_bits(gradients(outer), gradients(plain))
