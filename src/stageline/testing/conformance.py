"""The conformance suite of transports, and a transport that injects faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stageline.common.errors import PeerFailed, TransportError
from stageline.tensors.pytree import Leaf
from stageline.transport.protocol import Header, Message, Traffic, Transport, kinds_of

Counts = Mapping[tuple[int, Traffic], int]
"""The number of messages by the rank at the other end, and by traffic."""

Begin = Callable[[Counts, Counts], None]
"""Called before a round with the number of messages to receive, and to send."""

PAYLOADS: list[list[Leaf]] = [
    [torch.arange(6, dtype=torch.float32).reshape(2, 3)],
    [torch.arange(6, dtype=torch.float32).reshape(2, 3) + 1],
    [torch.ones(3, 1, 2, dtype=torch.bfloat16), torch.tensor(7), None, "text é", 3, 2.5, True],
    [torch.zeros(0, 4), torch.tensor([True, False]), torch.tensor([1 + 2j])],
    [],
    [None],
    [torch.arange(10).to(torch.int16)[::2], float("inf"), -0.0],
    ["x" * 20_000, torch.ones(5)],
    [torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    [torch.ones(1).expand(4, 3), torch.arange(12.0).reshape(3, 4)[:, 1:3], torch.tensor([1 + 2j]).conj()],
    [torch.ones(100_000, dtype=torch.float64)],
    [torch.ones(100_000, dtype=torch.float64) * 2],
]
"""Everything a message may hold: changing shapes and types, layouts, no tensors, and large ones."""


def exercise(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    """Run one rank's side of the suite between ranks 0 and 1; raise AssertionError if the transport does not conform.

    Run it on both ranks at the same time. `begin` is called before each round with the number of messages that each
    channel will receive and send, and `finish` after it. The transport cannot be used after the last round, in which
    one of its ranks fails.

    >>> import threading
    >>> from stageline.transport.threads import ThreadHub
    >>> hub, passed = ThreadHub(ranks=2), []
    >>> def side(rank):
    ...     exercise(hub.end(rank), lambda expected, owed: None, lambda: None)
    ...     passed.append(rank)
    >>> threads = [threading.Thread(target=side, args=(rank,)) for rank in range(2)]
    >>> for thread in threads: thread.start()
    >>> for thread in threads: thread.join()
    >>> sorted(passed)
    [0, 1]
    """
    for check in (
        _keeps_order_and_content,
        _keeps_traffic_apart,
        _refuses_the_wrong_header,
        _refuses_tensors_that_were_not_announced,
        _respects_the_deadline,
        _does_not_wait_for_the_receiver,
        _carries_large_messages_both_ways,
        _wakes_a_rank_that_waits_for_a_failed_one,
    ):
        check(transport, begin)
        finish()


def _header(transport: Transport, traffic: Traffic, microbatch: int, step: int, sending: bool) -> Header:
    me, other = transport.rank, 1 - transport.rank
    source, target = (me, other) if sending else (other, me)
    return Header(source, target, traffic, stage=source, microbatch=microbatch, step=step)


def _keeps_order_and_content(transport: Transport, begin: Begin) -> None:
    counts: Counts = {(1 - transport.rank, "forward"): len(PAYLOADS)}
    begin(counts, counts)
    for number, leaves in enumerate(PAYLOADS):
        wants = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        transport.send(Message(_header(transport, "forward", number, 0, True), leaves, f"tree {number}", wants))
    for number, leaves in enumerate(PAYLOADS):
        message = transport.receive(_header(transport, "forward", number, 0, False), 30.0)
        assert message.tree == f"tree {number}"
        assert len(message.leaves) == len(leaves)
        for mine, theirs in zip(leaves, message.leaves, strict=True):
            _assert_same(mine, theirs)
        assert list(message.wants_gradient) == [
            isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves
        ]


def _assert_same(mine: Any, theirs: Any) -> None:
    if isinstance(mine, Tensor):
        assert isinstance(theirs, Tensor)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)
        if torch.empty_like(mine).stride() == mine.stride():  # without gaps: kernels choose by the layout
            assert theirs.stride() == mine.stride()
    else:
        assert type(mine) is type(theirs)
        assert repr(mine) == repr(theirs)


def _keeps_traffic_apart(transport: Transport, begin: Begin) -> None:
    """Backward messages can be received before forward ones that were sent earlier."""
    counts: Counts = {(1 - transport.rank, "forward"): 2, (1 - transport.rank, "backward"): 2}
    begin(counts, counts)
    ways: list[Traffic] = ["forward", "backward"]
    for traffic in ways:
        for number in range(2):
            header = _header(transport, traffic, number, 1, True)
            transport.send(Message(header, [torch.full((2,), float(number)), traffic], "", [True, False]))
    for traffic in reversed(ways):
        for number in range(2):
            message = transport.receive(_header(transport, traffic, number, 1, False), 30.0)
            _assert_same(torch.full((2,), float(number)), message.leaves[0])
            assert message.leaves[1] == traffic


def _refuses_the_wrong_header(transport: Transport, begin: Begin) -> None:
    """An unexpected sender, stage, microbatch or step is refused, and the next message arrives."""
    wrong = {"source": 7, "stage": 8, "microbatch": 9, "step": 10}
    counts: Counts = {(1 - transport.rank, "forward"): len(wrong) + 1}
    begin(counts, counts)
    honest = _header(transport, "forward", 3, 2, True)
    for field, value in wrong.items():
        transport.send(Message(replace(honest, **{field: value}), [1], "", [False]))  # type: ignore[arg-type]
    transport.send(Message(honest, [1], "", [False]))
    expected = _header(transport, "forward", 3, 2, False)
    for field, value in wrong.items():
        error = _refused(transport, expected, f"a message with an unexpected {field} was accepted")
        assert str(expected) in error, error
        assert str(replace(expected, **{field: value})) in error, error  # type: ignore[arg-type]
    _assert_same(1, transport.receive(expected, 30.0).leaves[0])


def _refuses_tensors_that_were_not_announced(transport: Transport, begin: Begin) -> None:
    """A message whose tensors do not have the announced type or shape."""
    counts: Counts = {(1 - transport.rank, "backward"): 3}
    begin(counts, counts)
    announced = torch.ones(2, 3)
    others = [announced.to(torch.int32), announced.reshape(3, 2), announced]
    for number, leaf in enumerate(others):
        header = _header(transport, "backward", number, 2, True)
        transport.send(Message(header, [leaf], "", [True], kinds_of([announced])))
    for number, actual in enumerate(["int32 of shape (2, 3)", "float32 of shape (3, 2)"]):
        header = _header(transport, "backward", number, 2, False)
        error = _refused(transport, header, "a tensor that differs from its announcement was accepted")
        assert "float32 of shape (2, 3)" in error, error
        assert actual in error, error
    _assert_same(announced, transport.receive(_header(transport, "backward", 2, 2, False), 30.0).leaves[0])


def _refused(transport: Transport, header: Header, otherwise: str) -> str:
    try:
        transport.receive(header, 30.0)
    except TransportError as error:
        return str(error)
    raise AssertionError(otherwise)


def _respects_the_deadline(transport: Transport, begin: Begin) -> None:
    counts: Counts = {(1 - transport.rank, "forward"): 1}
    begin(counts, counts)
    began = time.monotonic()
    try:
        transport.receive(_header(transport, "backward", 0, 3, False), 0.2)
    except TransportError as error:
        assert f"of rank {1 - transport.rank}" in str(error)
        assert time.monotonic() - began < 20
    else:
        raise AssertionError("a message that nobody sent was received")
    # The other rank may still wait; it must not mistake the next message for the one that it waits for.
    transport.send(Message(_header(transport, "forward", 0, 3, True), ["waited"], "", [False]))
    transport.receive(_header(transport, "forward", 0, 3, False), 30.0)


def _does_not_wait_for_the_receiver(transport: Transport, begin: Begin) -> None:
    """Rank 1 receives the last message of rank 0 before its first ones."""
    counts: Counts = {(1 - transport.rank, "forward"): 4, (1 - transport.rank, "backward"): 1}
    begin(*((counts, {}) if transport.rank else ({}, counts)))
    if transport.rank == 0:
        for number in range(4):
            transport.send(Message(_header(transport, "forward", number, 4, True), [_LARGE + number], "", [True]))
        transport.send(Message(_header(transport, "backward", 0, 4, True), ["last"], "", [False]))
    else:
        assert list(transport.receive(_header(transport, "backward", 0, 4, False), 30.0).leaves) == ["last"]
        for number in range(4):
            message = transport.receive(_header(transport, "forward", number, 4, False), 30.0)
            _assert_same(_LARGE + number, message.leaves[0])


def _carries_large_messages_both_ways(transport: Transport, begin: Begin) -> None:
    """Both ranks send more than any buffer holds before either receives."""
    ways: list[Traffic] = ["forward", "backward"]
    counts: Counts = {(1 - transport.rank, traffic): 3 for traffic in ways}
    begin(counts, counts)
    for number in range(3):
        for traffic in ways:
            transport.send(Message(_header(transport, traffic, number, 5, True), [_LARGE * number], "", [True]))
    for number in range(3):
        for traffic in ways:
            message = transport.receive(_header(transport, traffic, number, 5, False), 30.0)
            _assert_same(_LARGE * number, message.leaves[0])


def _wakes_a_rank_that_waits_for_a_failed_one(transport: Transport, begin: Begin) -> None:
    come: Counts = {(1, "forward"): 1} if transport.rank == 0 else {(0, "backward"): 2}
    go: Counts = {(1, "backward"): 2} if transport.rank == 0 else {(0, "forward"): 1}
    begin(come, go)
    if transport.rank == 0:
        transport.receive(_header(transport, "forward", 0, 6, False), 30.0)
        transport.fail(ArithmeticError("planted"), "rank 0 failed in a test")
    else:
        transport.send(Message(_header(transport, "forward", 0, 6, True), ["all else is done"], "", [False]))
        try:
            transport.receive(_header(transport, "backward", 0, 6, False), 30.0)
        except PeerFailed as error:
            assert error.origin == 0
            assert "rank 0 failed in a test: " in str(error)
            assert "planted" in str(error)
        else:
            raise AssertionError("a message of a rank that failed was received")


_LARGE = torch.arange(1 << 20, dtype=torch.float32)


class FaultyTransport:
    """A transport that corrupts chosen messages as it sends them.

    It drops, repeats or delays them, changes their headers (a field of the wrong type makes a header unreadable), or
    replaces their contents by tensors whose type or shape was not announced.

    >>> import torch
    >>> from stageline.transport.threads import ThreadHub
    >>> hub, header = ThreadHub(ranks=2), Header(0, 1, "forward", 0, 0, 0)
    >>> faulty = FaultyTransport(hub.end(0), replaced=lambda message: [torch.zeros(3, dtype=torch.int32)])
    >>> faulty.send(Message(header, [torch.zeros(3)], "", [True]))
    >>> hub.end(1).receive(header, deadline=1.0)
    Traceback (most recent call last):
        ...
    stageline.common.errors.TransportError: rank 1 expected the output of stage 0, microbatch 0, step 0, of rank 0
    as [float32 of shape (3,)], but got [int32 of shape (3,)]
    """

    def __init__(
        self,
        inner: Transport,
        *,
        drop: Callable[[Header], bool] = lambda header: False,
        repeat: Callable[[Header], bool] = lambda header: False,
        delay: Callable[[Header], float] = lambda header: 0.0,
        relabel: Callable[[Header], Header] = lambda header: header,
        replaced: Callable[[Message], Sequence[Leaf]] = lambda message: message.leaves,
    ) -> None:
        """Each function decides by the header of a message; `replaced` receives the whole message."""
        self.inner = inner
        self.rank, self.ranks, self.arrived = inner.rank, inner.ranks, 0.0
        self._drop, self._repeat, self._delay = drop, repeat, delay
        self._relabel, self._replaced = relabel, replaced

    def send(self, message: Message) -> None:
        """Send a message, with its faults."""
        if self._drop(message.header):
            return
        time.sleep(self._delay(message.header))
        kinds = message.kinds or kinds_of(message.leaves)
        corrupted = replace(message, header=self._relabel(message.header), leaves=self._replaced(message), kinds=kinds)
        for _ in range(2 if self._repeat(message.header) else 1):
            self.inner.send(corrupted)

    def receive(self, header: Header, deadline: float) -> Message:
        """Receive a message unchanged."""
        message = self.inner.receive(header, deadline)
        self.arrived = self.inner.arrived
        return message

    def fail(self, error: BaseException, where: str) -> None:
        """Report a failure to the other ranks."""
        self.inner.fail(error, where)

    def close(self) -> None:
        """Close the inner transport."""
        self.inner.close()
