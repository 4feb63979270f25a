"""Whether a model computes in a pipeline what it computes alone: both ways on one batch, compared bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import StagelineError, shorten
from stageline.model.asked import whole
from stageline.model.huggingface import own_loss
from stageline.model.passed import arguments
from stageline.model.unwrap import unwrapped
from stageline.runtime.pipeline import Pipeline
from stageline.runtime.randomness import Generators
from stageline.runtime.tree import batch_size, split_batch
from stageline.schedules.schedule import Schedule
from stageline.testing.reference import Difference, differences


@dataclass(frozen=True)
class Report:
    """What a check found; true where every bit is the same."""

    schedule: Schedule
    loss: float
    alone: float
    """The loss of the model alone."""
    differing: tuple[Difference, ...]
    """The gradients and buffers that differ in any bit, those that differ most first."""
    compared: int
    """How many gradients and buffers were compared."""
    tied: tuple[str, ...]
    """Parameters that several stages use: their gradients are added up stage by stage, and may differ by rounding."""
    reference: str

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return self.loss == self.alone and not self.differing

    @property
    def worst(self) -> Difference | None:
        """The largest difference, and where it is."""
        return self.differing[0] if self.differing else None

    def __bool__(self) -> bool:
        """Whether every bit is the same."""
        return self.equal

    def __str__(self) -> str:
        """Say it in a few lines."""
        lines = [
            f"{self.schedule.name} on {self.schedule.ranks} ranks, {self.schedule.stages} stages, "
            f"{self.schedule.microbatches} microbatches, against {self.reference}",
            f"loss       {self.loss!r} and {self.alone!r}: {'the same' if self.loss == self.alone else 'not the same'}",
            f"bits       {self.compared - len(self.differing)} of {self.compared} gradients and buffers are the same",
        ]
        for name, largest in self.differing[:5]:
            why = ", used by several stages: added up stage by stage" if name in self.tied else ""
            lines.append(f"           {name} differs by {largest:.3g}{why}")
        if len(self.differing) > 5:
            lines.append(f"           and {len(self.differing) - 5} more")
        return "\n".join(lines)


def check(
    model: nn.Module,
    batch: Any,
    *,
    ranks: int,
    schedule: str | Path | Schedule = "1f1b",
    microbatches: int | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    example: Any = None,
    **options: Any,
) -> Report:
    """Run a copy of the model alone and another one in a pipeline, on the same batch, and compare.

    `batch` is a pair of inputs and targets, or a dict of keywords for a model that computes its own loss. A model that
    draws random numbers is compared with a pipeline of one rank, which draws the same ones. Yours is left as it is.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> report = check(model, (torch.ones(4, 4), torch.ones(4, 2)), ranks=2, loss_fn=nn.functional.mse_loss)
    >>> report.equal, report.compared
    (True, 4)
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise StagelineError(f"check takes a model, an nn.Module, got {shorten(model)}")
    whole("ranks", ranks)
    inputs, targets, loss = _understood(batch, loss_fn)
    samples = batch_size(inputs, "the inputs")
    parts = min(2 * ranks, samples) if microbatches is None else microbatches
    if isinstance(schedule, Schedule):
        parts = schedule.microbatches
    piped, plain = copy.deepcopy(model), copy.deepcopy(model)
    pipe = Pipeline(
        piped, loss_fn=loss, schedule=schedule, ranks=ranks, microbatches=parts, example=example, seed=0, **options
    )
    if len(pipe._world.here) != pipe.schedule.ranks:
        raise StagelineError("check compares in one process; call it without torchrun")
    # Copies: a model may change its inputs in place.
    found = pipe.step(*copy.deepcopy((inputs, targets))).loss
    alone, reference = _alone(plain, loss, inputs, targets, parts)
    if alone is None:
        plain, reference = copy.deepcopy(model), "one rank: the model draws random numbers"
        alone = (
            Pipeline(plain, loss_fn=loss, schedule="gpipe", ranks=1, microbatches=parts, example=example, seed=0)
            .step(inputs, targets)
            .loss
        )
    mine, other = _state(piped), _state(plain)
    tied = {id(parameter) for parameter in pipe._placed.uses}
    return Report(
        schedule=pipe.schedule,
        loss=found,
        alone=alone,
        differing=tuple(sorted(differences(mine, other), key=lambda each: -each.largest)),
        compared=sum(value is not None for value in other.values()),
        tied=tuple(name for name, parameter in piped.named_parameters() if id(parameter) in tied),
        reference=reference,
    )


def _understood(batch: Any, loss_fn: Callable[[Any, Any], Any] | None) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    if isinstance(batch, tuple | list) and len(batch) == 2 and loss_fn is not None:
        return batch[0], batch[1], loss_fn
    if isinstance(batch, Mapping):
        return dict(batch), batch.get("labels"), loss_fn or own_loss
    raise StagelineError(
        f"batch is a pair of inputs and targets, with loss_fn=, or a dict of keywords for a model with its own loss; "
        f"got {shorten(batch)}{'' if loss_fn else ' and no loss_fn'}"
    )


def _alone(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], inputs: Any, targets: Any, parts: int
) -> tuple[float | None, str]:
    """The loss of a plain loop over the microbatches; None where the model draws random numbers."""
    samples = batch_size(inputs, "the inputs")
    wanted = [None] * parts if targets is None else split_batch(targets, parts)
    total = 0.0
    with torch.random.fork_rng(devices=[]):
        before = Generators.now()
        for given, target in list(zip(split_batch(inputs, parts), wanted, strict=True))[: min(parts, samples)]:
            loss = loss_fn(_call(model, given), target)
            loss = loss[0] if isinstance(loss, tuple) else loss
            weighed = loss * (batch_size(given, "the inputs") / samples)
            weighed.backward()
            total += float(weighed.detach())
        if before.moved():
            return None, ""
    return total, "a plain loop of one process"


def _call(model: nn.Module, given: Any) -> Any:
    if isinstance(model, nn.Sequential):
        return model(given)
    args, kwargs = arguments(given)
    return model(*args, **kwargs)


def _state(model: nn.Module) -> dict[str, Tensor | None]:
    grads: dict[str, Tensor | None] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads | {f"{name} (buffer)": buffer for name, buffer in model.named_buffers()}
