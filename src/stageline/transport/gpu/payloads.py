"""Tensors on process groups of their own, beside the headers: how messages travel between GPUs.

A header goes from host to host, and hosts run ahead of their GPUs: by the time the GPU gets to the message, the header
has arrived and the receive is posted, with the size in the header.

On one communicator a send could queue behind a receive, and two ranks could wait for each other. So there is a group
for every traffic and direction, up to higher ranks or down to lower ones: 4 groups, on each of which a pair of ranks
only sends in one direction, in the order of the headers.

The tests have no two GPUs, so they do not run NCCL: they run this file with gloo as the backend, on the host.
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
        """Create the groups; the first message creates their communicators."""
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
        """Send after what the compute stream holds so far; the bytes must be kept until the work is done."""
        sent = bytes_of(tensor)
        work = dist.isend(sent, group_dst=target, group=self._groups[(traffic, source < target)])
        return (work if tensor.is_cuda else _Awaited(work)), sent

    def receive(
        self, meta: TensorMeta, source: int, target: int, traffic: Traffic, staging: Staging | None
    ) -> tuple[Tensor, Arrive | None]:
        """Post the receive of a tensor; if it fills memory of a GPU, return how the compute stream waits for it."""
        group = self._groups[(traffic, source < target)]
        # On the stream for arrivals, which does not wait for computations.
        with staging.beside() if staging is not None else nullcontext():
            tensor = room_for(meta, "cpu" if staging is None else staging.device)
            work = dist.irecv(bytes_of(tensor), group_src=source, group=group)
        assert work is not None
        if staging is None:
            work.wait()
            return tensor, None
        return tensor, lambda: staging.take([tensor], work.wait)


class _Awaited:
    """A gloo send, which completes only when something waits for it."""

    def __init__(self, work: Any) -> None:
        """Wait on a thread."""
        self._thread = threading.Thread(target=work.wait, name="stageline payload", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        """Whether it is complete, as for an NCCL send."""
        return not self._thread.is_alive()
