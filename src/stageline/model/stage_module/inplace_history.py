"""Which tensors units change in place while a forward is looked at, and what the forward computes from them.

Every stage runs the forward around the units by itself, and only its own units compute. A tensor that the forward made
and a unit of an earlier stage changed in place is therefore unchanged on a later stage. A unit's output arrives as it
was left, so what the forward computed from it before the change cannot be computed there again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.common.errors import StagelineError

Read = tuple["Memory", frozenset[int]]
"""A tensor that something was computed from, and the calls that had changed it by then."""


class Memory:
    """What happened to the memory of a tensor, which its views share."""

    __slots__ = ("changes", "reads", "root")

    def __init__(self, root: str | None = None, reads: Iterable[Read] = ()) -> None:
        """`root` names an input or a unit's output, which passes from stage to stage as it is."""
        self.root = root
        self.changes: set[int] = set()
        self.reads = set(reads)

    def read(self) -> set[Read]:
        """What is computed from it now depends on; what no unit can have changed is left out."""
        own = {(self, frozenset(self.changes))} if self.changes or self.root is not None else set()
        return self.reads | own


class History:
    """Notes the changes of one forward, and which calls use what was changed."""

    def __init__(self) -> None:
        """Nothing was changed yet."""
        self._real: dict[Any, tuple[Memory, Tensor]] = {}
        self._used: list[tuple[int, Memory, frozenset[int], frozenset[int]]] = []
        self._everywhere: set[Read] = set()
        """What the forward read as numbers: all that comes later may depend on it."""
        self._modes = ExitStack()

    def of(self, tensor: Tensor) -> Memory | None:
        """What is known of a tensor: absent ones have it with them."""
        memory: Memory | None = getattr(tensor, "_memory", None)
        if memory is None and self._real:
            memory = self._real.get(storage(tensor), (None,))[0]
        return memory

    def read(self, tensors: Iterable[Tensor]) -> set[Read]:
        """What depends on these tensors depends on this."""
        return set().union(*(memory.read() for each in tensors if (memory := self.of(each)) is not None))

    def write(self, tensor: Tensor, reads: set[Read]) -> None:
        """The forward itself writes something into a tensor, or computes it."""
        memory = self.of(tensor)
        if memory is not None:
            memory.reads |= reads
        elif reads:
            self._real[storage(tensor)] = (Memory(reads=reads), tensor)

    def change(self, tensor: Tensor, position: int, root: str | None) -> None:
        """A unit changed a tensor in place."""
        memory = self.of(tensor)
        if memory is None:
            if not self._real:
                self._modes.enter_context(_Follow(self))
            memory = Memory(root)
            self._real[storage(tensor)] = (memory, tensor)  # the tensor too: its address may not be used again
        memory.changes.add(position)

    def read_number(self, tensors: Iterable[Tensor]) -> None:
        """The forward looks into a tensor."""
        self._everywhere |= self.read(tensors)

    def use(self, position: int, tree: Any) -> None:
        """A unit is given something, or the model gives it."""
        tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        for memory, then in self.read(tensors) | self._everywhere:
            if memory.changes:
                self._used.append((position, memory, then, frozenset(memory.changes)))

    def close(self) -> None:
        """The forward has ended."""
        self._modes.close()

    def check(self, names: Sequence[str], cuts: Iterable[int], changed: Iterable[str]) -> None:
        """Refuse a change that a later stage would miss, or see too early; `changed` are values passed as copies."""
        changed, cuts = set(changed), list(cuts)
        for position, memory, then, now in sorted(self._used, key=lambda use: (use[0], sorted(use[3]))):
            arrives = memory.root is not None and memory.root not in changed
            for at in sorted(now - then if arrives else then):
                if any(at < cut <= position for cut in cuts):
                    user = names[position] if position < len(names) else "the output of the model"
                    raise StagelineError(
                        f"{names[at]} changes in place a tensor that it is given and that the forward uses again for "
                        f"{user}, on another stage, where it is not changed so; let {names[at]} work on a copy "
                        "(x.clone(), or inplace=False), or give back what it computes"
                    )


class Unchanged:
    """Looks at the tensors of the forward that a unit is given, where only its real call shows what it changes."""

    def __init__(self, name: str, given: Any, held: Iterable[Tensor]) -> None:
        """Before the call; what is `held` arrives at later stages as the unit leaves it."""
        arrives = {storage(tensor) for tensor in held}
        leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        self._name = name
        self._tensors = [tensor for tensor in leaves if storage(tensor) not in arrives]
        self._versions = versions(self._tensors)

    def check(self) -> None:
        """After the call."""
        for tensor, old, new in zip(self._tensors, self._versions, versions(self._tensors), strict=True):
            if old != new:
                raise StagelineError(
                    f"{self._name} changes in place a tensor of shape {tuple(tensor.shape)} that it is given, and the "
                    "forward may use it again on another stage, where it is not changed so; let it work on a copy "
                    "(x.clone(), or inplace=False), or give back what it computes"
                )


class _Follow(TorchDispatchMode):
    """Follows what is computed from tensors that are there, once a unit has changed one of them."""

    def __init__(self, history: History) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._history = history

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        reads = self._history.read(given)
        if reads and not getattr(func, "is_view", False):
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            for tensor in tensors:
                if not hasattr(tensor, "_memory"):
                    self._history.write(tensor, reads)
            if not tensors:
                self._history.read_number(given)
        return result


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def storage(tensor: Tensor) -> Any:
    """What a tensor and its views have in common."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse, or made of other tensors
        return id(tensor)
