"""GPU tensors that are sent through host memory while the GPU keeps computing.

Out: a stream beside the compute stream waits for what was computed so far and copies it into pinned memory; an event
marks the end of the copy. In: another stream copies from pinned memory to the GPU, and the compute stream waits for it,
on the GPU, when the message is taken. The thread that computes never waits.

Nothing here is called, and torch.cuda is not touched, before a tensor of a GPU is sent or received.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stageline.transport.threads import Arrive
from stageline.transport.wire import TensorMeta, bytes_of, fill, room_for


def pinned(size: int) -> Tensor:
    """Allocate this many bytes of pinned host memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Staging:
    """The two streams beside the compute stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where this process's stages are."""
        self.device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, tensors: Sequence[Tensor], places: Sequence[Tensor]) -> torch.cuda.Event:
        """Copy tensors into pinned memory once they are computed; the event marks the end of the copies.

        Called on the thread that computes. The tensors may be dropped at once; their memory is not reused before it is
        copied.
        """
        pieces = [bytes_of(tensor) for tensor in tensors]  # on the compute stream, where one has gaps
        self._out.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self._out):
            for piece, place in zip(pieces, places, strict=True):
                place.copy_(piece, non_blocking=True)
                piece.record_stream(self._out)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._out)
        return done

    def to_device(self, places: Sequence[Tensor], metas: Sequence[TensorMeta]) -> tuple[list[Tensor], Arrive]:
        """Start copying from pinned memory; the thread that takes the message calls the returned function."""
        tensors: list[Tensor] = []
        with torch.cuda.device(self.device), torch.cuda.stream(self._in):
            for place, meta in zip(places, metas, strict=True):
                tensors.append(fill(room_for(meta, self.device), place))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._in)
        return tensors, lambda: self._take(tensors, done)

    def _take(self, tensors: Sequence[Tensor], done: torch.cuda.Event) -> None:
        """Let the compute stream wait for the copies, and keep the tensors as long as it needs them."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(stream)
