"""A rank of two replicas of two, of which one is killed in the backward of its second step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import FaultyStage


def die(value: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return value


def main(rank: int, folder: str) -> None:
    """Train until a rank is lost, and write the error."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    stages = [FaultyStage(nn.Linear(4, 4)) for _ in range(2)]
    pipe = sl.Pipeline(stages, loss_fn=functional.mse_loss, ranks=2, replicas=2, microbatches=4, deadline=60.0)
    x = torch.full((8, 4), float(pipe.replica))
    pipe.step(x, x)
    if rank == 2:
        stages[0].plant(die, "B", 3)  # its last action: the others are adding up, or wait for it
    try:
        pipe.step(x, x)
    except sl.PipelineError as error:
        (Path(folder) / f"said-{rank}").write_text(str(error))
