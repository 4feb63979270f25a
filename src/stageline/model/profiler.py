"""Profile the layers of a model, and its loss: measure their costs on this machine."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stageline.autograd.engine import in_this_thread
from stageline.autograd.graphs.options import Compile, compile_options
from stageline.common.errors import StagelineError, shorten
from stageline.common.heap import keep_memory
from stageline.model import huggingface
from stageline.model._torch_private import hook_dictionaries, tensors_in
from stageline.model.compiled_models import compiled, eager, unwrapped
from stageline.model.measurement import CallBenchmark, PeakMeter, Timer, Where, is_host_bound, run_round, total_time
from stageline.model.neighbours import Launcher, Neighbours, neighbours_of
from stageline.model.observation import LayerTrace, Storages, capture, state_storages, storages_of
from stageline.model.profile import Layer, Profile, stage_transients
from stageline.model.samples import KINDS, LayerSamples, layer_key, pooled, relative_range, repeat
from stageline.model.stage_module.boundary import arguments
from stageline.model.units import Unit, in_call_order, layers_of, refuse_lazy, units_of
from stageline.tensors.buffers import all_buffers, put_back
from stageline.tensors.pytree import refuse_arrays


def profile(
    model: nn.Module,
    example: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    targets: Any = None,
    compile: Compile = False,
    repeats: int = 5,
    warmup: int = 2,
    neighbours: int = 0,
    launcher: Launcher = "processes",
) -> Profile:
    """Measure the costs of a model's units: the times of F, I and W, and the bytes that are held between them.

    `example` is one microbatch: a tuple of arguments, a dict of keywords, or the only argument. With `loss_fn` and its
    `targets`, the costs of the last unit include the loss. `compile` is that of `Pipeline`: the units are measured
    compiled, and the bytes between I and W are those of their graphs. Noisy measurements are repeated more often than
    `repeats`, and the profile says how far they varied.

    Ranks on one machine slow each other down: with `neighbours`, the layers are measured alone and beside so many
    others that compute, as processes or as threads (`launcher`). `Profile.speeds` says how much slower that is.

    >>> measured = profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(3, 4), repeats=1, warmup=0)
    >>> [(layer.name, layer.parameters) for layer in measured.layers]
    [('0', 80), ('1', 40)]
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise StagelineError(f"profile expects a model (nn.Module), got {shorten(model)}")
    refuse_lazy(model)
    refuse_arrays(example, "the example")
    units = units_of(model)
    if not isinstance(model, nn.Sequential):
        huggingface.prepare(model)
        with suppress(StagelineError):  # the costs do not depend on the order
            units, _ = in_call_order(model, units, example)
    loss = None if loss_fn is None else LossLayer(loss_fn, targets)
    check_neighbours(neighbours, launcher)
    return profile_units(
        model, units, example, loss=loss, compile=compile, repeats=repeats, warmup=warmup, neighbours=neighbours,
        launcher=launcher,
    )  # fmt: skip


def check_neighbours(neighbours: Any, launcher: Any) -> None:
    """Refuse a number or a kind of neighbours that does not exist."""
    if not isinstance(neighbours, int) or isinstance(neighbours, bool) or neighbours < 0:
        raise StagelineError(f"neighbours must be an integer >= 0, got {shorten(neighbours)}")
    if launcher not in ("processes", "threads"):
        raise StagelineError(f"launcher must be 'processes' or 'threads', got {shorten(launcher)}")


def profile_units(
    model: nn.Module,
    units: Sequence[Unit],
    example: Any,
    *,
    loss: LossLayer | None = None,
    neighbours: int = 0,
    **options: Any,
) -> Profile:
    """Measure every unit on its own, once even if the model calls it twice; the last one with the loss.

    `options` are those of `profile_layers`.
    """
    refuse_lazy(model)
    args, kwargs = arguments(example)
    by_module = {id(unit.module): (unit.name, unit.module) for unit in reversed(units)}
    layers: list[tuple[str, nn.Module]] = list(reversed(by_module.values()))
    keywords = {**huggingface.defaults_of(model), **kwargs}
    with eager(model, [unit.module for unit in units]):
        options["beside"] = (partial(_job_of, model, args, keywords), neighbours) if neighbours else None
        if loss is None:
            return profile_layers(layers, lambda: model(*args, **keywords), **options)
        layers.append((LOSS, loss))
        measured = profile_layers(layers, lambda: loss(model(*args, **keywords)), **options)
        return replace(measured, layers=with_loss(measured.layers))


def profile_layers(
    layers: Sequence[tuple[str, nn.Module]],
    run: Callable[[], Any],
    *,
    compile: Compile = False,
    repeats: int = 5,
    warmup: int = 2,
    device: torch.device | str | None = None,
    beside: tuple[Callable[[], Callable[[], object]], int] | None = None,
    launcher: Launcher = "processes",
) -> Profile:
    """Measure layers, given by name in the order in which data passes through them.

    `run` runs the forward of the whole model once, to observe the inputs of every layer; then each layer is run alone
    with those inputs, compiled as `compile` says. `beside` are a function that makes the job of a neighbour, and the
    number of neighbours: on the CPU, layers are measured alone and beside them. Gradients, buffers, random state and
    modes are left unchanged. Raises `StagelineError` if an argument is invalid or a layer fails.

    >>> body, head = nn.Linear(4, 8), nn.Linear(8, 2)
    >>> x = torch.randn(3, 4)
    >>> profile = profile_layers([("body", body), ("head", head)], lambda: head(body(x).relu()), repeats=1)
    >>> [(layer.name, layer.parameters, layer.message) for layer in profile.layers]
    [('body', 160, 96), ('head', 72, 24)]
    """
    layers = _check_layers(layers)
    for name, value, minimum in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise StagelineError(f"{name} must be an integer >= {minimum}, got {shorten(value)}")
    modules = list(dict.fromkeys(module for _, module in layers))
    with _preserved_state(modules), in_this_thread(), ExitStack() as stack:
        traces = capture(layers, run)
        if compile is not False:
            stack.enter_context(compiled(modules, compile_options(compile, split=True)))
        compute_device = torch.device(device) if device is not None else _device_of(traces)
        on_gpu = compute_device.type == "cuda"
        if not on_gpu:
            keep_memory()  # as a step does
        timer, state = Timer(compute_device), state_storages(modules)
        benchmarks = [[CallBenchmark(trace, call, timer) for call in trace.calls] for trace in traces]
        all_calls = [call for calls in benchmarks for call in calls]
        if compile is not False:
            run_round(all_calls, None)  # compiles; a backward of that run is not split
        residues = [sum(call.residue(state) for call in calls) for calls in benchmarks]
        for _ in range(warmup):
            run_round(all_calls, None)
        make_job, count = (lambda: _nothing, 0) if beside is None or on_gpu else beside
        with neighbours_of(make_job, count, launcher) as neighbours:
            totals = repeat(lambda: _run_rounds(all_calls, neighbours), repeats)
        if on_gpu:
            _measure_on_gpu(all_calls, compute_device, repeats, warmup)
        where: Where = "host" if on_gpu and is_host_bound(all_calls) else "alone"
        samples = [_samples(trace, calls, where) for trace, calls in zip(traces, benchmarks, strict=True)]
        speed = 1.0
        if all(call.times("beside")["B"] for call in all_calls):
            speed = min(1.0, total_time(all_calls, "alone") / max(total_time(all_calls, "beside"), 1e-12))
    machine = f"{platform.machine()}, {os.cpu_count()} processors"
    if on_gpu:
        machine = str(torch.cuda.get_device_name(compute_device))
    return Profile(
        _measured_layers(traces, benchmarks, residues, samples),
        machine,
        str(compute_device),
        torch.__version__,
        torch.get_num_threads(),
        len(totals),
        uncertainty=relative_range(totals),
        speeds=() if count == 0 else tuple(1.0 - (1.0 - speed) * others / count for others in range(count + 1)),
        launcher=launcher if count else "",
    )


def _run_rounds(calls: Sequence[CallBenchmark], neighbours: Neighbours | None) -> float:
    """Run a round alone, and one beside neighbours at work; return the seconds of the first."""
    if neighbours is not None and neighbours.work():
        run_round(calls, "beside")
    if neighbours is not None:
        neighbours.pause()
    return run_round(calls, "alone")


def _measure_on_gpu(calls: Sequence[CallBenchmark], device: torch.device, repeats: int, warmup: int) -> None:
    """Measure how long the host takes to start the kernels of each call, and the peak of its memory."""
    for round_index in range(warmup + repeats):
        torch.cuda.synchronize(device)
        run_round(calls, "host" if round_index >= warmup else None)
    meter = PeakMeter(device)
    for call in calls:
        call.measure_transients(meter)


def _samples(trace: LayerTrace, calls: Sequence[CallBenchmark], where: Where) -> LayerSamples:
    """Return all measurements of a layer: sums over its calls."""
    by_call = [call.times(where) for call in calls]
    times = {kind: [sum(parts) for parts in zip(*(call[kind] for call in by_call), strict=True)] for kind in KINDS}
    return LayerSamples(layer_key(trace.module, [leaf for call in trace.calls for leaf in call.leaves]), times)


def _nothing() -> None:
    pass


def _job_of(model: nn.Module, args: Any, keywords: Mapping[str, Any]) -> Callable[[], object]:
    """Return a forward and backward of a copy of the model, for a neighbour."""
    try:
        own = deepcopy(model)
    except Exception:  # not every model can be copied
        return partial(time.sleep, 1e-3)

    def run() -> None:
        with torch.enable_grad():
            _backward(own(*args, **keywords))

    return run


def _measured_layers(
    traces: Sequence[LayerTrace],
    benchmarks: Sequence[Sequence[CallBenchmark]],
    residues: Sequence[int],
    samples: Sequence[LayerSamples],
) -> tuple[Layer, ...]:
    measured: list[Layer] = []
    earlier_weights: set[Any] = set()
    layer_times = zip(traces, benchmarks, residues, samples, pooled(samples), strict=True)
    for trace, calls, residue, own_samples, seconds in layer_times:
        weights = storages_of(list(trace.module.parameters()))
        layer = _measured_layer(trace, calls, seconds, residue, weights, earlier_weights)
        measured.append(replace(layer, ranges=tuple(own_samples.low_and_high(kind) for kind in KINDS)))
        earlier_weights |= set(weights)
    return tuple(measured)


def _measured_layer(
    trace: LayerTrace,
    calls: Sequence[CallBenchmark],
    seconds: Mapping[str, float],
    residue: int,
    weights: Storages,
    earlier_weights: set[Any],
) -> Layer:
    def outside(storages: Storages) -> int:
        return sum(size for key, size in storages.items() if key not in trace.saved and key not in weights)

    return Layer(
        name=trace.name,
        kind=type(trace.module).__name__,
        forward=seconds["F"],
        backward_input=seconds["I"],
        backward_weight=seconds["W"],
        backward=seconds["B"],
        activation=sum(trace.saved.values()),
        residue=residue,
        parameters=sum(weights.values()),
        tied=sum(size for key, size in weights.items() if key in earlier_weights),
        message=trace.message,
        arriving=outside(trace.inputs),
        leaving=outside(trace.outputs),
        calls=len(calls),
        forward_transient=max(call.transients["F"] for call in calls),
        backward_transient=max(call.transients["B"] for call in calls),
        backward_input_transient=max(call.transients["I"] for call in calls),
        backward_weight_transient=max(call.transients["W"] for call in calls),
    )


def profile_model(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    layers: Sequence[tuple[str, nn.Module]] | None = None,
    repeats: int = 5,
    warmup: int = 2,
    device: torch.device | str | None = None,
) -> Profile:
    """Measure the layers of a model that is called as `model(*args, **kwargs)`.

    `layers` are (name, module) pairs, by default the children of an `nn.Sequential`. `args` is a tuple, or a single
    argument.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    >>> profile = profile_model(model, torch.tensor([[1, 2, 3]]), repeats=1)
    >>> [layer.kind for layer in profile.layers], profile.parameters
    (['Embedding', 'Linear'], 360)
    """
    if layers is None:
        if not isinstance(model, nn.Sequential):
            raise StagelineError(
                f"cannot infer the layers of a {type(model).__name__}; pass layers=[(name, module), …] in the order "
                "in which data passes through them"
            )
        layers = layers_of(model)
    positional = args if isinstance(args, tuple) else (args,)
    return profile_layers(
        layers, lambda: model(*positional, **(kwargs or {})), repeats=repeats, warmup=warmup, device=device
    )


def _check_layers(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the layers as a list; raise `StagelineError` if they are invalid or would be counted twice."""
    pairs = list(layers)
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], nn.Module):
            raise StagelineError(f"layers must be (name, module) pairs, got {shorten(pair)}")
    if not pairs:
        raise StagelineError("layers is empty; pass at least one (name, module) pair")
    names = [name for name, _ in pairs]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise StagelineError(f"two layers are named {repeated[0]!r}; names must be unique")
    by_module = {module: name for name, module in pairs}
    for name, module in pairs:
        for inner in module.modules():
            if inner is not module and inner in by_module:
                raise StagelineError(f"layer {by_module[inner]!r} is inside layer {name!r}; list only one of them")
    return pairs


def _device_of(traces: Sequence[LayerTrace]) -> torch.device:
    """Return the device of the layers: a GPU if any tensor is on one."""
    tensors: list[Tensor] = [tensor for trace in traces for tensor in trace.module.parameters()]
    tensors += [leaf for trace in traces for call in trace.calls for leaf in call.leaves if isinstance(leaf, Tensor)]
    devices = [tensor.device for tensor in tensors]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def time_alone(
    model: nn.Module, example: Any, loss_fn: Callable[[Any, Any], Any] | None, targets: Any, repeats: int = 4
) -> float:
    """Return the median time of a forward and backward of a whole model on the CPU; infinity if it takes too long.

    Without a loss, the backward is that of the sum of the outputs. Random state is left unchanged; gradients are added.

    >>> time_alone(nn.Linear(2, 2), torch.ones(1, 2), None, None) > 0
    True
    """
    args, kwargs = arguments(example)
    taken: list[float] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        while len(taken) < 1 + repeats and sum(taken) < MAX_SECONDS_ALONE:
            start = time.perf_counter()
            output = model(*args, **{**huggingface.defaults_of(model), **kwargs})
            _backward(output if loss_fn is None else loss_fn(output, targets))
            taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:]) if taken[1:] else math.inf


MAX_SECONDS_ALONE = 3.0
"""Seconds after which `time_alone` stops repeating."""


def _backward(outputs: Any) -> None:
    torch.autograd.backward([output.sum() for output in tensors_in(outputs) if output.requires_grad])


@contextmanager
def _preserved_state(modules: Sequence[nn.Module]) -> Iterator[None]:
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


# The loss, as part of the last unit: logits and their gradients can be large

LOSS = "loss_fn"
"""The name under which a loss is measured."""


class LossLayer(nn.Module):
    """A loss function as a layer after the model."""

    def __init__(self, function: Callable[[Any, Any], Any], targets: Any) -> None:
        super().__init__()
        self.function, self.targets = function, targets

    def forward(self, output: Any) -> Any:
        """Return the loss of the model's output."""
        return self.function(output, self.targets)


def with_loss(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Add the costs of the loss, which is the last layer, to those of the layer before it.

    >>> head = Layer("1", "Linear", 1.0, 1.0, 1.0, 2.0, 80, 40, 0, 0, 8, 0, 8, 1)
    >>> loss = Layer(LOSS, "LossLayer", 0.5, 0.5, 0.0, 0.5, 8, 0, 0, 0, 4, 0, 0, 1)
    >>> (joint,) = with_loss([head, loss])
    >>> joint.name, joint.forward, joint.backward, joint.activation, joint.message
    ('1', 1.5, 2.5, 88, 8)
    """
    *others, last, loss = layers
    transients = stage_transients([last, replace(loss, message=0)])  # the gradient of a loss is one number
    joint = replace(
        last,
        forward=last.forward + loss.forward,
        backward_input=last.backward_input + loss.backward_input,
        backward_weight=last.backward_weight + loss.backward_weight,
        backward=last.backward + loss.backward,
        ranges=tuple(
            (low + more[0], high + more[1]) for (low, high), more in zip(last.ranges, loss.ranges, strict=False)
        ),
        activation=last.activation + loss.activation,
        residue=last.residue + loss.residue,
        # The input and the output of a unit, and the gradient of its output, are added for a stage.
        forward_transient=max(0, round(transients["F"]) - last.arriving - last.leaving),
        backward_transient=max(0, round(transients["B"]) - last.message),
        backward_input_transient=max(0, round(transients["I"]) - last.message),
        backward_weight_transient=round(transients["W"]),
    )
    return (*others, joint)
