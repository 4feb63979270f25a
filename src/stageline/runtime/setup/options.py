"""The options of a pipeline: one field for each, checked on creation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from stageline.autograd.graphs.options import Compile
from stageline.autograd.recompute import Choice, Policy
from stageline.common.errors import StagelineError, nearest, shorten
from stageline.runtime.batches.chunk_specs import ChunkSpecs
from stageline.runtime.penalty import Penalty
from stageline.runtime.replan import MODES, Replan
from stageline.schedules.sharding import ReshardAfterForward, check_option
from stageline.tensors.pytree import refuse_arrays
from stageline.timeline.costs import Costs

if TYPE_CHECKING:
    from stageline.planning.plan import Plan


Reduction: TypeAlias = Literal["mean", "sum", "count"]
"""How loss_fn reduces the losses of a microbatch's samples."""


@dataclass
class PipelineOptions:
    """How a pipeline trains; `Pipeline` documents each option."""

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
    cuda_graphs: bool = False
    bucket_mb: float = 25.0
    reduce_dtype: torch.dtype | None = None
    replan: Replan = "off"
    replan_every: int = 10
    planned: Costs | Plan | None = None
    stragglers: bool = True
    chunk_specs: ChunkSpecs = field(default_factory=ChunkSpecs)
    parallelize: Callable[[Any, Any], Any] | None = None
    shard_optimizer: bool = False
    reshard_after_forward: ReshardAfterForward = "default"

    def __post_init__(self) -> None:
        refuse_arrays(self.example, "the example")
        if self.loss_reduction not in ("mean", "sum", "count"):
            raise StagelineError(f"loss_reduction must be 'mean', 'sum' or 'count', got {self.loss_reduction!r}")
        dtype, every = self.reduce_dtype, self.replan_every
        penalty: Any = self.penalty
        if not isinstance(self.bucket_mb, int | float) or not self.bucket_mb > 0:
            raise StagelineError(f"bucket_mb must be a size in MiB above 0, got {shorten(self.bucket_mb)}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise StagelineError(
                f"reduce_dtype must be a floating-point type such as torch.bfloat16, got {shorten(dtype)}"
            )
        if penalty is not None and not callable(penalty):
            expected = "a function of a parameter's name and the parameter"
            raise StagelineError(f"penalty must be {expected}, got {shorten(penalty)}")
        if self.replan not in MODES:
            meant = nearest(str(self.replan), MODES)
            raise StagelineError(f"replan must be 'off', 'warn' or 'auto', got {shorten(self.replan)}{meant}")
        if not isinstance(every, int) or isinstance(every, bool) or every < 2:
            raise StagelineError(f"replan_every must be an integer >= 2, got {shorten(every)}")
        for name, value in (("cuda_graphs", self.cuda_graphs), ("shard_optimizer", self.shard_optimizer)):
            if not isinstance(value, bool):
                raise StagelineError(f"{name} must be True or False, got {shorten(value)}")
        if isinstance(self.compile, Mapping) and self.compile.get("mode") == "reduce-overhead":
            self.cuda_graphs = True  # inductor's own graphs know nothing of the order of actions
            self.compile = {name: value for name, value in self.compile.items() if name != "mode"} or True
        parallelize: Any = self.parallelize
        if parallelize is not None and not callable(parallelize):
            expected = "a function of a stage and a mesh that changes the stage in place"
            raise StagelineError(f"parallelize must be {expected}, got {shorten(parallelize)}")
        check_option("reshard_after_forward", self.reshard_after_forward)
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError):
            expected = "a torch.device or its name, such as 'cuda:0'"
            raise StagelineError(f"device must be {expected}, got {shorten(self.device)}") from None
        if not callable(self.loss_fn):
            raise StagelineError(f"loss_fn must be a function of output and target, got {shorten(self.loss_fn)}")
        self.seconds = find_deadline(self.deadline)


def find_deadline(deadline: float | None) -> float:
    """The deadline in seconds: the option, the environment variable STAGELINE_DEADLINE, or a minute."""
    text = os.environ.get("STAGELINE_DEADLINE", "")
    try:
        seconds = float(deadline if deadline is not None else text or 60.0)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        name, value = ("deadline", deadline) if deadline is not None else ("STAGELINE_DEADLINE", text)
        raise StagelineError(f"{name} must be a number of seconds above 0, got {value!r}")
    return seconds
