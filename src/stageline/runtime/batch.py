"""A user's batch before it runs: all ranks agree on it, and it is cut into the microbatches of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stageline.common.errors import PipelineError, StagelineError
from stageline.distributed.rank_host import Floats, World
from stageline.model.huggingface import own_loss
from stageline.runtime.batches.input_gradients import (
    refuse_graphs,
    refuse_keywords,
    refuse_target_graphs,
    wanted,
    with_leaves,
)
from stageline.runtime.executor import StepRequest
from stageline.runtime.microbatches import (
    COUNT,
    MODE,
    NAMES,
    REFUSED,
    SCALE,
    BatchRow,
    Keywords,
    difference,
    input_parts,
    keyword_parts,
    settings_row,
    target_parts,
    validate_batch,
    weights,
)
from stageline.runtime.rank_executors import ExecutorSet
from stageline.runtime.replicas import Replicas
from stageline.runtime.setup.model_stages import ModelStages
from stageline.runtime.setup.options import PipelineOptions
from stageline.schedules.schedule import Schedule


@dataclass(frozen=True)
class Batch:
    """What a user asks to be run, in this replica."""

    inputs: Any
    targets: Any = None
    keywords: Keywords | None = None
    training: bool = False
    with_targets: bool = True
    keep: bool = False
    """Whether the outputs are wanted."""
    count: float | None = None
    scale: float = 1.0
    sync: bool = True
    """Whether gradients are added up over replicas."""
    check_gradients: bool = True
    """Whether gradients that are not finite fail the step."""

    @property
    def columns(self) -> list[int]:
        """The indices into `NAMES` of what must be the same on all ranks of a replica."""
        return [0, 1, 2, 3, SCALE, COUNT, MODE] if self.with_targets else [0, 1, 3, MODE]

    @property
    def mode(self) -> int:
        """Training, evaluation or prediction, and `sync`, as a number."""
        return 1 + self.training + 2 * self.with_targets + 4 * self.sync


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on before a step."""

    samples: int
    """Of this replica."""
    total: int
    """Of all replicas."""
    rows: Callable[[], Floats]
    """Waits for the rows of all ranks of this replica, to be compared."""
    refused: Exception | None = None
    """Why this process cannot run the batch."""


class BatchIntake:
    """Takes in the batches of a pipeline, on all processes alike."""

    def __init__(
        self, options: PipelineOptions, schedule: Schedule, world: World, stages: ModelStages, replicas: Replicas | None
    ) -> None:
        self._options, self._world, self._stages, self._replicas = options, world, stages, replicas
        self.parts, self._stage_count = schedule.microbatches, schedule.stages
        """How many microbatches a batch is cut into."""
        table = schedule.placement.table
        self.first_ranks, self.last_ranks = (sorted(set(table[:, stage].tolist())) for stage in (0, -1))
        self.readers = {1: set(self.first_ranks), 2: set(self.last_ranks)}
        """By index into `NAMES`: the ranks that read the inputs, and those that read the targets."""
        self.agreed: int | None = None
        """How many samples all ranks had in the last step."""

    def targets(self, targets: Any) -> Any:
        """The targets of the loss: a model that computes its own loss has them among its inputs."""
        return None if self._options.loss_fn is own_loss else targets

    def validate(self, batch: Batch) -> BatchRow:
        """Make sure that a batch can be cut."""
        specs, alone = self._options.chunk_specs, self._world.single_process
        if alone and specs.kwargs is not None and batch.training:
            specs.refuse_unknown(batch.inputs, batch.keywords)
        if batch.keep:
            specs.refuse_merge()
        validated = validate_batch(self._stage_count, batch.inputs, batch.targets, batch.keywords, not alone, specs)
        if alone and batch.inputs is None:
            raise StagelineError("the inputs are None; the first stage needs them")
        if alone and validated.samples is None:
            raise StagelineError(
                "the chunk specs give all of the batch to every microbatch, so there is nothing to cut into "
                f"{self.parts} microbatches; let them cut one tensor at least"
            )
        settings = settings_row(batch.scale, batch.count, self._stages.model.training)
        return BatchRow(validated.samples, np.concatenate([validated.row, settings]))

    def agree(self, batch: Batch, elements: int) -> Agreement:
        """Agree on the batch with all ranks.

        Nothing waits, except for a rank that was given nothing, or another number of samples than in the last step: it
        waits until it knows what the others were given. Where there are replicas, all ranks wait.
        """
        world, replicas = self._world, self._replicas
        refused: Exception | None = None
        try:
            own = self.validate(batch)
        except StagelineError as error:
            if world.single_process and replicas is None:
                raise
            refused, own = error, BatchRow(None, np.array(REFUSED))
        if replicas is not None:
            row = replicas.row(own, batch.mode, batch.count, elements, refused is not None)
            known = world.all_gather(row)
            counts = replicas.agree(known, [] if world.single_process else batch.columns, self.readers, refused)
            rows_here = known[world.replica, :, : len(NAMES)]
            return Agreement(counts[world.replica], sum(counts), lambda: rows_here)
        gathered = world.all_gather_async(own.row)

        def rows() -> Floats:
            first: Floats = gathered()[0]
            return first

        if own.samples is not None and (world.single_process or own.samples == self.agreed):
            return Agreement(own.samples, own.samples, rows, refused)
        known = rows()
        sizes = set(known[:, 0].tolist()) - {0.0}
        apart = difference(known, [0])
        if not sizes or (apart and self.agreed not in sizes):  # and every rank knows it
            raise refused or PipelineError(apart or "no rank was given the inputs")
        samples = int(self.agreed) if apart and self.agreed is not None else int(sizes.pop())
        return Agreement(samples, samples, rows, refused or (PipelineError(apart) if apart else None))

    def request(self, executors: ExecutorSet, batch: Batch, step: int, samples: int, total: int) -> StepRequest:
        """Cut the batch, and refuse what a step cannot do with it; parts that would be empty are left out.

        `samples` are those of this replica, `total` those of all.
        """
        parts, specs, training = self.parts, self._options.chunk_specs, batch.training
        filled = min(parts, samples)
        wants: Sequence[bool] = ()
        if training and not (_has_no_graph(batch.inputs) and _has_no_graph(batch.targets) and not batch.keywords):
            wants = wanted(batch.inputs)
            refuse_graphs(batch.inputs, self._world.layout.replicas)
            refuse_keywords(batch.keywords)
            refuse_target_graphs(batch.targets)
        whole, roots = with_leaves(batch.inputs) if wants else (batch.inputs, ())
        with torch.enable_grad() if wants else nullcontext():  # gradients go from the parts to the whole
            inputs = input_parts(whole, parts, filled, specs)
        request = StepRequest(
            step=step,
            samples=total,
            inputs=inputs,
            inputs_want=wants,
            input_roots=roots,
            targets=target_parts(batch.targets, parts, filled, specs) if batch.with_targets else [],
            weights=weights(
                self._options.loss_reduction, samples, parts, filled, batch.count, not batch.with_targets, total
            ),
            keywords=keyword_parts(batch.keywords, self._stage_count, parts, filled, specs) if batch.keywords else {},
            training=training,
            keep_outputs=batch.keep,
            scale=batch.scale,
            check_finite=self._options.check_finite,
            check_gradients=batch.check_gradients,
        )
        if training and not self._stages.plain:
            self._stages.placed.refuse_hooks(self._stages.name_of)
        for executor in executors.executors if request.keywords else ():
            for stage, keywords in request.keywords.items():
                if stage in executor.stages:
                    executor.stages[stage].check_keywords(list(keywords[0]))
        return request


def _has_no_graph(value: Any) -> bool:
    """Whether a value is no tensor of a graph, for sure and at a glance."""
    return value is None or (type(value) is Tensor and not value.requires_grad)
