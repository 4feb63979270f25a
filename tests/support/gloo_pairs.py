"""Communicators of two processes over gloo, in place of NCCL: the transport cannot tell them apart."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline.transport.gpu.payloads import Payloads
from stageline.transport.wire import TRAFFIC


class GlooPair:
    """Sends and receives on the host, through a group that no other channel of its pair of ranks uses."""

    device = torch.device("cpu")

    def __init__(self, group: Any, source: int, target: int) -> None:
        self.group, self.source, self.target = group, source, target

    def send(self, piece: Tensor, peer: int) -> Any:
        assert peer == 1
        return _Awaited(dist.isend(piece, group_dst=self.target, group=self.group))

    def receive(self, room: Tensor, peer: int) -> None:
        assert peer == 0
        work = dist.irecv(room, group_src=self.source, group=self.group)
        assert work is not None
        work.wait()


class _Awaited:
    """A gloo send, which completes only when something waits for it."""

    def __init__(self, work: Any) -> None:
        self._thread = threading.Thread(target=work.wait, name="stageline payload", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


def gloo_payloads() -> Payloads:
    """Payloads for tensors of the host, between all processes of the default group, which call this together."""
    payloads, ranks = Payloads(), range(dist.get_world_size())
    for traffic in TRAFFIC:
        for up in (True, False):
            group = dist.new_group(backend="gloo")
            ends = [(source, target) for source in ranks for target in ranks if source != target]
            payloads.update(
                {
                    (source, target, traffic): GlooPair(group, source, target)
                    for source, target in ends
                    if (source < target) is up
                }
            )
    return payloads
