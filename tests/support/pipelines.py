"""Small models, batches and losses for tests of the runtime, and the loop they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import assert_same_bits, one_process_step
from support.gradients import gradients

TRAINING = [name for name in sl.families() if name != "forward-only"]


class Block(nn.Module):
    """Norm, two linear layers and a residual: what a transformer's feed-forward part does."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.down(functional.gelu(self.up(self.norm(x)))))


def blocks(count: int = 8, width: int = 8) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(width) for _ in range(count)))


class Head(nn.Module):
    """A last layer that uses the weight of another layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def tied_model() -> Any:
    torch.manual_seed(3)
    embedding: Any = nn.Embedding(11, 8)
    return nn.Sequential(embedding, Block(), Block(), Head(embedding.weight))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(samples: int = 10, width: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(samples, 3, width), torch.randn(samples, 3, width)


def weights(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


class Trained(NamedTuple):
    """The results of three steps of one process."""

    losses: list[float]
    gradients: list[dict[str, Tensor | None]]
    weights: dict[str, Tensor | None]


@cache
def plainly_trained(microbatches: int, directions: tuple[int, ...] | None, dtype: torch.dtype) -> Trained:
    """The plain loop on the blocks; it is the same for every family and number of ranks."""
    model = blocks().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = (part.to(dtype) for part in batch())
    losses, grads = [], []
    for _ in range(3):
        losses.append(one_process_step(model, functional.mse_loss, x, y, microbatches, directions=directions))
        grads.append({name: grad.clone() for name, grad in gradients(model).items() if grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, [dict(gradient) for gradient in grads], weights(model))


def sizes(name: str, ranks: Sequence[int] = (1, 2, 3, 4)) -> Iterator[tuple[int, int]]:
    for count in ranks:
        for microbatches in range(1, 10):
            try:
                sl.schedule(name, count, microbatches)
            except sl.ScheduleError:
                continue
            yield count, microbatches


def train_beside_the_loop(
    name: str, ranks: int, microbatches: int, dtype: torch.dtype, here: int | None = None
) -> None:
    """Three steps of a family; fail where a loss, a gradient or a weight differs in any bit from the plain loop's.

    `here` is the rank of this process, if each is one: it then gets only what it needs, or everything.
    """
    what = f"of {name}, {ranks} ranks, {microbatches} microbatches, {dtype}"
    x, y = (part.to(dtype) for part in batch())
    pipe = sl.Pipeline(
        blocks().to(dtype), loss_fn=functional.mse_loss, schedule=name, ranks=ranks, microbatches=microbatches
    )
    directions = tuple(pipe.schedule.placement.direction.tolist())
    expected = plainly_trained(microbatches, directions if 1 in directions else None, dtype)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    stages = set(pipe.schedule.placement.stages_of(here)) if here is not None else set(range(pipe.schedule.stages))
    for step in range(3):
        everything = here is None or here % 2 == 1
        stats = pipe.step(
            x if 0 in stages or everything else None, y if pipe.schedule.stages - 1 in stages or everything else None
        )
        assert stats.loss == expected.losses[step], what
        mine = dict(pipe.named_gradients())
        assert_same_bits(mine, {key: expected.gradients[step].get(key) for key in mine}, f"gradients {what}")
        optimizer.step()
        optimizer.zero_grad()
    trained: dict[str, Tensor | None] = {key: value.detach() for key, value in pipe.named_parameters()}
    assert_same_bits(trained, {key: expected.weights[key] for key in trained}, f"weights {what}")
    assert pipe.timeline.schedule == pipe.schedule


class Noisy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.dropout(super().forward(x)))


def noisy() -> Any:
    torch.manual_seed(6)
    return nn.Sequential(*(Noisy() for _ in range(8)))


class Average(nn.Module):
    """Keeps a running mean in a buffer that it reassigns, and one that it changes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count: Tensor
        self.scale: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.scale.add_(1.0)
        return torch.as_tensor(self.linear(x) * self.scale.clone())


def linear_pipeline(**options: Any) -> sl.Pipeline:
    """Four linear layers on two ranks, unless the options say otherwise."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return sl.Pipeline(layers, **{"loss_fn": functional.mse_loss, "ranks": 2, "microbatches": 2, **options})


def assert_steps_equal_loop(build: Any, x: Tensor, y: Tensor, microbatches: int = 2, **options: Any) -> sl.StepStats:
    """Run two steps of a pipeline and of the plain loop, and compare every bit."""
    torch.manual_seed(1)
    model = build()
    plain = copy.deepcopy(nn.Sequential(*model))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, microbatches=microbatches, **options)
    for _ in range(2):
        stats = pipe.step(x, y)
        assert stats.loss == one_process_step(plain, functional.mse_loss, x, y, microbatches)
    assert_same_bits(gradients(nn.Sequential(*model)), gradients(plain))
    return stats
