"""The last states of a rank in host memory, in files that outlive its process: its replacement reads them."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.distributed.state_memory import HEAD, step_of
from stageline.transport.wire import DTYPES

_ALIGN = 64


class Slot:
    """One state in a file: its step, its description as JSON, and the bytes of its tensors.

    The second number of its head is the length of the description.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._bytes: mmap.mmap | None = None
        self._layout: list[tuple[str, torch.dtype, torch.Size]] = []
        self._targets: list[Tensor] = []
        self._start = 0

    def write(self, step: int, tensors: Mapping[str, Tensor], state: Any) -> None:
        """Replace the state; one that a killed process left half-written is not valid."""
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        text = json.dumps(state).encode()
        if layout != self._layout or HEAD.size + len(text) > self._start:
            self._lay_out(layout, len(text))
        data = self._bytes
        assert data is not None
        HEAD.pack_into(data, 0, 0, len(text))
        for target, tensor in zip(self._targets, tensors.values(), strict=True):
            target.copy_(tensor)
        data[HEAD.size : HEAD.size + len(text)] = text
        HEAD.pack_into(data, 0, step + 1, len(text))

    def _lay_out(self, layout: list[tuple[str, torch.dtype, torch.Size]], length: int) -> None:
        """Place the tensors behind a description of this length, which later ones may exceed a little."""
        entries, sizes, at = [], [], 0
        for name, dtype, shape in layout:
            size = shape.numel() * dtype.itemsize
            entries.append([name, str(dtype).removeprefix("torch."), list(shape), at])
            sizes.append((at, size, dtype, shape))
            at += -(-size // _ALIGN) * _ALIGN
        index = json.dumps(entries).encode()
        self._start = -(-(HEAD.size + 2 * length) // 4096) * 4096
        end = self._start + at
        file = os.open(self._path, os.O_RDWR)
        try:
            os.pwrite(file, bytes(HEAD.size), 0)  # not valid from here on
            os.ftruncate(file, end + len(index) + HEAD.size)
            os.pwrite(file, index + HEAD.pack(self._start, len(index)), end)
            self._targets = []
            self._bytes = data = mmap.mmap(file, end) if end else None
        finally:
            os.close(file)
        assert data is not None
        whole = torch.frombuffer(data, dtype=torch.uint8)[self._start :]
        self._targets = [whole[place : place + size].view(dtype).view(shape) for place, size, dtype, shape in sizes]
        self._layout = layout

    def step(self) -> int | None:
        """The step of the state; None if there is none, or it is incomplete."""
        return step_of(self._path)

    def read(self) -> tuple[dict[str, Tensor], Any]:
        """The tensors and the description of a complete state; the tensors share the memory of the file."""
        file = os.open(self._path, os.O_RDWR)
        try:
            data = mmap.mmap(file, os.fstat(file).st_size)
        finally:
            os.close(file)
        start, length = HEAD.unpack_from(data, len(data) - HEAD.size)
        end = len(data) - HEAD.size - length
        whole = torch.frombuffer(data, dtype=torch.uint8)
        tensors = {}
        for name, dtype, shape, at in json.loads(data[end : end + length]):
            kind = DTYPES[dtype]
            size = torch.Size(shape).numel() * kind.itemsize
            tensors[name] = whole[start + at : start + at + size].view(kind).view(shape)
        _, text = HEAD.unpack_from(data, 0)
        return tensors, json.loads(data[HEAD.size : HEAD.size + text])


class Snapshots:
    """The last two states of a rank: ranks are at most one state apart, so there is one that all of them have.

    >>> paths = ["first", "second"]
    >>> for path in paths:
    ...     open(path, "w").close()
    >>> snapshots = Snapshots(paths)
    >>> for step in (1, 2, 3):
    ...     snapshots.write(step, {"weight": torch.full((2,), float(step))}, {"seen": 8 * step})
    >>> Snapshots(paths).steps(), Snapshots(paths).read(2)
    ([2, 3], ({'weight': tensor([2., 2.])}, {'seen': 16}))
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._slots = [Slot(path) for path in paths]

    def steps(self) -> list[int]:
        """The steps of the states, in their order."""
        return sorted(step for slot in self._slots if (step := slot.step()) is not None)

    def write(self, step: int, tensors: Mapping[str, Tensor], state: Any) -> None:
        """Write a state, in the place of the oldest one."""
        same = [slot for slot in self._slots if slot.step() == step]
        oldest = min(self._slots, key=lambda slot: -1 if slot.step() is None else slot.step() or 0)
        (same or [oldest])[0].write(step, tensors, state)

    def read(self, step: int) -> tuple[dict[str, Tensor], Any]:
        """The state of a step."""
        return next(slot for slot in self._slots if slot.step() == step).read()
