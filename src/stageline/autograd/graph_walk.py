"""Walking a graph of known form: it happens for every microbatch, so the way is written out once and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Edge = tuple[int, int]
"""A node, by its number in the graph, and which of its outputs."""

Walk = Callable[..., list[Any] | None]
"""From the roots of a graph to its nodes by their numbers; None, or a ValueError, where its form is another."""


def compile_walk(roots: int, children: Sequence[Sequence[Edge | None]]) -> Walk:
    """Write the way from the roots to all nodes as a function, with a line for each node, and compile it.

        ((n1, o0),) = n0.next_functions                 n1 is met here for the first time
        ((x0, o1), (n2, o2)) = n1.next_functions        this edge of n1 leads to n0, or the graph is another
        if x0 is not n0: return None
        …
        return [n0, n1, n2, …] if [o0, o1, …] == outputs else None

    Nodes are numbered in the order in which they are met.

    >>> class Node:
    ...     next_functions = ()
    >>> root, leaf = Node(), Node()
    >>> root.next_functions = ((leaf, 0), (None, 0))
    >>> walk = compile_walk(1, [[(1, 0), None], []])
    >>> walk(root) == [root, leaf]
    True
    """
    met = roots
    lines: list[str] = []
    outputs: list[int] = []
    for number, edges in enumerate(children):
        if not edges:
            continue  # leads nowhere, as its kind says
        taken: list[str] = []
        checks: list[str] = []
        for edge in edges:
            name = f"x{len(checks)}"
            if edge is not None and edge[0] == met:
                name, met = f"n{met}", met + 1
            else:
                checks.append(f"{name} is not {'None' if edge is None else f'n{edge[0]}'}")
            taken.append(f"({name}, o{len(outputs)})")
            outputs.append(0 if edge is None else edge[1])
        lines.append(f"    ({', '.join(taken)},) = n{number}.next_functions")
        if checks:
            lines.append(f"    if {' or '.join(checks)}: return None")
    given = ", ".join(f"n{number}" for number in range(roots))
    every = ", ".join(f"n{number}" for number in range(len(children)))
    found = ", ".join(f"o{index}" for index in range(len(outputs)))
    last = f"    return [{every}] if [{found}] == outputs else None"
    space: dict[str, Any] = {"outputs": outputs}
    exec("\n".join([f"def walk({given}):", *lines, last]), space)  # of numbers alone: nothing from outside gets in
    walk: Walk = space["walk"]
    return walk
