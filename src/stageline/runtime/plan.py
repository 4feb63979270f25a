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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from stageline.runtime.halves import HALVES, Half, Wanted
from stageline.runtime.walk import Edge, Walk, compile_walk

VIEWS = frozenset(
    ["TBackward0", "ToCopyBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "AliasBackward0"]
)
"""Nodes between a parameter and its use that compute nothing worth putting off."""


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
        return nodes if usual and _hooked(nodes, self.savers) == self.hooked else None


def _ends_in(node: Any, tensor: Tensor) -> bool:
    """Whether a node is the one that a tensor's gradient comes to first; asked without making that node."""
    return node is tensor.grad_fn if tensor.grad_fn is not None else getattr(node, "variable", None) is tensor


def _hooked(nodes: Sequence[Any], savers: Iterable[tuple[int, str]]) -> list[int]:
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
            names = _names[type(node)] = _saved_names(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        if names and _hooked([node], [(0, names[0])]) == [CHECKPOINT]:
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return False


_names: dict[type, list[str]] = {}
"""What nodes of a class save."""


def make_plan(roots: Sequence[tuple[Node, int]], ends: Sequence[Node]) -> tuple[Plan, list[Node]]:
    """Walk a graph, and find out how to split its backward."""
    numbers: dict[Node, int] = {}
    nodes: list[Node] = []

    def number_of(node: Node) -> int:
        if node not in numbers:
            numbers[node] = len(nodes)
            nodes.append(node)
        return numbers[node]

    starts = [(number_of(node), output) for node, output in roots]
    children: list[tuple[Edge | None, ...]] = []
    while len(children) < len(nodes):
        found = nodes[len(children)].next_functions
        children.append(tuple(None if child is None else (number_of(child), output) for child, output in found))
    inputs = [numbers.get(end, -1) for end in ends]
    found_leaves: list[tuple[int, Any]] = [
        (number, node.variable)
        for number, node in enumerate(nodes)
        if hasattr(node, "variable") and number not in inputs
    ]
    leaves = {number: leaf.numel() for number, leaf in found_leaves}
    parameters = {number: leaf for number, leaf in found_leaves if isinstance(leaf, nn.Parameter)}
    plan = Plan([(type(node), node.name()) for node in nodes], children, starts, inputs, leaves, parameters)
    _Analysis(plan, nodes).decide()
    return plan, nodes


class _Analysis:
    """Which nodes lead to ends and which to parameters, and what follows from it."""

    def __init__(self, plan: Plan, nodes: Sequence[Node]) -> None:
        self.plan, self.nodes = plan, nodes
        self.names = [node.name() for node in nodes]
        self.order = list(_children_first(plan))
        self.stops = {number for number in plan.inputs if number >= 0}

    def below(self, number: int) -> Iterator[int]:
        return (edge[0] for edge in self.plan.children[number] if edge is not None)

    def decide(self) -> None:
        plan = self.plan
        plan.whole = any(name == "CheckpointFunctionBackward" for name in self.names)
        if plan.whole:
            return
        if not self.stops:
            entries = self._entries()
            savers = [(number, name) for number in entries for name in _saved_names(self.nodes[number])[:1]]
            # What torch's checkpointing holds it gives out once in every run, so I and W cannot both have of it.
            self.stops = set() if CHECKPOINT in _hooked(self.nodes, savers) else entries
            plan.ends = sorted({edge for edges in plan.children for edge in edges if edge and edge[0] in self.stops})
            plan.ends += sorted({root for root in plan.roots if root[0] in self.stops} - set(plan.ends))
        self._spread()
        plan.onward = [index for index, (number, _) in enumerate(plan.roots) if self.leads_on[number]]
        plan.rest = [index for index, (number, _) in enumerate(plan.roots) if not self.leads_on[number]]
        self._find_forks()
        if self.outside & set(plan.together):
            if plan.ends:  # then W runs all of it
                plan.ends, plan.forks, plan.together, plan.onward = [], [], [], []
                plan.rest = list(range(len(plan.roots)))
            else:
                plan.whole = True

    def _entries(self) -> set[int]:
        """Where the data enters a graph without inputs: the last nodes on the way from the outputs, weights aside."""
        plain: set[int] = set()  # parameters, and mere views of them
        for number in self.order:
            below = list(self.below(number))
            if number in self.plan.leaves or (self.names[number] in VIEWS and all(child in plain for child in below)):
                plain.add(number)
        entries: set[int] = set()
        seen: set[int] = set()
        waiting = [number for number, _ in self.plan.roots if number not in plain]
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            half = HALVES.get(self.names[number])
            onward = [
                edge[0]
                for index, edge in enumerate(self.plan.children[number])
                if edge is not None and edge[0] not in plain and (half is None or index in half.data)
            ]
            waiting += onward
            if not onward:
                entries.add(number)
        # An entry behind which lies another one could not be run by W alone.
        behind = {child for entry in entries for child in self._all_below(entry)}
        return set() if entries & behind else entries

    def _all_below(self, number: int) -> set[int]:
        found: set[int] = set()
        waiting = list(self.below(number))
        while waiting:
            child = waiting.pop()
            if child not in found:
                found.add(child)
                waiting += self.below(child)
        return found

    def _spread(self) -> None:
        """For every node: whether it leads to an end, and which parameters lie behind it that do not."""
        self.leads_on: dict[int, bool] = {}
        self.behind: dict[int, frozenset[int]] = {}
        for number in self.order:
            below = list(self.below(number))
            self.leads_on[number] = number in self.stops or any(self.leads_on[child] for child in below)
            if number in self.plan.leaves:
                self.behind[number] = frozenset([number])
            else:
                sides = [self.behind[child] for child in below if not self.leads_on[child]]
                self.behind[number] = frozenset().union(*sides)

    def _find_forks(self) -> None:
        plan = self.plan
        found: list[Fork] = []
        savers: list[tuple[int, str]] = []
        for number in self.order:
            if not self.leads_on[number] or number in self.stops:
                continue
            sides = [
                (index, edge)
                for index, edge in enumerate(plan.children[number])
                if edge is not None and not self.leads_on[edge[0]] and self.behind[edge[0]]
            ]
            if not sides:
                continue
            leaves = tuple(dict.fromkeys(leaf for _, (child, _) in sides for leaf in sorted(self.behind[child])))
            edges = tuple(index for index, _ in sides)
            half = HALVES.get(self.names[number])
            names = [f"_raw_saved_{name}" for name in half.tensors] if half else _saved_names(self.nodes[number])
            savers += [(number, name) for name in names[:1]]
            if half is not None and not self._by_hand(half, number, edges, leaves):
                half = None
            children = tuple(edge for _, edge in sides)
            found.append(Fork(number, leaves, half, edges, children, (), (), True))
        plan.savers, plan.hooked = savers, _hooked(self.nodes, savers)
        self._settle(found)

    def _by_hand(self, half: Half, number: int, edges: Sequence[int], leaves: Sequence[int]) -> bool:
        leads_to_complex = any(self.nodes[leaf].variable.is_complex() for leaf in leaves)  # type: ignore[attr-defined]
        usual = not (leads_to_complex or self.nodes[number]._input_metadata[0].dtype.is_complex)
        apart = half.data == {0, 1} or not half.data & set(edges)
        return usual and apart and half.fits(self.nodes[number])

    def _settle(self, found: list[Fork]) -> None:
        """Say which parameters come with I, and which forks share one."""
        plan = self.plan
        uses: dict[int, list[Fork]] = {}
        for fork in found:
            for leaf in fork.leaves:
                uses.setdefault(leaf, []).append(fork)
        outside = {leaf for index in plan.rest for leaf in self.behind[plan.roots[index][0]]}
        outside |= {leaf for stop in self.stops for leaf in self._all_below(stop) if leaf in plan.leaves}
        self.outside = outside
        held = dict(zip((number for number, _ in plan.savers), plan.hooked, strict=True))
        together: set[int] = set()
        for fork in found:
            if held.get(fork.node) == CHECKPOINT or BackwardCFunction in type(self.nodes[fork.node]).__mro__:
                together.update(fork.leaves)
        for leaf, forks in uses.items():
            # Parts of one gradient are added in the order of a whole backward only if W computes them all in one go.
            by_hand = all(fork.half is not None and self._directly(fork, leaf) for fork in forks)
            if (len(forks) > 1 and not by_hand) or (leaf in outside and not (by_hand and len(forks) == 1)):
                together.add(leaf)
        before = -1
        while len(together) != before:  # what lies behind one edge comes with I as a whole, or with W
            before = len(together)
            for fork in found:
                for child, _ in fork.children:
                    if self.behind[child] & together:
                        together |= self.behind[child]
        plan.together = sorted(together)
        for fork in sorted(found, key=lambda fork: -self.nodes[fork.node]._sequence_nr()):
            kept = [
                (edge, child)
                for edge, child in zip(fork.edges, fork.children, strict=True)
                if not self.behind[child[0]] & together
            ]
            leaves = tuple(leaf for leaf in fork.leaves if leaf not in together)
            if leaves:
                alone = all(len(uses[leaf]) == 1 and leaf not in outside for leaf in leaves)
                alone = alone and sum(len(self.behind[child]) for _, (child, _) in kept) == len(leaves)
                edges, children = zip(*kept, strict=True)
                targets, turned = zip(*(self._target(child) for child, _ in children), strict=True)
                wanted = None
                if alone and all(target is not None for target in targets):
                    each = zip(edges, targets, turned, strict=True)
                    wanted = tuple(Wanted(edge, target.shape, target.dtype, turn) for edge, target, turn in each)
                plan.forks.append(Fork(fork.node, leaves, fork.half, edges, children, targets, turned, alone, wanted))

    def _directly(self, fork: Fork, leaf: int) -> bool:
        """Whether a fork leads to a leaf by one edge, and through a transposition at most."""
        ways = [child for child, _ in fork.children if leaf in self.behind[child]]
        first = ways[0]
        through = [first, *self.below(first)] if self.names[first] == "TBackward0" else [first]
        return len(ways) == 1 and leaf in through

    def _target(self, child: int) -> tuple[Any, bool]:
        """The plain parameter that an edge leads to, and whether through a transposition."""
        turned = self.names[child] == "TBackward0"
        leaf = next(self.below(child), child) if turned else child
        parameter = self.plan.parameters.get(leaf)
        plain = type(parameter) is nn.Parameter
        return (parameter, turned) if plain else (None, False)


def _saved_names(node: Node) -> list[str]:
    return [name for name in dir(node) if name.startswith("_raw_saved_") and not isinstance(getattr(node, name), tuple)]


def _children_first(plan: Plan) -> Iterator[int]:
    """All nodes, each after the nodes it leads to."""
    entered: set[int] = set()
    left: set[int] = set()
    for root, _ in plan.roots:
        waiting = [root]
        while waiting:
            number = waiting[-1]
            if number in left:
                waiting.pop()
            elif number in entered:
                left.add(number)
                waiting.pop()
                yield number
            else:
                entered.add(number)
                waiting += [edge[0] for edge in plan.children[number] if edge is not None and edge[0] not in entered]
