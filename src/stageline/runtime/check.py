"""Check a pipeline against the model in one process: both run the same batch, and every bit is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.common.units import format_sizes
from stageline.distributed.collectives import ProcessCollectives
from stageline.distributed.layout import ranks_of
from stageline.model.compiled_models import unwrapped
from stageline.model.huggingface import own_loss
from stageline.model.split import check_positive
from stageline.runtime._torch_private import pytree
from stageline.runtime.batches.chunk_specs import ChunkSpecs
from stageline.runtime.microbatches import Batch, digest, input_parts, target_parts
from stageline.runtime.pipeline import Pipeline
from stageline.runtime.reference import (
    FINE,
    Difference,
    OneProcess,
    Reasons,
    Reordered,
    copy_batch,
    count_samples,
    differences,
    differentiable,
    within,
)
from stageline.runtime.stage import Stage
from stageline.runtime.state_dict import gather_state
from stageline.schedules.schedule import Schedule
from stageline.tensors.copies import detached
from stageline.tensors.sharded import local

Verdict: TypeAlias = Literal["equal", "reordered", "different"]


@dataclass(frozen=True)
class Report:
    """The result of `check`; true if every bit is the same."""

    schedule: Schedule
    loss: float
    alone: float
    """The loss of the model in one process."""
    differing: tuple[Difference, ...]
    """The gradients and buffers that differ in any bit, the largest difference first."""
    compared: int
    """The number of gradients and buffers compared."""
    tied: tuple[str, ...]
    """Parameters that several stages use. Their gradients are summed stage by stage and may differ by rounding."""
    reference: str
    """What the pipeline was compared with, in words."""
    reordered: tuple[Reordered, ...] = ()
    """The differing gradients whose terms are only summed in another order, and why."""
    loss_rounding: float = 0.0
    """By how much rounding may change the loss: 0 unless replicas or tensor parallel sum it in another order."""
    microbatches: int = 0
    """The number of microbatches that ran; a small batch has fewer than the schedule."""

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return self.loss == self.alone and not self.differing

    @property
    def verdict(self) -> Verdict:
        """One of "equal", "reordered" and "different".

        "reordered" means that only gradients summed in another order differ, and by no more than rounding.
        """
        if self.equal:
            return "equal"
        same_loss = abs(self.loss - self.alone) <= self.loss_rounding
        return "reordered" if same_loss and not self.unexplained else "different"

    @property
    def _loss_in_words(self) -> str:
        if self.loss == self.alone:
            return "the same"
        return "not the same" if abs(self.loss - self.alone) > self.loss_rounding else "the same within rounding"

    @property
    def unexplained(self) -> tuple[Difference, ...]:
        """The differences that the order of summation does not explain."""
        known = {tensor.name for tensor in self.reordered}
        return tuple(tensor for tensor in self.differing if tensor.name not in known)

    @property
    def worst(self) -> Difference | None:
        """The largest difference."""
        return self.differing[0] if self.differing else None

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        sizes = format_sizes(self.schedule.ranks, self.schedule.stages, self.microbatches or self.schedule.microbatches)
        lines = [
            f"{self.schedule.name} on {sizes}, against {self.reference}",
            f"verdict    {self.verdict}: {_MEANING[self.verdict]}",
            f"loss       {self.loss!r} and {self.alone!r}: {self._loss_in_words}",
            f"bits       {self.compared - len(self.differing)} of {self.compared} gradients and buffers are the same",
        ]
        why = {tensor.name: f", rounding: {tensor.why}" for tensor in self.reordered}
        shown = sorted(self.differing, key=lambda tensor: tensor.name in why)  # unexplained ones first
        lines += [f"           {name} differs by {largest:.3g}{why.get(name, '')}" for name, largest in shown[:5]]
        if len(self.differing) > 5:
            lines.append(f"           and {len(self.differing) - 5} more")
        return "\n".join(lines)


_MEANING = {
    "equal": "every bit is the same",
    "reordered": "the same sums in another order; they differ only by rounding",
    "different": "the pipeline computes something else than the model in one process",
}


def check(
    model: nn.Module,
    batch: Any,
    *,
    ranks: int | None = None,
    schedule: str | Path | Schedule | type = "1f1b",
    microbatches: int | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    example: Any = None,
    **options: Any,
) -> Report:
    """Run one copy of the model in one process and another in a pipeline on the same batch, and compare them.

    `batch` is a pair of inputs and targets, or a dict of keyword arguments for a model that computes its own loss. A
    model that draws random numbers is compared with a pipeline of one rank, which draws the same ones. `model` itself
    is not changed.

    In a job of several processes, all of them call this with the same model and the same whole batch, of which each
    data coordinate takes its share. `mesh` and `parallelize` are those of `Pipeline`; `ranks` is by default that of the
    mesh. Every process holds the whole model beside its stages.

    The report's `verdict` is "equal" if every bit is the same, "reordered" if the only differences are gradients whose
    terms a pipeline sums in another order (tied weights, values that several stages use) and they are within rounding,
    and "different" otherwise.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> report = check(model, (torch.ones(4, 4), torch.ones(4, 2)), ranks=2, loss_fn=nn.functional.mse_loss)
    >>> report.verdict, report.equal, report.compared
    ('equal', True, 4)
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise StagelineError(f"check expects a model (nn.Module), got {shorten(model)}")
    if ranks is None and options.get("mesh") is not None:
        ranks = ranks_of(options["mesh"])
    check_positive("ranks", ranks)
    assert ranks is not None
    inputs, targets, loss = _parse_batch(batch, loss_fn)
    names = ("args_chunk_spec", "kwargs_chunk_spec", "targets_chunk_spec", "output_merge_spec")
    samples = count_samples(inputs, ChunkSpecs(*(options.get(name) for name in names)))
    inputs = pytree.tree_map(_as_leaf, inputs)
    parts = min(2 * ranks, samples) if microbatches is None else microbatches
    if isinstance(schedule, Schedule):
        parts = schedule.microbatches
    piped = copy.deepcopy(model)
    pipe = Pipeline(
        piped, loss_fn=loss, schedule=schedule, ranks=ranks, microbatches=parts, example=example, seed=0, **options
    )
    if pipe.options.shard_optimizer:
        raise StagelineError(
            "check compares all gradients, but shard_optimizer=True keeps only some of them; leave it out"
        )
    _compare_models(pipe, model)
    shares, specs = pipe.replicas, pipe.options.chunk_specs
    own_inputs, own_targets = _share((inputs, targets), samples, pipe)
    if pipe.runner.stages.awaits_batch:
        pipe.runner.show(Batch(own_inputs, own_targets))
    sent = _watch_cuts(pipe, min(parts, count_samples(own_inputs, specs)))
    # A model may change its inputs in place, so both runs get copies.
    stats = pipe.step(*copy_batch((own_inputs, own_targets)))
    alone = OneProcess(model, inputs, targets, example=example, parts=parts * shares, specs=specs, penalty=pipe.penalty)
    total, plain, reference = alone.run(loss)
    other = _state(plain)
    mine = _gathered(pipe, _state(piped), other)
    differing = tuple(sorted(differences(mine, other), key=lambda tensor: -tensor.largest))
    reasons = _reorder_reasons(pipe, sent)
    tied = {id(parameter) for parameter in pipe.runner.stages.placed.uses}
    return Report(
        schedule=pipe.schedule,
        loss=stats.loss,
        alone=total,
        differing=differing,
        compared=sum(value is not None for value in other.values()),
        tied=tuple(name for name, parameter in piped.named_parameters() if id(parameter) in tied),
        reference=reference,
        reordered=_reordered(differing, mine, other, reasons, alone, loss),
        loss_rounding=reasons.rounding(plain) * abs(total) if _cut(pipe) else 0.0,
        microbatches=stats.microbatches,
    )


def _compare_models(pipe: Pipeline, model: nn.Module) -> None:
    """Raise the same error on all processes if their models differ: a step trains only the stages of a process."""
    host = pipe.runner.host
    if not isinstance(host, ProcessCollectives) or not pipe.options.compare_weights:
        return
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    known = host.all_gather(np.array([float(digest(local(tensor))) for tensor in tensors.values()]))
    differing = (known != known[0, 0]).any(axis=(0, 1)).tolist()
    name = next((name for name, differs in zip(tensors, differing, strict=True) if differs), None)
    if name is not None:
        raise StagelineError(
            f"check needs the same model in all processes, but they hold different values of {name}; a training step "
            "updates only the stages of a process, so check before training, or load pipe.state_dict(gather=True) "
            "into the model on every process"
        )


def _share(batch: tuple[Any, Any], samples: int, pipe: Pipeline) -> tuple[Any, Any]:
    """The inputs and targets of this process's data coordinate."""
    shares, specs = pipe.replicas, pipe.options.chunk_specs
    if shares == 1:
        return batch
    if samples < shares:
        raise StagelineError(
            f"check divides the batch among {shares} replicas, but the batch has only {samples} samples; pass more"
        )
    inputs, targets = input_parts(batch[0], shares, shares, specs), target_parts(batch[1], shares, shares, specs)
    return inputs[pipe.replica], targets[pipe.replica]


def _gathered(
    pipe: Pipeline, state: dict[str, Tensor | None], other: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """The gradients and buffers of all stages, whole, where the others are; all processes call this together."""
    host, owners = pipe.runner.host, pipe.runner.stages.owners
    if not isinstance(host, ProcessCollectives):
        return state
    owned = {name: value for name, value in state.items() if owners.get(name.removesuffix(" (buffer)"), 0) in host.here}
    gathered = gather_state(host, pipe.ranks, owned, list(state))
    devices = {name: torch.device("cpu") if tensor is None else tensor.device for name, tensor in other.items()}
    return {name: None if value is None else value.to(devices[name]) for name, value in gathered.items()}


def _cut(pipe: Pipeline) -> str:
    """Why a mesh may sum every value in another order; empty if it has only stages."""
    layout = pipe.runner.host.layout
    shares = f"the samples of {layout.data_rows} replicas are summed separately" if layout.data_rows > 1 else ""
    tensors = f"tp {layout.tensors} cuts layers, whose outputs are sums of parts" if layout.tensors > 1 else ""
    return "; ".join(filter(None, (shares, tensors)))


def _watch_cuts(pipe: Pipeline, filled: int) -> dict[int, int]:
    """Count, in the next step, how many values that require a gradient each stage sends."""
    sent: dict[int, int] = {}

    def watched(stage: Stage) -> Callable[..., Any]:
        forward = stage.forward

        def count(*args: Any) -> Any:
            output = forward(*args)
            sent[stage.index] = max(sent.get(stage.index, 0), differentiable(output.leaves))
            return output

        return count

    for executor in pipe.runner.executors_for(filled, True).executors:
        for stage in executor.stages.values():
            stage.forward = watched(stage)  # type: ignore[method-assign]
    return sent


def _reorder_reasons(pipe: Pipeline, sent: Mapping[int, int]) -> Reasons:
    """Which gradients a pipeline sums in a different order from one process, and why."""
    names = {parameter: name for name, parameter in pipe.model.named_parameters()}
    stages: dict[str, list[int]] = {}
    for stage, part in enumerate(pipe.runner.stages.parts):
        for parameter in part.parameters():
            stages.setdefault(names[parameter], []).append(stage)
    sums: dict[str, str] = {}
    for name, users in stages.items():
        if len(users) > 1:
            sums[name] = f"stages {', '.join(map(str, users))} use it, and it is summed stage by stage"
        elif pipe.schedule.placement.directions > 1:
            sums[name] = "the microbatches of each direction are summed separately"
        elif not pipe.certificate.in_order:
            sums[name] = "the schedule runs the backwards of microbatches in another order"
    last = pipe.schedule.stages - 1
    host = pipe.runner.host
    if isinstance(host, ProcessCollectives):
        counts = host.all_gather(np.array([float(sent.get(stage, 0)) for stage in range(last + 1)]))
        sent = dict(enumerate(counts.max(axis=(0, 1)).astype(int).tolist()))
    branching = max((stage for stage, count in sent.items() if count > 1 and stage < last), default=-1)
    why = f"several stages use a value of stage {branching} or an earlier one, whose gradient is summed stage by stage"
    arriving = {name: why for name, users in stages.items() if min(users) <= branching}
    if cut := _cut(pipe):
        return Reasons({}, dict.fromkeys(stages, cut), len(stages))
    return Reasons(sums, arriving, pipe.schedule.stages)


def _reordered(
    differing: Sequence[Difference],
    mine: Mapping[str, Tensor | None],
    other: Mapping[str, Tensor | None],
    reasons: Reasons,
    alone: OneProcess,
    loss_fn: Callable[[Any, Any], Any],
) -> tuple[Reordered, ...]:
    """The differences that have a reason and are within its bound."""
    known = [tensor for tensor in differing if reasons.of(tensor.name)]
    if not known:
        return ()
    summands = alone.summands(loss_fn)
    coarse = any(
        torch.finfo(grad.dtype).eps > FINE
        for tensor in known
        if tensor.name in reasons.arriving and (grad := other[tensor.name]) is not None
    )
    exact = alone.exact(loss_fn) if coarse else {}
    explained = []
    for name, largest in known:
        one, two = mine[name], other[name]
        if one is not None and two is not None and within(one, two, name, reasons, summands, exact.get(name)):
            explained.append(Reordered(name, largest, reasons.of(name)))
    return tuple(explained)


def _as_leaf(value: Any) -> Any:
    """A leaf, so that gradients of the inputs do not reach the caller's graph."""
    return detached(value, value.requires_grad) if isinstance(value, Tensor) else value


def _parse_batch(batch: Any, loss_fn: Callable[[Any, Any], Any] | None) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    if isinstance(batch, tuple | list) and len(batch) == 2 and loss_fn is not None:
        return batch[0], batch[1], loss_fn
    if isinstance(batch, Mapping):
        return dict(batch), None if loss_fn is None else batch.get("labels"), loss_fn or own_loss
    raise StagelineError(
        "batch must be a pair of inputs and targets, with loss_fn=, or a dict of keyword arguments for a model with "
        f"its own loss; got {shorten(batch)}{'' if loss_fn else ' and no loss_fn'}"
    )


def _state(model: nn.Module) -> dict[str, Tensor | None]:
    grads: dict[str, Tensor | None] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads | {f"{name} (buffer)": buffer for name, buffer in model.named_buffers()}
