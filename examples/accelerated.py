"""A pipeline in a script of Hugging Face accelerate: accelerate places the processes, Stageline trains the stages.

torchrun --nproc-per-node 2 examples/accelerated.py [--steps 3]        pip install accelerate
accelerate launch --num_processes 2 examples/accelerated.py            with two GPUs

`accelerator.prepare` would wrap the model for data parallel; a pipeline takes the model itself.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator  # type: ignore[import-untyped, import-not-found, unused-ignore]
from accelerate.utils import set_seed  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import nn

import stageline as sl


def build() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def train(accelerator: Accelerator, steps: int) -> list[float]:
    set_seed(0)
    model, ranks = build().to(accelerator.device), accelerator.num_processes
    pipe = sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, ranks=ranks)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    batch = torch.randn(8, 16, device=accelerator.device)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        stats = pipe.step(batch, torch.zeros_like(batch))
        optimizer.step()
        losses.append(stats.loss)
        accelerator.print(f"step {step}: loss {stats.loss:.4f} on {pipe.ranks} ranks")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    train(Accelerator(cpu=not torch.cuda.is_available()), options.steps)


if __name__ == "__main__":
    main()
