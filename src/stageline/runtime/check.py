"""Whether a model computes in a pipeline what it computes alone: both ways on one batch, compared bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.model.compiled_models import unwrapped
from stageline.model.huggingface import own_loss
from stageline.model.split_request import whole
from stageline.model.stage_module.boundary import arguments
from stageline.runtime._torch_private import pytree
from stageline.runtime.batches.chunk_specs import ChunkSpecs
from stageline.runtime.microbatches import input_parts, look_at, target_parts
from stageline.runtime.penalty import add_gradients, terms_of
from stageline.runtime.pipeline import Pipeline
from stageline.runtime.reference import Difference, differences
from stageline.runtime.rounding import FINE, Reasons, Reordered, Summands, differentiable, within
from stageline.runtime.stage import Stage
from stageline.runtime.step import Batch
from stageline.schedules.schedule import Schedule
from stageline.tensors.random_numbers import Generators
from stageline.tensors.subclasses import cloned, detached, is_plain_tensor

Verdict: TypeAlias = Literal["equal", "reordered", "different"]


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
    reordered: tuple[Reordered, ...] = ()
    """Of those that differ: the gradients that are only added up in another order, and why."""

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return self.loss == self.alone and not self.differing

    @property
    def verdict(self) -> Verdict:
        """ "equal"; "reordered", where nothing differs but gradients that are added up in another order, by no more
        than rounding; or "different".
        """
        if self.equal:
            return "equal"
        return "reordered" if self.loss == self.alone and not self.unexplained else "different"

    @property
    def unexplained(self) -> tuple[Difference, ...]:
        """What differs, and not because of the order of additions."""
        known = {tensor.name for tensor in self.reordered}
        return tuple(tensor for tensor in self.differing if tensor.name not in known)

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
            f"verdict    {self.verdict}: {_MEANING[self.verdict]}",
            f"loss       {self.loss!r} and {self.alone!r}: {'the same' if self.loss == self.alone else 'not the same'}",
            f"bits       {self.compared - len(self.differing)} of {self.compared} gradients and buffers are the same",
        ]
        why = {tensor.name: f", rounding: {tensor.why}" for tensor in self.reordered}
        shown = sorted(self.differing, key=lambda tensor: tensor.name in why)  # what nothing explains comes first
        lines += [f"           {name} differs by {largest:.3g}{why.get(name, '')}" for name, largest in shown[:5]]
        if len(self.differing) > 5:
            lines.append(f"           and {len(self.differing) - 5} more")
        return "\n".join(lines)


_MEANING = {
    "equal": "every bit is the same",
    "reordered": "the same sums, added in another order; they differ by rounding alone",
    "different": "the pipeline does not compute what the model alone does",
}


def check(
    model: nn.Module,
    batch: Any,
    *,
    ranks: int,
    schedule: str | Path | Schedule | type = "1f1b",
    microbatches: int | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    example: Any = None,
    **options: Any,
) -> Report:
    """Run a copy of the model alone and another one in a pipeline, on the same batch, and compare.

    `batch` is a pair of inputs and targets, or a dict of keywords for a model that computes its own loss. A model that
    draws random numbers is compared with a pipeline of one rank, which draws the same ones. Yours is left as it is.
    The report's `verdict` is "equal" where every bit is the same; "reordered" where only gradients differ whose
    summands a pipeline adds in another order (tied weights, values that several stages use), by no more than rounding;
    or "different".

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> report = check(model, (torch.ones(4, 4), torch.ones(4, 2)), ranks=2, loss_fn=nn.functional.mse_loss)
    >>> report.verdict, report.equal, report.compared
    ('equal', True, 4)
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise StagelineError(f"check takes a model, an nn.Module, got {shorten(model)}")
    whole("ranks", ranks)
    inputs, targets, loss = _understood(batch, loss_fn)
    names = ("args_chunk_spec", "kwargs_chunk_spec", "targets_chunk_spec", "output_merge_spec")
    samples = _samples(inputs, ChunkSpecs(*(options.get(name) for name in names)))
    inputs = pytree.tree_map(_leaf, inputs)
    parts = min(2 * ranks, samples) if microbatches is None else microbatches
    if isinstance(schedule, Schedule):
        parts = schedule.microbatches
    piped = copy.deepcopy(model)
    pipe = Pipeline(
        piped, loss_fn=loss, schedule=schedule, ranks=ranks, microbatches=parts, example=example, seed=0, **options
    )
    if len(pipe._world.here) != pipe.schedule.ranks:
        raise StagelineError("check compares in one process; call it without torchrun")
    if pipe._waits:
        pipe._see(Batch(inputs, targets))
    sent = _watch_cuts(pipe, min(parts, samples))
    # Copies: a model may change its inputs in place.
    found = pipe.step(*_copied((inputs, targets))).loss
    alone = _Alone(model, pipe, inputs, targets, example, parts)
    total, plain, reference = alone.run(loss)
    mine, other = _state(piped), _state(plain)
    differing = tuple(sorted(differences(mine, other), key=lambda tensor: -tensor.largest))
    reasons = _reasons(pipe, sent)
    tied = {id(parameter) for parameter in pipe._placed.uses}
    return Report(
        schedule=pipe.schedule,
        loss=found,
        alone=total,
        differing=differing,
        compared=sum(value is not None for value in other.values()),
        tied=tuple(name for name, parameter in piped.named_parameters() if id(parameter) in tied),
        reference=reference,
        reordered=_reordered(differing, mine, other, reasons, alone, loss),
    )


def _watch_cuts(pipe: Pipeline, filled: int) -> dict[int, int]:
    """Note how many values that want gradients each stage gives, in the step to come."""
    sent: dict[int, int] = {}

    def watched(stage: Stage) -> Callable[..., Any]:
        forward = stage.forward

        def count(*args: Any) -> Any:
            leaves, tree = forward(*args)
            sent[stage.index] = max(sent.get(stage.index, 0), differentiable(leaves))
            return leaves, tree

        return count

    for executor in pipe._crew(filled, training=True).executors:
        for stage in executor.stages.values():
            stage.forward = watched(stage)  # type: ignore[method-assign]
    return sent


def _reasons(pipe: Pipeline, sent: Mapping[int, int]) -> Reasons:
    """Which gradients a pipeline adds in another order than one process does, and why."""
    names = {parameter: name for name, parameter in pipe.model.named_parameters()}
    stages: dict[str, list[int]] = {}
    for stage, part in enumerate(pipe._parts):
        for parameter in part.parameters():
            stages.setdefault(names[parameter], []).append(stage)
    sums: dict[str, str] = {}
    for name, users in stages.items():
        if len(users) > 1:
            sums[name] = f"stages {', '.join(map(str, users))} use it, and it is added up stage by stage"
        elif pipe.schedule.placement.directions > 1:
            sums[name] = "the microbatches of each direction are added for themselves"
        elif not pipe.certificate.in_order:
            sums[name] = "the schedule runs the backwards of microbatches in an order of its own"
    last = pipe.schedule.stages - 1
    branching = max((stage for stage, count in sent.items() if count > 1 and stage < last), default=-1)
    why = f"several stages use a value of stage {branching} or before it, whose gradient is added up stage by stage"
    arriving = {name: why for name, users in stages.items() if min(users) <= branching}
    return Reasons(sums, arriving, pipe.schedule.stages)


def _reordered(
    differing: Sequence[Difference],
    mine: Mapping[str, Tensor | None],
    other: Mapping[str, Tensor | None],
    reasons: Reasons,
    alone: _Alone,
    loss_fn: Callable[[Any, Any], Any],
) -> tuple[Reordered, ...]:
    """Those of what differs that have a reason, and differ by no more than it explains."""
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
    found = []
    for name, largest in known:
        one, two = mine[name], other[name]
        if one is not None and two is not None and within(one, two, name, reasons, summands, exact.get(name)):
            found.append(Reordered(name, largest, reasons.of(name)))
    return tuple(found)


class _Alone:
    """The model without a pipeline: a plain loop over the microbatches, or one rank where it draws random numbers."""

    def __init__(self, model: nn.Module, pipe: Pipeline, inputs: Any, targets: Any, example: Any, parts: int) -> None:
        """Of a model that stays as it is."""
        self._model, self._example, self._parts, self._specs = model, example, parts, pipe._specs
        self._penalty = pipe.penalty
        self._inputs, self._targets = inputs, targets
        self._draws = False

    def run(self, loss_fn: Callable[[Any, Any], Any]) -> tuple[float, nn.Module, str]:
        """The loss, the model with its gradients, and what it is in words."""
        model = copy.deepcopy(self._model)
        total = None if self._draws else self._loop(model, loss_fn, self._inputs, self._targets)
        if total is not None:
            return total, model, "a plain loop of one process"
        self._draws, model = True, copy.deepcopy(self._model)
        return self._one_rank(model, loss_fn), model, "one rank: the model draws random numbers"

    def _one_rank(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any]) -> float:
        specs = self._specs
        pipe = Pipeline(
            model, loss_fn=loss_fn, schedule="gpipe", ranks=1, microbatches=self._parts, example=self._example, seed=0,
            args_chunk_spec=specs.args, kwargs_chunk_spec=specs.kwargs, targets_chunk_spec=specs.targets,
            penalty=self._penalty,
        )  # fmt: skip
        return pipe.step(*_copied((self._inputs, self._targets))).loss

    def _loop(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any], inputs: Any, targets: Any) -> float | None:
        """The loss of a plain loop over the microbatches; None where the model draws random numbers."""
        inputs, targets = _copied((inputs, targets))
        samples = _samples(inputs, self._specs)
        filled = min(self._parts, samples)
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            before = Generators.now()
            for given, target in zip(
                input_parts(inputs, self._parts, filled, self._specs),
                target_parts(targets, self._parts, filled, self._specs),
                strict=True,
            ):
                loss = loss_fn(_call(model, given), target)
                loss = loss[0] if isinstance(loss, tuple) else loss
                weighed = loss * (_samples(given, self._specs) / samples)
                weighed.backward()
                total += float(weighed.detach())
            if before.moved():
                return None
        if self._penalty is not None:
            terms = terms_of(self._penalty, model.named_parameters())
            add_gradients(terms)
            total += sum(float(term.detach()) for term in terms.values())
        return total

    def summands(self, loss_fn: Callable[[Any, Any], Any]) -> Summands:
        """What the gradients are sums of."""
        model = copy.deepcopy(self._model)
        found = Summands({parameter: name for name, parameter in model.named_parameters()})
        if self._draws:
            self._one_rank(model, found.watch(loss_fn))
        else:
            self._loop(model, found.watch(loss_fn), self._inputs, self._targets)
        return found

    def exact(self, loss_fn: Callable[[Any, Any], Any]) -> dict[str, Tensor]:
        """The gradients in float64; none where the model draws random numbers or does not run in float64."""
        if self._draws:
            return {}
        try:
            model = copy.deepcopy(self._model).double()
            inputs, targets = pytree.tree_map(_doubled, (self._inputs, self._targets))
            self._loop(model, loss_fn, inputs, targets)
        except Exception:  # whatever the model says to float64
            return {}
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _samples(inputs: Any, specs: ChunkSpecs) -> int:
    given = look_at(0, inputs, None, None, False, specs).samples
    if given is None:
        raise StagelineError("the inputs have nothing that is cut into microbatches; let one tensor of them be cut")
    return given


def _leaf(value: Any) -> Any:
    """A leaf of its own, so that gradients of the inputs stay here."""
    return detached(value, value.requires_grad) if isinstance(value, Tensor) else value


def _copied(tree: Any) -> Any:
    """A deep copy; torch copies neither tensors of a graph nor most classes that are derived from its own."""
    odd = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and not _copies_itself(leaf)]
    return copy.deepcopy(tree, {id(leaf): detached(cloned(leaf), leaf.requires_grad) for leaf in odd})


def _copies_itself(tensor: Tensor) -> bool:
    return is_plain_tensor(tensor) and tensor.is_leaf


def _understood(batch: Any, loss_fn: Callable[[Any, Any], Any] | None) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    if isinstance(batch, tuple | list) and len(batch) == 2 and loss_fn is not None:
        return batch[0], batch[1], loss_fn
    if isinstance(batch, Mapping):
        return dict(batch), None if loss_fn is None else batch.get("labels"), loss_fn or own_loss
    raise StagelineError(
        f"batch is a pair of inputs and targets, with loss_fn=, or a dict of keywords for a model with its own loss; "
        f"got {shorten(batch)}{'' if loss_fn else ' and no loss_fn'}"
    )


def _call(model: nn.Module, given: Any) -> Any:
    if isinstance(model, nn.Sequential):
        return model(given)
    args, kwargs = arguments(given)
    return model(*args, **kwargs)


def _state(model: nn.Module) -> dict[str, Tensor | None]:
    grads: dict[str, Tensor | None] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads | {f"{name} (buffer)": buffer for name, buffer in model.named_buffers()}
