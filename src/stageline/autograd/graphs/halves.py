"""Cut the backward graph of a compiled unit into I and W.

    saved tensors ──┐
    gradients of ───┼──▶ I ──▶ gradients of the inputs
    the outputs     │    │
                    └────┴kept──▶ W ──▶ gradients of the parameters

I holds everything that the gradients of the inputs need. W holds every expensive operator that only gradients of
parameters need. What lies between them is placed so that the fewest bytes are kept from I to W: a minimum cut, in which
cheap operators (pointwise ones and views) may also run again in W. No matrix product, convolution or attention runs
twice.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import networkx  # type: ignore[import-untyped]  # torch depends on it
import torch
from torch.fx import Graph, GraphModule, Node

from stageline.autograd.graphs._torch_private import OPERATORS, size_hint, tensors_in
from stageline.autograd.graphs.backward import Halves

aten = torch.ops.aten
REDUCTIONS = frozenset([aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.var])
INSEPARABLE = frozenset([aten.native_group_norm_backward.default])
"""Operators that must compute the gradient of their input: without it, this one crashes on channels-last tensors."""


def cut_backward(
    module: GraphModule, weight_outputs: Collection[int], constants: Collection[int] = ()
) -> Halves | None:
    """Cut a backward graph; None if it has no gradients of inputs, or none of parameters.

    `weight_outputs` are the indices of the outputs that are gradients of parameters. `constants` are the inputs of the
    unit that are parameters or buffers, which cost nothing to keep.
    """
    outputs = _outputs(module.graph)
    inner = [index for index, node in enumerate(outputs) if isinstance(node, Node) and index not in weight_outputs]
    outer = [index for index, node in enumerate(outputs) if isinstance(node, Node) and index in weight_outputs]
    if not inner or not outer:
        return None
    _separate_masked(module.graph, [outputs[index] for index in inner])
    outputs = _outputs(module.graph)
    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    free = {node for node in arguments if node.name in {f"primals_{index + 1}" for index in constants}}
    kept_nodes = _minimum_cut(module.graph, [outputs[i] for i in inner], [outputs[i] for i in outer], free)
    computed = [node for node in kept_nodes if node.op != "placeholder"]
    position = {node: index for index, node in enumerate(arguments)}
    kept = [(True, position[n]) if n.op == "placeholder" else (False, computed.index(n)) for n in kept_nodes]
    saved = [node for node in arguments if node not in free and not node.name.startswith("tangents")]
    return Halves(
        _extract(module, arguments, [*(outputs[index] for index in inner), *computed]),
        _extract(module, kept_nodes, [outputs[index] for index in outer]),
        kept,
        inner,
        outer,
        sum(_bytes(node) for node in kept_nodes if node not in free),
        sum(_bytes(node) for node in saved),
    )


def _outputs(graph: Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _bytes(node: Node) -> int:
    total = 0
    for tensor in tensors_in(node):
        elements = 1
        for size in tensor.shape:
            elements *= size_hint(size)
        total += elements * tensor.element_size()
    return total


def _needed(nodes: Iterable[Node], stop: Collection[Node] = ()) -> set[Node]:
    """The nodes that these depend on, and themselves; not what lies behind those in `stop`."""
    reached: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += () if node in stop else node.all_input_nodes
    return reached


def _extract(module: GraphModule, arguments: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """The part of a graph from some of its nodes to others."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed = _needed(outputs, set(arguments))
    for node in module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(module, graph)


def _separate_masked(graph: Graph, inner: Sequence[Node]) -> None:
    """Let operators such as `convolution_backward` compute gradients of inputs and of parameters in two calls."""
    first = _needed(inner)
    for node in list(graph.nodes):
        mask = _mask_argument(node)
        if mask is None or node not in first or any(user.target is not operator.getitem for user in node.users):
            continue
        onward = {int(user.args[1]) for user in node.users if user in first}
        rest = [user for user in node.users if int(user.args[1]) not in onward]
        if not rest:
            continue
        flags = list(node.args[mask])
        with graph.inserting_after(node):
            twin = graph.node_copy(node)
        node.update_arg(mask, [flag and index in onward for index, flag in enumerate(flags)])
        twin.update_arg(mask, [flag and index not in onward for index, flag in enumerate(flags)])
        values = node.meta["val"]
        for half in (node, twin):
            chosen: Any = half.args[mask]
            half.meta = {**node.meta, "val": tuple(v if flag else None for v, flag in zip(values, chosen, strict=True))}
        for user in rest:
            user.update_arg(0, twin)


def _mask_argument(node: Node) -> int | None:
    """The position of `output_mask` among the arguments of a node, if it has that many."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or node.target in INSEPARABLE:
        return None
    for index, argument in enumerate(schema.arguments):
        if argument.name == "output_mask" and index < len(node.args) and isinstance(node.args[index], list | tuple):
            return index
    return None


def _is_cheap(node: Node) -> bool:
    """Whether a node may run in both halves."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    known = OPERATORS.is_recomputable(node) or OPERATORS.is_view(node) or OPERATORS.is_fusible(node)
    costly = OPERATORS.is_compute_intensive(node) or OPERATORS.is_random(node)
    return node.op == "call_function" and known and not costly


def _is_reduction(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in REDUCTIONS


def _minimum_cut(graph: Graph, inner: Sequence[Node], outer: Sequence[Node], free: set[Node]) -> list[Node]:
    """The nodes whose values are kept from I to W, in the order of the graph.

    Every node is an edge of the network, with its bytes as capacity. The source is tied to what I has: the arguments,
    and what it must compute itself. The sink is tied to what W must compute itself.
    """
    first = _needed(inner)
    wanted = _needed(outer)
    network = networkx.DiGraph()
    network.add_nodes_from(["I", "W"])
    for node in graph.nodes:
        if node not in wanted:
            continue
        several = isinstance(node.meta.get("val"), tuple | list)  # its items can be kept, and it cannot
        # Among cuts of equal size, keep what exists anyway, and bases rather than views of them.
        preference = 0 if node.op == "placeholder" else 2 if OPERATORS.is_view(node) else 1
        size = {} if several else {"capacity": 0 if node in free else 4 * _bytes(node) + preference}
        network.add_edge((node, "before"), (node, "after"), **size)
        for user in node.users:
            if user in wanted:
                network.add_edge((node, "after"), (user, "before"))
        cheap, reduction = _is_cheap(node), _is_reduction(node)
        if node.op == "placeholder" or (node in first and (not cheap or reduction or several)):
            network.add_edge("I", (node, "before"))
        elif node not in first and not cheap and not reduction:
            network.add_edge((node, "before"), "W")
    for node in outer:
        network.add_edge((node, "after"), "W")
    _, (side, _) = networkx.minimum_cut(network, "I", "W")
    return [node for node in graph.nodes if (node, "before") in side and (node, "after") not in side]
