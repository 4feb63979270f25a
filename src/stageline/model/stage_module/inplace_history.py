"""Which tensors units modify in place, and what the forward computes from them.

Every stage runs the code around the units, but only its own units compute. If a unit of an earlier stage modifies a
tensor that the forward created, the tensor is therefore unmodified on a later stage. The output of a unit arrives in
its final state, so a later stage cannot recompute what the forward computed from it before it was modified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from stageline.common.errors import StagelineError
from stageline.model._torch_private import TorchDispatchMode, storage_id, tensors_in, version_of

Read = tuple["StorageHistory", frozenset[int]]
"""Memory that something was computed from, and the calls that had modified it by then."""


class StorageHistory:
    """What happened to the memory of a tensor and its views."""

    __slots__ = ("changes", "reads", "root")

    def __init__(self, root: str | None = None, reads: Iterable[Read] = ()) -> None:
        """`root` is the name of a model input or a unit's output; these cross stage boundaries in their final state."""
        self.root = root
        self.changes: set[int] = set()
        """The calls of units that modified it."""
        self.reads = set(reads)

    def read(self) -> set[Read]:
        """Return the dependencies of a value that is computed from this memory now."""
        own = {(self, frozenset(self.changes))} if self.changes or self.root is not None else set()
        return self.reads | own


class InplaceHistory:
    """Records in-place changes during one forward, and which calls use the modified tensors."""

    def __init__(self) -> None:
        self._real: dict[Any, tuple[StorageHistory, Tensor]] = {}
        self._uses: list[tuple[int, StorageHistory, frozenset[int], frozenset[int]]] = []
        self._control_reads: set[Read] = set()
        """Tensors whose values the forward read: anything later may depend on them."""
        self._modes = ExitStack()

    def of(self, tensor: Tensor) -> StorageHistory | None:
        """Return the history of a tensor; placeholder tensors carry theirs."""
        history: StorageHistory | None = getattr(tensor, "storage_history", None)
        if history is None and self._real:
            history = self._real.get(storage_id(tensor), (None,))[0]
        return history

    def read(self, tensors: Iterable[Tensor]) -> set[Read]:
        """Return the dependencies of a value that is computed from these tensors."""
        return set().union(*(history.read() for tensor in tensors if (history := self.of(tensor)) is not None))

    def write(self, tensor: Tensor, reads: set[Read]) -> None:
        """Record that the forward itself writes to a tensor, or computes it."""
        history = self.of(tensor)
        if history is not None:
            history.reads |= reads
        elif reads:
            self._real[storage_id(tensor)] = (StorageHistory(reads=reads), tensor)

    def change(self, tensor: Tensor, position: int, root: str | None) -> None:
        """Record that a unit modified a tensor in place."""
        history = self.of(tensor)
        if history is None:
            if not self._real:
                self._modes.enter_context(_Follow(self))
            history = StorageHistory(root)
            self._real[storage_id(tensor)] = (history, tensor)  # keeps the tensor alive, so that no id is reused
        history.changes.add(position)

    def read_value(self, tensors: Iterable[Tensor]) -> None:
        """Record that the forward reads the values of tensors, for example in an `if`."""
        self._control_reads |= self.read(tensors)

    def use(self, position: int, tree: Any) -> None:
        """Record the arguments of a unit, or the output of the model."""
        for history, changes_then in self.read(tensors_in(tree)) | self._control_reads:
            if history.changes:
                self._uses.append((position, history, changes_then, frozenset(history.changes)))

    def close(self) -> None:
        """End the recording."""
        self._modes.close()

    def check(self, names: Sequence[str], cuts: Iterable[int], copied: Iterable[str]) -> None:
        """Refuse a change that a later stage would miss or see too early; `copied` are values passed as copies."""
        copied, cuts = set(copied), list(cuts)
        for position, history, then, now in sorted(self._uses, key=lambda use: (use[0], sorted(use[3]))):
            arrives = history.root is not None and history.root not in copied
            for call in sorted(now - then if arrives else then):
                if any(call < cut <= position for cut in cuts):
                    user = names[position] if position < len(names) else "the output of the model"
                    raise StagelineError(
                        f"{names[call]} modifies one of its inputs in place, and the forward uses that tensor again "
                        f"for {user}, on another stage, which does not see the change; let {names[call]} work on a "
                        "copy (x.clone(), or inplace=False), or return what it computes"
                    )


class UnchangedInputs:
    """Checks that a unit does not modify its inputs, if only the real call can show it."""

    def __init__(self, name: str, inputs: Any, passed: Iterable[Tensor]) -> None:
        """Record the inputs before the call; `passed` tensors cross stage boundaries and may change."""
        arrives = {storage_id(tensor) for tensor in passed}
        self._name = name
        self._tensors = [tensor for tensor in tensors_in(inputs) if storage_id(tensor) not in arrives]
        self._versions = list(map(version_of, self._tensors))

    def check(self) -> None:
        """Compare after the call."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if version != version_of(tensor):
                raise StagelineError(
                    f"{self._name} modifies one of its inputs in place, a tensor of shape {tuple(tensor.shape)}, and "
                    "the forward may use it again on another stage, which does not see the change; let it work on a "
                    "copy (x.clone(), or inplace=False), or return what it computes"
                )


class _Follow(TorchDispatchMode):
    """Records what is computed from real tensors, once a unit has modified one of them."""

    def __init__(self, history: InplaceHistory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._history = history

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs))
        reads = self._history.read(inputs)
        if reads and not getattr(func, "is_view", False):
            outputs = tensors_in(result)
            for tensor in outputs:
                if not hasattr(tensor, "storage_history"):
                    self._history.write(tensor, reads)
            if not outputs:
                self._history.read_value(inputs)
        return result
