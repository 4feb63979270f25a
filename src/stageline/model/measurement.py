"""Measure each layer alone, with the inputs that it received in an observed run: times, memory, and what W needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from stageline.autograd.engine import ArrivingGradients, backward, registered_hooks
from stageline.autograd.graph_plan import GraphPlan
from stageline.autograd.split_backward import SplitBackward
from stageline.common.errors import StagelineError
from stageline.model._torch_private import (
    sleep_on_gpu,
    tensors_in,
    tree_unflatten,
)
from stageline.model.observation import Call, LayerTrace, Storages, errors_named, storages_of
from stageline.model.samples import KINDS, Times, typical
from stageline.tensors.thread_context import plain_precision

Measured = TypeVar("Measured")
Measure = Callable[[Callable[[], Any]], tuple[Measured, Any]]
"""Calls a function; returns what it measured, and the result."""


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


Where = Literal["alone", "beside", "host"]
"""How a time was measured: alone, beside neighbours at work, or on the host of a GPU, in a loop that does not wait."""


class CallBenchmark:
    """One call of one layer, run repeatedly."""

    def __init__(self, trace: LayerTrace, call: Call, timer: Timer) -> None:
        self._trace, self._call, self._timer = trace, call, timer
        self._plans: list[GraphPlan] = []
        self._graph = _Graph()
        self._times: dict[Where, Times] = {where: {kind: [] for kind in KINDS} for where in get_args(Where)}
        self.transients = dict.fromkeys("FIWB", 0)
        """Bytes that are held only while an action runs."""

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

    def _forward(self, measure: Measure[Measured]) -> Measured:
        """Run F; one of the backwards below must follow."""
        inputs, args, kwargs = self._new_inputs()
        hooks_before = registered_hooks()
        with self._errors_named(), ExitStack() as stack:
            for autocast in self._call.autocasts:
                stack.enter_context(autocast)
            measured, output = measure(lambda: self._trace.module(*args, **kwargs))
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._graph = _Graph(inputs, outputs, registered_hooks() != hooks_before)
        return measured

    def _halves(self, measure: Measure[Measured], nothing: Measured) -> tuple[Measured, Measured]:
        """Run I and W; `nothing` is what they take if there is no graph."""
        graph, self._graph = self._graph, _Graph()
        if not graph.outputs:
            return nothing, nothing
        with self._errors_named(), plain_precision():
            split = graph.split(self._plans)
            del graph
            return measure(split.input_gradients)[0], measure(split.weight_gradients)[0]

    def _whole(self, measure: Measure[Measured], nothing: Measured) -> Measured:
        """Run B; `nothing` is what it takes if there is no graph."""
        graph, self._graph = self._graph, _Graph()
        if not graph.outputs:
            return nothing
        grads = graph.grads()
        with self._errors_named(), plain_precision(), ArrivingGradients(graph.inputs):
            return measure(lambda: backward(graph.outputs, grads))[0]

    def forward(self, where: Where | None) -> None:
        """Run F, before `halves` or `whole`, and record its time; None is a warm-up."""
        self._record("F", self._forward(self._measure(where)), where)

    def halves(self, where: Where | None) -> None:
        """Run I and W."""
        for kind, seconds in zip("IW", self._halves(self._measure(where), 0.0), strict=True):
            self._record(kind, seconds, where)

    def whole(self, where: Where | None) -> None:
        """Run B."""
        self._record("B", self._whole(self._measure(where), 0.0), where)

    def _measure(self, where: Where | None) -> Measure[float]:
        return on_host if where == "host" else self._timer

    def measure_transients(self, meter: PeakMeter) -> None:
        """Record how far memory rises while F, B, I and W run."""
        self.transients["F"] = self._forward(meter.above_end)
        self.transients["B"] = self._whole(meter.above_start, 0)
        self._forward(meter.above_end)
        self.transients["I"], self.transients["W"] = self._halves(meter.above_start, 0)

    def residue(self, state: Storages) -> int:
        """Run F, I and W; return the bytes held from I to W, apart from parameters and buffers (`state`)."""
        self.forward(None)
        graph, self._graph = self._graph, _Graph()
        if not graph.outputs:
            return 0
        with self._errors_named():
            split = graph.split(self._plans)
            split.input_gradients()
            retained = storages_of([tensor for tree in split.retained() for tensor in tensors_in(tree)])
            split.weight_gradients()
        return sum(size for key, size in retained.items() if key not in state)

    def _record(self, kind: str, seconds: float, where: Where | None) -> None:
        if where is not None:
            self._times[where][kind].append(seconds)

    def times(self, where: Where) -> Times:
        """Return the recorded times by kind."""
        if where != "host":
            return self._times[where]
        once_per_stage = {"B": self._timer.engine_call, "I": self._timer.engine_call}
        return {
            kind: [max(0.0, seconds - once_per_stage.get(kind, 0.0)) for seconds in times]
            for kind, times in self._times[where].items()
        }

    def _errors_named(self) -> AbstractContextManager[None]:
        return errors_named([self._trace], "it ran alone with the inputs from the model")


def total_time(calls: Sequence[CallBenchmark], where: Where) -> float:
    """Return the typical time of F and B of all calls."""
    return sum(typical(call.times(where)[kind]) for call in calls for kind in "FB")


def is_host_bound(calls: Sequence[CallBenchmark]) -> bool:
    """Whether a GPU waits for its host in a step. The host runs ahead, so the sums over all units decide."""
    return total_time(calls, "host") > total_time(calls, "alone")


def run_round(calls: Sequence[CallBenchmark], where: Where | None) -> float:
    """Run all calls once with split backwards and once with whole ones; return the recorded seconds.

    They run in the order of a step, so that caches and memory are as in a step, and a slow spell of the machine affects
    all layers. On the host of a GPU, one is launched after the other without waiting, as in a step.
    """
    for run_backward in (CallBenchmark.halves, CallBenchmark.whole):
        for call in calls:
            call.forward(where)
        for call in reversed(calls):
            run_backward(call, where)
    if where is None:
        return 0.0
    return sum(
        sum(times[-2:] if kind == "F" else times[-1:]) for call in calls for kind, times in call.times(where).items()
    )


Value = TypeVar("Value")

AHEAD = 2e-3
"""Seconds by which the host runs ahead of the GPU; enough for the kernels of a unit."""
ENGINE_CALLS = 10
"""Backwards of an almost empty graph, to measure what a call of autograd's engine takes."""


class Timer:
    """Measures the seconds of a call: on the host with its clock, on a GPU with events."""

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise StagelineError(f"device must be 'cpu' or 'cuda', got {str(device)!r}")
        self.device = device

    @cached_property
    def engine_call(self) -> float:
        """The host's seconds for a call of autograd's engine on a GPU, which every stage makes once, not every unit."""
        if self.device.type == "cpu":
            return 0.0
        leaf = torch.zeros((), device=self.device, requires_grad=True)
        return min(on_host(lambda: backward([leaf + 0], [None]))[0] for _ in range(ENGINE_CALLS))

    def __call__(self, call: Callable[[], Value]) -> tuple[float, Value]:
        """Return the seconds, and the result of the call."""
        if self.device.type == "cpu":
            return on_host(call)
        make: Any = torch.cuda.Event
        start, end = make(enable_timing=True), make(enable_timing=True)
        stream = torch.cuda.current_stream(self.device)
        stream.synchronize()
        # In a step, the host runs ahead of the GPU. The GPU waits for it here, so that it is not idle between kernels.
        with torch.cuda.device(self.device):
            sleep_on_gpu(AHEAD)
        start.record(stream)
        value = call()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3, value


def on_host(call: Callable[[], Value]) -> tuple[float, Value]:
    """The host's seconds for a call, which may leave work to a GPU, and the result."""
    start_time = time.perf_counter()
    value = call()
    return time.perf_counter() - start_time, value


class PeakMeter:
    """Measures how far the memory of a GPU rises above its level before or after a call; nothing on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def above_end(self, call: Callable[[], Value]) -> tuple[int, Value]:
        """Return the peak above what the call leaves allocated, and its result."""
        peak, value = self._peak(call)
        return (0 if self._device is None else max(0, peak - torch.cuda.memory_allocated(self._device))), value

    def above_start(self, call: Callable[[], Value]) -> tuple[int, Value]:
        """Return the peak above what was allocated before the call, and its result."""
        before = 0 if self._device is None else torch.cuda.memory_allocated(self._device)
        peak, value = self._peak(call)
        return max(0, peak - before), value

    def _peak(self, call: Callable[[], Value]) -> tuple[int, Value]:
        if self._device is None:
            return 0, call()
        torch.cuda.reset_peak_memory_stats(self._device)
        value = call()
        return torch.cuda.max_memory_allocated(self._device), value
