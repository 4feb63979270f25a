"""What ranks of a Ray cluster run in tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stageline as sl


def gradients() -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The place of this rank, and its gradients of one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    batch = torch.randn(8, 4)
    pipe = sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, ranks=2, deadline=60)
    pipe.step(batch, torch.zeros(8, 4))
    return dict(os.environ), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def step_until_killed(folder: str) -> None:
    """Step for ever; rank 1 dies in its third step."""
    torch.set_num_threads(1)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        die_once(Path(folder), after=6)
        return nn.functional.mse_loss(output, target)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule="1f1b", microbatches=2, ranks=2, deadline=20)
    while True:
        pipe.step(torch.ones(2, 2), torch.ones(2, 2))


def build() -> nn.Module:
    """A small model."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def samples() -> list[Any]:
    """Pairs of inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), torch.randn(4, generator=generator)) for _ in range(64)]


class DyingLoss:
    """A loss whose rank dies once, in a folder that remembers it."""

    def __init__(self, folder: Path, after: int) -> None:
        self.folder, self.after = folder, after

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        die_once(self.folder, self.after)
        return nn.functional.mse_loss(output, target)


def die_once(folder: Path, after: int) -> None:
    """Kill this process at its call number `after`, unless a process has died in this folder already."""
    _calls.append(1)
    mark = folder / "died"
    if len(_calls) >= after and not mark.exists():
        mark.write_text(os.environ["RANK"])
        os.kill(os.getpid(), signal.SIGKILL)


_calls: list[int] = []


def node_of(actor: Any) -> str:
    """The host of an actor."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def loop_of_ray_train(config: dict[str, str]) -> None:
    """What a worker of Ray Train runs: Ray has made the process group."""
    _, own = gradients()
    torch.save(own, Path(config["folder"]) / f"rank-{os.environ['RANK']}.pt")


def wait_or_return(mark: str) -> int:
    """The first start reports and waits for ever in a step; the second returns its rank."""
    from stageline.distributed.launchers.ray import report

    rank = int(os.environ["RANK"])
    if Path(mark).exists():
        return rank
    pipe = sl.Pipeline(build(), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=2, ranks=2, deadline=20)
    batch = torch.ones(2, 4)
    pipe.step(batch, batch)
    if rank == 0:
        Path(mark).write_text("started")
        report("started")
    while True:
        pipe.step(batch, batch)
