"""Measure the cost of one layer, run alone with the inputs it received in a run of the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stageline.autograd.engine import ArrivingGradients, registered_hooks
from stageline.autograd.graph_plan import GraphPlan
from stageline.autograd.split_backward import SplitBackward
from stageline.common.errors import StagelineError
from stageline.model._torch_private import hook_dictionaries, tensors_in, tree_unflatten
from stageline.model.profile.capture import Call, LayerTrace, Storages, storages_of
from stageline.tensors.buffers import all_buffers, put_back

Value = TypeVar("Value")


class Timer:
    """Measures the duration of a call: with the host's clock, or with CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise StagelineError(f"device must be 'cpu' or 'cuda', got {str(device)!r}")
        self._device = device

    def __call__(self, call: Callable[[], Value]) -> tuple[float, Value]:
        """Return the seconds, and the result of the call."""
        if self._device.type == "cpu":
            start_time = time.perf_counter()
            value = call()
            return time.perf_counter() - start_time, value
        make: Any = torch.cuda.Event
        start, end = make(enable_timing=True), make(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()
        start.record(stream)
        value = call()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3, value


@dataclass
class _Graph:
    """The graph that F leaves: inputs that require a gradient, and outputs that have one."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    hooked: bool = False
    """Whether the forward registered hooks."""

    def grads(self) -> list[Tensor]:
        return [torch.ones_like(output) for output in self.outputs]

    def split(self, plans: list[GraphPlan]) -> SplitBackward:
        return SplitBackward(self.outputs, self.grads(), self.inputs, plans, hooked=self.hooked)


class CallBenchmark:
    """One call of one layer, run repeatedly."""

    def __init__(self, trace: LayerTrace, call: Call, timer: Timer) -> None:
        self._trace, self._call, self._timer = trace, call, timer
        self._plans: list[GraphPlan] = []
        self._graph = _Graph()
        self._times: dict[str, list[float]] = {kind: [] for kind in "FIWB"}

    def _new_inputs(self) -> tuple[list[Tensor], Any, Any]:
        """Return the inputs that require a gradient, as leaves of a new graph, and the arguments."""
        leaves = [
            leaf.detach().requires_grad_(requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf, requires_grad in zip(self._call.leaves, self._call.requires_grad, strict=True)
        ]
        inputs = [leaf for leaf, requires_grad in zip(leaves, self._call.requires_grad, strict=True) if requires_grad]
        if self._call.mutates_inputs:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, self._call.tree)
        return inputs, args, kwargs

    def forward(self, keep: bool) -> None:
        """Run F; one of the backwards below must follow. Record its time if `keep`, else it is a warm-up."""
        inputs, args, kwargs = self._new_inputs()
        hooks_before = registered_hooks()
        with self._error_context(), ExitStack() as stack:
            for autocast in self._call.autocasts:
                stack.enter_context(autocast)
            seconds, output = self._timer(lambda: self._trace.module(*args, **kwargs))
        self._record("F", seconds, keep)
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._graph = _Graph(inputs, outputs, registered_hooks() != hooks_before)

    def halves(self, keep: bool) -> None:
        """Run I and W."""
        graph, self._graph = self._graph, _Graph()
        seconds = [0.0, 0.0]
        if graph.outputs:
            with self._error_context():
                split = graph.split(self._plans)
                del graph
                seconds = [self._timer(half)[0] for half in (split.input_gradients, split.weight_gradients)]
        self._record("I", seconds[0], keep)
        self._record("W", seconds[1], keep)

    def whole(self, keep: bool) -> None:
        """Run B."""
        graph, self._graph = self._graph, _Graph()
        seconds = 0.0
        if graph.outputs:
            grads = graph.grads()
            with self._error_context(), ArrivingGradients(graph.inputs):
                seconds, _ = self._timer(lambda: torch.autograd.backward(graph.outputs, grads))
        self._record("B", seconds, keep)

    def residue(self, state: Storages) -> int:
        """Run F, I and W; return the bytes held from I to W, apart from parameters and buffers (`state`)."""
        self.forward(keep=False)
        graph, self._graph = self._graph, _Graph()
        if not graph.outputs:
            return 0
        with self._error_context():
            split = graph.split(self._plans)
            split.input_gradients()
            retained = storages_of([tensor for tree in split.retained() for tensor in tensors_in(tree)])
            split.weight_gradients()
        return sum(size for key, size in retained.items() if key not in state)

    def _record(self, kind: str, seconds: float, keep: bool) -> None:
        if keep:
            self._times[kind].append(seconds)

    def median(self, kind: str) -> float:
        """Return the median of the recorded times."""
        return statistics.median(self._times[kind])

    @contextmanager
    def _error_context(self) -> Iterator[None]:
        try:
            yield
        except StagelineError:
            raise
        except Exception as error:
            raise StagelineError(
                f"{self._trace.title} failed when it ran alone with the inputs from the model: "
                f"{type(error).__name__}: {error}"
            ) from error


def run_round(calls: Sequence[CallBenchmark], keep: bool) -> None:
    """Run all calls once with split backwards and once with whole ones.

    They run in the order of a step, so that caches and memory are as in a step, and a slow spell of the machine affects
    all layers.
    """
    for backward in (CallBenchmark.halves, CallBenchmark.whole):
        for call in calls:
            call.forward(keep)
        for call in reversed(calls):
            backward(call, keep)


@contextmanager
def preserved_state(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore gradients, buffers and random state on exit, and disable hooks of parameters meanwhile."""
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    grads = [parameter.grad for parameter in parameters]
    buffers = [buffer for module in modules for buffer in all_buffers(module)]
    hooks = [(dictionary, dict(dictionary)) for parameter in parameters for dictionary in hook_dictionaries(parameter)]
    cuda_devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        for parameter in parameters:
            parameter.grad = None
        for dictionary, _ in hooks:
            dictionary.clear()
        with torch.random.fork_rng(devices=cuda_devices), torch.enable_grad():
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for dictionary, entries in hooks:
            dictionary.update(entries)
        put_back(buffers)
