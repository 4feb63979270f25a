"""The backward in two halves, for any graph that autograd recorded, with no change to the model.

I runs the graph from the outputs to the inputs and nothing beside it: autograd skips what the inputs do not
need, so no weight gradient is computed. On the way it notes what flows into each *fork*, a node from which one
branch goes on to the inputs and another to parameters alone:

    output ── Addmm ── Gelu ── Addmm ── input        the Addmm nodes are forks
                │               │
                w2              w1

W then runs every fork once more, towards its parameters alone, from what was noted. So every matrix product runs once,
in the half where it belongs, and gives the bits it gives in a whole backward.

Some parameters cannot be split off: those that several forks share (their parts would be added in another order),
and those behind a Python autograd function or a compiled region, which computes all its gradients at once. Their
gradients are computed with I and handed out with W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Fork:
    """A node whose weight gradients are put off: the parameters behind it, and what flowed into it."""

    node: Node
    parameters: list[Tensor]
    grads: tuple[Tensor | None, ...] = ()


@dataclass
class SplitBackward:
    """One backward of one stage and microbatch: first `input_gradients`, later `weight_gradients`."""

    outputs: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    inputs: Sequence[Tensor]
    _forks: list[_Fork] = field(default_factory=list)
    _together: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    _rest: tuple[list[Tensor], list[Tensor | None]] = ((), ())  # type: ignore[assignment]
    unsplit: int = 0
    """How many elements of parameters got their gradient with I."""
    total: int = 0
    """How many elements of parameters get a gradient."""

    def input_gradients(self) -> list[Tensor | None]:
        """Run I: the gradients of the inputs, None where there is none."""
        plan = _Plan(self.outputs, self.inputs)
        onward = [index for index, output in enumerate(self.outputs) if plan.reaches_input(output)]
        rest = [index for index in range(len(self.outputs)) if index not in set(onward)]
        # Outputs that no input has a part in are the business of W alone.
        self._rest = ([self.outputs[index] for index in rest], [self.grads[index] for index in rest])
        self.total = sum(parameter.numel() for parameter in plan.parameters)
        if not onward:
            return [None] * len(self.inputs)
        self._forks, together = plan.forks()
        hooks = [fork.node.register_prehook(_noting(fork)) for fork in self._forks]
        try:
            found = torch.autograd.grad(
                [self.outputs[index] for index in onward],
                [*self.inputs, *together],
                [self.grads[index] for index in onward],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        self._together = list(zip(together, found[len(self.inputs) :], strict=True))
        self.unsplit = sum(parameter.numel() for parameter in together)
        return list(found[: len(self.inputs)])

    def weight_gradients(self) -> None:
        """Run W: add into the `.grad` of every parameter, firing its hooks, as a whole backward would."""
        for parameter, grad in self._together:
            if grad is not None:
                torch.autograd.backward([parameter], [grad])
        for fork in self._forks:
            edges = [GradientEdge(fork.node, index) for index, grad in enumerate(fork.grads) if grad is not None]
            if edges:
                noted = [grad for grad in fork.grads if grad is not None]
                torch.autograd.backward(edges, noted, inputs=fork.parameters)
        outputs, grads = self._rest
        if outputs:
            torch.autograd.backward(outputs, grads)
        self._forks, self._together, self._rest = [], [], ([], [])


def _noting(fork: _Fork) -> Any:
    def note(grads: tuple[Tensor | None, ...]) -> None:
        fork.grads = grads

    return note


class _Plan:
    """The recorded graph, and which of its nodes lead to inputs and which to parameters."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self.ends = {get_gradient_edge(tensor).node for tensor in inputs}
        self.order = _children_first([get_gradient_edge(output).node for output in outputs])
        self.to_input: dict[Node, bool] = {}
        self.behind: dict[Node, frozenset[Node]] = {}
        for node in self.order:
            children = [child for child, _ in node.next_functions if child is not None]
            self.to_input[node] = node in self.ends or any(self.to_input[child] for child in children)
            if node in self.ends:
                self.behind[node] = frozenset()
            elif hasattr(node, "variable"):
                self.behind[node] = frozenset([node])
            elif len(children) == 1:
                self.behind[node] = self.behind[children[0]]
            else:
                sides = [self.behind[child] for child in children if not self.to_input[child]]
                self.behind[node] = frozenset().union(*sides)
        self.parameters = [node.variable for node in self.order if hasattr(node, "variable") and node not in self.ends]

    def reaches_input(self, output: Tensor) -> bool:
        return self.to_input[get_gradient_edge(output).node]

    def forks(self) -> tuple[list[_Fork], list[Tensor]]:
        """The forks, last in the model first, and the parameters whose gradients must come with I."""
        found: list[tuple[Node, list[Node]]] = []
        uses: dict[Node, int] = {}
        whole: set[Node] = set()
        for node in reversed(self.order):
            if not self.to_input[node] or node in self.ends:
                continue
            leaves = [
                leaf
                for child, _ in node.next_functions
                if child is not None and not self.to_input[child]
                for leaf in self.behind[child]
            ]
            if leaves:
                found.append((node, leaves))
                if BackwardCFunction in type(node).__mro__:
                    whole.update(leaves)
                for leaf in set(leaves):
                    uses[leaf] = uses.get(leaf, 0) + 1
        whole.update(leaf for leaf, count in uses.items() if count > 1)
        forks = []
        for node, leaves in found:
            own = [leaf.variable for leaf in dict.fromkeys(leaves) if leaf not in whole]  # type: ignore[attr-defined]
            if own:
                forks.append(_Fork(node, own))
        return forks, [leaf.variable for leaf in self.order if leaf in whole]  # type: ignore[attr-defined]


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes that the roots lead to, each after the nodes it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, entered = stack.pop()
        if entered:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in seen)
    return order
