"""Tensors on groups of their own, beside the headers: how messages travel between GPUs.

A header goes from host to host and is read by the host, which runs ahead of its GPU: by the time the GPU comes to the
message, the header is long there and the receive is posted, with just the size that the header told.

On one communicator a send could stand in line behind a receive, and two ranks could wait for each other. So there is
a group for every traffic and way, up to higher ranks or down to lower ones: 4 groups, on each of which a pair of ranks
only ever sends in one direction, in the order of the headers.

NCCL itself was not run by the tests, which have no two GPUs: they run this file with gloo as the backend, on the host.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stageline.transport.gpu.host_staging import Staging
from stageline.transport.protocol import Traffic
from stageline.transport.threads import Arrive
from stageline.transport.wire import TRAFFIC, TensorMeta, bytes_of, room_for


class PayloadGroups:
    """The groups for tensors of one type of device; made by all ranks together."""

    def __init__(self, backend: str = "nccl", device_type: str = "cuda") -> None:
        """Make the groups; communicators come with the first message."""
        self.device_type = device_type
        self._groups = {
            (traffic, up): dist.new_group(backend=backend, group_desc=f"stageline {traffic} {'up' if up else 'down'}")
            for traffic in TRAFFIC
            for up in (True, False)
        }

    def carries(self, tensor: Tensor) -> bool:
        """Whether a tensor travels here, and not with its header."""
        return tensor.device.type == self.device_type and tensor.numel() > 0

    def send(self, tensor: Tensor, source: int, target: int, traffic: Traffic) -> tuple[Any, Tensor]:
        """Send once the compute stream has come to here; the bytes must be kept until the work is done."""
        sent = bytes_of(tensor)
        work = dist.isend(sent, group_dst=target, group=self._groups[(traffic, source < target)])
        return (work if tensor.is_cuda else _Awaited(work)), sent

    def receive(
        self, described: TensorMeta, source: int, target: int, traffic: Traffic, staging: Staging | None
    ) -> tuple[Tensor, Arrive | None]:
        """Post the receive of a tensor; where it fills memory of a GPU, say how its compute stream waits for it."""
        group = self._groups[(traffic, source < target)]
        # Of the stream for arrivals, where no computation is in the way.
        with staging.beside() if staging is not None else nullcontext():
            tensor = room_for(described, "cpu" if staging is None else staging.device)
            work = dist.irecv(bytes_of(tensor), group_src=source, group=group)
        assert work is not None
        if staging is None:
            work.wait()
            return tensor, None
        return tensor, lambda: staging.take([tensor], work.wait)


class _Awaited:
    """A send of gloo, which tells that it is done only to who waits for it."""

    def __init__(self, work: Any) -> None:
        """Wait on a thread."""
        self._thread = threading.Thread(target=work.wait, name="stageline payload", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        """As a send of NCCL says it."""
        return not self._thread.is_alive()
