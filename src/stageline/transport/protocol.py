"""What a transport is: ordered channels between ranks, every wait with a deadline, and a way to tell of a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from stageline.errors import StagelineError

Traffic: TypeAlias = Literal["forward", "backward"]
Leaf: TypeAlias = Tensor | int | float | str | bool | None
"""What a message may hold; trees are flattened before they are sent."""


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


@dataclass(frozen=True)
class Message:
    """A header, the leaves of a tree, its shape as text, and which of the tensors want a gradient back."""

    header: Header
    leaves: Sequence[Leaf]
    tree: str
    wants_gradient: Sequence[bool]


class TransportError(StagelineError, RuntimeError):
    """A message that did not come, came to the wrong place, or is not what was expected."""


class PeerFailed(TransportError):
    """Another rank failed; `origin` is the rank, and the message says where."""

    def __init__(self, message: str, origin: int) -> None:
        """Keep the rank that failed first."""
        super().__init__(message)
        self.origin = origin


class Transport(Protocol):
    """One rank's end: messages leave and arrive in order on the channels between ranks."""

    rank: int
    ranks: int

    def send(self, message: Message) -> None:
        """Send to the rank that the header names; does not wait for the receiver."""

    def receive(self, header: Header, deadline: float) -> Message:
        """Wait for the next message of the header's channel, at most `deadline` seconds; it must bear this header."""

    def fail(self, error: BaseException, where: str) -> None:
        """Tell all ranks that this one failed, so that none waits for it."""

    def close(self) -> None:
        """Leave nothing behind."""


def check_header(found: Header, expected: Header) -> None:
    """Refuse a message that is not the one expected on its channel."""
    if found != expected:
        raise TransportError(f"rank {expected.target} expected {expected}, and got {found}")
