"""The NCCL communicators of a process: made ahead of the first step, aborted when a rank is lost, closed at exit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from stageline.common.errors import TransportError
from stageline.distributed._torch_private import default_store
from stageline.distributed.process_exit import leave_stuck, shut_down_at_exit
from stageline.transport.gpu import nccl
from stageline.transport.gpu.payloads import ChannelEnds, Payloads

CLOSING = 3.0
"""Seconds in which communicators are closed at exit; those that take longer end with the process."""

MONITORING = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
"""torch's own monitor of NCCL groups, which warns on every rank that ends after the one that keeps the store."""


class Communicators:
    """Those of one process, for the channels of all its pipelines and for its replica groups."""

    def __init__(self, prefix: str) -> None:
        """`prefix` is a part of the store that no other set of communicators uses."""
        self.payloads = Payloads()
        self._prefix = f"{prefix}/nccl"
        self._of_replicas: dict[tuple[int, ...], nccl.Communicator] = {}
        self._open: list[nccl.Communicator] = []
        shut_down_at_exit(self.close)

    def join(
        self, process: int, channels: Iterable[ChannelEnds], replicas: Sequence[int], device: torch.device
    ) -> None:
        """Make the communicators that are missing for this process's channels and its replica group, all at once."""
        members: dict[Any, tuple[int, ...]] = {
            channel: channel[:2] for channel in self.payloads.missing(channels) if process in channel[:2]
        }
        if len(replicas) > 1 and tuple(replicas) not in self._of_replicas:
            members["replicas", *replicas] = tuple(replicas)
        joined = nccl.connect(self._seats(process, members), device)
        self._open += joined.values()
        pairs = {name: communicator for name, communicator in joined.items() if name[0] != "replicas"}
        nccl.open_channels(list(pairs.values()))
        self.payloads.update(pairs)
        self._of_replicas.update({name[1:]: joined[name] for name in joined if name not in pairs})

    def _seats(self, process: int, members: dict[Any, tuple[int, ...]]) -> dict[Any, nccl.Seat]:
        """The first member of each communicator makes its id, and passes it on through the store."""
        store = default_store()
        keys = {name: f"{self._prefix}/{'-'.join(map(str, name))}" for name in members}
        for name, processes in members.items():
            if processes[0] == process:
                store.set(keys[name], nccl.new_id())
        return {
            name: nccl.Seat(store.get(keys[name]).decode(), len(processes), processes.index(process))
            for name, processes in members.items()
        }

    def of_replicas(self, processes: Sequence[int]) -> nccl.Communicator | None:
        """The communicator of a replica group; None if there is none."""
        return self._of_replicas.get(tuple(processes))

    def abort(self) -> None:
        """End everything that waits for a lost rank, on the GPU and on the host; does not wait for that."""
        ending, self._open = self._open, []
        for communicator in ending:  # each on a thread: one that hangs must not keep the others from ending
            thread = threading.Thread(target=_end, args=(communicator.abort,), name="stageline abort", daemon=True)
            leave_stuck(thread)
            thread.start()

    def close(self) -> None:
        """Close them at the same time, since each takes NCCL half a second; all processes do so at exit."""
        ending, self._open = self._open, []
        threads = {
            communicator: threading.Thread(target=_end, args=(communicator.close,), name="stageline close", daemon=True)
            for communicator in ending
        }
        for thread in threads.values():
            thread.start()
        end = time.monotonic() + CLOSING
        for thread in threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        for thread in threads.values():
            if thread.is_alive():
                leave_stuck(thread)


def _end(end: Any) -> None:
    with suppress(TransportError):  # it is gone either way
        end()


@contextmanager
def quiet_groups() -> Iterator[None]:
    """Let torch make NCCL groups without a monitor of its own, unless the user has set that."""
    added = [name for name in MONITORING if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "0"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
