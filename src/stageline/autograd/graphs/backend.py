"""Backends for `torch.compile` whose backward can run in two halves.

`GraphBackend` compiles a unit as usual: Dynamo captures it and guards it, and AOTAutograd traces its forward and
backward. Only the backward differs: it is a `CompiledBackward`, made of the two graphs of `halves`.

The graphs run as they are, operator by operator ("graphs"), which gives the bits of autograd, or compiled by inductor.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from stageline.autograd.graphs import _torch_private as private
from stageline.autograd.graphs.backward import CompiledBackward, Halves, Run
from stageline.autograd.graphs.halves import cut_backward

Compiler = Literal["graphs", "inductor"]


class GraphBackend:
    """A backend for `torch.compile`; units compiled by the same one share their graphs if they are equal.

    >>> import torch
    >>> layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> compiled = torch.compile(layer, backend=GraphBackend("graphs"))
    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> compiled(x).sum().backward()
    >>> x.grad.shape
    torch.Size([1, 2])
    """

    def __init__(self, compiler: Compiler, report: Callable[[str], None] = lambda reason: None) -> None:
        """`report` is called once with the place of each unit that falls back, and why."""
        self.compiler = compiler
        self.units: list[Halves] = []
        """The halves of the units that were compiled so far."""
        self._report = report
        self._reported: set[str] = set()

    def __call__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compile what Dynamo captured; if that fails, report it and return the captured module as it is."""
        unit = _Unit(self, _place_of(module), inputs)
        compiled: Any = module
        try:
            with warnings.catch_warnings():  # of torch's own code, and of the failure that is reported here
                warnings.simplefilter("ignore")
                compiled = self._compiled(unit, module, inputs, mode, options)
        except private.REQUESTS:
            raise
        except Exception as error:  # torch's compilers fail in any way
            reason = f"{type(error).__name__}: {_first_line(error)}"
            unit.reports = [f"{unit.place} runs without compilation: torch failed with {reason}"]
        for report in unit.reports:
            self._report_once(report)
        return compiled

    def _compiled(
        self,
        unit: _Unit,
        module: GraphModule,
        inputs: Sequence[Any],
        mode: str | None,
        options: Mapping[str, Any] | None,
    ) -> Any:
        with private.eager_lowering():
            if self.compiler == "graphs":
                return private.aot_module_simplified(
                    module,
                    inputs,
                    fw_compiler=lambda graph, examples: private.boxed(graph),
                    bw_compiler=unit.compile_backward,  # type: ignore[arg-type]
                    inference_compiler=lambda graph, examples: private.boxed(graph),
                    partition_fn=private.default_partition,
                )
            patches = {**private.mode_options(mode), **(options or {}), "triton.cudagraphs": False}
            compile_fx = private.inductor().compile_fx
            return compile_fx(module, inputs, inner_compile=unit.compile_inner, config_patches=patches)

    def add(self, halves: Halves) -> None:
        """Note the halves of a unit."""
        self.units.append(halves)

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)


class _Unit:
    """One unit that is being compiled."""

    def __init__(self, backend: GraphBackend, place: str, inputs: Sequence[Any]) -> None:
        self.backend, self.place, self.inputs = backend, place, len(inputs)
        self.reports: list[str] = []
        """What falls back, and why."""
        self.weights = {i for i, value in enumerate(inputs) if isinstance(value, nn.Parameter) and value.requires_grad}
        tensors = (int(isinstance(value, Tensor)) for value in inputs)
        self.edges = [count - 1 for count in accumulate(tensors)]
        """For each input that is a tensor, its edge of the autograd node: dynamic sizes have none."""

    def compile_backward(self, graph: GraphModule, examples: Sequence[Any]) -> Run:
        """Compile a backward whose operators run as they are."""
        halves = self._halves(graph)
        if halves is None:
            return private.boxed(graph)
        return self._joined(halves, private.boxed(halves.inputs), private.boxed(halves.weights))

    def compile_inner(self, graph: GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        """Compile a forward or a backward with inductor."""
        compile_inner = private.inductor().compile_fx_inner
        halves = None
        if options.get("is_backward"):
            private.restride(graph, examples)
            halves = self._halves(graph)
        if halves is None:
            return compile_inner(graph, examples, **options)
        options["static_input_idxs"] = ()

        def compile_half(half: GraphModule) -> Any:
            (output,) = half.graph.find_nodes(op="output")
            # The other half, and autograd, rely on the strides that were traced.
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
            values = [node.meta["val"] for node in half.graph.find_nodes(op="placeholder")]
            # The cache on disk expects the arguments of a whole graph where sizes are dynamic.
            if any(isinstance(size, torch.SymInt) for value in values for size in getattr(value, "shape", [value])):
                with private.without_disk_cache():
                    return compile_inner(half, values, **options)
            return compile_inner(half, values, **options)

        return self._joined(halves, compile_half(halves.inputs), compile_half(halves.weights))

    def _joined(self, halves: Halves, inputs: Run, weights: Run) -> CompiledBackward:
        self.backend.add(halves)
        return CompiledBackward(halves, inputs, weights, self.inputs, self.edges, self.weights)

    def _halves(self, graph: GraphModule) -> Halves | None:
        """Cut a backward, if all its outputs are gradients of what Dynamo passed to the unit."""
        metadata = private.backward_metadata()
        (output,) = graph.graph.find_nodes(op="output")
        reason = _obstacle(metadata, len(output.args[0]), self.inputs)
        if reason:
            self.reports.append(f"the backward of {self.place} stays whole, and is computed in I: {reason}")
            return None
        metadata.bw_donated_idxs = []  # I must not overwrite what W reads
        return cut_backward(graph, self.weights, self.weights | set(metadata.static_input_indices or ()))


def _obstacle(metadata: Any, outputs: int, inputs: int) -> str:
    """Why the outputs of a backward graph are not one gradient for every input of the unit; empty if they are."""
    if metadata is None:
        return "torch did not say what the unit's backward returns"
    if outputs != inputs:
        return f"its backward returns {outputs} values for {inputs} inputs, as for aliased inputs or tensor subclasses"
    if metadata.tokens or getattr(metadata, "is_rng_op_functionalized", False):
        return "its backward has effects beside gradients"
    if metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw:
        return "its backward changes an input in place"
    return ""


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "").strip()


def _place_of(module: GraphModule) -> str:
    """Where the code of a captured unit is, for messages."""
    for node in reversed(module.graph.nodes):
        frames = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
        if frames:
            return re.sub(r"torch_dynamo_resume_in_(\w+)_at_\d+", r"\1", frames[0])  # what follows a graph break
    return "a compiled unit"
