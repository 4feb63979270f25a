"""Tensors that go from one CUDA stream or GPU to another: the reader waits for the writer, the host for neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stageline.tensors.pytree import Leaf


def written(leaves: Sequence[Leaf]) -> Any:
    """An event after which this rank's stream has written the leaves; None if there is nothing to wait for."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(leaf.device))
            return event
    return None


def read(leaves: Sequence[Leaf], event: Any) -> list[Leaf]:
    """Let this rank's stream wait for the event, and bring the leaves to its GPU."""
    if event is None:
        return list(leaves)
    here = torch.cuda.current_device()
    mine = torch.cuda.current_stream(here)
    mine.wait_event(event)
    here_leaves: list[Leaf] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            theirs = torch.cuda.current_stream(leaf.device)
            if leaf.device.index != here:  # a copy between GPUs runs in both their streams
                theirs.wait_event(event)
            leaf.record_stream(theirs)  # its memory is not reused before this rank has read it
            here_leaves.append(leaf if leaf.device.index == here else leaf.to(f"cuda:{here}", non_blocking=True))
        else:
            here_leaves.append(leaf)
    return here_leaves
