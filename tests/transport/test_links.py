"""The connections between processes: who may connect, what wakes a wait, and messages that come in any pieces."""

from __future__ import annotations

import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from stageline.common.errors import PeerFailed, TransportError
from stageline.common.trust import proof
from stageline.distributed.bootstrap import own_host
from stageline.transport.protocol import Header, Message
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.transport import LARGE, SocketTransport
from support.instances import examples

TOKEN = "0" * 32
Pair = tuple[SocketTransport, SocketTransport]


def connect() -> tuple[Links, Links]:
    ends = Links(0, 2), Links(1, 2)
    for end in ends:
        end.meet([peer.address for peer in ends], TOKEN)
    return ends


@pytest.fixture
def links() -> Iterator[tuple[Links, Links]]:
    ends = connect()
    yield ends
    for end in ends:
        end.close()


def header(number: int) -> Header:
    return Header(0, 1, "forward", 0, number, 0)


def message(number: int, size: int) -> Message:
    return Message(header(number), [torch.full((size,), float(number))], "*", [True])


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 1000, 1024, LARGE // 4 + 1, 3 * LARGE]), min_size=1, max_size=8),
    waits=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_messages_of_changing_sizes_arrive_whether_they_were_waited_for_or_not(
    sizes: list[int], waits: list[bool]
) -> None:
    """A rank that waits prepares for a message like the one before; the next may be larger, smaller or empty."""
    ends = connect()
    sender, receiver = SocketTransport(ends[0]), SocketTransport(ends[1])
    for _ in range(2):  # a channel that had large messages is read by a thread in the next step
        sender.begin({}, {(1, "forward"): len(sizes)})
        receiver.begin({(0, "forward"): len(sizes)}, {})
        for number, (size, wait) in enumerate(zip(sizes, waits, strict=False)):
            if wait:
                threading.Timer(0.005, sender.send, (message(number, size),)).start()
            else:
                sender.send(message(number, size))
            received_message = receiver.receive(header(number), 20.0)
            assert torch.equal(torch.as_tensor(received_message.leaves[0]), torch.full((size,), float(number)))
            assert received_message.header == header(number)
        sender.finish(20.0)
        receiver.finish(20.0)
    for end in ends:
        end.close()


def test_several_messages_at_once_are_taken_one_by_one_although_another_was_expected(
    links: tuple[Links, Links],
) -> None:
    """What was read beyond a message that is smaller than expected belongs to the next one."""
    sender, receiver = (SocketTransport(end) for end in links)
    sender.begin({}, {(1, "forward"): 4})
    receiver.begin({(0, "forward"): 4}, {})
    sender.send(message(0, 1000))
    receiver.receive(header(0), 20.0)

    def send_at_once() -> None:
        time.sleep(0.05)
        out = links[0].outbound(1, "forward")
        pieces: list[bytes] = []
        real, out.write = out.write, lambda some: pieces.extend(map(bytes, some)) or []  # type: ignore
        for number, size in ((1, 3), (2, 5), (3, 1000)):
            sender.send(message(number, size))
        real([memoryview(b"".join(pieces))])

    thread = threading.Thread(target=send_at_once)
    thread.start()
    for number, size in ((1, 3), (2, 5), (3, 1000)):
        received_message = receiver.receive(header(number), 20.0)
        assert torch.equal(torch.as_tensor(received_message.leaves[0]), torch.full((size,), float(number)))
    thread.join()


def call(links: Links) -> socket.socket:
    host, port, _ = links.address.split("|")
    return socket.create_connection((host, int(port)))


def hello(sender: int, links: Links, token: str = TOKEN, **other: Any) -> bytes:
    """The hello of a rank, with some fields replaced."""
    words = {"source": sender, "target": links.rank, "lane": 0, "address": links.address, "nonce": "a" * 32, **other}
    claim = proof(token, "sender", *(words[name] for name in ("source", "target", "lane", "address", "nonce")))
    return struct.pack("<8s32s64sii", b"stagelin", b"a" * 32, claim.encode(), sender, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"token": "1" * 32},
        {"sender": 7},
        {"source": 1},
        {"target": 0},
        {"lane": 1},
        {"address": "127.0.0.1|1|" + "0" * 32},
        {"nonce": "b" * 32},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_stranger_is_not_heard(links: tuple[Links, Links], other: dict[str, Any]) -> None:
    """A secret, rank, lane, listener or nonce that the proof does not cover; something else, or nothing at all."""
    strangers = [call(links[1]) for _ in range(4)]
    strangers[0].sendall(hello(**{"sender": 0, "links": links[1], **other}))
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
    strangers[2].close()
    sender, receiver = (SocketTransport(end) for end in links)
    sender.begin({}, {(1, "forward"): 1})
    receiver.begin({(0, "forward"): 1}, {})
    sender.send(message(0, 3))
    assert torch.as_tensor(receiver.receive(header(0), 20.0).leaves[0]).tolist() == [0.0] * 3
    for stranger in strangers:
        stranger.close()


def test_a_wait_ends_when_another_rank_fails_or_its_connection_does(links: tuple[Links, Links]) -> None:
    sender, receiver = (SocketTransport(end) for end in links)
    sender.begin({}, {(1, "forward"): 2})
    receiver.begin({(0, "forward"): 2}, {})
    sender.send(message(0, 3))
    receiver.receive(header(0), 20.0)
    threading.Timer(0.05, receiver.interrupt, (5, "rank 5 died")).start()
    with pytest.raises(PeerFailed, match="rank 5 died"):
        receiver.receive(header(1), 600.0)
    links[0].hang_up()
    with pytest.raises(TransportError, match=r"receiving from rank 0 failed: it closed the connection"):
        receiver.finish(600.0)


def test_a_receiver_that_takes_nothing_does_not_hold_up_others() -> None:
    """Data that the network does not accept waits only for its own receiver."""
    ends = [Links(rank, 3) for rank in range(3)]
    for end in ends:
        end.meet([peer.address for peer in ends], TOKEN)
    sender, second, third = (SocketTransport(end) for end in ends)
    sender.begin({}, {(1, "forward"): 1, (2, "forward"): 1})
    third.begin({(0, "forward"): 1}, {})
    large = torch.zeros(64 << 20, dtype=torch.uint8)
    sender.send(Message(header(0), [large], "*", [True]))
    assert sender.kept == 1
    large.fill_(9)  # the tensor changed after the send: it must have been copied
    to_third = Header(0, 2, "forward", 0, 0, 0)
    sender.send(Message(to_third, [torch.ones(3)], "*", [True]))
    assert torch.as_tensor(third.receive(to_third, 20.0).leaves[0]).tolist() == [1.0] * 3
    second.begin({(0, "forward"): 1}, {})
    received_tensor = torch.as_tensor(second.receive(header(0), 20.0).leaves[0])
    assert not received_tensor.any()
    for transport in (sender, second, third):
        transport.finish(20.0)
    assert sender.kept == 0
    for end in ends:
        end.close()


def test_the_address_of_this_machine_is_the_one_that_leads_to_rank_0() -> None:
    several = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert own_host(several, "") == "127.0.0.1"
    assert own_host({**several, "STAGELINE_HOST": "::1"}, "10.0.0.1") == "::1"
    assert own_host({**several, "MASTER_ADDR": "no such host"}, "") == "127.0.0.1"


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(TransportError, match=r"rank 0 cannot listen at 203\.0\.113\.7"):
        Links(0, 1, "203.0.113.7")


def test_a_sender_that_ends_late_does_no_harm(links: tuple[Links, Links], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have had no time to end, on a busy machine, when the next step begins."""
    sender, receiver = (SocketTransport(end) for end in links)
    real = sender._outbox._send_all

    def late(ear: socket.socket) -> None:
        real(ear)
        time.sleep(0.3)

    monkeypatch.setattr(sender._outbox, "_send_all", late)
    for step in range(3):
        sender.begin({}, {(1, "forward"): 1})
        receiver.begin({(0, "forward"): 1}, {})
        sent = Message(header(step), [torch.full((8 << 20,), step, dtype=torch.uint8)], "*", [False])
        sender.send(sent)
        assert torch.equal(
            torch.as_tensor(receiver.receive(header(step), 20.0).leaves[0]), torch.as_tensor(sent.leaves[0])
        )
        sender.finish(20.0)
        receiver.finish(20.0)
    sender.close(5.0)


def received(links: tuple[Links, Links]) -> list[float]:
    """The contents of a message that is sent now."""
    sender, receiver = (SocketTransport(end) for end in links)
    sender.begin({}, {(1, "forward"): 1})
    receiver.begin({(0, "forward"): 1}, {})
    sender.send(message(0, 3))
    return torch.as_tensor(receiver.receive(header(0), 20.0).leaves[0]).tolist()


def test_a_hello_serves_at_one_listener_and_once(links: tuple[Links, Links]) -> None:
    with call(links[1]) as rank, call(links[1]) as replayed, call(links[0]) as reflected:
        for link in (rank, replayed, reflected):
            link.sendall(hello(0, links[1]))
        links[1].connect(links[1].inbound(0, "forward"), 20.0)
        links[0].connect(links[0].inbound(0, "forward"), 0.5)
        taken = links[1].inbound(0, "forward").offered
        assert taken is not None
        assert taken.getpeername() == rank.getsockname()
        assert replayed.recv(1) == reflected.recv(1) == b""
        assert not links[0].inbound(0, "forward").connected


def test_idle_connections_are_dropped_before_a_rank_is_turned_away(links: tuple[Links, Links]) -> None:
    """Also where the process can open only a few more files, as after a thousand connections."""
    strangers = [call(links[1]) for _ in range(150)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
    try:
        assert received(links) == [0.0] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(links[1]._strangers) < 100
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_says_nothing_has_to_go_in_time(
    links: tuple[Links, Links], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stageline.transport.tcp.links.PATIENCE", 0.0)
    with call(links[1]) as stranger:
        links[1].connect(links[1].inbound(0, "forward"), 20.0)
        time.sleep(0.01)
        links[1].connect(links[1].inbound(0, "forward"), 0.01)
        assert stranger.recv(1) == b""


def test_links_that_outlive_their_module_end_without_a_word(tmp_path: Path) -> None:
    """At interpreter shutdown, when module globals are gone before the last objects."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom stageline.transport.tcp import links\nlinks.kept = links.Links(0, 1)\nsys.kept = links\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
