"""Steps of sharded stages that differ from each other: in microbatches, in the modules that run, after a failure."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import stageline as sl
from stageline.testing import run_ranks
from support.meshes import (
    MeshBlock,
    assert_close,
    compare,
    data,
    error_of,
    loss_fn,
    mesh_of,
    pipeline,
    quiet,
    sequential,
    sharded,
    whole_of,
)


class Collectives(TorchDispatchMode):
    """Counts the gathers and reductions that this process starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in ("_allgather_base_", "_reduce_scatter_base_"):
            self.counts[kind.strip("_")] += kind in str(func)
        return func(*args, **(kwargs or {}))


def gradients(model: nn.Module, shares: list[tuple[Tensor, Tensor]], microbatches: int) -> dict[str, Tensor | None]:
    """Those of the plain loop on the samples of all data coordinates."""
    model = copy.deepcopy(model)
    total = sum(len(inputs) for inputs, _ in shares)
    for inputs, targets in shares:
        for x, y in zip(inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True):
            if len(x):
                (loss_fn(model(x), y) * (len(x) / total)).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients(pipe: sl.Pipeline, expected: dict[str, Tensor | None], what: str) -> None:
    for name, grad in pipe.named_gradients():
        wanted = expected[name]
        assert (grad is None) == (wanted is None), (what, name)
        if grad is not None and wanted is not None:
            assert_close(whole_of(grad), wanted, f"{what}: {name}")


def shard_replicas(part: nn.Module, mesh: Any) -> None:
    """Shard over the replicas of a mesh that has no dimension for shards."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(part, mesh=mesh)


def shards_over_replicas(folder: str) -> str:
    """FSDP2 reduces such gradients itself, and every replica saves its parts."""
    mesh = mesh_of((2, 2), "pp", "dp")
    compare(sequential(), mesh, shard_replicas, "zb-h1", 4, max_norm=0.5)
    pipe = pipeline(sequential(), mesh, shard_replicas)
    assert pipe.runner.host.layout.name(3) == "process 3 (pp 1, dp 1)"
    pipe.step(*data(pipe.replica))
    sl.save_checkpoint(folder, 1, pipe)
    other = pipeline(lambda: sequential(), mesh_of((4,), "pp"))
    sl.load_checkpoint(folder, other)
    for name, value in other.state_dict(gather=True).items():
        assert torch.equal(value, sequential().state_dict()[name])
    return error_of(lambda: pipeline(sequential(), mesh, shard_replicas, cuda_graphs=True))


def alternates(mesh: DeviceMesh, how: str) -> None:
    """Evaluations and smaller batches between steps do not change what a step gathers and reduces."""
    pipe = pipeline(sequential(), mesh, sharded, schedule="zb-h1", microbatches=4, reshard_after_forward=how)
    counts = []
    for samples in (8, 0, 8, 2, 8):
        pipe.zero_grad()
        if not samples:
            pipe.evaluate(*data(pipe.replica))
            continue
        shares = [data(share, samples) for share in range(2)]
        with Collectives() as collectives:
            pipe.step(*shares[pipe.replica])
        assert_gradients(pipe, gradients(sequential(), shares, 4), f"{how}, {samples} samples")
        counts += [collectives.counts] if samples == 8 else []
    assert counts[0] == counts[1] == counts[2], counts
    # Fewer samples than microbatches in one data coordinate alone.
    shares = [data(0, 8), data(1, 2)]
    pipe.zero_grad()
    refused = error_of(lambda: pipe.step(*shares[pipe.replica]))
    if how == "always":
        assert refused.startswith("some processes have 2 samples, fewer than the 4 microbatches, and others")
    else:
        assert not refused
        assert_gradients(pipe, gradients(sequential(), shares, 4), "2 samples in one of two")


class Routed(nn.Module):
    """Three experts, of which one runs: by the sign of the first feature of the first token, and never the last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return x + self.experts[int(x[0, 0, 0] > 0)](x)


def routed() -> nn.Sequential:
    """Every sample with the first token 0 takes one expert, and every other one the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), Routed(), MeshBlock(), Routed(), nn.Linear(8, 12)).double()
    with torch.no_grad():
        model.get_parameter("0.weight")[:, 0] = -10.0
        model.get_parameter("0.weight")[0, 0] = 10.0
    return model


def shard_experts(part: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in part.modules():
        for expert in module.experts if isinstance(module, Routed) else ():
            fully_shard(expert, mesh=mesh["dp_shard"])
    fully_shard(part, mesh=mesh["dp_shard"])


def routes(mesh: DeviceMesh) -> str:
    """Data coordinates whose samples take different experts: each has the gradients of all, and the last has none."""
    shares = [data(share, 4) for share in range(2)]
    for share, (tokens, _) in enumerate(shares):
        tokens[:, 0] = 5 * share
    expected = gradients(routed(), shares, 2)
    assert expected["1.experts.2.weight"] is None
    for fn, how in ((None, "default"), (None, "always"), (shard_experts, "default")):
        pipe = pipeline(routed(), mesh, fn, schedule="zb-h1", reshard_after_forward=how)
        pipe.step(*shares[pipe.replica])
        assert_gradients(pipe, expected, f"experts, {how}")
        # Gradients of earlier steps stay, those of parameters without samples as well.
        before = {name: None if grad is None else whole_of(grad).clone() for name, grad in pipe.named_gradients()}
        pipe.step(*shares[pipe.replica])
        twice = {name: None if grad is None else 2 * grad for name, grad in before.items()}
        assert_gradients(pipe, twice, f"experts, {how}, twice")
    pipe = pipeline(routed(), mesh, shard_experts, reshard_after_forward="always")
    return error_of(lambda: pipe.step(*shares[pipe.replica]))


def refuses_hooks(mesh: DeviceMesh) -> str:
    """Hooks of whole gradients run once a step; those that FSDP2 does not call are refused."""
    pipe = pipeline(sequential(), mesh, schedule="zb-h1", microbatches=4)
    calls: Counter[str] = Counter()
    named: Any = list(pipe.named_parameters())
    for name, parameter in named:
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    pipe.step(*data(pipe.replica))
    assert calls == {name: 1 for name, _ in named}
    named[0][1].register_hook(lambda grad: grad)
    return error_of(lambda: pipe.step(*data(pipe.replica)))


def loses_step(mesh: DeviceMesh, rank: int) -> str:
    """After a failed step, the next one runs, unless processes stopped at different collectives."""
    wrong = False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output, target) * (float("nan") if wrong else 1.0)

    pipe = pipeline(sequential(), mesh, loss_fn=loss)
    for wrong in (True, False, True):
        pipe.zero_grad()
        assert bool(error_of(lambda: pipe.step(*data(pipe.replica)))) == wrong
    wrong = False
    pipe.zero_grad()
    group, tensor = mesh.get_group("dp_shard"), torch.zeros(1)
    work = dist.all_reduce(tensor, group=group, async_op=True) if rank == 3 else None
    errors = {error_of(lambda: pipe.step(*data(pipe.replica))) for _ in range(2)}
    created = error_of(lambda: pipeline(sequential(), mesh))
    assert created.startswith("processes create a pipeline while they are at different collectives"), created
    if rank == 2:
        dist.all_reduce(tensor, group=group)
    if work is not None:
        work.wait()
    (error,) = errors
    return error


def list_of_blocks(part: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    blocks: Any = [module for module in part.modules() if isinstance(module, MeshBlock)]
    fully_shard(blocks, mesh=mesh["dp_shard"])


def other_weights(rank: int) -> nn.Sequential:
    """One of the processes has another weight in its part of a block."""
    model = sequential()
    if rank == 3:
        with torch.no_grad():
            model.get_parameter("4.up.weight")[0, 0] += 1
    return model


def on_steps(rank: int, folder: str) -> dict[str, str]:
    quiet()
    errors = {"graphs": shards_over_replicas(folder)}
    mesh = mesh_of((2, 2), "pp", "dp_shard")
    for how in ("default", "always"):
        alternates(mesh, how)
    return errors | {
        "blocks": routes(mesh),
        "hook": refuses_hooks(mesh),
        "list": error_of(lambda: pipeline(sequential(), mesh, list_of_blocks)),
        "weights": error_of(lambda: pipeline(other_weights(rank), mesh)),
        "apart": loses_step(mesh, rank),
    }


def test_steps_that_differ_from_each_other(tmp_path: Path) -> None:
    for errors in run_ranks(on_steps, 4, str(tmp_path), timeout=200):
        assert errors["graphs"].startswith("cuda_graphs=True cannot be combined with stages whose parameters")
        assert "ran different blocks of their stage, or in a different order" in errors["blocks"]
        assert "has a hook, but FSDP2 shards it" in errors["hook"]
        assert "parallelize applied fully_shard to a list of 2 modules of stage" in errors["list"]
        assert (
            "a step failed while processes were at different collectives of their layers (process 2 (pp 1"
            in (errors["apart"])
        )
