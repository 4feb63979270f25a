"""The backward in two halves, for any graph that autograd recorded, with no change to the model.

I runs the graph from the outputs to the inputs and nothing beside it: autograd skips what the inputs do not
need, so no weight gradient is computed. On the way it notes what flows into each fork, a node from which one
branch goes on to the inputs and another to parameters alone (see `plan`). W then computes the weight gradients of every
fork from what was noted. So every matrix product runs once, in the half where it belongs, and gives the bits it gives
in a whole backward.

Where all forks are of a known kind (see `halves`), I frees the graph as it goes, as a whole backward does, and what
stays until W is what W needs: inputs and output gradients of the linear layers and norms. Other forks run once more in
W, for which the graph has to stay.

Some parameters cannot be split off: those behind a Python autograd function, a compiled region or torch's
checkpointing, which compute all their gradients at once. Theirs are computed with I and handed out with W. So are those
of a whole graph that may have hooks (see `hooks`): each hook runs once, and sees and changes what it does in a whole
backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from stageline.autograd import engine
from stageline.autograd._torch_private import add_tensors, has_hooks, input_metadata, sequence_number, tensor_hooks
from stageline.autograd.graph_analysis import make_plan
from stageline.autograd.graph_plan import Fork, Plan
from stageline.autograd.weight_gradients import Wanted

PLANS = 16
"""How many forms of graphs a stage remembers."""

PENDING = 64 * 2**20
"""How many bytes of weight gradients W computes before it adds them up and lets them go."""


SMALL = 2**16
"""Up to how many elements a gradient has that is added up together with others: a GPU saves a call for each of them."""

SMALL_ON_HOST = 2**12
"""The host rather adds a larger one at once, as long as it is in its caches."""


@dataclass
class _Noted:
    """What I saw at a fork."""

    fork: Fork
    grads: tuple[Tensor | None, ...] = ()
    saved: tuple[Any, ...] = ()


@dataclass
class _Roots:
    """Gradients on their way to parameters, which autograd is to bring there."""

    edges: list[GradientEdge] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    bytes: int = 0

    def add(self, edge: GradientEdge, grad: Tensor) -> None:
        self.edges.append(edge)
        self.grads.append(grad)
        self.bytes += grad.numel() * grad.element_size()

    def run(self) -> None:
        if self.edges:
            engine.backward(self.edges, self.grads)
        self.edges, self.grads, self.bytes = [], [], 0


@dataclass
class SplitBackward:
    """One backward of one stage and microbatch: first `input_gradients`, later `weight_gradients`."""

    outputs: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    inputs: Sequence[Tensor]
    plans: list[Plan] = field(default_factory=list)
    """The forms of graphs that were seen before, the last one first; a new one is added."""
    direct: bool = True
    """Whether gradients may be added without autograd where a parameter has no hooks that it would call."""
    hooked: bool = False
    """Whether the graph may have hooks; then I computes all gradients, and W only hands them out."""
    whole: bool = False
    """Whether hooks expect gradients to be added as they come; then I is the whole backward."""
    unsplit: int = 0
    """How many elements of parameters got their gradient with I."""
    total: int = 0
    """How many elements of parameters get a gradient."""
    _noted: list[_Noted] = field(default_factory=list)
    _nodes: list[Node] = field(default_factory=list)
    _together: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    _last: tuple[list[GradientEdge], list[Tensor | None]] = field(default_factory=lambda: ([], []))
    """The roots of W's last run: where the data enters, and outputs that depend on parameters alone."""
    _rest: bool = False
    """Whether there are such outputs."""

    def _find_plan(self) -> Plan:
        roots = [(engine.node_of(output), output.output_nr) for output in self.outputs]
        dtypes = [tensor.dtype for tensor in (*self.outputs, *self.inputs)]
        for place, plan in enumerate(self.plans):
            known = plan.dtypes == dtypes and plan.at_once == self.hooked
            nodes = plan.match(roots, self.inputs) if known else None
            if nodes is not None:
                self._nodes = nodes
                self.plans.insert(0, self.plans.pop(place))
                return plan
        plan, self._nodes = make_plan(roots, [engine.node_of(tensor) for tensor in self.inputs], self.hooked)
        plan.dtypes = dtypes
        self.plans.insert(0, plan)
        del self.plans[PLANS:]
        return plan

    def input_gradients(self) -> list[Tensor | None]:
        """Run I: the gradients of the inputs, None where there is none."""
        plan = self._find_plan()
        self.total = plan.total
        if plan.whole or self.whole:
            return self._whole()
        parameters = [self._leaf(leaf) for leaf in plan.together]
        self.unsplit = plan.unsplit
        ends = [GradientEdge(self._nodes[number], output) for number, output in plan.ends]
        self._rest = bool(plan.rest)
        self._last = (
            [get_gradient_edge(self.outputs[index]) for index in plan.rest],
            [self._root_gradient(index) for index in plan.rest],
        )
        if not plan.onward:
            return self._done([None] * len(self.inputs))
        self._noted = [_Noted(fork) for fork in plan.forks]
        late = self._noted if plan.late or plan.keeps_graph else []
        early = [] if late else self._noted
        for noted in early:
            noted.saved = noted.fork.half.take(self._nodes[noted.fork.node])  # type: ignore[union-attr]
        forks = [GradientEdge(self._nodes[noted.fork.node], 0) for noted in early]
        handles = [engine.add_prehook(self._nodes[noted.fork.node], self._noting(noted)) for noted in late]
        quiet = [(hooks, dict(hooks)) for parameter in parameters if (hooks := tensor_hooks(parameter))]
        for dictionary, _ in quiet:
            dictionary.clear()  # they fire once, when W hands the gradients out
        try:
            found = engine.gradients(
                [self.outputs[index] for index in plan.onward],
                [self.grads[index] for index in plan.onward],
                [*(ends or self.inputs), *parameters, *forks],
                keep=plan.keeps_graph,
            )
        finally:
            for handle in handles:
                handle.remove()
            for dictionary, kept in quiet:
                dictionary.update(kept)
        first = len(ends or self.inputs)
        then = first + len(parameters)
        self._together = list(zip(parameters, found[first:then], strict=True))
        for noted, grad in zip(early, found[then:], strict=True):
            noted.grads = (grad,)
        if not ends:
            return self._done(list(found[:first]))
        self._last[0][:0] = ends
        self._last[1][:0] = found[:first]
        return self._done([None] * len(self.inputs))

    def _done(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Let go of what only I needed."""
        self.outputs = self.grads = self.inputs = ()
        return found

    def _leaf(self, number: int) -> Tensor:
        node: Any = self._nodes[number]
        return torch.as_tensor(node.variable)

    def _root_gradient(self, index: int) -> Tensor:
        grad = self.grads[index]
        return torch.ones_like(self.outputs[index]) if grad is None else grad

    def _whole(self) -> list[Tensor | None]:
        """Run a backward that cannot be split, all of it."""
        self.unsplit = self.total
        with engine.ArrivingGradients(self.inputs) as gradients:
            engine.backward(self.outputs, self.grads)
        return self._done(gradients)

    def _noting(self, noted: _Noted) -> Any:
        node, half = self._nodes[noted.fork.node], noted.fork.half

        def note(grads: tuple[Tensor | None, ...]) -> None:
            noted.grads = grads
            if half is not None:
                noted.saved = half.take(node)

        return note

    def weight_gradients(self) -> None:
        """Run W: add into the `.grad` of every parameter, firing its hooks, as a whole backward would."""
        for parameter, grad in self._together:
            if grad is not None:
                torch.autograd.backward([parameter], [grad])
        soon = _Roots()
        last = _Roots()  # what several forks have a part in is added up in one go, as in a whole backward
        sums: tuple[list[Tensor], list[Tensor]] = ([], [])
        with torch.no_grad():
            for noted in self._noted:
                if noted.fork.half is None:
                    self._run_again(noted)
                    continue
                for index, grad in self._by_hand(noted, sums):
                    number, output = noted.fork.children[index]
                    (soon if noted.fork.alone else last).add(GradientEdge(self._nodes[number], output), grad)
                noted.saved = noted.grads = ()
                if soon.bytes > PENDING:
                    soon.run()
            if sums[0]:
                add_tensors(*sums)
            soon.run()
            for root, grad in self._called_entries() or zip(*self._last, strict=True):
                if grad is not None:
                    last.add(root, grad)
            last.run()
        self._noted, self._together, self._nodes, self._last = [], [], [], ([], [])

    def retained(self) -> Iterator[Any]:
        """Yield what is held from I to W, as trees of tensors: gradients, and what nodes saved and did not release."""
        for noted in self._noted:
            yield noted.grads, noted.saved
        yield [grad for _, grad in self._together], self._last[1]
        for node in self._nodes:
            for name in dir(node):
                if name.startswith("_saved_") or name == "saved_tensors":
                    try:
                        yield getattr(node, name)
                    except RuntimeError:  # released
                        break

    def _by_hand(self, noted: _Noted, sums: tuple[list[Tensor], list[Tensor]]) -> list[tuple[int, Tensor]]:
        """Compute the gradients of one fork's edges; give back those that autograd is to bring to their parameters.

        Those of plain parameters are added up here: large ones at once, small ones in one go at the end.
        """
        fork = noted.fork
        grad = noted.grads[0] if noted.grads else None
        if grad is None or fork.half is None:
            return []
        wanted: Sequence[Wanted]
        if fork.wanted is not None and self.direct and not any(map(has_hooks, fork.targets)):
            wanted, plain = fork.wanted, [True] * len(fork.wanted)
        else:
            plain = [
                self.direct and fork.alone and target is not None and not has_hooks(target) for target in fork.targets
            ]
            wanted = [self._wanted(fork, index, plain[index]) for index in range(len(fork.edges))]
        left = []
        for index, found in enumerate(fork.half.give(noted.saved, grad, wanted)):
            if not plain[index]:
                left.append((index, found))
                continue
            parameter = fork.targets[index]
            if parameter.grad is not None and found.numel() <= (SMALL_ON_HOST if found.is_cpu else SMALL):
                sums[0].append(parameter.grad)
                sums[1].append(found)
            elif parameter.grad is not None:
                parameter.grad.add_(found)
            else:
                parameter.grad = found.clone() if _shares(found, grad) else found
        return left

    def _wanted(self, fork: Fork, index: int, plain: bool) -> Wanted:
        if plain:
            target = fork.targets[index]
            return Wanted(fork.edges[index], target.shape, target.dtype, fork.turned[index])
        number, output = fork.children[index]
        there = input_metadata(self._nodes[number])[output]
        return Wanted(fork.edges[index], torch.Size(there.shape), there.dtype)

    def _run_again(self, noted: _Noted) -> None:
        """Run a node once more, and bring what leads to parameters alone there."""
        roots = _Roots()
        gradients = _call(self._nodes[noted.fork.node], noted.grads)
        for edge, (number, output) in zip(noted.fork.edges, noted.fork.children, strict=True):
            grad = gradients[edge]
            if grad is not None:
                roots.add(GradientEdge(self._nodes[number], output), grad)
        roots.run()

    def _called_entries(self) -> list[tuple[GradientEdge, Tensor | None]]:
        """Call the nodes in which the data enters; give back their edges and gradients.

        Empty where there are none, or where the engine has to run them: nodes of Python functions, and those beside
        outputs that depend on parameters alone, whose order among each other is the engine's to know.
        """
        arrived: dict[Node, dict[int, Tensor | None]] = {}
        for edge, grad in zip(*self._last, strict=True):
            arrived.setdefault(edge.node, {})[edge.output_nr] = grad
        if self._rest or any(BackwardCFunction in type(node).__mro__ for node in arrived):
            return []
        called: list[tuple[GradientEdge, Tensor | None]] = []
        for node, grads in sorted(arrived.items(), key=lambda item: -sequence_number(item[0])):
            gradients = _call(node, [grads.get(index) for index in range(len(input_metadata(node)))])
            for (child, output), grad in zip(node.next_functions, gradients, strict=True):
                if child is not None:
                    called.append((GradientEdge(child, output), grad))
        return called


def _call(node: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Run a node without the engine, which would call its hooks, as I has done: `retain_grad` would add twice."""
    if all(grad is None for grad in grads):
        return [None] * len(node.next_functions)
    gradients = node(*grads)
    return gradients if isinstance(gradients, tuple) else (gradients,)


def _shares(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors lie in the same memory: one may be the other, or a view of it."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
