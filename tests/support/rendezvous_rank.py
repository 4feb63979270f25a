"""A rank that joins several rendezvous in one process, each for a pipeline that may fail.

The outcome of each round is a line of JSON in `rounds-RANK`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step

RANKS = 3


def train(rank: int, fault: str) -> dict[str, Any]:
    """Run a correct step, and then a fault on the last rank."""
    torch.manual_seed(1)
    stages = [nn.Linear(3, 3) for _ in range(RANKS)]
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(RANKS)))
    plain.load_state_dict(nn.Sequential(*stages).state_dict())
    pipe = sl.Pipeline(stages, loss_fn=functional.mse_loss, schedule="1f1b", microbatches=2)
    x, y = torch.ones(4, 3), torch.zeros(4, 3)
    pipe.step(x, y)
    one_process_step(plain, functional.mse_loss, x, y, microbatches=2)
    mine, alone = dict(pipe.named_gradients()), {name: value.grad for name, value in plain.named_parameters()}
    assert_same_bits(mine, {name: alone[name] for name in mine}, "gradients")
    host: Any = pipe.runner.host
    if fault and rank == RANKS - 1:
        host.all_reduce(np.zeros(1))  # so all have finished their step
    if fault == "kill" and rank == RANKS - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "leave" and rank == RANKS - 1:
        host.abandon(KeyboardInterrupt("planted"))
        return {"error": ""}
    try:
        if fault:
            host.all_reduce(np.zeros(1))
            host.all_reduce(np.zeros(1))
    except sl.PipelineError as error:
        return {"error": str(error)}
    return {"error": ""}


def main(rank: int, folder: str, rounds: list[list[Any]], script_makes_it: bool) -> None:
    """Each round is its number, its port, and its fault."""
    torch.set_num_threads(1)
    for number, port, fault in rounds:
        os.environ["MASTER_PORT"] = str(port)
        if script_makes_it:
            dist.init_process_group("gloo")
        outcome = train(rank, fault)
        with (Path(folder) / f"rounds-{rank}").open("a") as file:
            file.write(json.dumps({"round": number, **outcome}) + "\n")
        # A rank that is done must not take the channel away from those that are not.
        end = time.monotonic() + 200.0
        (Path(folder) / f"done-{number}-{rank}").touch()
        while fault != "kill" and len(list(Path(folder).glob(f"done-{number}-*"))) < RANKS:
            assert time.monotonic() < end
            time.sleep(0.01)
        dist.destroy_process_group()
