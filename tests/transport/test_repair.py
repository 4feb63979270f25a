"""Connections that break are opened again, and what was lost is sent again: a pipeline computes the same bits."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.common.errors import TransportError
from stageline.testing import assert_same_bits, one_process_step, run_ranks
from stageline.transport.protocol import Header, Message
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.outbox import COPIED, Sent
from stageline.transport.tcp.transport import LARGE, SocketTransport
from stageline.transport.wire import memory_of
from support.gradients import gradients
from support.relay import RelayedConnections

TOKEN = "0" * 32


@pytest.fixture
def relays() -> Iterator[RelayedConnections]:
    with RelayedConnections() as relays:
        yield relays


@pytest.fixture
def links(relays: RelayedConnections) -> Iterator[tuple[Links, Links]]:
    ends = Links(0, 2), Links(1, 2)
    for end in ends:
        end.meet([peer.address for peer in ends], TOKEN)
    yield ends
    for end in ends:
        end.close()


class Disturber:
    """Resets all connections again and again, each time at a random moment after some progress was made."""

    def __init__(self, relays: RelayedConnections, seed: int) -> None:
        self.progress = self.resets = 0
        self._relays, self._chance, self._over = relays, random.Random(seed), False
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        before = self.progress
        while not self._over:
            time.sleep(0.02 * self._chance.random())
            if self.progress != before:
                before = self.progress
                self.resets += self._relays.reset()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._thread.join()


def header(source: int, number: int) -> Header:
    return Header(source, 1 - source, "forward", 0, number, 0)


def contents(step: int, number: int, size: int) -> Tensor:
    return torch.full((size,), float(100 * step + number))


SIZES = [3, 5, COPIED // 2, LARGE // 3, 3, LARGE // 2, 1, 2]


def test_all_messages_arrive_once_and_in_order_whenever_connections_are_reset(
    links: tuple[Links, Links], relays: RelayedConnections
) -> None:
    """Small messages, of which copies are kept, and large ones; while both ends send, wait or do neither."""
    ends = [SocketTransport(end) for end in links]
    disturber = Disturber(relays, seed=0)

    def work(rank: int) -> None:
        transport, channel = ends[rank], (1 - rank, "forward")
        for step in range(12):
            transport.begin({channel: len(SIZES)}, {channel: len(SIZES)})  # type: ignore[dict-item]
            for number, size in enumerate(SIZES):
                transport.send(Message(header(rank, number), [contents(step, number, size)], "*", [True]))
            for number, size in enumerate(SIZES):
                message = transport.receive(header(1 - rank, number), 60.0)
                if not torch.equal(torch.as_tensor(message.leaves[0]), contents(step, number, size)):
                    failures.append(f"step {step}, message {number} of {1 - rank}")
                disturber.progress += 1
            transport.finish(60.0)

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(repr(error))

    failures: list[str] = []
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    with disturber:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200.0)
    assert not failures
    assert disturber.resets > 4, "nothing was disturbed"


def test_a_receiver_that_alone_knows_of_a_broken_connection_calls_its_sender(links: tuple[Links, Links]) -> None:
    """As when a firewall forgets a connection: one end is told, and the other has nothing more to send."""
    sender, receiver = (SocketTransport(end) for end in links)
    sender.begin({}, {(1, "forward"): 2})
    receiver.begin({(0, "forward"): 2}, {})
    sender.send(Message(header(0, 0), [torch.ones(3)], "*", [True]))
    receiver.receive(header(0, 0), 60.0)
    old = links[1].inbound(0, "forward").link
    assert old is not None
    fresh = old.dup()  # keeps the connection open, so that the sender is told nothing
    old.close()
    links[1].inbound(0, "forward").link = None
    links[1].inbound(0, "forward").broken = "planted"
    sender.send(Message(header(0, 1), [torch.zeros(3)], "*", [True]))
    assert torch.as_tensor(receiver.receive(header(0, 1), 60.0).leaves[0]).tolist() == [0.0] * 3
    fresh.close()


def test_a_message_whose_tensor_changed_is_not_sent_again() -> None:
    tensor = torch.zeros(COPIED)
    sent = Sent([memory_of(tensor)], None, [(tensor, tensor._version, tensor.data_ptr())], 4 * COPIED)
    assert bytes(sent.copied().pieces[0]) == bytes(4 * COPIED)
    tensor.add_(1)
    with pytest.raises(TransportError, match="changed in place after it was sent"):
        sent.copied()


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.rand(64, 64, generator=generator), torch.rand(64, 64, generator=generator)


STEPS = 8


def disturbed(rank: int) -> tuple[list[float], int]:
    """Train while all connections of links and of the control channel are reset every now and then."""
    with RelayedConnections() as relays:
        modules = layers()
        plain: Any = copy.deepcopy(nn.Sequential(*modules))
        pipe = sl.Pipeline(modules, loss_fn=functional.mse_loss, schedule="1f1b", microbatches=8, deadline=100)
        losses, disturber = [], Disturber(relays, rank)
        with disturber:
            for batch in batches():
                losses.append(float(pipe.step(*batch).loss))
                disturber.progress += 1
        for batch in batches():
            one_process_step(plain, functional.mse_loss, *batch, microbatches=8)
        assert_same_bits(gradients(nn.Sequential(*modules)[rank]), gradients(plain[rank]))
        pipe.evaluate(*batch)  # the ranks end together: nobody leaves while another one repairs
        return losses, disturber.resets


def test_a_pipeline_whose_connections_are_reset_computes_the_same_bits() -> None:
    results = run_ranks(disturbed, 3, timeout=200.0)
    assert all(losses == results[0][0] for losses, _ in results)
    assert sum(resets for _, resets in results) > 10, "nothing was disturbed"
