"""What a step tells its caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stageline.timeline.timeline import Timeline


@dataclass(frozen=True)
class StepStats:
    """The figures of one step."""

    loss: float
    """The loss of the step: the sum over microbatches of loss × weight, in their order; then over replicas; and the
    penalty, where there is one."""
    losses: tuple[float, ...]
    """Each microbatch's part of it, in this replica."""
    metrics: dict[str, float]
    """What `loss_fn` returned beside the loss, weighed and added as the loss is."""
    seconds: float
    """How long the step took; in a run, how long after the one before it was over."""
    samples: int
    """How many samples it trained on, in all replicas."""
    microbatches: int
    """How many microbatches ran in this replica; fewer than asked for where the batch has fewer samples."""
    unsplit: float
    """The share of the parameters' elements whose gradients could not be split off and came with I, not with W."""
    measured: Callable[[], Timeline] = field(repr=False, compare=False)
    """Gives the measured timeline of the step."""
    penalty: float = 0.0
    """The sum of what `penalty=` gave for all parameters."""
    norm: float | None = None
    """In a run: the norm of all gradients before they were clipped; None where nothing asked for it."""

    @cached_property
    def bubble(self) -> float | None:
        """The share of the step's makespan that its busiest rank did not compute, measured.

        None where the clocks of the ranks were not aligned.
        """
        return self.measured().bubble


@dataclass(frozen=True)
class Evaluation:
    """What a batch gives without training on it."""

    loss: float | None
    losses: tuple[float, ...]
    metrics: dict[str, float]
    outputs: Any
    seconds: float
