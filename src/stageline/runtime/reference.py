"""The reference: what one process computes, which a pipeline must equal bit for bit.

A pipeline sums some gradients in another order. Two sums of the same n numbers in different orders differ by at most
(n - 1) · eps · (the sum of their absolute values). The terms of a parameter's gradient are the contributions of each of
its uses in each microbatch; `Summands` records them in the autograd graph of the model in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError
from stageline.distributed.bootstrap import several_processes
from stageline.model.stage_module.boundary import arguments
from stageline.runtime._torch_private import pytree
from stageline.runtime.batches.chunk_specs import ChunkSpecs
from stageline.runtime.microbatches import input_parts, target_parts, validate_batch
from stageline.runtime.penalty import Penalty, add_gradients, terms_of
from stageline.runtime.pipeline import Pipeline
from stageline.runtime.step_report import add_up
from stageline.tensors.copies import cloned, detached, is_plain_tensor
from stageline.tensors.pytree import batch_size, split_batch
from stageline.tensors.random_numbers import Generators


def one_process_step(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    microbatches: int,
    *,
    loss_reduction: str = "mean",
    directions: Sequence[int] | None = None,
) -> float:
    """Run the microbatches one after the other, adding into `.grad`, and return the loss.

    `directions` is a schedule's `placement.direction`. With two directions, the microbatches of each are summed
    separately, and then the two sums are added.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> _ = one_process_step(model, torch.nn.functional.mse_loss, torch.ones(3, 2), torch.ones(3, 1), microbatches=2)
    >>> model.weight.grad.shape
    torch.Size([1, 2])
    """
    samples = batch_size(inputs, "the inputs")
    parts = list(zip(split_batch(inputs, microbatches), split_batch(targets, microbatches), strict=True))
    count = min(microbatches, samples)
    ways = [0] * count if directions is None else [int(way) for way in directions[:count]]
    losses: dict[int, Tensor] = {}
    kept: dict[nn.Parameter, Tensor | None] = {}
    for way in sorted(set(ways)):
        if way > 0:
            kept = {parameter: parameter.grad for parameter in model.parameters()}
            model.zero_grad(set_to_none=True)
        for index in (index for index in range(count) if ways[index] == way):
            xi, yi = parts[index]
            weight = batch_size(xi, "the inputs") / samples if loss_reduction == "mean" else 1.0
            loss = loss_fn(model(xi), yi) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            losses[index] = loss.detach()
        for parameter, before in kept.items():
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
    return add_up(float(losses[index]) for index in range(count))


class Difference(NamedTuple):
    """A tensor that differs between the two sides."""

    name: str
    largest: float
    """The largest absolute difference; infinite if one side has no tensor or another shape."""


def differences(first: dict[str, Tensor | None], second: dict[str, Tensor | None]) -> list[Difference]:
    """List the tensors that differ in any bit, by name.

    >>> import torch
    >>> differences({"a": torch.zeros(2)}, {"a": torch.tensor([0.0, 0.5])})
    [Difference(name='a', largest=0.5)]
    """
    differing = []
    for name in sorted({*first, *second}):
        one, two = first.get(name), second.get(name)
        if one is None and two is None:
            continue
        if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
            differing.append(Difference(name, float("inf")))
        elif not torch.equal(one, two):
            differing.append(Difference(name, float((one.double() - two.double()).abs().max())))
    return differing


def assert_same_bits(first: dict[str, Tensor | None], second: dict[str, Tensor | None], what: str = "tensors") -> None:
    """Fail with the names and sizes of what differs."""
    differing = differences(first, second)
    if differing:
        shown = ", ".join(f"{name} by {largest:g}" for name, largest in differing[:5])
        raise AssertionError(f"{len(differing)} of {len({*first, *second})} {what} differ: {shown}")


class OneProcess:
    """A step of a model in one process: a plain loop over the microbatches.

    A model that draws random numbers runs as a pipeline of one rank instead, which draws the same ones. Every run
    works on a copy of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        *,
        example: Any,
        parts: int,
        specs: ChunkSpecs,
        penalty: Penalty | None,
    ) -> None:
        self._model, self._example, self._parts, self._specs = model, example, parts, specs
        self._penalty = penalty
        self._inputs, self._targets = inputs, targets
        self._draws = False

    def run(self, loss_fn: Callable[[Any, Any], Any]) -> tuple[float, nn.Module, str]:
        """Return the loss, the model with its gradients, and the kind of reference in words."""
        model = copy.deepcopy(self._model)
        total = None if self._draws else self._loop(model, loss_fn, self._inputs, self._targets)
        if total is not None:
            return total, model, "a plain loop of one process"
        if several_processes(60.0):
            raise StagelineError(
                "the model draws random numbers, and a plain loop draws different ones than a pipeline of processes; "
                "check the model in eval() mode, or without torchrun"
            )
        self._draws, model = True, copy.deepcopy(self._model)
        return self._one_rank(model, loss_fn), model, "one rank: the model draws random numbers"

    def _one_rank(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any]) -> float:
        specs = self._specs
        pipe = Pipeline(
            model, loss_fn=loss_fn, schedule="gpipe", ranks=1, microbatches=self._parts, example=self._example, seed=0,
            args_chunk_spec=specs.args, kwargs_chunk_spec=specs.kwargs, targets_chunk_spec=specs.targets,
            penalty=self._penalty,
        )  # fmt: skip
        return pipe.step(*copy_batch((self._inputs, self._targets))).loss

    def _loop(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any], inputs: Any, targets: Any) -> float | None:
        """Return the loss of a plain loop over the microbatches; None if the model draws random numbers."""
        inputs, targets = copy_batch((inputs, targets))
        samples = count_samples(inputs, self._specs)
        filled = min(self._parts, samples)
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            before = Generators.now()
            for part, target in zip(
                input_parts(inputs, self._parts, filled, self._specs),
                target_parts(targets, self._parts, filled, self._specs),
                strict=True,
            ):
                loss = loss_fn(_call(model, part), target)
                loss = loss[0] if isinstance(loss, tuple) else loss
                weighted = loss * (count_samples(part, self._specs) / samples)
                weighted.backward()
                total += float(weighted.detach())
            if before.moved():
                return None
        if self._penalty is not None:
            terms = terms_of(self._penalty, model.named_parameters())
            add_gradients(terms)
            total += add_up(float(term.detach()) for term in terms.values())
        return total

    def summands(self, loss_fn: Callable[[Any, Any], Any]) -> Summands:
        """The terms that the gradients are sums of."""
        model = copy.deepcopy(self._model)
        summands = Summands({parameter: name for name, parameter in model.named_parameters()})
        if self._draws:
            self._one_rank(model, summands.watch(loss_fn))
        else:
            self._loop(model, summands.watch(loss_fn), self._inputs, self._targets)
        return summands

    def exact(self, loss_fn: Callable[[Any, Any], Any]) -> dict[str, Tensor]:
        """The gradients in float64; empty if the model draws random numbers or does not run in float64."""
        if self._draws:
            return {}
        try:
            model = copy.deepcopy(self._model).double()
            inputs, targets = pytree.tree_map(_to_double, (self._inputs, self._targets))
            self._loop(model, loss_fn, inputs, targets)
        except Exception:  # the model may refuse float64 in any way
            return {}
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _to_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def count_samples(inputs: Any, specs: ChunkSpecs) -> int:
    """The number of samples in a batch."""
    samples = validate_batch(0, inputs, None, None, False, specs).samples
    if samples is None:
        raise StagelineError("no tensor of the inputs is split into microbatches; at least one must be")
    return samples


def copy_batch(tree: Any) -> Any:
    """Deep-copy a batch, also tensors that `copy.deepcopy` refuses: those of a graph and most subclasses."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    odd = [tensor for tensor in tensors if not (is_plain_tensor(tensor) and tensor.is_leaf)]
    return copy.deepcopy(tree, {id(leaf): detached(cloned(leaf), leaf.requires_grad) for leaf in odd})


def _call(model: nn.Module, part: Any) -> Any:
    if isinstance(model, nn.Sequential):
        return model(part)
    args, kwargs = arguments(part)
    return model(*args, **kwargs)


FINE = 1e-5
"""The largest machine epsilon of which a small multiple still separates a mistake from rounding."""
SLACK = 16
"""How much rounding errors may grow through the layers above, as a multiple of epsilon."""
COARSE = 4
"""The same in half precision, where a larger multiple would hide mistakes."""


class Reordered(NamedTuple):
    """A gradient whose terms a pipeline sums in a different order from one process."""

    name: str
    largest: float
    """The largest absolute difference."""
    why: str


@dataclass(frozen=True)
class Reasons:
    """Why gradients may be summed in another order, by the names of their parameters."""

    sums: Mapping[str, str] = field(default_factory=dict)
    """Gradients whose own terms are reordered."""
    arriving: Mapping[str, str] = field(default_factory=dict)
    """Gradients computed from one whose terms are reordered."""
    stages: int = 1

    def rounding(self, model: nn.Module) -> float:
        """How far rounding may change the loss, relative to it, if every layer sums in another order."""
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        return SLACK * (self.stages + 1) * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def of(self, name: str) -> str:
        """All reasons for one parameter; empty if there is none."""
        return "; ".join(reasons[name] for reasons in (self.sums, self.arriving) if name in reasons)


@dataclass
class Summands:
    """The terms of the gradients of a model: their number and the sum of their absolute values."""

    names: Mapping[nn.Parameter, str]
    count: dict[str, int] = field(default_factory=dict)
    size: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wrap a loss function so that the backward of its result records every term."""

        def watched(output: Any, target: Any) -> Any:
            loss = loss_fn(output, target)
            self._hook(loss[0] if isinstance(loss, tuple) else loss)
            return loss

        return watched

    def _hook(self, root: Tensor) -> None:
        """Add a hook to every node of the graph that passes a gradient directly to a parameter."""
        waiting, seen = [root.grad_fn], set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            edges: dict[int, str] = {}
            for index, (above, _) in enumerate(node.next_functions):
                name = self.names.get(getattr(above, "variable", None))  # type: ignore[arg-type]
                if name is not None:
                    edges[index] = name
                else:
                    waiting.append(above)
            if edges:
                node.register_hook(lambda inputs, _, edges=edges: self._record(inputs, edges))

    def _record(self, gradients: Sequence[Tensor | None], edges: Mapping[int, str]) -> None:
        for index, name in edges.items():
            summand = gradients[index] if index < len(gradients) else None
            if summand is not None:
                self.count[name] = self.count.get(name, 0) + 1
                size = summand.detach().to_dense().double().abs()
                self.size[name] = self.size[name] + size if name in self.size else size


def within(mine: Tensor, other: Tensor, name: str, reasons: Reasons, summands: Summands, exact: Tensor | None) -> bool:
    """Whether two gradients differ by no more than their reasons explain; `exact` is the float64 gradient, if known."""
    if name not in summands.size or mine.shape != other.shape or summands.size[name].shape != mine.shape:
        return False
    eps = float(torch.finfo(other.dtype).eps)
    size = summands.size[name]
    bound = torch.zeros_like(size)
    if name in reasons.sums:
        bound += (summands.count[name] - 1) * eps * size * 1.01
    if name in reasons.arriving:
        if eps <= FINE:
            bound += SLACK * (reasons.stages + 1) * eps * float(size.max())
        elif exact is not None:  # at most four times the other gradient's own error
            bound += 4 * float((other.double() - exact).abs().max())
        else:
            bound += COARSE * eps * float(size.max())
    difference = (mine.double() - other.double()).abs()
    return bool((difference <= bound + float(torch.finfo(other.dtype).tiny)).all())


def differentiable(leaves: Iterable[Any]) -> int:
    """How many of the values that a stage sends require a gradient."""
    return len({id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad})
