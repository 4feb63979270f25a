"""The transport protocol: ordered channels between ranks, a deadline for every wait, and a way to report failures."""

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
    """Identifies a message; checked on arrival, so that a mix-up is an error and never a wrong number."""

    source: int
    target: int
    traffic: Traffic
    stage: int
    microbatch: int
    step: int

    def __str__(self) -> str:
        """As errors name it."""
        what = "output" if self.traffic == "forward" else "gradient"
        return (
            f"the {what} of stage {self.stage}, microbatch {self.microbatch}, step {self.step}, of rank {self.source}"
        )


def kinds_of(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """The kinds of leaves, as a message announces them.

    >>> kinds_of([torch.zeros(2, 3), 1.5, None])
    ('float32 of shape (2, 3)', 'float', 'None')
    """
    return tuple([tensor_kind(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else _name(leaf) for leaf in leaves])


def _name(leaf: Leaf) -> str:
    return "None" if leaf is None else type(leaf).__name__


@lru_cache(maxsize=4096)
def tensor_kind(dtype: torch.dtype, shape: torch.Size) -> str:
    """The kind of a tensor, as a message announces it."""
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


@dataclass(frozen=True)
class Message:
    """A header, the leaves of a tree, its shape as text, and which of the tensors want a gradient back."""

    header: Header
    leaves: Sequence[Leaf]
    tree: str
    wants_gradient: Sequence[bool]
    kinds: Sequence[str] = ()
    """The announced kinds of its leaves (see `kinds_of`), checked on arrival; empty if not announced."""

    @property
    def announced(self) -> bool:
        """Whether the leaves are what was announced."""
        return not self.kinds or tuple(self.kinds) == kinds_of(self.leaves)


class Transport(Protocol):
    """One rank's end: messages leave and arrive in order on the channels between ranks."""

    rank: int
    ranks: int
    arrived: float
    """When the last received message arrived, by `time.perf_counter`."""

    def send(self, message: Message) -> None:
        """Send to the rank in the header; does not wait for the receiver."""

    def receive(self, header: Header, deadline: float) -> Message:
        """Wait for the next message of the header's channel, at most `deadline` seconds; it must have this header."""

    def fail(self, error: BaseException, where: str) -> None:
        """Report to all ranks that this one failed, so that none waits for it."""

    def close(self) -> None:
        """Close connections and end threads."""


def check_message(message: Message, expected: Header) -> None:
    """Refuse a message that is not the expected one of its channel, or does not hold what it announces."""
    if message.header != expected:
        raise TransportError(f"rank {expected.target} expected {expected}, and got {message.header}")
    if not message.announced:
        raise TransportError(
            f"rank {expected.target} expected {expected} as {_listed(message.kinds)}, and got "
            f"{_listed(kinds_of(message.leaves))}"
        )


def _listed(kinds: Sequence[str]) -> str:
    return f"[{', '.join(kinds)}]" if len(kinds) < 9 else f"[{', '.join(kinds[:8])}, … {len(kinds)} in all]"
