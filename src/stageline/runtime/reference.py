"""What one process computes: the loop that a pipeline must equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stageline.tensors.pytree import batch_size, split_batch


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
    """Run the microbatches one after the other, adding into `.grad`; give back the loss.

    `directions` is a schedule's `placement.direction`: with two directions, the microbatches of each are summed
    for themselves, and then the sums are added.

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
    return sum(float(losses[index]) for index in range(count))


class Difference(NamedTuple):
    """A tensor that is not the same on both sides."""

    name: str
    largest: float
    """The largest absolute difference; infinite where one side has no tensor or another shape."""


def differences(first: dict[str, Tensor | None], second: dict[str, Tensor | None]) -> list[Difference]:
    """List the tensors that differ in any bit, by name.

    >>> import torch
    >>> differences({"a": torch.zeros(2)}, {"a": torch.tensor([0.0, 0.5])})
    [Difference(name='a', largest=0.5)]
    """
    found = []
    for name in sorted({*first, *second}):
        one, two = first.get(name), second.get(name)
        if one is None and two is None:
            continue
        if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
            found.append(Difference(name, float("inf")))
        elif not torch.equal(one, two):
            found.append(Difference(name, float((one.double() - two.double()).abs().max())))
    return found


def assert_same_bits(first: dict[str, Tensor | None], second: dict[str, Tensor | None], what: str = "tensors") -> None:
    """Fail with the names and sizes of what differs."""
    found = differences(first, second)
    if found:
        shown = ", ".join(f"{name} by {largest:g}" for name, largest in found[:5])
        raise AssertionError(f"{len(found)} of {len({*first, *second})} {what} differ: {shown}")
