"""What every transport must do: one suite for all of them. Run `exercise` on both of two ranks at the same time."""

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
"""How many messages go over the channel with a rank, by traffic."""

Begin = Callable[[Counts, Counts], None]
"""Called before a round with the messages that will come, and those that will go."""

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
"""All that a message may hold: shapes and types that change from one to the next, layouts, nothing, and much."""


def exercise(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    """Run one rank's side of the suite between ranks 0 and 1; raises AssertionError where the transport falls short.

    `begin` is called before a round with the number of messages each channel will bring and carry, `finish` after it.
    After the last round the transport is not used again: one of its ranks has failed.

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
        _refuses_what_was_not_announced,
        _waits_no_longer_than_its_deadline,
        _does_not_wait_for_the_receiver,
        _takes_much_both_ways_at_once,
        _wakes_who_waits_for_a_rank_that_fails,
    ):
        check(transport, begin, finish)


def _header(transport: Transport, traffic: Traffic, microbatch: int, step: int, sending: bool) -> Header:
    me, other = transport.rank, 1 - transport.rank
    source, target = (me, other) if sending else (other, me)
    return Header(source, target, traffic, stage=source, microbatch=microbatch, step=step)


def _keeps_order_and_content(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    counts: Counts = {(1 - transport.rank, "forward"): len(PAYLOADS)}
    begin(counts, counts)
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
        if torch.empty_like(mine).stride() == mine.stride():  # without gaps: kernels choose by the layout
            assert theirs.stride() == mine.stride()
    else:
        assert type(mine) is type(theirs)
        assert repr(mine) == repr(theirs)


def _keeps_traffic_apart(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    """Backward messages can be taken before forward ones that were sent earlier."""
    counts: Counts = {(1 - transport.rank, "forward"): 2, (1 - transport.rank, "backward"): 2}
    begin(counts, counts)
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
    """Another sender, stage, microbatch or step than expected: each is refused, and the next message is not harmed."""
    wrong = {"source": 7, "stage": 8, "microbatch": 9, "step": 10}
    counts: Counts = {(1 - transport.rank, "forward"): len(wrong) + 1}
    begin(counts, counts)
    honest = _header(transport, "forward", 3, 2, True)
    for field, value in wrong.items():
        transport.send(Message(replace(honest, **{field: value}), [1], "", [False]))  # type: ignore[arg-type]
    transport.send(Message(honest, [1], "", [False]))
    expected = _header(transport, "forward", 3, 2, False)
    for field, value in wrong.items():
        said = _refused(transport, expected, f"a message with another {field} than expected was taken")
        assert str(expected) in said, said
        assert str(replace(expected, **{field: value})) in said, said  # type: ignore[arg-type]
    _assert_same(1, transport.receive(expected, 30.0).leaves[0])
    finish()


def _refuses_what_was_not_announced(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    """A message whose tensors are of another type or shape than it says."""
    counts: Counts = {(1 - transport.rank, "backward"): 3}
    begin(counts, counts)
    announced = torch.ones(2, 3)
    others = [announced.to(torch.int32), announced.reshape(3, 2), announced]
    for number, leaf in enumerate(others):
        header = _header(transport, "backward", number, 2, True)
        transport.send(Message(header, [leaf], "", [True], kinds_of([announced])))
    for number, found in enumerate(["int32 of shape (2, 3)", "float32 of shape (3, 2)"]):
        header = _header(transport, "backward", number, 2, False)
        said = _refused(transport, header, "a tensor that is not what was announced was taken")
        assert "float32 of shape (2, 3)" in said, said
        assert found in said, said
    _assert_same(announced, transport.receive(_header(transport, "backward", 2, 2, False), 30.0).leaves[0])
    finish()


def _refused(transport: Transport, header: Header, otherwise: str) -> str:
    try:
        transport.receive(header, 30.0)
    except TransportError as error:
        return str(error)
    raise AssertionError(otherwise)


def _waits_no_longer_than_its_deadline(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
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
    # The other may still wait; what comes next must not be taken for what it waits for.
    transport.send(Message(_header(transport, "forward", 0, 3, True), ["waited"], "", [False]))
    transport.receive(_header(transport, "forward", 0, 3, False), 30.0)
    finish()


def _does_not_wait_for_the_receiver(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    """Rank 1 takes what rank 0 sends first only after what it sends last."""
    counts: Counts = {(1 - transport.rank, "forward"): 4, (1 - transport.rank, "backward"): 1}
    begin(*((counts, {}) if transport.rank else ({}, counts)))
    if transport.rank == 0:
        for number in range(4):
            transport.send(Message(_header(transport, "forward", number, 4, True), [_MUCH + number], "", [True]))
        transport.send(Message(_header(transport, "backward", 0, 4, True), ["last"], "", [False]))
    else:
        assert list(transport.receive(_header(transport, "backward", 0, 4, False), 30.0).leaves) == ["last"]
        for number in range(4):
            found = transport.receive(_header(transport, "forward", number, 4, False), 30.0)
            _assert_same(_MUCH + number, found.leaves[0])
    finish()


def _takes_much_both_ways_at_once(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
    """More than any buffer on the way holds, sent by both before either takes any."""
    ways: list[Traffic] = ["forward", "backward"]
    counts: Counts = {(1 - transport.rank, traffic): 3 for traffic in ways}
    begin(counts, counts)
    for number in range(3):
        for traffic in ways:
            transport.send(Message(_header(transport, traffic, number, 5, True), [_MUCH * number], "", [True]))
    for number in range(3):
        for traffic in ways:
            found = transport.receive(_header(transport, traffic, number, 5, False), 30.0)
            _assert_same(_MUCH * number, found.leaves[0])
    finish()


def _wakes_who_waits_for_a_rank_that_fails(transport: Transport, begin: Begin, finish: Callable[[], None]) -> None:
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
    finish()


_MUCH = torch.arange(1 << 20, dtype=torch.float32)


class FaultyTransport:
    """A transport that fails on purpose, for tests: it spoils chosen messages as they are sent.

    It drops, repeats or delays them, relabels their headers (a field of the wrong type makes one that cannot be read),
    or replaces what they hold by something that was not announced: another type, another shape.

    >>> import torch
    >>> from stageline.transport.threads import ThreadHub
    >>> hub, header = ThreadHub(ranks=2), Header(0, 1, "forward", 0, 0, 0)
    >>> faulty = FaultyTransport(hub.end(0), replaced=lambda message: [torch.zeros(3, dtype=torch.int32)])
    >>> faulty.send(Message(header, [torch.zeros(3)], "", [True]))
    >>> hub.end(1).receive(header, deadline=1.0)
    Traceback (most recent call last):
        ...
    stageline.common.errors.TransportError: rank 1 expected the output of stage 0, microbatch 0, step 0, of rank 0
    as [float32 of shape (3,)], and got [int32 of shape (3,)]
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
        """Each fault is told by the message's header; `replaced` by the whole message."""
        self.inner = inner
        self.rank, self.ranks, self.arrived = inner.rank, inner.ranks, 0.0
        self._drop, self._repeat, self._delay = drop, repeat, delay
        self._relabel, self._replaced = relabel, replaced

    def send(self, message: Message) -> None:
        """Send it, or do something worse."""
        if self._drop(message.header):
            return
        time.sleep(self._delay(message.header))
        kinds = message.kinds or kinds_of(message.leaves)
        spoiled = replace(message, header=self._relabel(message.header), leaves=self._replaced(message), kinds=kinds)
        for _ in range(2 if self._repeat(message.header) else 1):
            self.inner.send(spoiled)

    def receive(self, header: Header, deadline: float) -> Message:
        """Receive faithfully."""
        message = self.inner.receive(header, deadline)
        self.arrived = self.inner.arrived
        return message

    def fail(self, error: BaseException, where: str) -> None:
        """Fail faithfully."""
        self.inner.fail(error, where)

    def close(self) -> None:
        """Close faithfully."""
        self.inner.close()
