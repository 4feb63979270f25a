"""Rounding: how much a gradient may change when its terms are summed in another order.

Two sums of the same n numbers in different orders differ by at most (n - 1) · eps · (the sum of their absolute values).
The terms of a parameter's gradient are the contributions of each of its uses in each microbatch. They are read from the
autograd graph of the model in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FINE = 1e-5
"""The largest machine epsilon of which a small multiple still separates a mistake from rounding."""
SLACK = 16
"""How much rounding may grow on its way through the layers above, as a multiple of epsilon."""
COARSE = 4
"""The same in half precision, where a larger multiple would hide mistakes."""


class Reordered(NamedTuple):
    """A gradient whose terms a pipeline sums in another order than one process does."""

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
