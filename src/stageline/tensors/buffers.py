"""Buffers of a module that is recomputed: the second run sees them as the first did, and leaves them untouched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stageline.tensors._torch_private import buffers_of, children_of, version_of
from stageline.tensors.sharded import local

Snapshot = tuple[tuple[nn.Module, str, Tensor, int, Tensor | None], ...]
"""For each buffer: its module and name, the tensor, its version, and a copy if a forward changes it."""

BufferCopies = list[tuple[nn.Module, str, Tensor, Tensor]]
"""For each buffer: its module and name, the tensor, and a copy of this process's part of it."""


def all_buffers(module: nn.Module) -> BufferCopies:
    """Return the buffers of a module and of all modules in it."""
    return [
        (owner, name, buffer, local(buffer).detach().clone())
        for owner in _modules_in(module)
        for name, buffer in buffers_of(owner).items()
        if buffer is not None
    ]


def _modules_in(module: nn.Module) -> list[nn.Module]:
    """`module.modules()`, in a third of the time: a GPU is idle before the first action of a step."""
    modules = {id(module): module}
    waiting = [module]
    while waiting:
        new = [child for child in children_of(waiting.pop()).values() if child is not None and id(child) not in modules]
        modules.update((id(child), child) for child in new)
        waiting += reversed(new)
    return list(modules.values())


def put_back(taken: BufferCopies) -> None:
    """Restore the buffers, including buffers reassigned since."""
    for owner, name, buffer, copy in taken:
        buffers_of(owner)[name] = buffer
        local(buffer).data.copy_(copy)


def _same(buffer: Tensor, copy: Tensor | None) -> bool:
    """Compared by value: the kernels of some norms change their buffers without a new version."""
    return copy is None or torch.equal(local(buffer), copy)


class Buffers:
    """Learns in the first forward which buffers it changes; later, only those are copied before a forward."""

    def __init__(self, module: nn.Module) -> None:
        """The buffers of a module and of all modules in it."""
        self._module = module
        self._changing: set[tuple[int, str]] | None = None

    def before(self) -> Snapshot:
        """Record the buffers before a forward."""
        return tuple(
            (owner, name, buffer, version_of(buffer), self._copy(owner, name, buffer))
            for owner in self._module.modules()
            for name, buffer in buffers_of(owner).items()
            if buffer is not None
        )

    def _copy(self, owner: nn.Module, name: str, buffer: Tensor) -> Tensor | None:
        wanted = self._changing is None or (id(owner), name) in self._changing
        return local(buffer).detach().clone() if wanted else None

    def after(self, before: Snapshot) -> None:
        """Learn which buffers the forward changed."""
        known = self._changing or set()
        changed = {
            (id(owner), name)
            for owner, name, buffer, version, copy in before
            if (id(owner), name) not in known
            and (buffers_of(owner).get(name) is not buffer or version_of(buffer) != version or not _same(buffer, copy))
        }
        self._changing = changed | known

    @contextmanager
    def as_before(self, before: Snapshot) -> Iterator[None]:
        """Restore the buffers inside the block, and undo that afterwards.

        The tensors are changed through .data: to a graph that has saved them, they have not changed.
        """
        touched = [
            (owner, name, buffer, copy)
            for owner, name, buffer, _, copy in before
            if (id(owner), name) in (self._changing or set())
        ]
        now = [(owner, name, buffers_of(owner)[name]) for owner, name, _, _ in touched]
        values = [None if tensor is None else local(tensor).detach().clone() for _, _, tensor in now]
        with torch.no_grad():
            for owner, name, buffer, copy in touched:
                buffers_of(owner)[name] = buffer
                if copy is not None:
                    local(buffer).data.copy_(copy)
        try:
            yield
        finally:
            with torch.no_grad():
                for (owner, name, tensor), value in zip(now, values, strict=True):
                    buffers_of(owner)[name] = tensor
                    if tensor is not None and value is not None:
                        local(tensor).data.copy_(value)
