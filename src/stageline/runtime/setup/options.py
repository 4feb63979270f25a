"""The options of a pipeline: one field for each, checked on creation, and compared between processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from stageline.autograd.recompute import Choice, Policy
from stageline.common.errors import StagelineError, shorten
from stageline.runtime.batches.chunk_specs import ChunkSpecs
from stageline.runtime.grad_reduce import check_buckets
from stageline.runtime.penalty import Penalty, check_penalty
from stageline.runtime.replan import Replan, check_replan
from stageline.runtime.setup.compile import Compile
from stageline.runtime.setup.handshake import function_fact
from stageline.tensors.pytree import refuse_arrays
from stageline.timeline.costs import Costs

if TYPE_CHECKING:
    from stageline.planning.plan import Plan


Reduction: TypeAlias = Literal["mean", "sum", "count"]
"""How loss_fn reduces the losses of a microbatch's samples."""


@dataclass
class PipelineOptions:
    """How a pipeline trains; `Pipeline` documents each option.

    >>> PipelineOptions(loss_fn=torch.nn.functional.mse_loss, deadline=0)
    Traceback (most recent call last):
    ...
    stageline.StagelineError: deadline is a number of seconds above 0, got 0
    """

    loss_fn: Callable[[Any, Any], Any]
    loss_reduction: Reduction = "mean"
    penalty: Penalty | None = None
    check_finite: bool = True
    compare_weights: bool = True
    recompute: Choice = "none"
    recompute_policy: Policy | None = None
    seed: int | None = None
    deadline: float | None = None
    example: Any = None
    device: torch.device | str = "cpu"
    compile: Compile = False
    bucket_mb: float = 25.0
    reduce_dtype: torch.dtype | None = None
    replan: Replan = "off"
    replan_every: int = 10
    planned: Costs | Plan | None = None
    stragglers: bool = True
    chunk_specs: ChunkSpecs = field(default_factory=ChunkSpecs)

    def __post_init__(self) -> None:
        refuse_arrays(self.example, "the example")
        if self.loss_reduction not in ("mean", "sum", "count"):
            raise StagelineError(f"loss_reduction is 'mean', 'sum' or 'count', got {self.loss_reduction!r}")
        check_buckets(self.bucket_mb, self.reduce_dtype)
        check_penalty(self.penalty)
        check_replan(self.replan, self.replan_every)
        if not callable(self.loss_fn):
            raise StagelineError(f"loss_fn is a function of output and target, got {shorten(self.loss_fn)}")
        self.seconds = find_deadline(self.deadline)

    def facts(self) -> dict[str, str]:
        """The options that must be the same on all processes, as text."""
        return {
            "the seed that was passed": repr(self.seed),
            "loss_reduction": self.loss_reduction,
            "loss_fn": function_fact(self.loss_fn),
            "penalty": function_fact(self.penalty),
            "check_finite": str(self.check_finite),
            "compare_weights": str(self.compare_weights),
            "bucket_mb and reduce_dtype": f"{self.bucket_mb:g} {self.reduce_dtype}",
            "the chunk specs": str(self.chunk_specs),
            "replan, replan_every and planned": f"{self.replan} {self.replan_every} {self.planned}",
        }


def find_deadline(deadline: float | None) -> float:
    """The deadline in seconds: the option, the environment variable STAGELINE_DEADLINE, or a minute."""
    text = os.environ.get("STAGELINE_DEADLINE", "")
    try:
        seconds = float(deadline if deadline is not None else text or 60.0)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        name, value = ("deadline", deadline) if deadline is not None else ("STAGELINE_DEADLINE", text)
        raise StagelineError(f"{name} is a number of seconds above 0, got {value!r}")
    return seconds
