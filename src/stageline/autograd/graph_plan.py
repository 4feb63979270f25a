"""The structure of a recorded graph, analysed once: which nodes lead to the inputs, and where weights branch off.

    output ── Addmm ── Gelu ── Addmm ── input        the Addmm nodes are forks: one branch continues to the
                │               │                    *ends*, where I stops, another to parameters alone
                w2              w1

The ends are the inputs of the stage. The first stage has none that require a gradient; there, I stops at the nodes in
which the data enters, such as the embedding, and W runs those.

The next microbatch records another graph of the same form, so a plan is made once and then only compared with the graph
at hand, node by node. A graph of another form (experts, another branch) gets a plan of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from stageline.autograd._torch_private import saved_hook, saved_names, storage_id
from stageline.autograd.weight_gradients import Formula, WantedGradient
from stageline.tensors.sharded import local


class FreedMemory:
    """Memory that is freed between I and W, as that of gathered parameters: W must not read it.

    What I keeps for W of such memory is copied, once a step.
    """

    def __init__(self, storages: frozenset[int]) -> None:
        """`storages` are the identifiers of the memory."""
        self._storages = storages
        self._copies: dict[Any, Tensor] = {}

    def holds(self, value: Any) -> bool:
        """Whether a value is a tensor in this memory."""
        return isinstance(value, Tensor) and storage_id(local(value)) in self._storages

    def read_by(self, node: Any) -> bool:
        """Whether a node may read this memory when it runs: what hooks hold could be anything."""
        names = saved_names(node)
        if any(saved_hook(name)(node) is not None for name in names) or "saved_tensors" in dir(node):
            return True
        return any(self.holds(value) for name in names for value in (getattr(node, f"_saved_{name}"),))

    def kept(self, value: Any) -> Any:
        """A value that I keeps for W: a copy if it lies in this memory; itself while the memory is freed."""
        if not self.holds(value):
            return value
        key = (storage_id(local(value)), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if key not in self._copies and local(value).untyped_storage().nbytes():
            self._copies[key] = value.detach().clone()
        return self._copies.get(key, value)

    def is_apart(self, values: Iterable[Any]) -> bool:
        """Whether no value lies in this memory."""
        return not any(map(self.holds, values))

    def forget(self) -> None:
        """Drop the copies: the parameters are about to change."""
        self._copies.clear()


class Fork(NamedTuple):
    """A node whose weight gradients are left to W."""

    node: int
    leaves: tuple[int, ...]
    """The parameters behind it."""
    formula: Formula | None
    """How their gradients are computed; None if the node runs again in W."""
    edges: tuple[int, ...]
    """Which edges of the node lead to them."""
    children: tuple[Edge, ...]
    """And where those edges lead."""
    targets: tuple[Any, ...]
    """For each edge, the parameter it leads to directly or through a transposition alone; None for anything else."""
    transposed: tuple[bool, ...]
    """Whether there is a transposition in between."""
    alone: bool
    """Whether no other fork contributes to the gradients of these parameters."""
    wanted: tuple[WantedGradient, ...] | None = None
    """The gradients of its edges, if all lead to parameters directly and no other fork contributes to them."""


@dataclass
class GraphPlan:
    """The form of a graph, and how its backward is split."""

    kinds: list[tuple[type, str]]
    """The class and the name of every node."""
    children: list[tuple[Edge | None, ...]]
    roots: list[Edge]
    inputs: list[int]
    """The node of each input; -1 where the outputs do not depend on it."""
    leaves: dict[int, int]
    """The nodes that accumulate the gradients of leaves other than the inputs, and how many elements these have."""
    parameters: dict[int, nn.Parameter]
    """Those of them that are parameters. The nodes themselves are not kept from one graph to the next: on a GPU they
    belong to the stream in which they were created, and every forward may create its own leaves beside parameters."""
    dtypes: list[Any] = field(default_factory=list)
    """Of the outputs and inputs of the graph."""
    hooked: list[int] = field(default_factory=list)
    """For each of `savers`, who holds its saved tensors."""
    onward: list[int] = field(default_factory=list)
    """The roots that lead to an end."""
    rest: list[int] = field(default_factory=list)
    """The roots that lead to parameters alone."""
    ends: list[Edge] = field(default_factory=list)
    """Where I stops, if not at inputs."""
    forks: list[Fork] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    """The parameters whose gradients I must compute."""
    at_once: bool = False
    """Whether I computes all gradients, as there may be hooks on the graph."""
    whole: bool = False
    """Whether nothing can be split, and the backward runs as one."""
    savers: list[tuple[int, str]] = field(default_factory=list)
    """The nodes of forks that save tensors, and the name of the first tensor of each."""

    @cached_property
    def total(self) -> int:
        """How many elements of parameters get a gradient."""
        return sum(self.leaves.values())

    @cached_property
    def unsplit(self) -> int:
        """How many of them get it from I."""
        return sum(self.leaves[leaf] for leaf in self.together)

    @cached_property
    def late(self) -> bool:
        """Whether to read what a fork saved only when I arrives there, since reading it recomputes it."""
        return HOOKS in self.hooked

    @cached_property
    def keeps_graph(self) -> bool:
        """Whether some fork must run again, for which the graph has to stay."""
        return any(fork.formula is None for fork in self.forks)

    @cached_property
    def _types(self) -> list[type]:
        return [kind for kind, _ in self.kinds]

    @cached_property
    def _names(self) -> list[tuple[int, str]]:
        """The names of nodes of a class that stands for many kinds."""
        return [(number, name) for number, (kind, name) in enumerate(self.kinds) if kind.__name__ == "CppFunction"]

    @cached_property
    def _conditions(self) -> list[tuple[Callable[[Any], bool], int]]:
        """What has to hold for nodes with a formula, and their numbers."""
        formulas = [(fork.formula, fork.node) for fork in self.forks if fork.formula is not None]
        return [(formula.fits, number) for formula, number in formulas if formula.fits is not None]

    @cached_property
    def targets(self) -> list[Any]:
        """All parameters that forks lead to directly."""
        return [target for fork in self.forks for target in fork.targets if target is not None]

    @cached_property
    def _walk(self) -> Walk:
        return compile_walk(len({number for number, _ in self.roots}), self.children)

    def match(self, roots: Sequence[tuple[Node, int]], inputs: Sequence[Tensor]) -> list[Node] | None:
        """The nodes of a graph by their numbers in this plan; None if the graph has another form."""
        if len(roots) != len(self.roots) or len(inputs) != len(self.inputs):
            return None
        starts: list[Any] = []
        for (node, root_output), (number, output) in zip(roots, self.roots, strict=True):
            if number == len(starts):
                starts.append(node)
            if root_output != output or number >= len(starts) or starts[number] is not node:
                return None
        try:
            nodes = self._walk(*starts)
        except (ValueError, AttributeError):  # a node with more edges, fewer, or none
            return None
        if nodes is None:
            return None
        if len(nodes) != len(self.kinds) or len(set(nodes)) != len(nodes):
            return None
        if list(map(type, nodes)) != self._types or any(nodes[number].name() != name for number, name in self._names):
            return None
        leaves = map(_variable, map(nodes.__getitem__, self.parameters))
        if not all(map(is_, leaves, self.parameters.values())):
            return None
        for number, tensor in zip(self.inputs, inputs, strict=True):
            if number >= 0 and not _ends_in(nodes[number], tensor):
                return None
        usual = all(fits(nodes[number]) for fits, number in self._conditions)
        return nodes if usual and hooked_by(nodes, self.savers) == self.hooked else None


_variable = attrgetter("variable")
"""The leaf that a node accumulates the gradient of."""


def _ends_in(node: Any, tensor: Tensor) -> bool:
    """Whether the gradient of a tensor arrives at this node first; does not create that node."""
    return node is tensor.grad_fn if tensor.grad_fn is not None else getattr(node, "variable", None) is tensor


def hooked_by(nodes: Sequence[Any], savers: Iterable[tuple[int, str]]) -> list[int]:
    """Who holds what these nodes saved: autograd itself, torch's checkpointing, or other hooks.

    A node saves all its tensors at the same moment, so the first one stands for all.
    """
    hooks = [saved_hook(name)(nodes[number]) for number, name in savers]
    return [0 if hook is None else _holder(hook) for hook in hooks]


HOOKS, CHECKPOINT = 1, 2


def _holder(hook: Any) -> int:
    return CHECKPOINT if "checkpoint" in (getattr(hook, "__module__", None) or "") else HOOKS


def checkpointed(outputs: Sequence[Any]) -> bool:
    """Whether torch's checkpointing holds saved tensors of the graph that led to these tensors."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        names = _names.get(type(node))
        if names is None:
            names = _names[type(node)] = saved_names(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        if names and hooked_by([node], [(0, names[0])]) == [CHECKPOINT]:
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return False


_names: dict[type, list[str]] = {}
"""The names of the tensors that nodes of a class save."""


Edge = tuple[int, int]
"""A node, by its number in the graph, and which of its outputs."""

Walk = Callable[..., list[Any] | None]
"""From the roots of a graph to its nodes by their numbers; returns None or raises ValueError for another form."""


def compile_walk(roots: int, children: Sequence[Sequence[Edge | None]]) -> Walk:
    """Compile a function that walks from the roots to all nodes, with a line for each node.

        ((n1, o0),) = n0.next_functions                 n1 is visited here first
        ((x0, o1), (n2, o2)) = n1.next_functions        this edge of n1 leads to n0, or the form differs
        if x0 is not n0: return None
        …
        return [n0, n1, n2, …] if [o0, o1, …] == outputs else None

    Nodes are numbered in the order of their first visit.

    >>> class Node:
    ...     next_functions = ()
    >>> root, leaf = Node(), Node()
    >>> root.next_functions = ((leaf, 0), (None, 0))
    >>> walk = compile_walk(1, [[(1, 0), None], []])
    >>> walk(root) == [root, leaf]
    True
    """
    visited = roots
    lines: list[str] = []
    outputs: list[int] = []
    for number, edges in enumerate(children):
        if not edges:
            continue  # leads nowhere, as its kind says
        taken: list[str] = []
        checks: list[str] = []
        for edge in edges:
            name = f"x{len(checks)}"
            if edge is not None and edge[0] == visited:
                name, visited = f"n{visited}", visited + 1
            else:
                checks.append(f"{name} is not {'None' if edge is None else f'n{edge[0]}'}")
            taken.append(f"({name}, o{len(outputs)})")
            outputs.append(0 if edge is None else edge[1])
        lines.append(f"    ({', '.join(taken)},) = n{number}.next_functions")
        if checks:
            lines.append(f"    if {' or '.join(checks)}: return None")
    parameters = ", ".join(f"n{number}" for number in range(roots))
    every = ", ".join(f"n{number}" for number in range(len(children)))
    numbers = ", ".join(f"o{index}" for index in range(len(outputs)))
    last = f"    return [{every}] if [{numbers}] == outputs else None"
    space: dict[str, Any] = {"outputs": outputs}
    exec("\n".join([f"def walk({parameters}):", *lines, last]), space)  # of numbers alone: no injection
    walk: Walk = space["walk"]
    return walk
