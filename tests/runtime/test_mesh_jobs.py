"""Meshes of three dimensions, and processes that fail in a mesh."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import stageline as sl
from stageline.distributed import collectives
from stageline.runtime._torch_private import joins_packed_parts
from stageline.testing import ForkServer, run_ranks
from stageline.train.gpt import GPT
from support.meshes import (
    VOCABULARY,
    WIDTH,
    MeshBlock,
    assert_same,
    both,
    compare,
    compare_schedules,
    data,
    error_of,
    mesh_of,
    own_forward,
    pipeline,
    quiet,
    sequential,
    sharded,
    tensor_parallel,
    train,
)
from support.ports import free_port


def hybrid(part: nn.Module, mesh: DeviceMesh | None) -> None:
    """Shard over dp_shard, and let FSDP2 itself reduce over dp_replicate, for some of the blocks."""
    from torch.distributed.fsdp import fully_shard

    assert mesh is not None
    blocks = [module for module in part.modules() if isinstance(module, MeshBlock)]
    for block in blocks[1:]:
        fully_shard(block, mesh=mesh["dp_replicate", "dp_shard"])


def shards_optimizer(mesh: DeviceMesh, fn: Any) -> None:
    """Replicas that divide the optimizer's state have the bits of those that do not."""
    results = [
        train(pipeline(sequential(), mesh, fn, schedule="zb-h1", shard_optimizer=shard), max_norm=0.5)
        for shard in (False, True)
    ]
    assert_same(results[0], results[1])


def odd() -> nn.Sequential:
    """A model whose layers two processes cannot share evenly."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 9), nn.Linear(9, 11), nn.Linear(11, 3), nn.Linear(3, VOCABULARY)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers).double()


def shard_all(part: nn.Module, mesh: DeviceMesh | None) -> None:
    from torch.distributed.fsdp import fully_shard

    assert mesh is not None
    fully_shard(part, mesh=mesh["dp_shard"])


def divides_alike(mesh: DeviceMesh) -> None:
    """The parts of a parameter are updated in the same replica, also if they differ in size."""
    pipe = pipeline(odd(), mesh, shard_all, shard_optimizer=True)
    updates = [name for name, _ in pipe.named_parameters() if pipe.updates(name)]
    gathered: list[Any] = [None] * mesh["dp_shard"].size()
    dist.all_gather_object(gathered, updates, mesh["dp_shard"].get_group())
    assert updates
    assert gathered == [updates] * len(gathered)


def planned() -> GPT:
    torch.manual_seed(0)
    return GPT(VOCABULARY, 6, WIDTH, 4, heads=2, tied=True).double()


def on_eight(rank: int) -> dict[str, Any]:
    quiet()
    mesh = mesh_of((2, 2, 2), "pp", "dp_shard", "tp")
    compare_schedules(sequential(), mesh, both, [("zb-v", 4, {})])
    if joins_packed_parts():
        compare(planned(), mesh, None, "zb-h1", 4, max_norm=0.5)  # by its own plan, and then FSDP2
    else:
        assert "cannot join the parts of packed parameters" in error_of(lambda: pipeline(planned(), mesh))
    name = pipeline(sequential(), mesh, both).runner.host.layout.name(5)
    replicated = mesh_of((2, 2, 2), "dp_replicate", "pp", "dp_shard")
    compare(sequential(), replicated, hybrid, "zb-h1", 4, max_norm=0.5)
    divides_alike(replicated)
    four = mesh_of((2, 4), "pp", "dp")  # a sum of four terms depends on their order
    result = compare_schedules(sequential(), four, None, [("1f1b", 4, {})])
    collectives.GLOO_CHUNK = 64  # as if the gradients were large
    assert_same(compare(sequential(), four, None, "1f1b", 4, max_norm=0.5, bucket_mb=1e-3), result)
    compare_schedules(odd(), mesh_of((2, 4), "pp", "dp_shard"), shard_all, [("1f1b", 4, {})])  # so does a norm
    shards_optimizer(mesh_of((2, 2, 2), "model", "pp", "dp")["pp", "dp"], None)
    return {"name": name, "hybrid": error_of(lambda: pipeline(sequential(), replicated, hybrid, shard_optimizer=True))}


def test_two_by_two_by_two() -> None:
    for result in run_ranks(on_eight, 8, timeout=400):
        assert result["name"] == "process 5 (pp 1, dp_shard 0, tp 1)"
        assert "FSDP2 already reduces the gradient of" in result["hybrid"]


def on_eight_in_other_orders(rank: int) -> None:
    quiet()
    mesh = mesh_of((2, 2, 2), "pp", "dp_shard", "tp")
    compare_schedules(sequential(), mesh, both, [("synthesized", 4, {})])
    compare(own_forward(), mesh, both, "1f1b", 4, reshard_after_forward="always")
    assert pipeline(own_forward(), mesh, both, schedule="zb-v").step(*data(rank // 2 % 2)).unsplit == 0
    compare(sl.build(own_forward, seed=3), mesh, both, "zb-h1", 1, source=own_forward, seed=3)
    replicated = mesh_of((2, 2, 2), "dp_replicate", "pp", "dp_shard")
    compare(sequential(), replicated, sharded, "zb-h1", 4, max_norm=0.5)
    shards_optimizer(replicated, sharded)
    tensors = mesh_of((2, 2, 2), "tp", "dp", "pp")
    compare(sequential(), tensors, tensor_parallel, "1f1b", 4, max_norm=0.5)
    shards_optimizer(tensors, tensor_parallel)
    # Both halves of the job are meshes of their own; the name of the dimension that parts them is the user's.
    compare(sequential(), mesh_of((2, 2, 2), "pp", "half", "dp_shard")["pp", "dp_shard"], sharded, "zb-h1", 4)


@pytest.mark.mesh_matrix
@pytest.mark.timeout(600)
def test_two_by_two_by_two_in_other_orders() -> None:
    run_ranks(on_eight_in_other_orders, 8, timeout=500)


@pytest.mark.parametrize("how", ["kill", "raise", "clip", "column", "build"])
def test_a_process_that_fails_is_named_by_its_place(fork_server: ForkServer, how: str, tmp_path: Path) -> None:
    """Also where another one waits for it, or for one that it stopped, in a collective of FSDP2.

    Other columns of the mesh go on.
    """
    common = {
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = Path(__file__).parents[1] / "support" / "mesh_rank.py"
    processes = []
    for rank in range(4):
        environment = {**common, "RANK": str(rank), "STAGELINE_FLIGHT_DIR": str(tmp_path / "flights")}
        log = tmp_path / f"log-{rank}"
        processes.append(
            fork_server.start(script, "main", [rank, str(tmp_path), how], log=log, environment=environment)
        )
    try:
        for rank, process in enumerate(processes[:3]):
            assert process.wait(200) == 0, (tmp_path / f"log-{rank}").read_text()
    finally:
        for process in processes:
            process.signal(signal.SIGKILL)
            process.wait(200)
    for rank in range(3):
        after, _, text = (tmp_path / f"said-{rank}").read_text().partition(" ")
        if how != "column":
            assert float(after) < 40  # seconds, not the deadline
        if how in ("kill", "clip"):
            assert text.startswith("process 3 (pp 1, dp_shard 1) died (its process exited without"), text
        elif how == "column" and rank != 1:
            assert text == "6 steps"
        elif how == "column":
            assert text.startswith("process 3 (pp 1) died (its process exited without"), text
            assert "process 1 (pp 0): process 3 (pp 1) died" in (tmp_path / f"log-{rank}").read_text()
        elif how == "build":
            error = "parallelize raised an error for stage 1: ArithmeticError: planted"
            assert text == f"process 3 (pp 1, dp_shard 1) failed to build its stages: {error}"
        else:
            assert text.startswith("process 3 (pp 1, dp_shard 1) failed in F of stage 1, microbatch 3: Arith"), text
