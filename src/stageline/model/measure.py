"""What one layer costs, run alone with what it was given in a run of the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError
from stageline.model.capture import Call, Seen, Storages, storages_of, tensors_in
from stageline.runtime.buffers import all_buffers, put_back
from stageline.runtime.hooks import registered
from stageline.runtime.plan import Plan
from stageline.runtime.split import Arriving, SplitBackward

Value = TypeVar("Value")


class Timer:
    """Tells how long a call takes: by the host's clock, or by events where a GPU computes."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the layers compute."""
        if device.type not in ("cpu", "cuda"):
            raise StagelineError(f"layers are measured on 'cpu' or 'cuda', got device {str(device)!r}")
        self._device = device

    def __call__(self, call: Callable[[], Value]) -> tuple[float, Value]:
        """Seconds, and what the call gave back."""
        if self._device.type == "cpu":
            began = time.perf_counter()
            value = call()
            return time.perf_counter() - began, value
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
    """What F leaves: the inputs that want a gradient, and the outputs that have one."""

    wanted: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    hooked: bool = False
    """Whether hooks were registered meanwhile."""

    def grads(self) -> list[Tensor]:
        return [torch.ones_like(output) for output in self.outputs]

    def split(self, plans: list[Plan]) -> SplitBackward:
        return SplitBackward(self.outputs, self.grads(), self.wanted, plans, hooked=self.hooked)


class Alone:
    """One call of one layer, to be repeated."""

    def __init__(self, seen: Seen, call: Call, timer: Timer) -> None:
        """`call` is one of those that were seen."""
        self._seen, self._call, self._timer = seen, call, timer
        self._plans: list[Plan] = []
        self._graph = _Graph()
        self._times: dict[str, list[float]] = {kind: [] for kind in "FIWB"}

    def _fresh(self) -> tuple[list[Tensor], Any, Any]:
        """The inputs that want a gradient, as leaves of a graph to come, and the arguments."""
        leaves = [
            leaf.detach().requires_grad_(want) if isinstance(leaf, Tensor) else leaf
            for leaf, want in zip(self._call.leaves, self._call.wants, strict=True)
        ]
        wanted = [leaf for leaf, want in zip(leaves, self._call.wants, strict=True) if want]
        if self._call.changes:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._call.tree)
        return wanted, args, kwargs

    def forward(self, keep: bool) -> None:
        """Run F; one of the backwards below has to follow. Its time is kept if asked, or else it only warms up."""
        wanted, args, kwargs = self._fresh()
        before = registered()
        with self._named(), ExitStack() as stack:
            for each in self._call.autocasts:
                stack.enter_context(each)
            taken, output = self._timer(lambda: self._seen.module(*args, **kwargs))
        self._note("F", taken, keep)
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._graph = _Graph(wanted, outputs, registered() != before)

    def halves(self, keep: bool) -> None:
        """Run I and W."""
        graph, self._graph = self._graph, _Graph()
        taken = [0.0, 0.0]
        if graph.outputs:
            with self._named():
                split = graph.split(self._plans)
                del graph
                taken = [self._timer(half)[0] for half in (split.input_gradients, split.weight_gradients)]
        self._note("I", taken[0], keep)
        self._note("W", taken[1], keep)

    def whole(self, keep: bool) -> None:
        """Run B."""
        graph, self._graph = self._graph, _Graph()
        taken = 0.0
        if graph.outputs:
            grads = graph.grads()
            with self._named(), Arriving(graph.wanted):
                taken, _ = self._timer(lambda: torch.autograd.backward(graph.outputs, grads))
        self._note("B", taken, keep)

    def residue(self, held: Storages) -> int:
        """Run F, I and W; give back the bytes that stay from I to W, parameters and buffers (`held`) aside."""
        self.forward(keep=False)
        graph, self._graph = self._graph, _Graph()
        if not graph.outputs:
            return 0
        with self._named():
            split = graph.split(self._plans)
            split.input_gradients()
            stays = storages_of(list(_stays(split)))
            split.weight_gradients()
        return sum(size for key, size in stays.items() if key not in held)

    def _note(self, kind: str, seconds: float, keep: bool) -> None:
        if keep:
            self._times[kind].append(seconds)

    def median(self, kind: str) -> float:
        """Of the times that were kept."""
        return statistics.median(self._times[kind])

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except StagelineError:
            raise
        except Exception as error:
            raise StagelineError(
                f"{self._seen.title} failed when it was run alone with what the model gave it: "
                f"{type(error).__name__}: {error}"
            ) from error


def one_round(calls: Sequence[Alone], keep: bool) -> None:
    """Run all of them once by halves and once whole.

    In the order of a step, so that a layer finds caches and memory as it finds them there, and a slow spell of the
    machine hits all layers.
    """
    for backward in (Alone.halves, Alone.whole):
        for call in calls:
            call.forward(keep)
        for call in reversed(calls):
            backward(call, keep)


def _stays(split: SplitBackward) -> Iterator[Tensor]:
    """What a backward holds between its halves: gradients, and what nodes saved and have not yet let go."""
    for noted in split._noted:
        yield from tensors_in((noted.grads, noted.saved))
    yield from tensors_in([grad for _, grad in split._together])
    yield from tensors_in(split._last[1])
    for node in split._nodes:
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for name in names:
            try:
                yield from tensors_in(getattr(node, name))
            except RuntimeError:  # let go
                break


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let what runs inside have gradients, buffers and random numbers of its own, and call no hook of a parameter."""
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    grads = [parameter.grad for parameter in parameters]
    buffers = [taken for module in modules for taken in all_buffers(module)]
    hooks = [
        (dictionary, dict(dictionary))
        for parameter in parameters
        for dictionary in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if dictionary
    ]
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        for parameter in parameters:
            parameter.grad = None
        for dictionary, _ in hooks:
            dictionary.clear()
        with torch.random.fork_rng(devices=cuda), torch.enable_grad():
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for dictionary, kept in hooks:
            dictionary.update(kept)
        put_back(buffers)
