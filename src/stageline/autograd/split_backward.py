"""The backward in two halves, for any graph that autograd recorded, without changes to the model.

I runs the graph from the outputs to the inputs and nothing else: autograd skips what the inputs do not need, so no
weight gradient is computed. On its way it records the gradient of each fork, a node from which one branch leads to the
inputs and another to parameters alone (see `graph_plan`). W then computes the weight gradients of every fork from these
records. So every matrix product runs once, in the half where it belongs, and with the bits of a whole backward.

If all forks have a formula (see `weight_gradients`), I frees the graph as a whole backward does, and only what W needs
stays: inputs and output gradients of linear layers and norms. Other forks run again in W, so the graph has to stay.

A unit that Stageline compiled is one node, whose backward is made of two graphs (see `graphs`); I runs the first, W the
second.

Some parameters cannot be split off: those behind a Python autograd function, a region that another backend compiled or
torch's checkpointing, which compute all their gradients at once. I computes theirs, and W hands them out. The same
holds for a whole graph that may have hooks (see `engine`): each hook runs once, and sees and changes what it does in a
whole backward.
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
from stageline.autograd._torch_private import (
    add_tensors,
    any_hooks,
    has_hooks,
    input_metadata,
    sequence_number,
    tensor_hooks,
)
from stageline.autograd.graph_analysis import make_plan
from stageline.autograd.graph_plan import Fork, FreedMemory, GraphPlan
from stageline.autograd.graphs.backward import Deferred
from stageline.autograd.weight_gradients import WantedGradient

PLANS = 16
"""How many forms of graphs a stage remembers."""

PENDING = 64 * 2**20
"""How many bytes of weight gradients W computes before it accumulates and frees them."""

SMALL = 2**16
"""The largest number of elements of a gradient that is added together with others, which saves a GPU some calls."""

SMALL_ON_HOST = 2**12
"""The same on the host, which adds larger ones at once, while they are in its caches."""


@dataclass(slots=True)
class _ForkNote:
    """What I note at a fork."""

    fork: Fork
    grads: tuple[Tensor | None, ...] = ()
    saved: tuple[Any, ...] = ()


@dataclass
class _Roots:
    """Gradients that autograd is to propagate to parameters."""

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
    plans: list[GraphPlan] = field(default_factory=list)
    """The plans of earlier graphs, the latest first; a new one is added."""
    direct: bool = True
    """Whether gradients may be added without autograd where a parameter has no hooks that it would call."""
    hooked: bool = False
    """Whether the graph may have hooks; then I computes all gradients, and W only hands them out."""
    whole: bool = False
    """Whether hooks expect gradients to be added as they come; then I is the whole backward."""
    freed: FreedMemory | None = None
    """Memory that W must not read."""
    unsplit: int = 0
    """How many elements of parameters got their gradient from I."""
    total: int = 0
    """How many elements of parameters get a gradient."""
    _plan: GraphPlan | None = None
    _notes: list[_ForkNote] = field(default_factory=list)
    _nodes: list[Node] = field(default_factory=list)
    _together: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    _last: tuple[list[GradientEdge], list[Tensor | None]] = field(default_factory=lambda: ([], []))
    """The roots of W's last run: where the data enters, and outputs that depend on parameters alone."""
    _rest: bool = False
    """Whether there are such outputs."""
    _owners: list[GradientEdge] = field(default_factory=list)
    """Keep nodes of Python functions alive that W runs: in torch 2.11, the Python object of such a node does not."""

    def _find_plan(self) -> GraphPlan:
        roots = [(engine.node_of(output), output.output_nr) for output in self.outputs]
        dtypes = [tensor.dtype for tensor in (*self.outputs, *self.inputs)]
        for place, plan in enumerate(self.plans):
            known = plan.dtypes == dtypes and plan.at_once == self.hooked
            nodes = plan.match(roots, self.inputs) if known else None
            if nodes is not None:
                self._nodes = nodes
                self.plans.insert(0, self.plans.pop(place))
                return plan
        ends = [engine.node_of(tensor) for tensor in self.inputs]
        plan, self._nodes = make_plan(roots, ends, self.hooked, self.freed)
        plan.dtypes = dtypes
        self.plans.insert(0, plan)
        del self.plans[PLANS:]
        return plan

    def input_gradients(self) -> list[Tensor | None]:
        """Run I: the gradients of the inputs, None if there is none."""
        plan = self._plan = self._find_plan()
        self.total = plan.total
        if plan.whole or self.whole:
            return self._whole()
        parameters = [self._leaf(leaf) for leaf in plan.together]
        self.unsplit = plan.unsplit
        ends = [GradientEdge(self._nodes[number], output) for number, output in plan.ends]
        self._rest = bool(plan.rest)
        if ends:
            python = (output for output in self.outputs if isinstance(output.grad_fn, BackwardCFunction))
            self._owners = [get_gradient_edge(output) for output in python]
        self._last = (
            [get_gradient_edge(self.outputs[index]) for index in plan.rest],
            [self._root_gradient(index) for index in plan.rest],
        )
        if not plan.onward:
            return self._done([None] * len(self.inputs))
        self._notes = [_ForkNote(fork) for fork in plan.forks]
        late = self._notes if plan.late or plan.keeps_graph else []
        early = [] if late else self._notes
        for note in early:
            self._take(note, self._nodes[note.fork.node])
        watched = [note for note in early if not note.fork.formula.deferred]  # type: ignore[union-attr]
        forks = [GradientEdge(self._nodes[note.fork.node], 0) for note in watched]
        handles = [engine.add_prehook(self._nodes[note.fork.node], self._noting(note)) for note in late]
        if self.freed is not None:
            freed = [note for note in early if not self.freed.is_apart(note.saved)]
            handles += [engine.add_prehook(self._nodes[note.fork.node], self._noting(note)) for note in freed]
        quiet = [(hooks, dict(hooks)) for parameter in parameters if (hooks := tensor_hooks(parameter))]
        for dictionary, _ in quiet:
            dictionary.clear()  # they fire once, when W hands the gradients out
        try:
            gradients = engine.gradients(
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
        self._together = list(zip(parameters, gradients[first:then], strict=True))
        for note, grad in zip(watched, gradients[then:], strict=True):
            note.grads = (grad,)
        if not ends:
            return self._done(list(gradients[:first]))
        self._last[0][:0] = ends
        self._last[1][:0] = gradients[:first]
        return self._done([None] * len(self.inputs))

    def _done(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Free what only I needed."""
        self.outputs = self.grads = self.inputs = ()
        return gradients

    def _leaf(self, number: int) -> Tensor:
        node: Any = self._nodes[number]
        return torch.as_tensor(node.variable)

    def _root_gradient(self, index: int) -> Tensor:
        grad = self.grads[index]
        return torch.ones_like(self.outputs[index]) if grad is None else grad

    def _whole(self) -> list[Tensor | None]:
        """Run a backward that cannot be split."""
        self.unsplit = self.total
        with engine.ArrivingGradients(self.inputs) as gradients:
            engine.backward(self.outputs, self.grads)
        return self._done(gradients)

    def _noting(self, note: _ForkNote) -> Any:
        node = self._nodes[note.fork.node]

        def hook(grads: tuple[Tensor | None, ...]) -> None:
            note.grads = grads
            self._take(note, node)

        return hook

    def _take(self, note: _ForkNote, node: Node) -> None:
        """Keep what W needs of a node: a copy of what lies in memory that is freed before W."""
        if note.fork.formula is None:
            return
        note.saved = note.fork.formula.take(node)
        if self.freed is not None:
            note.saved = tuple(map(self.freed.kept, note.saved))
            for value in note.saved:
                if isinstance(value, Deferred):
                    value.keep = self.freed.kept

    def weight_gradients(self) -> None:
        """Run W: add into the `.grad` of every parameter, firing its hooks, as a whole backward would."""
        for parameter, grad in self._together:
            if grad is not None:
                torch.autograd.backward([parameter], [grad])
        soon = _Roots()
        last = _Roots()  # what several forks contribute to is accumulated in one run, as in a whole backward
        sums: tuple[list[Tensor], list[Tensor]] = ([], [])
        plain = self.direct and self._plan is not None and not any_hooks(self._plan.targets)
        with torch.no_grad():
            for note in self._notes:
                fork, formula = note.fork, note.fork.formula
                if formula is None:
                    self._run_again(note)
                    continue
                grad = note.grads[0] if note.grads else None
                if grad is None and not formula.deferred:
                    continue
                if plain and fork.wanted is not None:  # the usual case
                    gradients = formula.compute(note.saved, grad, fork.wanted)
                    for parameter, gradient in zip(fork.targets, gradients, strict=True):
                        if gradient is not None:
                            _accumulate(parameter, gradient, grad, sums)
                else:
                    for index, gradient in self._by_hand(note, grad, sums):
                        number, output = fork.children[index]
                        (soon if fork.alone else last).add(GradientEdge(self._nodes[number], output), gradient)
                note.saved = note.grads = ()
                if soon.bytes > PENDING:
                    soon.run()
            if sums[0]:
                add_tensors(*sums)
            soon.run()
            for root, grad in self._called_entries() or zip(*self._last, strict=True):
                if grad is not None:
                    last.add(root, grad)
            last.run()
        self._notes, self._together, self._nodes, self._last, self._owners = [], [], [], ([], []), []
        self._plan = None

    def retained(self) -> Iterator[Any]:
        """Yield what is held from I to W, as trees of tensors: gradients, and what nodes saved and did not release."""
        for note in self._notes:
            yield note.grads, [value.kept if isinstance(value, Deferred) else value for value in note.saved]
        yield [grad for _, grad in self._together], self._last[1]
        for node in self._nodes:
            for name in dir(node):
                if name.startswith("_saved_") or name == "saved_tensors":
                    try:
                        yield getattr(node, name)
                    except RuntimeError:  # released
                        break

    def _by_hand(
        self, note: _ForkNote, grad: Tensor | None, sums: tuple[list[Tensor], list[Tensor]]
    ) -> list[tuple[int, Tensor]]:
        """Compute the gradients of one fork's edges; return those that autograd is to propagate to parameters.

        Those of plain parameters are accumulated here.
        """
        fork = note.fork
        assert fork.formula is not None
        plain = [self.direct and fork.alone and target is not None and not has_hooks(target) for target in fork.targets]
        wanted = [self._wanted(fork, index, plain[index]) for index in range(len(fork.edges))]
        left = []
        for index, gradient in enumerate(fork.formula.compute(note.saved, grad, wanted)):
            if gradient is None:
                continue
            if plain[index]:
                _accumulate(fork.targets[index], gradient, grad, sums)
            else:
                left.append((index, gradient))
        return left

    def _wanted(self, fork: Fork, index: int, plain: bool) -> WantedGradient:
        if plain:
            target = fork.targets[index]
            return WantedGradient(fork.edges[index], target.shape, target.dtype, fork.transposed[index])
        number, output = fork.children[index]
        there = input_metadata(self._nodes[number])[output]
        return WantedGradient(fork.edges[index], torch.Size(there.shape), there.dtype)

    def _run_again(self, note: _ForkNote) -> None:
        """Run a node again, and propagate the gradients that lead to parameters alone."""
        roots = _Roots()
        gradients = _call(self._nodes[note.fork.node], note.grads)
        for edge, (number, output) in zip(note.fork.edges, note.fork.children, strict=True):
            grad = gradients[edge]
            if grad is not None:
                roots.add(GradientEdge(self._nodes[number], output), grad)
        roots.run()

    def _called_entries(self) -> list[tuple[GradientEdge, Tensor | None]]:
        """Call the nodes in which the data enters; return their edges and gradients.

        Empty if there are none, or if the engine has to run them: nodes of Python functions, and those beside outputs
        that depend on parameters alone, since only the engine knows their order.
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
    """Run a node without the engine, which would call its hooks again after I did: `retain_grad` would add twice."""
    if all(grad is None for grad in grads):
        return [None] * len(node.next_functions)
    gradients = node(*grads)
    return gradients if isinstance(gradients, tuple) else (gradients,)


def _accumulate(parameter: Any, gradient: Tensor, grad: Tensor | None, sums: tuple[list[Tensor], list[Tensor]]) -> None:
    """Add a gradient to that of a parameter: a large one at once; small ones are added together at the end (`sums`)."""
    total = parameter.grad
    if total is None:
        parameter.grad = gradient.clone() if grad is not None and _shares(gradient, grad) else gradient
    elif gradient.numel() <= (SMALL_ON_HOST if gradient.is_cpu else SMALL):
        sums[0].append(total)
        sums[1].append(gradient)
    else:
        total.add_(gradient)


def _shares(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors lie in the same memory: one may be the other, or a view of it."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
