"""The transport protocol: ordered channels between ranks, a deadline for every wait, and a way to report failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stageline.common.errors import TransportError
from stageline.tensors.pytree import Leaf
from stageline.transport.clock_alignment import Alignment

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


class RowExchange(Protocol):
    """Shares rows of numbers between some processes: each sends one, and all get all of them.

    While a call waits, it calls `check` now and then, which may raise.
    """

    def gather(self, row: NDArray[np.float64], check: Callable[[], None]) -> NDArray[np.float64]:
        """The rows of all ranks, in order."""

    def align(self, check: Callable[[], None]) -> Alignment:
        """The offsets between the clocks of the ranks."""


class ProcessTransport(Transport, Protocol):
    """The transport of a rank that is a process: it also counts the messages of a step, and can be interrupted."""

    patience: Callable[[int], bool]
    """Called when a deadline has passed: whether to keep waiting for that rank."""

    def begin(
        self,
        expected: Mapping[tuple[int, Traffic], int],
        owed: Mapping[tuple[int, Traffic], int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Begin a step in which each channel brings (`expected`) or takes (`owed`) so many messages."""

    def finish(self, deadline: float) -> None:
        """Wait until everything is sent and received."""

    def interrupt(self, culprit: int, text: str, *, final: bool = False) -> None:
        """Wake this rank if it waits for a message, since another one failed. May be called from any thread."""

    def exchange(self, ranks: Sequence[int]) -> RowExchange:
        """An exchange of rows between some of the ranks, this one among them; all of them create it."""

    def close(self, patience: float = 0.1) -> None:
        """Close connections, and wait at most `patience` seconds for the threads to end."""


def check_message(message: Message, expected: Header) -> None:
    """Refuse a message that is not the expected one of its channel, or does not hold what it announces."""
    if message.header != expected:
        raise TransportError(f"rank {expected.target} expected {expected}, but got {message.header}")
    if not message.announced:
        raise TransportError(
            f"rank {expected.target} expected {expected} as {_listed(message.kinds)}, but got "
            f"{_listed(kinds_of(message.leaves))}"
        )


def _listed(kinds: Sequence[str]) -> str:
    return f"[{', '.join(kinds)}]" if len(kinds) < 9 else f"[{', '.join(kinds[:8])}, … {len(kinds)} in all]"
