"""Tensors that are not float32 and plain: they work as in one process, or one clear sentence says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from support.gradients import gradients
from support.pipelines import batch, blocks


def absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().pow(2).mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128, torch.bfloat16])
def test_clipping_takes_parameters_of_any_type(dtype: torch.dtype) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for _ in range(4)))

    model, plain = layers(), layers()
    x = torch.randn(8, 4).to(dtype)
    pipe = sl.Pipeline(model, loss_fn=absolute, schedule="zb-h1", ranks=2, microbatches=4)
    pipe.step(x, x + 1)
    one_process_step(plain, absolute, x, x + 1, 4)
    assert_same_bits(gradients(model), gradients(plain))
    total = pipe.clip_grad_norm_(0.1)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    exact = dtype in (torch.float64, torch.complex128)
    assert total.dtype == (torch.float64 if exact else torch.float32)
    tolerance = 1e-12 if exact else 1e-6 if dtype == torch.complex64 else 1e-2
    torch.testing.assert_close(total, expected.to(total.dtype), rtol=tolerance, atol=0.0)
    for name, grad in gradients(plain).items():
        assert grad is not None
        torch.testing.assert_close(gradients(model)[name], grad, rtol=10 * tolerance, atol=0.0)


def test_a_run_clips_float64_as_steps_do() -> None:
    losses = []
    for interlocks in (True, False):
        model = blocks().double()
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="zb-v", ranks=2, microbatches=4)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        batches = [tuple(part.double() for part in batch())] * 3
        if interlocks:
            losses.append([stats.loss for stats in pipe.run(batches, optimizer=optimizer, max_norm=0.1)])
            continue
        losses.append([])
        for x, y in batches:
            losses[-1].append(pipe.step(x, y).loss)
            pipe.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]


# What torch's functions return.


class Giving(nn.Module):
    """A stage that passes on the result of a torch function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.name = nn.Linear(4, 4), name

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        if self.name == "svd":
            return torch.linalg.svd(y, full_matrices=False)
        if self.name == "topk":
            return y.topk(3, 1)
        return y.sort(1) if self.name == "sort" else y.max(1, keepdim=True)


class Taking(nn.Module):
    """A stage that takes it by the names of its fields."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value: Any) -> Tensor:
        return torch.as_tensor((value.values if hasattr(value, "values") else value.S).mean() * self.weight)


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def structures(rank: int) -> int:
    for name in ("max", "topk", "sort", "svd"):
        torch.manual_seed(0)
        stages, plain = [Giving(name), Taking()], nn.Sequential(Giving(name), Taking())
        plain.load_state_dict(nn.Sequential(*stages).state_dict())
        pipe = sl.Pipeline(stages, loss_fn=mean_of, schedule="zb-h1", ranks=2, microbatches=2)
        x = torch.randn(8, 4)
        pipe.step(x, x)
        one_process_step(plain, mean_of, x, x, 2)
        mine = dict(pipe.named_gradients())
        assert_same_bits(mine, {key: grad for key, grad in gradients(plain).items() if key in mine})
    return 4


def test_stages_pass_on_what_functions_of_torch_return() -> None:
    assert structures(0) == 4
    assert run_ranks(structures, 2) == [4, 4]


# What cannot be passed on or held.


class Nesting(nn.Module):
    """A stage that passes on a nested tensor."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.inner, self.layout = nn.Linear(4, 4), layout

    def forward(self, x: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(list(self.inner(x).split(1)), layout=self.layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    stages = [Nesting(layout), nn.Linear(4, 4)]
    x = torch.randn(4, 4)
    pipe = sl.Pipeline(stages, loss_fn=functional.mse_loss, microbatches=2)
    with pytest.raises(sl.PipelineError, match=r"stage 0 passes on a nested tensor, .* pass its values and offsets"):
        pipe.step(x, x)
    nested = torch.nested.as_nested_tensor(list(x.tensor_split(4)), layout=layout)
    with pytest.raises(sl.StagelineError, match="the inputs contain a nested tensor, which cannot be cut"):
        pipe.step(nested, x)


class Sparse(nn.Module):
    """A stage that passes on a sparse tensor."""

    def __init__(self, csr: bool) -> None:
        super().__init__()
        self.inner, self.csr = nn.Linear(4, 4), csr

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return torch.as_tensor(hidden.to_sparse_csr() if self.csr else hidden.to_sparse())


class LooksUp(nn.Module):
    """A stage that gives its input a sparse gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(torch.zeros(2, dtype=torch.long), x, sparse=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Sparse(False), nn.Linear(4, 4)], "stage 0 passes on a sparse tensor, of layout sparse_coo, in microbatch 0"),
        ([Sparse(True), nn.Linear(4, 4)], "stage 0 passes on a sparse tensor, of layout sparse_csr, in microbatch 0"),
        ([nn.Linear(4, 4), LooksUp()], "the gradient of an input of stage 1 is sparse, of layout sparse_coo"),
    ],
)
def test_sparse_tensors_between_stages_are_refused_by_name(stages: list[nn.Module], message: str) -> None:
    pipe = sl.Pipeline(stages, loss_fn=functional.mse_loss, microbatches=2)
    with pytest.raises(sl.PipelineError, match=message):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))


def test_lazy_modules_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(4))
    x = torch.randn(8, 3)
    with pytest.raises(sl.StagelineError, match=r"the parameter 0\.weight has no shape yet, .*model\(inputs\)"):
        sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    model(x)
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, ranks=2, microbatches=4)
    assert pipe.step(x, torch.randn(8, 4)).loss > 0
    with pytest.raises(sl.StagelineError, match="running_mean has no shape yet"):
        sl.Pipeline(nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(3, 3)), loss_fn=functional.mse_loss,
                    ranks=2, microbatches=4)  # fmt: skip


class Spreading(nn.Module):
    """A stage that passes on a DTensor."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.inner, self.mesh = nn.Linear(4, 4), mesh

    def forward(self, x: Tensor) -> Tensor:
        return DTensor.from_local(self.inner(x), self.mesh, [Replicate()])


def distributed(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors = []
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Replicate()]))
    x = torch.randn(4, 4)
    for stages in (model, [Spreading(mesh), nn.Linear(4, 4)]):
        with pytest.raises(sl.StagelineError) as caught:
            sl.Pipeline(stages, loss_fn=functional.mse_loss, ranks=2, microbatches=2).step(x, x)
        errors.append(str(caught.value))
    return errors


def test_distributed_tensors_are_refused_by_name() -> None:
    for held, passed in run_ranks(distributed, 2):
        assert "the parameter 1.weight is a DTensor; stages support only plain tensors" in held
        assert "stage 0 passes on a DTensor on a mesh of dimensions without names; between stages" in passed


CALLS: dict[str, Any] = {
    "split, printed": lambda model, example: str(sl.split(model, 2, example=example)),
    "split by parameters": lambda model, example: sl.split(model, 2, by="parameters", example=example),
    "split by time": lambda model, example: sl.split(model, 2, by="time", example=example),
    "profile": lambda model, example: sl.profile(model, example, repeats=1),
    "plan": lambda model, example: sl.plan(model, example, ranks=2, microbatches=2, repeats=1, time_limit=0.2),
    "auto": lambda model, example: sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule="auto", ranks=2, microbatches=2, example=example
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_lazy_modules_and_arrays_are_told_wherever_a_model_is_looked_at(call: Any) -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    with pytest.raises(sl.StagelineError, match=r"the parameter 0\.weight has no shape yet, because lazy modules"):
        call(lazy, torch.ones(4, 4))
    with pytest.raises(sl.StagelineError, match=r"numpy array of shape \(4, 4\).*torch\.from_numpy"):
        call(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4).numpy())
