"""How the backward of a recorded graph is split: which nodes lead to the inputs, and which weights can wait for W."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from stageline.autograd._torch_private import input_metadata, saved_names, sequence_number
from stageline.autograd.graph_plan import CHECKPOINT, Edge, Fork, FreedMemory, GraphPlan, hooked_by
from stageline.autograd.weight_gradients import Formula, WantedGradient, formula_of

VIEWS = frozenset(
    ["TBackward0", "ToCopyBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "AliasBackward0"]
)
"""Cheap nodes between a parameter and its use."""


def make_plan(
    roots: Sequence[tuple[Node, int]], ends: Sequence[Node], at_once: bool = False, freed: FreedMemory | None = None
) -> tuple[GraphPlan, list[Node]]:
    """Walk a graph and decide how to split its backward; `at_once` says that I computes all gradients.

    No node that reads `freed` memory runs in W.
    """
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
        edges = nodes[len(children)].next_functions
        children.append(tuple(None if child is None else (number_of(child), output) for child, output in edges))
    inputs = [numbers.get(end, -1) for end in ends]
    variables: list[tuple[int, Any]] = [
        (number, node.variable)
        for number, node in enumerate(nodes)
        if hasattr(node, "variable") and number not in inputs
    ]
    leaves = {number: leaf.numel() for number, leaf in variables}
    parameters = {number: leaf for number, leaf in variables if isinstance(leaf, nn.Parameter)}
    plan = GraphPlan([(type(node), node.name()) for node in nodes], children, starts, inputs, leaves, parameters)
    plan.at_once = at_once
    _Analysis(plan, nodes, freed).decide()
    return plan, nodes


class _Analysis:
    """Which nodes lead to ends and which to parameters, and what follows from it."""

    def __init__(self, plan: GraphPlan, nodes: Sequence[Node], freed: FreedMemory | None) -> None:
        self.plan, self.nodes, self.freed = plan, nodes, freed
        self.names = [node.name() for node in nodes]
        self.formulas = [formula_of(node) for node in nodes]
        self.order = list(_children_first(plan))
        self.stops = {number for number in plan.inputs if number >= 0}

    def below(self, number: int) -> Iterator[int]:
        return (edge[0] for edge in self.plan.children[number] if edge is not None)

    def decide(self) -> None:
        plan = self.plan
        plan.whole = any(name == "CheckpointFunctionBackward" for name in self.names)
        if plan.whole:
            return
        if plan.at_once:
            plan.together, plan.onward = sorted(plan.leaves), list(range(len(plan.roots)))
            return
        if not self.stops:
            entries = self._entries()
            savers = [(number, name) for number in entries for name in saved_names(self.nodes[number])[:1]]
            # Torch's checkpointing hands its tensors out once per run, so I and W cannot both read them.
            self.stops = set() if CHECKPOINT in hooked_by(self.nodes, savers) else entries
            plan.ends = sorted({edge for edges in plan.children for edge in edges if edge and edge[0] in self.stops})
            plan.ends += sorted({root for root in plan.roots if root[0] in self.stops} - set(plan.ends))
        self._spread()
        plan.onward = [index for index, (number, _) in enumerate(plan.roots) if self.leads_on[number]]
        plan.rest = [index for index, (number, _) in enumerate(plan.roots) if not self.leads_on[number]]
        self._find_forks()
        if self.outside & set(plan.together):
            if plan.ends and self.freed is None:  # then W runs all of it
                plan.ends, plan.forks, plan.together, plan.onward = [], [], [], []
                plan.rest = list(range(len(plan.roots)))
            else:
                plan.whole = True

    def _entries(self) -> set[int]:
        """Where the data enters a graph without inputs: the nodes furthest from the outputs that are not weights."""
        plain: set[int] = set()  # parameters, and views of them
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
            formula = self.formulas[number]
            onward = [
                edge[0]
                for index, edge in enumerate(self.plan.children[number])
                if edge is not None and edge[0] not in plain and (formula is None or index in formula.data)
            ]
            waiting += onward
            if not onward:
                entries.add(number)
        # W could not run an entry alone if there were another one behind it.
        behind = {child for entry in entries for child in self._all_below(entry)}
        return set() if entries & behind else entries

    def _all_below(self, number: int) -> set[int]:
        reached: set[int] = set()
        waiting = list(self.below(number))
        while waiting:
            child = waiting.pop()
            if child not in reached:
                reached.add(child)
                waiting += self.below(child)
        return reached

    def _spread(self) -> None:
        """For every node: whether it leads to an end, and which parameters lie behind its other branches."""
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
        forks: list[Fork] = []
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
            formula = self.formulas[number]
            names = formula.tensors if formula else saved_names(self.nodes[number])
            savers += [(number, name) for name in names[:1]]
            if formula is not None and not self._applies(formula, number, edges, leaves):
                formula = None
            children = tuple(edge for _, edge in sides)
            forks.append(Fork(number, leaves, formula, edges, children, (), (), True))
        plan.savers, plan.hooked = savers, hooked_by(self.nodes, savers)
        self._settle(forks)

    def _applies(self, formula: Formula, number: int, edges: Sequence[int], leaves: Sequence[int]) -> bool:
        leads_to_complex = any(self.nodes[leaf].variable.is_complex() for leaf in leaves)  # type: ignore[attr-defined]
        usual = formula.deferred or not (leads_to_complex or input_metadata(self.nodes[number])[0].dtype.is_complex)
        apart = formula.data == {0, 1} or formula.deferred or not formula.data & set(edges)
        return usual and apart and (formula.fits is None or formula.fits(self.nodes[number]))

    def _settle(self, candidates: list[Fork]) -> None:
        """Decide which parameters get their gradients from I, and which forks share one."""
        plan = self.plan
        uses: dict[int, list[Fork]] = {}
        for fork in candidates:
            for leaf in fork.leaves:
                uses.setdefault(leaf, []).append(fork)
        outside = {leaf for index in plan.rest for leaf in self.behind[plan.roots[index][0]]}
        outside |= {leaf for stop in self.stops for leaf in self._all_below(stop) if leaf in plan.leaves}
        self.outside = outside
        held = dict(zip((number for number, _ in plan.savers), plan.hooked, strict=True))
        together: set[int] = set()
        for fork in candidates:
            node = self.nodes[fork.node]
            if fork.formula is not None and fork.formula.deferred:  # I computes all gradients but those of parameters
                for edge, (child, _) in zip(fork.edges, fork.children, strict=True):
                    together.update(self.behind[child] if edge in fork.formula.data else ())
            elif held.get(fork.node) == CHECKPOINT or BackwardCFunction in type(node).__mro__:
                together.update(fork.leaves)
        for leaf, forks in uses.items():
            # Parts of one gradient are added in the order of a whole backward only if W computes all of them at once.
            by_hand = all(fork.formula is not None and self._directly(fork, leaf) for fork in forks)
            if (len(forks) > 1 and not by_hand) or (leaf in outside and not (by_hand and len(forks) == 1)):
                together.add(leaf)
        together |= self._reads_freed_memory(candidates)
        before = -1
        while len(together) != before:  # I computes everything behind an edge, or W does
            before = len(together)
            for fork in candidates:
                for child, _ in fork.children:
                    if self.behind[child] & together:
                        together |= self.behind[child]
        plan.together = sorted(together)
        for fork in sorted(candidates, key=lambda fork: -sequence_number(self.nodes[fork.node])):
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
                targets, transposed = zip(*(self._target(child) for child, _ in children), strict=True)
                wanted = None
                if alone and all(target is not None for target in targets):
                    wanted = tuple(
                        WantedGradient(edge, target.shape, target.dtype, turned)
                        for edge, target, turned in zip(edges, targets, transposed, strict=True)
                    )
                plan.forks.append(
                    Fork(fork.node, leaves, fork.formula, edges, children, targets, transposed, alone, wanted)
                )

    def _reads_freed_memory(self, candidates: Sequence[Fork]) -> set[int]:
        """The parameters behind nodes that W would run, and that read memory which is freed by then."""
        if self.freed is None:
            return set()
        again = {fork.node for fork in candidates if fork.formula is None}
        aside = {number for number in self.order if not self.leads_on[number] and number not in self.plan.leaves}
        entries = self.stops if self.plan.ends else set()
        reading = {number for number in again | aside | entries if self.freed.read_by(self.nodes[number])}
        behind: set[int] = set()
        for number in reading:
            behind |= self._all_below(number) if number in entries else self.behind[number]
        return behind & set(self.plan.leaves)

    def _directly(self, fork: Fork, leaf: int) -> bool:
        """Whether a fork leads to a leaf by one edge, and through a transposition at most."""
        ways = [child for child, _ in fork.children if leaf in self.behind[child]]
        first = ways[0]
        through = [first, *self.below(first)] if self.names[first] == "TBackward0" else [first]
        return len(ways) == 1 and leaf in through

    def _target(self, child: int) -> tuple[Any, bool]:
        """The plain parameter that an edge leads to, and whether through a transposition."""
        transposed = self.names[child] == "TBackward0"
        leaf = next(self.below(child), child) if transposed else child
        parameter = self.plan.parameters.get(leaf)
        plain = type(parameter) is nn.Parameter
        return (parameter, transposed) if plain else (None, False)


def _children_first(plan: GraphPlan) -> Iterator[int]:
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
