"""A recording of a constructor's operations on tensors, call by call, and its replay for some of the tensors.

Tensors are identified by their storage, so views are free: a call refers to a view of a storage, and a view of that is
another view of the same storage.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stageline.model._torch_private import disable_torch_function, neg_view, storage_pointer, tree_flatten, tree_map

META = torch.device("meta")
Draw = Callable[[int, Callable[[], Any]], Any]
"""Runs a call that draws random numbers, given its index on the tape."""


@dataclass(frozen=True)
class StorageView:
    """A tensor's view of a storage: dtype, size, stride and offset."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        """Return the view of a tensor."""
        storage = storage_of(tensor)
        form = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return cls(storage, tensor.dtype, *form, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor with this view on another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = tensor.conj()
        return neg_view(tensor) if self.negative else tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.size) * self.dtype.itemsize

    def fills(self, nbytes: int) -> bool:
        """Whether it covers a storage of this many bytes without a gap."""
        expected = 1
        for stride, size in sorted(dim for dim in zip(self.stride, self.size, strict=True) if dim[1] != 1):
            if stride != expected:
                return False
            expected *= size
        return self.nbytes == nbytes and self.offset == 0


@dataclass(frozen=True)
class Call:
    """A recorded call, with views in place of tensors.

    `new_results` are its results in new storages, by position; `covers` are the storages whose previous contents do not
    matter after it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    new_results: tuple[tuple[int, StorageView], ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    covers: frozenset[int]
    draws: bool
    default_dtype: torch.dtype


def storage_of(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage, unique while the storage is alive."""
    return storage_pointer(tensor.untyped_storage())


class Tape:
    """All calls in order, and the storages they use."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no identifier is reused
        self.unwritten: dict[int, list[StorageView]] = {}  # allocated but not filled: the views written so far
        self._writers: dict[int, list[int]] = {}

    def contains(self, tensor: Tensor) -> bool:
        """Whether the tensor is a meta tensor whose value is on the tape."""
        with disable_torch_function():
            return tensor.is_meta and tensor.layout is torch.strided and storage_of(tensor) in self.storages

    def add(self, tensor: Tensor) -> StorageView:
        """Register a tensor without contents; operations that read it before it is written have no value either."""
        view = StorageView.of(tensor)
        if view.storage not in self.storages:
            self.storages[view.storage] = tensor.untyped_storage()
            self.unwritten[view.storage] = []
        return view

    def constant(self, tensor: Tensor) -> Tensor:
        """Record the value of a tensor, and return a meta tensor in its place."""
        value = tensor.detach().resolve_conj().resolve_neg().clone()
        meta_tensor = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
        return torch.as_tensor(self.record(torch.clone, (value,), {}, meta_tensor))

    def record(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        result: Any,
        written: Sequence[StorageView] = (),
        *,
        draws: bool = False,
        overwrites: bool = False,
    ) -> Any:
        """Record a call with this result on meta tensors; `overwrites` if it does not read what it writes."""
        new_results = []
        for position, leaf in enumerate(tree_flatten(result)[0]):
            if isinstance(leaf, Tensor) and storage_of(leaf) not in self.storages:
                self.storages[storage_of(leaf)] = leaf.untyped_storage()
                new_results.append((position, StorageView.of(leaf)))
        inputs = [leaf for leaf in tree_flatten((arguments, keywords))[0] if isinstance(leaf, StorageView)]
        if overwrites:
            for view in written:
                inputs.remove(view)
        reads = dict.fromkeys(view.storage for view in inputs)
        reads_unwritten = any(not self.is_written(view) for view in inputs)
        covers = set()
        for view in written:
            if overwrites and not reads_unwritten and view.storage in self.unwritten:
                self.unwritten[view.storage].append(view)
            if overwrites and view.storage not in reads and view.fills(self.storages[view.storage].nbytes()):
                covers.add(view.storage)
                self.unwritten.pop(view.storage, None)
        writes = tuple(dict.fromkeys([*(view.storage for _, view in new_results), *(view.storage for view in written)]))
        if reads_unwritten:
            self.unwritten.update({storage: [] for storage in writes})
        for storage in writes:
            self._writers.setdefault(storage, []).append(len(self.calls))
        outcome = (tuple(new_results), tuple(reads), writes, frozenset(covers), draws, torch.get_default_dtype())
        self.calls.append(Call(function, arguments, keywords, *outcome))
        return result

    def is_written(self, view: StorageView) -> bool:
        """Whether every element of a view has a value."""
        written_views = self.unwritten.get(view.storage)
        if written_views is None or view.nbytes == 0:
            return True
        if {written_view.dtype for written_view in written_views} != {view.dtype}:
            return False
        is_set = torch.zeros(self.storages[view.storage].nbytes() // view.dtype.itemsize, dtype=torch.bool)
        for written_view in written_views:
            is_set.as_strided(written_view.size, written_view.stride, written_view.offset).fill_(True)
        if is_set.all():
            del self.unwritten[view.storage]
        return bool(is_set.as_strided(view.size, view.stride, view.offset).all())

    def program(self, storage: int) -> list[int]:
        """Return the calls that the current contents of a storage depend on, in order."""
        needed: set[int] = set()
        visited: set[tuple[int, int]] = set()
        heap: list[tuple[int, int]] = []

        def require(storage: int, before: int) -> None:
            writers = self._writers.get(storage, ())
            position = bisect.bisect_left(writers, before) - 1
            if position >= 0 and (entry := (-writers[position], storage)) not in visited:
                visited.add(entry)
                heapq.heappush(heap, entry)

        require(storage, len(self.calls))
        while heap:
            index, storage = heapq.heappop(heap)
            call = self.calls[-index]
            if storage not in call.covers:
                require(storage, -index)
            if -index not in needed:
                needed.add(-index)
                for other in {*call.reads, *call.writes} - call.covers:
                    require(other, -index)
        return sorted(needed)

    def replay(self, program: list[int], target: int, draw: Draw, *, clear: bool = False) -> torch.UntypedStorage:
        """Run calls with real memory on the host and return one storage; everything else is freed after its last use.

        With `clear`, allocated memory is set to zero.
        """
        last_use = {
            storage: index for index in program for storage in (*self.calls[index].reads, *self.calls[index].writes)
        }
        memory: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            return value.on(self._memory(memory, value.storage, clear)) if isinstance(value, StorageView) else value

        with torch.no_grad():
            for index in program:
                call = self.calls[index]
                arguments, keywords = tree_map(real, (call.arguments, call.keywords))
                run = partial(_run_call, call, arguments, keywords)
                results = draw(index, run) if call.draws else run()
                self._store(memory, call, tree_flatten(results)[0])
                del arguments, keywords, run, results
                for storage in {*call.reads, *call.writes} - {target}:
                    if last_use[storage] == index:
                        memory.pop(storage, None)
        return self._memory(memory, target, clear)

    def _memory(
        self, memory: dict[int, torch.UntypedStorage], storage: int, clear: bool = False
    ) -> torch.UntypedStorage:
        if storage not in memory:
            memory[storage] = allocate(self.storages[storage].nbytes())
            if clear:
                torch.empty(0, dtype=torch.uint8).set_(memory[storage]).zero_()
        return memory[storage]

    def _store(self, memory: dict[int, torch.UntypedStorage], call: Call, results: list[Any]) -> None:
        """Store new results where later calls expect them, with the recorded view."""
        used = set(map(storage_pointer, memory.values()))
        for position, view in call.new_results:
            result: Tensor = results[position]
            actual = StorageView.of(result)
            if view.storage in memory:
                continue
            same_form = (actual.dtype, actual.size, actual.stride, actual.offset) == (
                view.dtype, view.size, view.stride, view.offset,
            )  # fmt: skip
            if same_form and actual.storage not in used:
                memory[view.storage] = result.untyped_storage()
            else:
                view.on(self._memory(memory, view.storage)).copy_(result)


def allocate(nbytes: int) -> torch.UntypedStorage:
    """Allocate uninitialised memory on the host."""
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _run_call(call: Call, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Run a call with the default dtype that it was recorded with."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(call.default_dtype)
    try:
        return call.function(*arguments, **keywords)
    finally:
        torch.set_default_dtype(previous)
