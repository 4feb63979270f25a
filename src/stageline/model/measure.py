"""What one layer costs, run alone with what it was given in a run of the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError
from stageline.model.capture import Call, Seen, Storages, storages_of, tensors_in
from stageline.runtime.buffers import all_buffers, put_back
from stageline.runtime.plan import Plan
from stageline.runtime.split import Arriving, SplitBackward

Value = TypeVar("Value")
Times = dict[str, list[float]]
"""Seconds of F, I, W and B, one for each time they ran."""


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


class Alone:
    """One call of one layer, to be repeated."""

    def __init__(self, seen: Seen, call: Call, timer: Timer) -> None:
        """`call` is one of those that were seen."""
        self._seen, self._call, self._timer = seen, call, timer
        self._plans: list[Plan] = []
        self.times: Times = {kind: [] for kind in "FIWB"}

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

    def _forward(self) -> tuple[float, list[Tensor], list[Tensor]]:
        """Run F: seconds, the inputs that want a gradient, the outputs that have one."""
        wanted, args, kwargs = self._fresh()
        with ExitStack() as stack:
            for each in self._call.autocasts:
                stack.enter_context(each)
            taken, output = self._timer(lambda: self._seen.module(*args, **kwargs))
        return taken, wanted, [tensor for tensor in tensors_in(output) if tensor.requires_grad]

    def _split(self) -> tuple[float, SplitBackward | None]:
        taken, wanted, outputs = self._forward()
        grads = [torch.ones_like(output) for output in outputs]
        return taken, SplitBackward(outputs, grads, wanted, self._plans) if outputs else None

    def residue(self, held: Storages) -> int:
        """Bytes that stay from I to W, parameters and buffers (`held`) aside."""
        with self._named():
            _, split = self._split()
            if split is None:
                return 0
            split.input_gradients()
            stays = storages_of(list(_stays(split)))
            split.weight_gradients()
        return sum(size for key, size in stays.items() if key not in held)

    def run(self, keep: bool) -> None:
        """Run F, I and W, and F and B; keep the times, or only warm up."""
        with self._named():
            forward, split = self._split()
            taken = {"F": forward, "I": 0.0, "W": 0.0, "B": 0.0}
            if split is not None:
                taken["I"], _ = self._timer(split.input_gradients)
                taken["W"], _ = self._timer(split.weight_gradients)
                taken["B"] = self._whole()
        if keep:
            for kind, seconds in taken.items():
                self.times[kind].append(seconds)

    def _whole(self) -> float:
        # This F finds its weights in the caches, as none in a step does, so its time is not kept.
        _, wanted, outputs = self._forward()
        grads = [torch.ones_like(output) for output in outputs]
        with Arriving(wanted):
            return self._timer(lambda: torch.autograd.backward(outputs, grads))[0]

    def median(self, kind: str) -> float:
        """Of the times that were kept."""
        return statistics.median(self.times[kind])

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
