"""A rank on one of several hosts: trains a few steps, and compares its gradients with those of one process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step

torch.set_num_threads(1)


def main(deadline: float = 30.0, replicas: int = 1, steps: int = 2, pause: float = 0.0) -> None:
    """Print `done` after the steps, which may be some seconds apart, or the error."""
    ranks = int(os.environ["WORLD_SIZE"]) // replicas
    torch.manual_seed(1)
    stages, plain = ([nn.Linear(3, 3) for _ in range(ranks)] for _ in range(2))
    for copy, stage in zip(plain, stages, strict=True):
        copy.load_state_dict(stage.state_dict())
    whole = nn.Sequential(*plain)
    x, y = torch.ones(8, 3), torch.zeros(8, 3)
    try:
        pipe = sl.Pipeline(
            stages, loss_fn=functional.mse_loss, schedule="1f1b", microbatches=2, replicas=replicas, deadline=deadline
        )
        for step in range(steps):
            if pause:
                print(f"step {step}", flush=True)
                time.sleep(pause)
            pipe.zero_grad()
            whole.zero_grad()
            pipe.step(x, y)
            one_process_step(whole, functional.mse_loss, x, y, microbatches=2)
            alone = {name: value.grad for name, value in whole.named_parameters()}
            mine = dict(pipe.named_gradients())
            assert_same_bits(mine, {name: alone[name] for name in mine}, "gradients")
    except sl.StagelineError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)
    timeline = pipe.timeline
    if timeline is not None:
        print(f"clocks {timeline.uncertainty} makespan {timeline.makespan} machines {len(timeline.ranks_by_host)}")
    host: Any = pipe.runner.host
    print(f"done at {host._groups.links.address}", flush=True)


def script_makes_group(deadline: float = 30.0) -> None:
    """As `main`, in a group that the script made."""
    dist.init_process_group("gloo")
    main(deadline)
    dist.destroy_process_group()


def of_another_version(deadline: float = 30.0) -> None:
    """As `main`, where the last rank runs another version."""
    from stageline.distributed import meeting

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        meeting.__version__ = "0.0.9"  # type: ignore[attr-defined]
    main(deadline)
