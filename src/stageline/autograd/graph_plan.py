"""What a recorded graph looks like, found out once: which nodes lead to the inputs, and where weights branch off.

    output ── Addmm ── Gelu ── Addmm ── input        the Addmm nodes are forks: one branch goes on to the
                │               │                    *ends*, where I stops, another to parameters alone
                w2              w1

The ends are the inputs of the stage. The first stage has none that want a gradient; there, I stops at the nodes in
which the data enters, such as the embedding, and W runs those.

The next microbatch records another graph of the same form, so a plan is made once and then only compared with the graph
at hand, node by node: a form that changes (experts, another branch) is noticed and gets a plan of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from stageline.autograd.graph_walk import Edge, Walk, compile_walk
from stageline.autograd.weight_gradients import Half, Wanted


class Fork(NamedTuple):
    """A node whose weight gradients are put off."""

    node: int
    leaves: tuple[int, ...]
    """The parameters behind it."""
    half: Half | None
    """How they are computed by hand; None where the node runs once more in W."""
    edges: tuple[int, ...]
    """Which edges of the node lead to them."""
    children: tuple[Edge, ...]
    """And where those edges lead."""
    targets: tuple[Any, ...]
    """For each edge, the parameter it leads to directly, or through a transposition alone; None where there is more."""
    turned: tuple[bool, ...]
    """Whether there is a transposition in between."""
    alone: bool
    """Whether no other fork has a part in these parameters' gradients."""
    wanted: tuple[Wanted, ...] | None = None
    """The gradients of its edges, where all lead to parameters directly and nobody else has a part in them."""


@dataclass
class Plan:
    """The form of a graph, and how its backward is split."""

    kinds: list[tuple[type, str]]
    """The class and the name of every node."""
    children: list[tuple[Edge | None, ...]]
    roots: list[Edge]
    inputs: list[int]
    """The node of each input; -1 where the outputs do not depend on it."""
    leaves: dict[int, int]
    """The nodes where leaves other than the inputs gather their gradients, and how many elements these have."""
    parameters: dict[int, nn.Parameter]
    """Those of them that are parameters. The nodes themselves are not kept from one graph to the next: on a GPU they
    belong to the stream in which they were made; and a leaf that is no parameter may be made anew in every forward."""
    dtypes: list[Any] = field(default_factory=list)
    """Of the outputs and inputs of the graph."""
    hooked: list[int] = field(default_factory=list)
    """Of each node that saves tensors for its weight half: who holds them."""
    onward: list[int] = field(default_factory=list)
    """The roots that lead to an end."""
    rest: list[int] = field(default_factory=list)
    """The roots that lead to parameters alone."""
    ends: list[Edge] = field(default_factory=list)
    """Where I stops, if not at inputs."""
    forks: list[Fork] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    """The parameters whose gradients must come with I."""
    at_once: bool = False
    """Whether I computes all gradients, as there may be hooks on the graph."""
    whole: bool = False
    """Whether nothing can be split, and the backward runs as one."""
    savers: list[tuple[int, str]] = field(default_factory=list)
    """The forks' nodes and the names of what each saves first."""

    @cached_property
    def total(self) -> int:
        """How many elements of parameters get a gradient."""
        return sum(self.leaves.values())

    @cached_property
    def unsplit(self) -> int:
        """How many of them get it with I."""
        return sum(self.leaves[leaf] for leaf in self.together)

    @cached_property
    def late(self) -> bool:
        """Whether what the forks saved is to be read only when I comes to them, as reading it computes it anew."""
        return HOOKS in self.hooked

    @cached_property
    def keeps_graph(self) -> bool:
        """Whether some fork must run again, for which the graph has to stay."""
        return any(fork.half is None for fork in self.forks)

    @cached_property
    def _types(self) -> list[type]:
        return [kind for kind, _ in self.kinds]

    @cached_property
    def _names(self) -> list[tuple[int, str]]:
        """The names of nodes of a class that stands for many kinds."""
        return [(number, name) for number, (kind, name) in enumerate(self.kinds) if kind.__name__ == "CppFunction"]

    @cached_property
    def _walk(self) -> Walk:
        return compile_walk(len({number for number, _ in self.roots}), self.children)

    def match(self, roots: Sequence[tuple[Node, int]], inputs: Sequence[Tensor]) -> list[Node] | None:
        """The nodes of a graph by their numbers here, or None if the graph has another form."""
        if len(roots) != len(self.roots) or len(inputs) != len(self.inputs):
            return None
        starts: list[Any] = []
        for (node, given), (number, output) in zip(roots, self.roots, strict=True):
            if number == len(starts):
                starts.append(node)
            if given != output or number >= len(starts) or starts[number] is not node:
                return None
        try:
            nodes = self._walk(*starts)
        except (ValueError, AttributeError):  # a node with more edges, fewer, or none
            return None
        if nodes is None:
            return None
        if len(nodes) != len(self.kinds) or len(set(map(id, nodes))) != len(nodes):
            return None
        if list(map(type, nodes)) != self._types or any(nodes[number].name() != name for number, name in self._names):
            return None
        if any(nodes[number].variable is not parameter for number, parameter in self.parameters.items()):
            return None
        for number, tensor in zip(self.inputs, inputs, strict=True):
            if number >= 0 and not _ends_in(nodes[number], tensor):
                return None
        usual = all(fork.half is None or fork.half.fits(nodes[fork.node]) for fork in self.forks)
        return nodes if usual and hooked_by(nodes, self.savers) == self.hooked else None


def _ends_in(node: Any, tensor: Tensor) -> bool:
    """Whether a node is the one that a tensor's gradient comes to first; asked without making that node."""
    return node is tensor.grad_fn if tensor.grad_fn is not None else getattr(node, "variable", None) is tensor


def hooked_by(nodes: Sequence[Any], savers: Iterable[tuple[int, str]]) -> list[int]:
    """Who holds what these nodes saved: autograd itself, torch's checkpointing, or someone else's hooks.

    A node saves all its tensors in one moment, so the first tells of all.
    """
    hooks = [getattr(nodes[number], name).unpack_hook for number, name in savers]
    return [0 if hook is None else _holder(hook) for hook in hooks]


HOOKS, CHECKPOINT = 1, 2


def _holder(hook: Any) -> int:
    return CHECKPOINT if "checkpoint" in (getattr(hook, "__module__", None) or "") else HOOKS


def checkpointed(outputs: Sequence[Any]) -> bool:
    """Whether torch's checkpointing holds something of the graph that led to these tensors."""
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
"""What nodes of a class save."""


def saved_names(node: Node) -> list[str]:
    """The names of the tensors that a node saves."""
    return [name for name in dir(node) if name.startswith("_raw_saved_") and not isinstance(getattr(node, name), tuple)]
