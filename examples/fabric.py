"""A pipeline in a script of Lightning Fabric: Fabric starts the processes and places them, Stageline trains the stages.

python examples/fabric.py [--ranks 2] [--steps 3]        pip install lightning-fabric

`fabric.setup` would wrap the model for data parallel; a pipeline takes the model itself instead.
"""

from __future__ import annotations

import argparse

import torch
from lightning_fabric import Fabric  # type: ignore[import-not-found, unused-ignore]
from torch import nn

import stageline as sl


def build() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def train(fabric: Fabric, steps: int) -> list[float]:
    fabric.seed_everything(0, verbose=False)
    model, ranks = build().to(fabric.device), fabric.world_size
    pipe = sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, ranks=ranks)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    batch = torch.randn(8, 16, device=fabric.device)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        stats = pipe.step(batch, torch.zeros_like(batch))
        optimizer.step()
        losses.append(stats.loss)
        fabric.print(f"step {step}: loss {stats.loss:.4f} on {pipe.ranks} ranks")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    fabric = Fabric(accelerator="auto", devices=options.ranks, strategy="ddp")
    fabric.launch()
    train(fabric, options.steps)


if __name__ == "__main__":
    main()
