"""Data-parallel wrappers inside of stages: the gradients of one process, in every schedule that takes them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step, run_ranks

WRAPPERS = ["fully_shard", "FullyShardedDataParallel", "DistributedDataParallel", "replicate"]
MICROBATCHES = 4


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]
    return nn.Sequential(*blocks)


def wrapped(wrapper: str, mesh: DeviceMesh) -> nn.Sequential:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = layers()
    if wrapper == "FullyShardedDataParallel":
        options: Any = {"use_orig_params": True, "device_id": torch.device("cpu"), "process_group": mesh.get_group()}
        return nn.Sequential(*(FullyShardedDataParallel(block, **options) for block in model))
    if wrapper == "DistributedDataParallel":
        group = mesh.get_group()
        return nn.Sequential(*(nn.parallel.DistributedDataParallel(block, process_group=group) for block in model))
    for block in model:
        if wrapper == "fully_shard":
            for layer in block.children():
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(block, mesh=mesh)
        else:
            replicate(block, process_group=mesh.get_group())
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 8), torch.randn(8, 8)


def compare(wrapper: str, mesh: DeviceMesh, name: str, **options: Any) -> None:
    """Make two steps, and compare each with one process."""
    model, plain = wrapped(wrapper, mesh), layers()
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, microbatches=MICROBATCHES, ranks=2, **options)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        stats = pipe.step(*batch())
        one_process_step(plain, functional.mse_loss, *batch(), MICROBATCHES)
        mine, expected = gradients(model), gradients(plain)
        assert len(mine) == len(expected) == 16
        assert_same_bits(
            {str(index): grad for index, grad in enumerate(mine)},
            {str(index): grad for index, grad in enumerate(expected)},
            f"gradients of {wrapper} in {name}",
        )
        assert stats.unsplit == (0.0 if name == "1f1b" else 1.0)


def on_one_process(rank: int) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (1,))
    for wrapper in WRAPPERS:
        for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-zb"):
            compare(wrapper, mesh, name)
        compare(wrapper, mesh, "zb-h1", recompute="stage")
        with pytest.raises(sl.StagelineError, match=f"{wrapper} is applied to a stage with 0, 1, whose parameters"):
            compare(wrapper, mesh, "chimera")
    late = layers()
    pipe = sl.Pipeline(late, loss_fn=functional.mse_loss, schedule="chimera", microbatches=MICROBATCHES, ranks=2)
    from torch.distributed.fsdp import fully_shard

    fully_shard(late[0], mesh=mesh)
    with pytest.raises(sl.StagelineError, match="fully_shard is applied to a stage with 0, 1, whose parameters"):
        pipe.step(*batch())


def test_wrapped_modules_have_the_gradients_of_one_process() -> None:
    run_ranks(on_one_process, 1, timeout=120)


def on_processes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    for name in ("1f1b", "zb-h1", "zb-v"):
        model, plain = wrapped("fully_shard", mesh), layers()
        pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=name, microbatches=MICROBATCHES, ranks=2)
        for _ in range(2):
            pipe.zero_grad()
            plain.zero_grad()
            pipe.step(*batch())
            one_process_step(plain, functional.mse_loss, *batch(), MICROBATCHES)
            expected = {key: copy.copy(parameter.grad) for key, parameter in plain.named_parameters()}
            mine: dict[str, Any] = dict(pipe.named_gradients())
            assert_same_bits(
                {key: grad.full_tensor() for key, grad in mine.items()}, {key: expected[key] for key in mine}
            )


def test_processes_take_sharded_stages() -> None:
    run_ranks(on_processes, 2, timeout=120)
