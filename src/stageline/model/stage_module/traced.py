"""A model without a stack of blocks, cut in the graph that `torch.export` records: the last resort.

The graph is cut into segments. A segment starts at the first use of a parameter and ends at the first use of the next
one. A stage runs its segments and passes on the values that later ones need. Names are the model's own. Its hooks are
not called, and the graph is only valid for the mode (training or evaluation) in which it was traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageline.common.errors import StagelineError, shorten
from stageline.model._torch_private import (
    buffers_of,
    children_of,
    module_dictionaries,
    non_persistent_buffers,
    parameters_of,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from stageline.model.stage_module.boundary import arguments
from stageline.model.units import Unit


@dataclass(frozen=True)
class TracedModel:
    """The graph of a model, in segments."""

    model: nn.Module
    program: Any
    """The exported program."""
    segments: tuple[tuple[Any, ...], ...]
    """The nodes of each segment, in order."""
    tensor_names: Mapping[str, str]
    """The names of the model's tensors, by the names of the graph's inputs."""
    constants: Mapping[str, Any]
    inputs: tuple[str, ...]
    """The graph's inputs that are inputs of the model."""
    training: bool

    def units(self) -> list[Unit]:
        """Return a unit for each segment, named after the first parameter that no earlier segment uses."""
        units = []
        seen: set[str] = set()
        for index, nodes in enumerate(self.segments):
            own = [name for name in self.tensors_of(nodes) if name not in seen]
            seen.update(own)
            name = own[0].rpartition(".")[0] or own[0] if own else f"segment {index}"
            units.append(Unit(name, tensor_holder(self.model, own), False))
        return units

    def tensors_of(self, nodes: Sequence[Any]) -> list[str]:
        """Return the names of the tensors that nodes use, in order."""
        inputs = [source.name for node in nodes for source in node.all_input_nodes]
        return list(dict.fromkeys(self.tensor_names[name] for name in inputs if name in self.tensor_names))

    def unused(self) -> list[str]:
        """Return the names of the model's tensors that no node uses; the first stage holds them."""
        used = set(self.tensors_of([node for nodes in self.segments for node in nodes]))
        names = [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]
        return [name for name in names if name not in used]

    def part(self, start: int, stop: int) -> TracedPart:
        """Return the module for a stage of these segments."""
        before = [node for nodes in self.segments[:start] for node in nodes]
        own = [node for nodes in self.segments[start:stop] for node in nodes]
        after = [node for nodes in self.segments[stop:] for node in nodes]
        first, last = start == 0, stop == len(self.segments)
        arrives = [] if first else self._crossing(before, [*own, *after])
        leaves = [] if last else self._crossing([*before, *own], after)
        return TracedPart(_SegmentRunner(self, own, arrives, leaves, first, last))

    def _crossing(self, before: Sequence[Any], after: Sequence[Any]) -> list[str]:
        """Return the values from before a cut, or from the model's inputs, that are used after it."""
        available = {node.name for node in before} | set(self.inputs)
        used = [source.name for node in after for source in node.all_input_nodes]
        used += [node.name for node in self.outputs]
        return list(dict.fromkeys(name for name in used if name in available))

    @property
    def outputs(self) -> list[Any]:
        """The nodes of the model's output."""
        (last,) = [node for node in self.program.graph.nodes if node.op == "output"]
        return [leaf for leaf in tree_leaves(last.args[0]) if isinstance(leaf, torch.fx.Node)]


class TracedPart(nn.Sequential):
    """The part of a traced model for one stage, with the names of the whole model."""

    one_layer = True

    def __init__(self, runner: _SegmentRunner) -> None:
        super().__init__()
        self.__dict__["_segment_runner"] = runner
        traced = runner.traced
        names = [*traced.tensors_of(runner.nodes), *(traced.unused() if runner.first else [])]
        holder = tensor_holder(traced.model, names)
        self.__dict__.update(module_dictionaries(holder))
        self.__dict__["_non_persistent_buffers_set"] = non_persistent_buffers(holder)

    def forward(self, value: Any) -> Any:
        """Run the nodes of this stage."""
        run: _SegmentRunner = self.__dict__["_segment_runner"]
        return run(value, {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())})


@dataclass
class _SegmentRunner:
    traced: TracedModel
    nodes: list[Any]
    arrives: list[str]
    """The names of the values that cross the stage boundaries."""
    leaves: list[str]
    first: bool
    last: bool

    def __deepcopy__(self, memo: Any) -> _SegmentRunner:
        return self

    def __call__(self, value: Any, tensors: Mapping[str, Tensor]) -> Any:
        traced = self.traced
        if traced.model.training != traced.training:
            raise StagelineError(
                f"the model was traced in {'training' if traced.training else 'evaluation'} mode; split it again after "
                "train() or eval()"
            )
        inputs = list(tree_leaves(arguments(value))) if self.first else list(value)
        values: dict[str, Any] = {
            **traced.constants,
            **dict(zip(traced.inputs if self.first else self.arrives, inputs, strict=True)),
            **{graph_name: tensors[name] for graph_name, name in traced.tensor_names.items() if name in tensors},
        }
        for node in self.nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: values[source.name])
            values[node.name] = node.target(*args, **kwargs)
        if not self.last:
            return tuple(values[name] for name in self.leaves)
        return tree_unflatten([values[node.name] for node in traced.outputs], traced.program.call_spec.out_spec)


def tensor_holder(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return a module that holds some of a model's tensors under their names."""
    root = nn.Module()
    for name in names:
        path, _, tensor_name = name.rpartition(".")
        module = root
        for child in path.split(".") if path else []:
            if child not in children_of(module):
                module.add_module(child, nn.Module())
            module = module.get_submodule(child)
        source = model.get_submodule(path)
        if tensor_name in parameters_of(source):
            parameters_of(module)[tensor_name] = parameters_of(source)[tensor_name]
        else:
            persistent = tensor_name not in non_persistent_buffers(source)
            module.register_buffer(tensor_name, buffers_of(source)[tensor_name], persistent=persistent)
    return root


def trace(model: nn.Module, example: Any) -> TracedModel:
    """Trace a model with an example, for any number of samples."""
    args, kwargs = arguments(example)
    try:
        # torch.export wants the shapes by the names of the forward's parameters.
        shapes, keyword_shapes = tree_map(
            lambda leaf: {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None, (args, kwargs)
        )
        dynamic_shapes = dict(inspect.signature(model.forward).bind(*shapes, **keyword_shapes).arguments)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise StagelineError(
            f"{type(model).__name__} has no stack of blocks, and torch.export cannot trace it: {shorten(error, 300)}; "
            "pass an nn.Sequential or a list of stages, or name its blocks with by='type:ClassOfBlock'"
        ) from error
    signature: Any = program.graph_signature
    tensor_names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = {name: program.constants[key] for name, key in signature.inputs_to_lifted_tensor_constants.items()}
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    segments = tuple(_segments(nodes, tensor_names))
    return TracedModel(model, program, segments, tensor_names, constants, tuple(signature.user_inputs), model.training)


def _segments(nodes: Sequence[Any], tensor_names: Mapping[str, str]) -> list[tuple[Any, ...]]:
    segments: list[list[Any]] = [[]]
    seen: set[str] = set()
    for node in nodes:
        new = {source.name for source in node.all_input_nodes if source.name in tensor_names} - seen
        if new and any(source.name in seen for previous in segments[-1] for source in previous.all_input_nodes):
            segments.append([])
        seen |= new
        segments[-1].append(node)
    return [tuple(segment) for segment in segments]
