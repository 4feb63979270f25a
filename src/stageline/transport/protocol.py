"""What a transport is: ordered channels between ranks, every wait with a deadline, and a way to tell of a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from stageline.common.errors import TransportError
from stageline.tensors.pytree import Leaf

Traffic: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True)
class Header:
    """What a message is: checked on arrival, so that a mix-up is an error and never a wrong number."""

    source: int
    target: int
    traffic: Traffic
    stage: int
    microbatch: int
    step: int

    def __str__(self) -> str:
        """Say it as an error would."""
        what = "output" if self.traffic == "forward" else "gradient"
        return (
            f"the {what} of stage {self.stage}, microbatch {self.microbatch}, step {self.step}, of rank {self.source}"
        )


def kind_of(leaf: Leaf) -> str:
    """What a leaf is, as a message announces it.

    >>> import torch
    >>> kind_of(torch.zeros(2, 3)), kind_of(1.5), kind_of(None)
    ('float32 of shape (2, 3)', 'float', 'None')
    """
    if isinstance(leaf, Tensor):
        return _kind(leaf.dtype, leaf.shape)
    return "None" if leaf is None else type(leaf).__name__


@lru_cache(maxsize=4096)
def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


@dataclass(frozen=True)
class Message:
    """A header, the leaves of a tree, its shape as text, and which of the tensors want a gradient back.

    `kinds` is what the leaves were when the message was made; it is compared with them on arrival.
    """

    header: Header
    leaves: Sequence[Leaf]
    tree: str
    wants_gradient: Sequence[bool]
    kinds: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Note what the leaves are, unless it was noted when they were sent."""
        if not self.kinds:
            object.__setattr__(self, "kinds", tuple(kind_of(leaf) for leaf in self.leaves))

    @property
    def announced(self) -> bool:
        """Whether the leaves are what was announced."""
        return list(self.kinds) == [kind_of(leaf) for leaf in self.leaves]


class Transport(Protocol):
    """One rank's end: messages leave and arrive in order on the channels between ranks."""

    rank: int
    ranks: int
    arrived: float
    """When the message that was received last had come, by `time.perf_counter`."""

    def send(self, message: Message) -> None:
        """Send to the rank that the header names; does not wait for the receiver."""

    def receive(self, header: Header, deadline: float) -> Message:
        """Wait for the next message of the header's channel, at most `deadline` seconds; it must bear this header."""

    def fail(self, error: BaseException, where: str) -> None:
        """Tell all ranks that this one failed, so that none waits for it."""

    def close(self) -> None:
        """Leave nothing behind."""


def check_message(found: Message, expected: Header) -> None:
    """Refuse a message that is not the one expected on its channel, or does not hold what it announces."""
    if found.header != expected:
        raise TransportError(f"rank {expected.target} expected {expected}, and got {found.header}")
    if not found.announced:
        raise TransportError(
            f"rank {expected.target} expected {expected} as {_listed(found.kinds)}, and got "
            f"{_listed([kind_of(leaf) for leaf in found.leaves])}"
        )


def _listed(kinds: Sequence[str]) -> str:
    return f"[{', '.join(kinds)}]" if len(kinds) < 9 else f"[{', '.join(kinds[:8])}, … {len(kinds)} in all]"
