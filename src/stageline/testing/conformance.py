"""What every transport must do: one suite for all of them. Run `exercise` on both of two ranks at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stageline.transport.protocol import Header, Leaf, Message, Traffic, Transport, TransportError

Begin = Callable[[Mapping[tuple[int, Traffic], int]], None]

PAYLOADS: list[list[Leaf]] = [
    [torch.arange(6, dtype=torch.float32).reshape(2, 3)],
    [torch.arange(6, dtype=torch.float32).reshape(2, 3) + 1],
    [torch.ones(3, 1, 2, dtype=torch.bfloat16), torch.tensor(7), None, "text é", 3, 2.5, True],
    [torch.zeros(0, 4), torch.tensor([True, False]), torch.tensor([1 + 2j])],
    [],
    [None],
    [torch.arange(10).to(torch.int16)[::2], float("inf"), -0.0],
    ["x" * 20_000, torch.ones(5)],
    [torch.ones(100_000, dtype=torch.float64)],
    [torch.ones(100_000, dtype=torch.float64) * 2],
]
"""All that a message may hold: shapes and types that change from one to the next, nothing, and much."""


def exercise(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    """Run one rank's side of the suite between ranks 0 and 1; raises AssertionError where the transport falls short.

    `begin` is called before a round with the number of messages each channel will bring, `finish` after it.
    """
    _keeps_order_and_content(transport, begin, finish)
    _keeps_traffic_apart(transport, begin, finish)
    _refuses_the_wrong_header(transport, begin, finish)
    _waits_no_longer_than_its_deadline(transport, begin, finish)


def _header(transport: Transport, traffic: Traffic, microbatch: int, step: int, sending: bool) -> Header:
    me, other = transport.rank, 1 - transport.rank
    source, target = (me, other) if sending else (other, me)
    return Header(source, target, traffic, stage=source, microbatch=microbatch, step=step)


def _keeps_order_and_content(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    begin({(1 - transport.rank, "forward"): len(PAYLOADS)})
    for number, leaves in enumerate(PAYLOADS):
        wants = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        transport.send(Message(_header(transport, "forward", number, 0, True), leaves, f"tree {number}", wants))
    for number, leaves in enumerate(PAYLOADS):
        found = transport.receive(_header(transport, "forward", number, 0, False), 30.0)
        assert found.tree == f"tree {number}"
        assert len(found.leaves) == len(leaves)
        for mine, theirs in zip(leaves, found.leaves, strict=True):
            _assert_same(mine, theirs)
        assert list(found.wants_gradient) == [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    finish()


def _assert_same(mine: Any, theirs: Any) -> None:
    if isinstance(mine, Tensor):
        assert isinstance(theirs, Tensor)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)
    else:
        assert type(mine) is type(theirs)
        assert repr(mine) == repr(theirs)


def _keeps_traffic_apart(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    """Backward messages can be taken before forward ones that were sent earlier."""
    begin({(1 - transport.rank, "forward"): 2, (1 - transport.rank, "backward"): 2})
    ways: list[Traffic] = ["forward", "backward"]
    for traffic in ways:
        for number in range(2):
            header = _header(transport, traffic, number, 1, True)
            transport.send(Message(header, [torch.full((2,), float(number)), traffic], "", [True, False]))
    for traffic in reversed(ways):
        for number in range(2):
            found = transport.receive(_header(transport, traffic, number, 1, False), 30.0)
            _assert_same(torch.full((2,), float(number)), found.leaves[0])
            assert found.leaves[1] == traffic
    finish()


def _refuses_the_wrong_header(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    begin({(1 - transport.rank, "forward"): 1})
    transport.send(Message(_header(transport, "forward", 3, 2, True), [1], "", [False]))
    try:
        transport.receive(_header(transport, "forward", 4, 2, False), 30.0)
    except TransportError as error:
        assert "microbatch 4" in str(error)
        assert "microbatch 3" in str(error)
    else:
        raise AssertionError("a message with another header than expected was taken")
    finish()


def _waits_no_longer_than_its_deadline(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    begin({})
    began = time.monotonic()
    try:
        transport.receive(_header(transport, "backward", 0, 3, False), 0.2)
    except TransportError as error:
        assert f"of rank {1 - transport.rank}" in str(error)
        assert time.monotonic() - began < 20
    else:
        raise AssertionError("a message that nobody sent was received")
    finish()


class FaultyTransport:
    """A transport that fails on purpose, for tests: it drops, delays or relabels chosen messages as they are sent."""

    def __init__(
        self,
        inner: Transport,
        *,
        drop: Callable[[Header], bool] = lambda header: False,
        delay: Callable[[Header], float] = lambda header: 0.0,
        relabel: Callable[[Header], Header] = lambda header: header,
    ) -> None:
        """Each fault is told by the message's header."""
        self.inner = inner
        self.rank, self.ranks = inner.rank, inner.ranks
        self._drop, self._delay, self._relabel = drop, delay, relabel

    def send(self, message: Message) -> None:
        """Send it, or do something worse."""
        if self._drop(message.header):
            return
        time.sleep(self._delay(message.header))
        header = self._relabel(message.header)
        self.inner.send(Message(header, message.leaves, message.tree, message.wants_gradient))

    def receive(self, header: Header, deadline: float) -> Message:
        """Receive faithfully."""
        return self.inner.receive(header, deadline)

    def fail(self, error: BaseException, where: str) -> None:
        """Fail faithfully."""
        self.inner.fail(error, where)

    def close(self) -> None:
        """Close faithfully."""
        self.inner.close()
