"""A pipeline as one row of a larger mesh: tensor parallel, FSDP2 and replicas, against the plain loop in float64."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import stageline as sl
from stageline.distributed.layout import Layout
from stageline.testing import run_ranks
from support.meshes import (
    MeshBlock,
    assert_close,
    both,
    compare,
    data,
    loss_fn,
    own_forward,
    sequential,
    sharded,
    tensor_parallel,
    whole_of,
)

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("1f1b", 4, {}),
    ("interleaved", 4, {"chunks": 2}),
    ("zb-h1", 4, {}),
    ("zb-v", 4, {}),
    ("zb-v", 1, {}),
]
"""Schedules, one of them with fewer microbatches than ranks."""


def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def quiet() -> None:
    """torch warns of what a test does on purpose, such as several collectives for one tensor."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def error_of(call: Any) -> str:
    try:
        call()
    except sl.StagelineError as error:
        return str(error)
    return ""


def pipeline(model: Any, mesh: DeviceMesh, fn: Any = None, **options: Any) -> sl.Pipeline:
    options = {"loss_fn": loss_fn, "microbatches": 2, **options}
    return sl.Pipeline(model, mesh=mesh, parallelize=fn, **options)


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    weights = all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    return weights and one["losses"] == other["losses"] and one["norms"] == other["norms"]


# Tensor parallel.


def replaced(part: nn.Module, mesh: Any) -> nn.Module:
    return nn.Sequential(part)


def renamed(part: nn.Module, mesh: Any) -> None:
    for block in part.modules():
        if isinstance(block, MeshBlock):
            block.other = block.norm
            del block.norm


def halved(part: nn.Module, mesh: Any) -> None:
    for block in part.modules():
        if isinstance(block, MeshBlock):
            block.up = nn.Linear(8, 8)


def on_tensors(rank: int) -> dict[str, Any]:
    quiet()
    mesh = mesh_of((2, 2), "pp", "tp")
    for model in (sequential(), own_forward()):
        for schedule, microbatches, options in CASES:
            first = compare(model, mesh, tensor_parallel, schedule, microbatches, max_norm=0.5, **options)
    assert same_bits(first, compare(own_forward(), mesh, tensor_parallel, "zb-v", 1, max_norm=0.5))
    turned = mesh_of((2, 2), "tp", "pp")  # in any order
    compare(sequential(), turned, tensor_parallel, "1f1b", 4)
    alone = compare(sequential(), mesh_of((4,), "tp"), tensor_parallel, "1f1b", 4, max_norm=0.5)
    assert len(alone["norms"]) == 3
    # From functions that build the layers: each process keeps only its part of a parameter.
    seen: list[bool] = []

    def on_meta(part: nn.Module, inner: DeviceMesh | None) -> None:
        assert inner is not None
        assert inner.mesh_dim_names == ("tp",)
        seen.extend(parameter.is_meta for parameter in part.parameters())
        tensor_parallel(part, inner)

    for make in (sequential, own_forward):
        compare(sl.build(make, seed=3), mesh, on_meta, "zb-h1", 4, source=make, seed=3)
    assert seen
    assert all(seen)
    # A state of the whole model goes into the parts, and what is not cut is the same on all.
    pipe = pipeline(sequential(), mesh, tensor_parallel)
    state = {name: value + 1 for name, value in sequential().state_dict().items()}
    pipe.load_state_dict(state)
    for name, value in pipe.state_dict(gather=True).items():
        assert torch.equal(value, state[name]), name
    inf = pipe.step(*data(0)).loss
    norms = [pipe.grad_norm(norm_type).item() for norm_type in (1.0, 2.0, float("inf"))]
    grads = [whole_of(grad) for _, grad in pipe.named_gradients() if grad is not None]
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(
        gathered, [torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]), float("inf")).item()]
    )
    assert norms[2] == pytest.approx(max(value for (value,) in gathered), rel=1e-12)
    # Evaluation and prediction.
    model = sequential()
    model.load_state_dict(state)
    assert pipe.evaluate(*data(0)).loss == pytest.approx(inf, rel=1e-12)
    outputs = pipe.predict(data(0)[0])
    if outputs is not None:
        assert_close(outputs, model(data(0)[0]).detach(), "outputs")
    errors = {
        "samples": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel).step(*data(rank % 2))),
        "replaced": error_of(lambda: pipeline(sequential(), mesh, replaced)),
        "renamed": error_of(lambda: pipeline(sequential(), mesh, renamed)),
        "halved": error_of(lambda: pipeline(sequential(), mesh, halved)),
        "nothing": error_of(lambda: pipeline(sequential(), mesh)),
        "penalty": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel, penalty=lambda name, value: None)),
        "compile": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel, compile="eager")),
        "two directions": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel, schedule="chimera")),
        "not callable": error_of(lambda: pipeline(sequential(), mesh, "tp")),
        "unnamed": error_of(lambda: pipeline(sequential(), init_device_mesh("cpu", (2, 2)), tensor_parallel)),
        "unknown": error_of(lambda: pipeline(sequential(), mesh_of((2, 2), "pp", "shards"), sharded)),
        "context": error_of(lambda: pipeline(sequential(), mesh_of((2, 2), "pp", "cp"), sharded)),
        "part": error_of(lambda: pipeline(sequential(), mesh["pp"], None)),
        "twice": error_of(lambda: pipeline(sequential(), mesh_of((2, 2), "dp", "dp_replicate"), None)),
        "parallelize": error_of(lambda: pipeline(sequential(), mesh, tensor_parallel if rank else both)),
    }
    still = pipeline(sequential(), mesh, tensor_parallel)
    still.step(*data(0))
    assert repr(still.mesh) == repr(mesh)
    assert (still.ranks, still.replicas, still.replica) == (2, 1, 0)
    return errors


def test_tensor_parallel_rows_train_as_the_plain_loop_and_mistakes_are_named() -> None:
    results = run_ranks(on_tensors, 4, timeout=120)
    known = {
        "samples": r"process 1 \(pp 0, tp 1\) received a different batch from process 0 \(pp 0, tp 0\): the inputs "
        r"differ, and processes that differ only in pp or tp take the same samples",
        "replaced": r"parallelize returned another Sequential for stage \d; change the part in place, and return",
        "renamed": r"parallelize changed the names of the parameters of stage \d: \d.norm.weight is gone and "
        r"\d.other.weight is new; keep them",
        "halved": r"parallelize changed the shape of \d.up.weight from \(16, 8\) to \(8, 8\)",
        "nothing": r"the mesh has tp 2, and nothing says which layers are cut: pass parallelize=",
        "penalty": r"penalty= does not go together with stages whose parameters are sharded",
        "compile": r"compile= does not go together with stages whose parameters are sharded",
        "two directions": r"parallelize is applied to a stage with .*, whose parameters other stages or ranks also use",
        "not callable": r"parallelize is a function of a stage and a mesh that changes the stage in place, got 'tp'",
        "unnamed": r"mesh= is a DeviceMesh whose dimensions are named pp, dp, dp_replicate, dp_shard, tp, in any "
        r"order, and DeviceMesh.* has no names: pass mesh_dim_names=",
        "unknown": r"the mesh has the dimension 'shards' of size 2, and a pipeline knows pp, dp, dp_replicate, "
        r"dp_shard, tp; rename it \(did you mean 'dp_shard'\?\), or create a mesh without it",
        "context": r"the mesh has the dimension 'cp' of size 2, .*; context parallel is not supported",
        "part": r"the mesh \(pp 2\) holds the processes \[\d, \d\], and 4 were started: it must hold each of them once",
        "twice": r"the mesh has both 'dp' and 'dp_replicate', which are the same dimension; keep one",
        "parallelize": r"process 0 \(pp 0, tp 0\) and process 1 \(pp 0, tp 1\) differ in parallelize: .*",
    }
    for errors in results:
        assert list(errors) == list(known)
        for what, pattern in known.items():
            assert re.search(pattern, errors[what]), (what, errors[what])


# FSDP2.


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the gathers and reductions that this process starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in ("_allgather_base_", "_reduce_scatter_base_"):
            self.counts[kind.strip("_")] += kind in str(func)
        return func(*args, **(kwargs or {}))


def on_shards(rank: int) -> dict[str, str]:
    quiet()
    mesh = mesh_of((2, 2), "pp", "dp_shard")
    for model in (sequential(), own_forward()):
        for schedule, microbatches, options in CASES:
            first = compare(model, mesh, sharded, schedule, microbatches, max_norm=0.5, **options)
    assert same_bits(first, compare(own_forward(), mesh, sharded, "zb-v", 1, max_norm=0.5))
    for model in (sequential(), own_forward()):  # every block, without a function
        compare(model, mesh, None, "zb-h1", 4, max_norm=0.5)
    for make in (sequential, own_forward):
        compare(sl.build(make, seed=3), mesh, sharded, "zb-v", 4, source=make, seed=3)
    compare(sequential(), mesh_of((4,), "dp_shard"), sharded, "1f1b", 4, max_norm=0.5)
    compare(sequential(), mesh, sharded, "1f1b", 4, recompute="stage")
    # A step gathers every part once and reduces it once, whatever the number of microbatches.
    for schedule in ("1f1b", "zb-h1"):
        pipe = pipeline(sequential(), mesh, None, schedule=schedule, microbatches=6)
        parts: Any = pipe.runner.stages.local_parts()
        groups = sum(any(True for _ in layer.parameters()) for part in parts for layer in part)
        for _ in range(2):
            with Collectives() as collectives:
                pipe.step(*data(pipe.replica))
            assert collectives.counts == {"allgather_base": groups, "reduce_scatter_base": groups}, collectives.counts
        with Collectives() as collectives:
            pipe.evaluate(*data(pipe.replica))
        assert collectives.counts == {"allgather_base": groups, "reduce_scatter_base": 0}
    # Between steps, only parts are in memory, also after an evaluation.
    assert all(hasattr(parameter, "full_tensor") for parameter in pipe.parameters())
    # Gradients accumulate over steps.
    pipe = pipeline(sequential(), mesh, sharded)
    pipe.step(*data(pipe.replica))
    once = {name: whole_of(grad).clone() for name, grad in pipe.named_gradients()}
    pipe.step(*data(pipe.replica))
    for name, grad in pipe.named_gradients():
        assert_close(whole_of(grad), 2 * once[name], name)
    tied = sequential()
    tied[5].weight = tied[0].weight
    return {"tied": error_of(lambda: pipeline(tied, mesh)), "name": pipe.runner.host.layout.name(3)}


def test_sharded_rows_train_as_the_plain_loop() -> None:
    for errors in run_ranks(on_shards, 4, timeout=120):
        assert "is applied to a stage" in errors["tied"] or "sharding made them two" in errors["tied"]
        assert errors["name"] == "process 3 (pp 1, dp_shard 1)"


# All of them.


def hybrid(part: nn.Module, mesh: DeviceMesh | None) -> None:
    """Shard over dp_shard, and let FSDP2 itself reduce over dp_replicate, for some of the blocks."""
    from torch.distributed.fsdp import fully_shard

    assert mesh is not None
    blocks = [module for module in part.modules() if isinstance(module, MeshBlock)]
    for block in blocks[1:]:
        fully_shard(block, mesh=mesh["dp_replicate", "dp_shard"])


def on_eight(rank: int) -> dict[str, Any]:
    quiet()
    mesh = mesh_of((2, 2, 2), "pp", "dp_shard", "tp")
    compare(sequential(), mesh, both, "zb-v", 4, max_norm=0.5)
    compare(own_forward(), mesh, both, "1f1b", 4)
    compare(sl.build(own_forward, seed=3), mesh, both, "zb-h1", 1, source=own_forward, seed=3)
    name = pipeline(sequential(), mesh, both).runner.host.layout.name(5)
    replicated = mesh_of((2, 2, 2), "dp_replicate", "pp", "dp_shard")
    for fn in (sharded, hybrid):
        compare(sequential(), replicated, fn, "zb-h1", 4, max_norm=0.5)
    compare(sequential(), mesh_of((2, 2, 2), "tp", "dp", "pp"), tensor_parallel, "1f1b", 4, max_norm=0.5)
    return {"name": name}


def test_two_by_two_by_two() -> None:
    for result in run_ranks(on_eight, 8, timeout=150):
        assert result["name"] == "process 5 (pp 1, dp_shard 0, tp 1)"


def test_a_layout_knows_its_neighbours() -> None:
    layout = Layout(((0, 4), (1, 5), (2, 6), (3, 7)), shards=2, tensors=2, names=("pp", "dp_shard", "tp"))
    assert layout.coordinates(6) == {"dp_replicate": 0, "dp_shard": 1, "tp": 0, "pp": 1}
    assert layout.neighbours(6, ["dp_shard"]) == (4, 6)
    assert layout.neighbours(6, ["dp_shard", "tp"]) == (4, 5, 6, 7)
    assert (layout.data_rows, [layout.data_row(row) for row in range(4)]) == (2, [0, 0, 1, 1])
