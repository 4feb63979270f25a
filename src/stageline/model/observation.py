"""Observe one run of a model: the inputs of every layer, and what its forward saves and passes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from stageline.common.errors import StagelineError, shorten
from stageline.model._torch_private import (
    raw_version,
    tensors_in,
    tree_flatten,
)
from stageline.tensors.thread_context import autocasts

Storages = dict[Any, int]
"""Bytes per storage: tensors that share memory have one entry."""


@dataclass
class Call:
    """The arguments of one call of a layer."""

    leaves: list[Any]
    """The leaves of its arguments, with copies of the tensors."""
    tree: Any
    requires_grad: list[bool]
    """Which of the leaves require a gradient."""
    autocasts: list[Any]
    """The autocast state during the call."""
    mutates_inputs: bool = False
    """Whether it modifies its inputs in place."""


@dataclass
class LayerTrace:
    """What a run showed about one layer."""

    name: str
    module: nn.Module
    calls: list[Call] = field(default_factory=list)
    saved: Storages = field(default_factory=dict)
    """What it saves for the backward and no earlier layer saves."""
    inputs: Storages = field(default_factory=dict)
    """Of the first call."""
    outputs: Storages = field(default_factory=dict)
    """Of the last call."""
    message: int = 0
    """Bytes of the tensors in its last output."""

    @property
    def title(self) -> str:
        """Its name in error messages."""
        return f"layer {self.name!r} ({type(self.module).__name__})"


def storages_of(tensors: Sequence[Tensor]) -> Storages:
    """Return the storages of tensors. Keys stay valid after a storage is freed and are never reused."""
    storages: Storages = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            storages[StorageWeakRef(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError):  # sparse, or a wrapper around other tensors
            storages[object()] = tensor.numel() * tensor.element_size()
    return storages


def state_storages(layers: Sequence[nn.Module]) -> Storages:
    """Return the storages of parameters and buffers, which exist without any microbatch."""
    return storages_of([tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())])


def capture(layers: Sequence[tuple[str, nn.Module]], run: Callable[[], Any]) -> list[LayerTrace]:
    """Run the model once with autograd enabled, and return what was observed of each layer."""
    observer = _Observer(layers)
    with ExitStack() as stack:
        for module in observer.modules:
            for hook in observer.hooks(module):
                stack.callback(hook.remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(observer.pack, _no_backward))
        with errors_named(observer.inside, "the model ran"):
            run()
    return observer.traces()


@contextmanager
def errors_named(layers: Sequence[LayerTrace], when: str) -> Iterator[None]:
    """Name the innermost of the running layers in errors of its code."""
    try:
        yield
    except StagelineError:
        raise
    except Exception as error:
        if not layers:
            raise
        raise StagelineError(f"{layers[-1].title} failed when {when}: {type(error).__name__}: {error}") from error


def _no_backward(nothing: None) -> Tensor:
    raise StagelineError("run called backward, but it must run only the forward of the model")


class _Observer:
    """Hooks on the layers of a model."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self.layers = layers
        self.modules = list(dict.fromkeys(module for _, module in layers))
        self.inside: list[LayerTrace] = []
        """The layers that are running."""
        self._traces = {
            module: [LayerTrace(name, layer) for name, layer in layers if layer is module] for module in self.modules
        }
        self._counts = dict.fromkeys(self.modules, 0)
        self._state = state_storages(self.modules)
        self._saved: set[Any] = set()
        self._copies: dict[Any, Tensor] = {}
        self._versions: list[list[tuple[Tensor, int]]] = []

    def hooks(self, module: nn.Module) -> list[Any]:
        # These hooks run outside existing ones, which belong to the layer.
        return [
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    def pack(self, tensor: Tensor) -> None:
        """Record what the running layer saves, and drop the tensor."""
        if self.inside:
            for key, size in storages_of([tensor]).items():
                if key not in self._state and key not in self._saved:
                    self._saved.add(key)
                    self.inside[-1].saved[key] = size

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        traces, count = self._traces[module], self._counts[module]
        self._counts[module] += 1
        trace = traces[min(count, len(traces) - 1)]
        if not torch.is_grad_enabled():
            raise StagelineError(f"{trace.title} ran without gradients; call the model outside torch.no_grad() in run")
        leaves, tree = tree_flatten((args, kwargs))
        tensors = tensors_in(leaves)
        if not trace.calls:
            trace.inputs = storages_of(tensors)
        copies = [self._copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        trace.calls.append(Call(copies, tree, requires_grad, autocasts()))
        self._versions.append([(tensor, raw_version(tensor)) for tensor in tensors])
        self.inside.append(trace)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor, once if several layers receive it, such as a mask."""
        keys = list(storages_of([tensor]))
        try:
            key = (keys[0], tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, raw_version(tensor))
        except (RuntimeError, NotImplementedError):
            return tensor.detach().clone()
        if key not in self._copies:
            self._copies[key] = tensor.detach().clone()
        return self._copies[key]

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        trace = self.inside.pop()
        trace.calls[-1].mutates_inputs = any(raw_version(tensor) != version for tensor, version in self._versions.pop())
        tensors = tensors_in(output)
        if not tensors:
            raise StagelineError(
                f"{trace.title} returned {shorten(output)}, which contains no tensor; layers must return tensors, or "
                "tuples, lists and dicts of them"
            )
        trace.outputs = storages_of(tensors)
        trace.message = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def traces(self) -> list[LayerTrace]:
        unused = [name for name, module in self.layers if not self._counts[module]]
        if unused:
            raise StagelineError(
                f"run never called {', '.join(map(repr, unused))}; leave unused modules out of layers, and list "
                "modules that the forward calls as layer(…)"
            )
        for module, traces in self._traces.items():
            if 1 < len(traces) != self._counts[module]:
                raise StagelineError(
                    f"{traces[0].title} is listed {len(traces)} times and was called {self._counts[module]} times; "
                    "list it once, or once for each call"
                )
        remaining = {module: iter(traces) for module, traces in self._traces.items()}
        return [next(remaining[module]) for _, module in self.layers]
