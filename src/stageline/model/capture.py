"""One run of a model, watched: what every layer was called with, what it keeps for the backward, what it gives on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from stageline.errors import StagelineError, shorten
from stageline.runtime.surroundings import autocasts

Storages = dict[Any, int]
"""Memory by what it is, not by where: two tensors in the same memory have one entry. The bytes of each."""


@dataclass
class Call:
    """What a layer was called with, once."""

    leaves: list[Any]
    """Of its arguments, with copies of the tensors."""
    tree: Any
    wants: list[bool]
    """Which of the leaves want a gradient."""
    autocasts: list[Any]
    """The mixed precision of the moment."""
    changes: bool = False
    """Whether it changes what it is given in place."""


@dataclass
class Seen:
    """What a run showed of a layer."""

    name: str
    module: nn.Module
    calls: list[Call] = field(default_factory=list)
    saved: Storages = field(default_factory=dict)
    """What it keeps for the backward and no layer before it keeps already."""
    inputs: Storages = field(default_factory=dict)
    """Of its first call."""
    outputs: Storages = field(default_factory=dict)
    """Of its last call."""
    message: int = 0
    """Bytes of the tensors of its last output."""

    @property
    def title(self) -> str:
        """How errors name it."""
        return f"layer {self.name!r} ({type(self.module).__name__})"


def storages_of(tensors: Sequence[Tensor]) -> Storages:
    """The memory in which tensors lie; it is known again also when it is gone, and nothing else is taken for it.

    >>> x = torch.zeros(4)
    >>> list(storages_of([x, x[:2], x + 1]).values())
    [16, 16]
    """
    found: Storages = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            found[StorageWeakRef(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError):  # sparse, or made of other tensors
            found[object()] = tensor.numel() * tensor.element_size()
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def held(layers: Sequence[nn.Module]) -> Storages:
    """The memory of parameters and buffers, which is there with and without a microbatch."""
    return storages_of([tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())])


def capture(layers: Sequence[tuple[str, nn.Module]], run: Callable[[], Any]) -> list[Seen]:
    """Run the model once, with a graph of which nothing is kept, and give back what was seen of each layer."""
    watch = _Watch(layers)
    with ExitStack() as stack:
        for module in watch.modules:
            for hook in watch.hooks(module):
                stack.callback(hook.remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.pack, _no_backward))
        try:
            run()
        except StagelineError:
            raise
        except Exception as error:
            if not watch.inside:
                raise
            raise StagelineError(
                f"{watch.inside[-1].title} failed in the run of the model: {type(error).__name__}: {error}"
            ) from error
    return watch.found()


def _no_backward(nothing: None) -> Tensor:
    raise StagelineError("run ran a backward; a profile wants it to run the model's forward alone")


class _Watch:
    """Hooks on the layers of a model."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self.layers = layers
        self.modules = list(dict.fromkeys(module for _, module in layers))
        self.inside: list[Seen] = []
        """The layer that runs now."""
        self._places = {
            module: [Seen(name, each) for name, each in layers if each is module] for module in self.modules
        }
        self._counts = dict.fromkeys(self.modules, 0)
        self._held = held(self.modules)
        self._kept: set[Any] = set()
        self._copies: dict[Any, Tensor] = {}
        self._versions: list[list[tuple[Tensor, int]]] = []

    def hooks(self, module: nn.Module) -> list[Any]:
        # Outside of the hooks that are there: those belong to the layer, and run with it.
        return [
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    def pack(self, tensor: Tensor) -> None:
        """Note what the layer that runs keeps, and let it go."""
        if self.inside:
            for key, size in storages_of([tensor]).items():
                if key not in self._held and key not in self._kept:
                    self._kept.add(key)
                    self.inside[-1].saved[key] = size

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        places, count = self._places[module], self._counts[module]
        self._counts[module] += 1
        seen = places[min(count, len(places) - 1)]
        if not torch.is_grad_enabled():
            raise StagelineError(f"{seen.title} was run without gradients; let run call the model outside of no_grad")
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = tensors_in(leaves)
        if not seen.calls:
            seen.inputs = storages_of(tensors)
        copies = [self._copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        wants = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        seen.calls.append(Call(copies, tree, wants, autocasts()))
        self._versions.append([(tensor, tensor._version) for tensor in tensors])
        self.inside.append(seen)

    def _copy(self, tensor: Tensor) -> Tensor:
        """What many layers are given, such as a mask, is copied once."""
        keys = list(storages_of([tensor]))
        try:
            key = (keys[0], tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        except (RuntimeError, NotImplementedError):
            return tensor.detach().clone()
        if key not in self._copies:
            self._copies[key] = tensor.detach().clone()
        return self._copies[key]

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        seen = self.inside.pop()
        seen.calls[-1].changes = any(tensor._version != version for tensor, version in self._versions.pop())
        tensors = tensors_in(output)
        if not tensors:
            raise StagelineError(
                f"{seen.title} gave back {shorten(output)}, in which no tensor can be found; layers give back tensors, "
                "in tuples, lists and dicts"
            )
        seen.outputs = storages_of(tensors)
        seen.message = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def found(self) -> list[Seen]:
        never = [name for name, module in self.layers if not self._counts[module]]
        if never:
            raise StagelineError(
                f"run never called {', '.join(map(repr, never))}; leave out of layers what the model does not use, and "
                "give those modules that its forward calls as layer(…)"
            )
        for module, places in self._places.items():
            if 1 < len(places) != self._counts[module]:
                raise StagelineError(
                    f"{places[0].title} is listed {len(places)} times and was called {self._counts[module]} times; "
                    "list it once, or once for each call"
                )
        waiting = {module: iter(places) for module, places in self._places.items()}
        return [next(waiting[module]) for _, module in self.layers]
