"""What a constructor did to its tensors, written down call by call, and done again for a few of them.

Tensors are told apart by the memory they lie in, so that views cost nothing: a call refers to a place in a storage, and
a view of it is another place in the same one.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

META = torch.device("meta")


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: a storage, and what part of it is seen in which form."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Where this tensor lies."""
        storage = storage_of(tensor)
        form = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return cls(storage, tensor.dtype, *form, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in this form on another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.negative else tensor

    @property
    def nbytes(self) -> int:
        """What its elements take."""
        return math.prod(self.size) * self.dtype.itemsize

    def fills(self, nbytes: int) -> bool:
        """Whether it covers a storage of so many bytes without a gap.

        >>> Place(0, torch.float32, (2, 3), (1, 2), 0).fills(24), Place(0, torch.float32, (2, 3), (0, 1), 0).fills(24)
        (True, False)
        """
        expected = 1
        for stride, size in sorted(each for each in zip(self.stride, self.size, strict=True) if each[1] != 1):
            if stride != expected:
                return False
            expected *= size
        return self.nbytes == nbytes and self.offset == 0


@dataclass(frozen=True)
class Call:
    """One call, with places instead of tensors: what it reads, writes and makes.

    `fresh` are its results that lie in storages of their own, by their position; `covers` are the storages whose
    former contents do not matter after it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    fresh: tuple[tuple[int, Place], ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    covers: frozenset[int]
    draws: bool
    default_dtype: torch.dtype


def storage_of(tensor: Tensor) -> int:
    """What tells storages apart while they live."""
    return int(tensor.untyped_storage()._cdata)


def places_in(*values: Any) -> list[Place]:
    """All places in the arguments of a call."""
    return [each for each in tree_flatten(values)[0] if isinstance(each, Place)]


class Tape:
    """All calls in their order, and the storages they are about."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.calls: list[Call] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is used twice
        self.unwritten: dict[int, list[Place]] = {}  # allocated but not filled: the pieces written so far
        self._writers: dict[int, list[int]] = {}

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor stands for one whose value is on the tape."""
        with torch._C.DisableTorchFunction():
            return tensor.is_meta and tensor.layout is torch.strided and storage_of(tensor) in self.storages

    def add(self, tensor: Tensor) -> Place:
        """Take up a tensor without contents; what reads it before it is written has no value either."""
        place = Place.of(tensor)
        if place.storage not in self.storages:
            self.storages[place.storage] = tensor.untyped_storage()
            self.unwritten[place.storage] = []
        return place

    def constant(self, tensor: Tensor) -> Tensor:
        """A stand-in for a tensor with a value of its own, which is written down."""
        value = tensor.detach().resolve_conj().resolve_neg().clone()
        stand_in = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
        return torch.as_tensor(self.record(_copied, (value,), {}, stand_in))

    def record(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        result: Any,
        written: Sequence[Place] = (),
        *,
        draws: bool = False,
        blindly: bool = False,
    ) -> Any:
        """Write down a call that had this result on stand-ins; `blindly` if it does not read what it writes."""
        fresh = []
        for position, each in enumerate(tree_flatten(result)[0]):
            if isinstance(each, Tensor) and storage_of(each) not in self.storages:
                self.storages[storage_of(each)] = each.untyped_storage()
                fresh.append((position, Place.of(each)))
        made = [place.storage for _, place in fresh]
        inputs = places_in(arguments, keywords)
        if blindly:
            for place in written:
                inputs.remove(place)
        reads = dict.fromkeys(place.storage for place in inputs)
        holes = any(not self.is_written(place) for place in inputs)
        covers = set()
        for place in written:
            if blindly and not holes and place.storage in self.unwritten:
                self.unwritten[place.storage].append(place)
            if blindly and place.storage not in reads and place.fills(self.storages[place.storage].nbytes()):
                covers.add(place.storage)
                self.unwritten.pop(place.storage, None)
        if holes:
            self.unwritten.update({storage: [] for storage in [*made, *(place.storage for place in written)]})
        writes = tuple(dict.fromkeys([*made, *(place.storage for place in written)]))
        for storage in writes:
            self._writers.setdefault(storage, []).append(len(self.calls))
        self.calls.append(
            Call(
                function,
                arguments,
                keywords,
                tuple(fresh),
                tuple(reads),
                writes,
                frozenset(covers),
                draws,
                torch.get_default_dtype(),
            )
        )
        return result

    def is_written(self, place: Place) -> bool:
        """Whether every element at a place has been given a value."""
        pieces = self.unwritten.get(place.storage)
        if pieces is None or place.nbytes == 0:
            return True
        if {piece.dtype for piece in pieces} != {place.dtype}:
            return False
        seen = torch.zeros(self.storages[place.storage].nbytes() // place.dtype.itemsize, dtype=torch.bool)
        for piece in pieces:
            seen.as_strided(piece.size, piece.stride, piece.offset).fill_(True)
        if seen.all():
            del self.unwritten[place.storage]
        return bool(seen.as_strided(place.size, place.stride, place.offset).all())

    def program(self, storage: int) -> list[int]:
        """The calls that the contents of a storage depend on now, in their order."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        heap: list[tuple[int, int]] = []

        def want(storage: int, before: int) -> None:
            writers = self._writers.get(storage, ())
            position = bisect.bisect_left(writers, before) - 1
            if position >= 0 and (entry := (-writers[position], storage)) not in seen:
                seen.add(entry)
                heapq.heappush(heap, entry)

        want(storage, len(self.calls))
        while heap:
            index, storage = heapq.heappop(heap)
            call = self.calls[-index]
            if storage not in call.covers:
                want(storage, -index)
            if -index not in found:
                found.add(-index)
                for each in {*call.reads, *call.writes} - call.covers:
                    want(each, -index)
        return sorted(found)

    def replay(
        self,
        program: Iterable[int],
        target: int,
        draw: Callable[[int, Callable[[], Any]], Any],
        *,
        clear: bool = False,
    ) -> torch.UntypedStorage:
        """Run calls in real memory of the host and give back one storage; nothing else outlives its last use.

        Every call that draws random numbers is given to `draw` with its number on the tape. With `clear`, memory that
        is only allocated is zero.
        """
        program = list(program)
        last = {storage: at for at in program for storage in (*self.calls[at].reads, *self.calls[at].writes)}
        memory: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            return value.on(self._memory(memory, value.storage, clear)) if isinstance(value, Place) else value

        with torch.no_grad():
            for at in program:
                call = self.calls[at]
                arguments, keywords = tree_map(real, (call.arguments, call.keywords))
                results = _with_dtype(call, at, arguments, keywords, draw)
                self._keep(memory, call, tree_flatten(results)[0])
                del arguments, keywords, results
                for storage in {*call.reads, *call.writes} - {target}:
                    if last[storage] == at:
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

    def _keep(self, memory: dict[int, torch.UntypedStorage], call: Call, results: list[Any]) -> None:
        """Put new results where later calls look for them, in the form they were promised in."""
        taken = {int(each._cdata) for each in memory.values()}
        for position, place in call.fresh:
            result: Tensor = results[position]
            form = Place.of(result)
            same = (form.size, form.stride, form.offset) == (place.size, place.stride, place.offset)
            if place.storage in memory:
                continue
            if same and form.dtype == place.dtype and form.storage not in taken:
                memory[place.storage] = result.untyped_storage()
            else:
                place.on(self._memory(memory, place.storage)).copy_(result)


def allocate(nbytes: int) -> torch.UntypedStorage:
    """Memory of the host, with whatever it held before."""
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _copied(value: Tensor) -> Tensor:
    return value.clone()


def _with_dtype(
    call: Call,
    at: int,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    draw: Callable[[int, Callable[[], Any]], Any],
) -> Any:
    """Run a call under the default dtype it was recorded under."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(call.default_dtype)
    try:
        if call.draws:
            return draw(at, lambda: call.function(*arguments, **keywords))
        return call.function(*arguments, **keywords)
    finally:
        torch.set_default_dtype(before)
