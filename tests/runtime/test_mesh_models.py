"""Models with unusual parameters in sharded stages: outside of blocks, tied and not used, without dimensions."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import stageline as sl
from stageline.testing import run_ranks
from support.meshes import (
    VOCABULARY,
    WIDTH,
    assert_close,
    compare,
    data,
    error_of,
    loss_fn,
    mesh_of,
    pipeline,
    quiet,
    sequence_parallel,
    tied_own_forward,
    tied_sequential,
    whole_of,
)


class Scaled(nn.Module):
    """A factor that the forward itself multiplies with between all blocks, and an offset that it adds at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.offset = nn.Parameter(torch.randn(6, WIDTH))
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.offset
        for block in self.blocks:
            x = x + block(x).tanh() * self.factor
        return torch.as_tensor(self.head(x * self.factor) * self.temperature)


class NeverCalled(nn.Module):
    """An embedding that the forward never calls, and whose weight an encoder, a decoder and the head have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.source, self.target = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in (self.source, self.target, self.head):
            module.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, memory = self.target(tokens), self.source(tokens.flip(1))
        for block in self.blocks:
            x = x + block(x + memory).tanh()
        return torch.as_tensor(self.head(x))


class Warm(nn.Module):
    """A layer with a factor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.linear(x).tanh() * self.factor)


class Head(nn.Module):
    """Has a weight that it does not use, or, as `uses` says, uses it as well."""

    def __init__(self, weight: nn.Parameter, uses: bool) -> None:
        super().__init__()
        self.weight, self.uses, self.linear = weight, uses, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.as_tensor(y + x @ self.weight.t() if self.uses else y)


class Held(nn.Embedding):
    """An embedding that looks up another table than its weight."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Any:
        return self.table[tokens]


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled().double()


def never_called() -> NeverCalled:
    torch.manual_seed(0)
    return NeverCalled().double()


def warm() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Warm() for _ in range(4)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)).double()


def partly_used(first: bool, last: bool) -> nn.Sequential:
    """The first and the last layer have one weight, and use it or not."""
    torch.manual_seed(0)
    embedding: Any = nn.Embedding(VOCABULARY, WIDTH) if first else Held()
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(embedding, *blocks, Head(embedding.weight, last)).double()


def twice() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    layers = (layer, nn.Linear(WIDTH, WIDTH), layer, layer)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY)).double()


def turned() -> nn.Sequential:
    model = twice()
    model[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double().t())
    return model


def all_of_it(part: nn.Module, mesh: Any) -> None:
    """Shard what FSDP2 can shard: parameters without dimensions stay whole."""
    from torch.distributed.fsdp import fully_shard

    whole = {parameter for parameter in part.parameters() if parameter.dim() == 0}
    fully_shard(part, mesh=mesh["dp_shard"], ignored_params=whole)


def without_mesh(part: nn.Module, mesh: Any) -> None:
    """FSDP2 takes all processes of the job then."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(part)


def features_over_samples(part: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for module in part.modules():
        if isinstance(module, nn.Linear):
            parallelize_module(module, mesh["dp_shard"], ColwiseParallel())


def keeps_one_parameter(mesh: DeviceMesh) -> None:
    """A parameter that stages have outside of their blocks stays one parameter, however it is cut."""
    example = data(0)[0]
    for fn in (None, all_of_it):
        for schedule in ("1f1b", "zb-v"):
            compare(scaled(), mesh, fn, schedule, 4, max_norm=0.5)
        compare(scaled(), mesh, fn, "1f1b", 4, reshard_after_forward="always")
        compare(sl.build(scaled, seed=3), mesh, fn, "zb-v", 4, source=scaled, seed=3)
        for schedule, how in (("zb-v", "default"), ("1f1b", "always")):
            compare(never_called(), mesh, fn, schedule, 4, example=example, reshard_after_forward=how)
    pipe = pipeline(scaled(), mesh, all_of_it)
    pipe.step(*data(pipe.replica))
    assert all(grad is not None for _, grad in pipe.named_gradients())
    pipe.zero_grad()
    assert all(grad is None for _, grad in pipe.named_gradients())


def sums_what_is_used(mesh: DeviceMesh) -> None:
    """The gradient of a tied weight is that of the uses that ran; without one, there is none."""
    for first, last in ((True, False), (False, True), (False, False)):
        model = partly_used(first, last)
        for schedule in ("1f1b", "zb-v"):
            compare(copy.deepcopy(model), mesh, None, schedule, 4)
        pipe = pipeline(copy.deepcopy(model), mesh, schedule="zb-v")
        shares = [data(share) for share in range(2)]
        for inputs, targets in shares:
            (loss_fn(model(inputs), targets) / 2).backward()  # type: ignore[no-untyped-call]
        pipe.step(*shares[pipe.replica])
        for name, grad in pipe.named_gradients():
            expected = model.get_parameter(name).grad
            assert (grad is None) == (expected is None), name
            if grad is not None and expected is not None:
                assert_close(whole_of(grad), expected, name)


def adds_up_steps(mesh: DeviceMesh, model: nn.Module, fn: Any, sync: bool) -> None:
    """Gradients of several steps add up, those of parameters that several ranks use as well."""
    pipe = pipeline(copy.deepcopy(model), mesh, fn)
    for step in range(3):
        shares = [data(10 * step + share) for share in range(pipe.replicas)]
        pipe.step(*shares[pipe.replica], sync=sync or step == 2)
        for inputs, targets in shares:
            (loss_fn(model(inputs), targets) / len(shares)).backward()  # type: ignore[no-untyped-call]
    for name, grad in pipe.named_gradients():
        expected = model.get_parameter(name).grad
        assert grad is not None
        assert expected is not None
        assert_close(whole_of(grad), expected, f"{name} of three steps, {sync=}")


def steps_together(mesh: DeviceMesh, model: Any) -> None:
    """An optimizer that steps all parameters in one call, of which FSDP2 shards some."""
    pipe = pipeline(model, mesh)
    pipe.step(*data(pipe.replica))
    torch.optim.AdamW(pipe.parameters(), foreach=True).step()


def sends_past_others() -> None:
    """A tied weight that some ranks do not use, and have no memory for: their model is built by a function."""
    for mesh, schedule in ((mesh_of((2, 2), "pp", "dp"), "zb-v"), (mesh_of((4,), "pp"), "1f1b")):
        compare(sl.build(tied_sequential, seed=3), mesh, None, schedule, 4, source=tied_sequential, seed=3)


def on_models(rank: int) -> dict[str, str]:
    quiet()
    mesh = mesh_of((2, 2), "pp", "dp_shard")
    keeps_one_parameter(mesh)
    sums_what_is_used(mesh)
    for sync in (True, False):
        adds_up_steps(mesh, scaled(), None, sync)
        adds_up_steps(mesh, scaled(), all_of_it, sync)
        adds_up_steps(mesh, tied_sequential(), None, sync)
        adds_up_steps(mesh_of((2, 2), "pp", "tp"), tied_own_forward(), sequence_parallel, sync)
    sends_past_others()
    compare(warm(), mesh, None, "zb-v", 4, max_norm=0.5)
    compare(twice(), mesh, None, "1f1b", 4, reshard_after_forward="always")
    return {
        "twice": error_of(lambda: pipeline(twice(), mesh, schedule="zb-v")),
        "together": error_of(lambda: steps_together(mesh, scaled())),
        "together, built": error_of(lambda: steps_together(mesh, scaled)),
        "over stages": error_of(lambda: pipeline(twice(), mesh, without_mesh)),
        "over stages, built": error_of(lambda: pipeline(twice, mesh, without_mesh)),
        "over tp": error_of(lambda: pipeline(twice(), mesh_of((2, 2), "dp_shard", "tp"), without_mesh)),
        "over samples": error_of(lambda: pipeline(twice(), mesh, features_over_samples)),
        "turned": error_of(lambda: pipeline(turned(), mesh)),
    }


def test_parameters_outside_of_blocks_tied_ones_and_those_without_dimensions() -> None:
    results = run_ranks(on_models, 4, timeout=200)
    for errors in results:
        for what in ("together", "together, built"):
            assert re.match(r"AdamW would update .*, which is a DTensor, and offset, which is not", errors[what])
        for what in ("over stages", "over stages, built"):
            assert re.search(r"of process \d \(pp \d, .*\) over process \d .*, which has other stages;", errors[what])
        assert "which has the same samples, so gradients would count twice;" in errors["over tp"]
        assert "over dp_shard, whose processes have different samples" in errors["over samples"]
        assert "is the same layer in stages 1 and 2 of one process, but parallelize can cut a" in errors["twice"]
    assert "FSDP2 shards only contiguous parameters, but 2.weight of shape (8, 8)" in results[0]["turned"]
