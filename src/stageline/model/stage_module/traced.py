"""The last resort: a model without a stack of blocks, cut in the graph that `torch.export` makes of it.

The graph is cut into segments, each from the first use of some parameter to the next one's; a stage runs its segments
and passes on what later ones need. Names are the model's own; its hooks are not called, and whether it trains is what
it was when it was traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.common.errors import StagelineError, shorten
from stageline.model.stage_module.boundary import arguments
from stageline.model.units import Unit

Values = dict[str, Any]


@dataclass(frozen=True)
class Traced:
    """The graph of a model, in segments."""

    model: nn.Module
    graph: Any
    """The exported program."""
    segments: tuple[tuple[Any, ...], ...]
    """The nodes of each segment, in order."""
    held: Mapping[str, str]
    """The names of the model's tensors by those of the graph's inputs."""
    constants: Mapping[str, Any]
    given: tuple[str, ...]
    """The graph's inputs that are the model's."""
    training: bool

    def units(self) -> list[Unit]:
        """A unit for each segment, named for the first parameter that it is the first to use."""
        found = []
        seen: set[str] = set()
        for number, nodes in enumerate(self.segments):
            own = [name for name in self._tensors(nodes) if name not in seen]
            seen.update(own)
            name = own[0].rpartition(".")[0] or own[0] if own else f"segment {number}"
            found.append(Unit(name, holder(self.model, own), False))
        return found

    def _tensors(self, nodes: Sequence[Any]) -> list[str]:
        """The names of the tensors that nodes use, in their order."""
        used = [self.held[each.name] for node in nodes for each in node.all_input_nodes if each.name in self.held]
        return list(dict.fromkeys(used))

    def unused(self) -> list[str]:
        """The names of the model's tensors that no node uses; the first stage holds them."""
        used = set(self._tensors([node for nodes in self.segments for node in nodes]))
        own = [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]
        return [name for name in own if name not in used]

    def part(self, start: int, stop: int) -> TracedPart:
        """What a stage of so many segments holds."""
        before = [node for nodes in self.segments[:start] for node in nodes]
        nodes = [node for some in self.segments[start:stop] for node in some]
        after = [node for some in self.segments[stop:] for node in some]
        arrives = self._crossing(before, [*nodes, *after], first=start == 0)
        leaves = self._crossing([*before, *nodes], after, first=False)
        last = stop == len(self.segments)
        return TracedPart(self, nodes, [] if start == 0 else arrives, [] if last else leaves, start == 0, last)

    def _crossing(self, before: Sequence[Any], after: Sequence[Any], first: bool) -> list[str]:
        """The values that are made before a cut, or are the model's inputs, and needed after it."""
        made = {node.name for node in before} | set(self.given)
        used = [each.name for node in after for each in node.all_input_nodes if each.name in made]
        used += [each.name for each in self.outputs if each.name in made]
        return list(dict.fromkeys(used))

    @property
    def outputs(self) -> list[Any]:
        """The nodes that the model's output is made of."""
        (last,) = [node for node in self.graph.graph.nodes if node.op == "output"]
        return [leaf for leaf in pytree.tree_leaves(last.args[0]) if isinstance(leaf, torch.fx.Node)]


class TracedPart(nn.Sequential):
    """What a rank holds of a traced model for one stage, by the names of the whole model."""

    one_layer = True

    def __init__(
        self, traced: Traced, nodes: Sequence[Any], arrives: list[str], leaves: list[str], first: bool, last: bool
    ) -> None:
        """`arrives` and `leaves` are the names of what passes the cuts."""
        super().__init__()
        self.__dict__["_run"] = _Run(traced, list(nodes), arrives, leaves, first, last)
        found = holder(traced.model, [*traced._tensors(nodes), *(traced.unused() if first else [])])
        self.__dict__["_modules"], self.__dict__["_parameters"] = found._modules, found._parameters
        self.__dict__["_buffers"] = found._buffers
        self.__dict__["_non_persistent_buffers_set"] = found._non_persistent_buffers_set

    def forward(self, value: Any) -> Any:
        """Run the nodes of this stage."""
        run: _Run = self.__dict__["_run"]
        tensors = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}
        return run(value, tensors)


@dataclass
class _Run:
    traced: Traced
    nodes: list[Any]
    arrives: list[str]
    leaves: list[str]
    first: bool
    last: bool
    cache: dict[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> _Run:
        return self

    def __call__(self, value: Any, tensors: Mapping[str, Tensor]) -> Any:
        traced = self.traced
        if traced.model.training != traced.training:
            raise StagelineError(
                f"the model was traced while {'training' if traced.training else 'evaluating'}; split it once more "
                "after train() or eval()"
            )
        names = dict(zip(traced.given if self.first else self.arrives, self._flat(value), strict=True))
        values: Values = {**traced.constants, **names}
        for graph_name, name in traced.held.items():
            if name in tensors:
                values[graph_name] = tensors[name]
        for node in self.nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: values[each.name])
            values[node.name] = node.target(*args, **kwargs)
        if not self.last:
            return tuple(values[name] for name in self.leaves)
        found = [values[node.name] for node in traced.outputs]
        return pytree.tree_unflatten(found, traced.graph.call_spec.out_spec)

    def _flat(self, value: Any) -> list[Any]:
        if not self.first:
            return list(value)
        args, kwargs = arguments(value)
        return list(pytree.tree_leaves((args, kwargs)))


def holder(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A module that holds some of a model's tensors under their names."""
    root = nn.Module()
    for name in names:
        path, _, own = name.rpartition(".")
        at = root
        for part in path.split(".") if path else []:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        source = model.get_submodule(path)
        if own in source._parameters:
            at._parameters[own] = source._parameters[own]
        else:
            at.register_buffer(own, source._buffers[own], persistent=own not in source._non_persistent_buffers_set)
    return root


def trace(model: nn.Module, example: Any) -> Traced:
    """Trace a model with an example, for any number of samples."""
    args, kwargs = arguments(example)
    shapes = pytree.tree_map(_any_samples, (args, kwargs))
    try:
        graph = torch.export.export(model, args, kwargs, dynamic_shapes=_by_name(model, shapes))
    except Exception as error:
        raise StagelineError(
            f"{type(model).__name__} has no stack of blocks, and torch.export cannot trace it: {shorten(error, 300)}; "
            "give an nn.Sequential or a list of stages, or name its blocks with by='type:ClassOfBlock'"
        ) from error
    signature: Any = graph.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = {name: graph.constants[at] for name, at in signature.inputs_to_lifted_tensor_constants.items()}
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return Traced(
        model, graph, tuple(_segments(nodes, held)), held, constants, tuple(signature.user_inputs), model.training
    )


def _any_samples(leaf: Any) -> Any:
    return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None


def _by_name(model: nn.Module, shapes: tuple[Any, Any]) -> Any:
    """torch.export wants one entry for each parameter of the forward, by its name."""
    import inspect

    bound = inspect.signature(model.forward).bind(*shapes[0], **shapes[1])
    return dict(bound.arguments)


def _segments(nodes: Sequence[Any], held: Mapping[str, str]) -> list[tuple[Any, ...]]:
    found: list[list[Any]] = [[]]
    seen: set[str] = set()
    for node in nodes:
        fresh = {each.name for each in node.all_input_nodes if each.name in held} - seen
        if fresh and any(each.name in seen for some in found[-1] for each in some.all_input_nodes):
            found.append([])
        seen |= fresh
        found[-1].append(node)
    return [tuple(some) for some in found]
