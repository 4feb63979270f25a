"""How messages travel between GPUs: tensors separately from their headers.

A header goes from host to host, and hosts run ahead of their GPUs: by the time a GPU gets to the message, its header
has arrived and the receive is posted, with the size in the header. So a receive never has the wrong size, whatever
shapes do, and none is posted for a message that a failed rank does not send.

Every channel has a communicator of its own, on which one rank only sends and the other only receives, in the order of
the headers. So nothing that is sent waits for anything but its receiver. A receive stands in the compute stream right
before the action that needs it: a receive that is posted earlier would wait on the GPU beside other actions, and take
multiprocessors from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from stageline.transport.protocol import Traffic
from stageline.transport.wire import TensorMeta, bytes_of, room_for

ChannelEnds: TypeAlias = tuple[int, int, Traffic]
"""The process that sends, the one that receives, and the traffic."""


class Pair(Protocol):
    """A communicator of two processes: member 0 sends, member 1 receives."""

    device: torch.device
    """Where its tensors are."""

    def send(self, piece: Tensor, peer: int) -> Any:
        """Send bytes; the result's `is_completed` says whether their memory may be reused."""

    def receive(self, room: Tensor, peer: int) -> None:
        """Fill memory with bytes, before anything that the caller does with it afterwards."""


class Payloads(dict[ChannelEnds, Pair]):
    """The communicators of the channels of one process; a channel without one sends its tensors with the headers.

    >>> payloads = Payloads()
    >>> (0, 1, "forward") in payloads, payloads.carries(torch.ones(2), (0, 1, "forward"))
    (False, False)
    """

    def missing(self, channels: Iterable[ChannelEnds]) -> list[ChannelEnds]:
        """Those of the channels that have no communicator."""
        return [channel for channel in channels if channel not in self]

    def carries(self, tensor: Tensor, channel: ChannelEnds) -> bool:
        """Whether a tensor travels here, and not with its header."""
        pair = self.get(channel)
        return pair is not None and tensor.device == pair.device and tensor.numel() > 0

    def send(self, tensor: Tensor, channel: ChannelEnds) -> tuple[Any, Tensor]:
        """Send after what the compute stream holds so far; the bytes must be kept until the work is done."""
        piece = bytes_of(tensor)
        return self[channel].send(piece, peer=1), piece

    def receive(self, meta: TensorMeta, channel: ChannelEnds) -> Tensor:
        """Receive a tensor of this form, before what the compute stream gets next."""
        pair = self[channel]
        tensor = room_for(meta, pair.device)
        pair.receive(bytes_of(tensor), peer=0)
        return tensor
