"""One process of a mesh of stages and shards of which one process is killed, or fails, in its second step."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import stageline as sl

sys.path.insert(0, str(Path(__file__).parents[1]))  # a fork server does not know where tests are
from support.meshes import data, loss_fn, sequential, sharded


class Killer(nn.Module):
    """Ends one process in its second step."""

    def __init__(self, layer: nn.Module, folder: Path, rank: int, how: str) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0
        self.rank, self.how, self.file = rank, how, str(folder / "killed")

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.how != "clip" and self.calls == (8 if self.how in ("raise", "column") else 6) and self.rank == 3:
            Path(self.file).write_text(str(time.time()))
            if self.how == "raise":
                raise ArithmeticError("planted")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def fails_first(rank: int, folder: Path, part: nn.Module, mesh: Any) -> None:
    """Fail on one process before the collective in which the other one of its row waits for it."""
    if rank == 3:
        (folder / "killed").write_text(str(time.time()))
        raise ArithmeticError("planted")
    dist.all_reduce(torch.zeros(1), group=mesh["dp_shard"].get_group())
    sharded(part, mesh)


def main(rank: int, folder: str, how: str = "kill") -> None:
    """Train until the job ends, and write what it ended with, and how many seconds after the failure.

    With "clip", the process is killed while others wait for it to clip gradients.
    With "build", the process fails while the pipeline is created.
    With "column", every column of the mesh is a pipeline of its own.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    mesh = mesh["pp"] if how == "column" else mesh
    model = sequential()
    model[5] = Killer(model[5], Path(folder), rank, how)
    functions: dict[str, Any] = {
        "column": None,
        "build": lambda part, inner: fails_first(rank, Path(folder), part, inner),
    }
    try:
        pipe = sl.Pipeline(
            model,
            loss_fn=loss_fn,
            schedule="1f1b",
            microbatches=4,
            mesh=mesh,
            parallelize=functions.get(how, sharded),
            deadline=60.0,
        )
        for step in range(3):
            pipe.step(*data(pipe.replica))
            if how == "clip" and step == 1:
                if rank == 3:
                    (Path(folder) / "killed").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                pipe.clip_grad_norm_(1.0)
        if how == "column" and rank % 2 == 0:  # the other column has lost its process before these steps
            while not (Path(folder) / "said-1").exists():
                time.sleep(0.02)
            losses = [pipe.step(*data(0)).loss for _ in range(3)]
            (Path(folder) / f"said-{rank}").write_text(f"{losses[-1]} {pipe.steps} steps")
    except sl.StagelineError as error:
        after = time.time() - float((Path(folder) / "killed").read_text())
        (Path(folder) / f"said-{rank}").write_text(f"{after:.2f} {error}")
        if how != "column":  # it lives on: the others must not wait for its end
            while not all((Path(folder) / f"said-{other}").exists() for other in range(3)):
                time.sleep(0.02)
