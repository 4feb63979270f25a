"""The connections between processes: who may connect, what wakes a wait, and messages that come in any pieces."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
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

from stageline.common.errors import PeerFailed, TransportError, TrustError
from stageline.common.handshake import Reception, open_connection
from stageline.transport.protocol import Header, Message
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.transport import LARGE, SocketTransport
from support.instances import examples
from support.threads import left_over

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


def test_a_connection_that_is_accepted_while_the_links_close_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed open until the garbage collector found it, with a warning in an unrelated place."""
    accepted, closed = threading.Event(), threading.Event()
    receptions: list[Reception] = []

    class Late(Reception):
        def __init__(self, *arguments: Any) -> None:
            accepted.set()
            assert closed.wait(60)
            super().__init__(*arguments)
            receptions.append(self)

    monkeypatch.setattr("stageline.transport.tcp.links.Reception", Late)
    before = threading.enumerate()
    ends = connect()
    with socket.create_connection(("127.0.0.1", int(ends[1].address.partition("|")[2]))):
        assert accepted.wait(60)
        for end in ends:
            end.close()
        closed.set()
        assert left_over(before) == []
    assert [reception.link.fileno() for reception in receptions] == [-1]


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
    host, port = links.address.split("|")
    return socket.create_connection((host, int(port)))


STRANGE: dict[str, dict[str, Any]] = {
    "secret": {"secret": "1" * 32},
    "source": {"source": 7},
    "target": {"target": 0},
    "kind": {"kind": "sideways"},
}


@pytest.mark.parametrize("other", STRANGE.values(), ids=STRANGE)
def test_a_stranger_is_not_heard(links: tuple[Links, Links], other: dict[str, Any]) -> None:
    """Someone without the secret, or who asks for what is not expected; who says something else, or nothing at all."""
    strangers = [call(links[1]) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
    strangers[1].close()
    host, port = links[1].address.split("|")
    facts = {"source": 0, "target": 1, "kind": "forward", "call": False, **other}
    with pytest.raises(
        TrustError, match="it has a different secret" if "secret" in other else "expects no such connection"
    ):
        open_connection(host, int(port), str(facts.pop("secret", TOKEN)), facts, timeout=20.0)
    assert received(links) == [0.0] * 3
    for stranger in strangers:
        stranger.close()


def test_a_listener_without_the_secret_is_not_trusted(links: tuple[Links, Links]) -> None:
    """Someone who took the port of a rank, or changed its address in the store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            reception = Reception(listener.accept()[0], "1" * 32, lambda facts: {})
            for frame in (b'{"challenge": "0"}', b'{"answer": "{}", "proof": "0"}'):
                reception.link.setblocking(True)
                reception.link.sendall(len(frame).to_bytes(2, "big") + frame)
            reception.link.recv(1000)
            reception.link.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        links[0].meet([links[0].address, f"127.0.0.1|{listener.getsockname()[1]}"], TOKEN)
        with pytest.raises(
            TransportError, match=r"cannot connect to rank 1 at .* does not know the secret of this job"
        ):
            links[0].outbound(1, "forward")
        thread.join()


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


def test_a_recorded_handshake_is_useless(links: tuple[Links, Links]) -> None:
    """A relay records what a rank says; played again to the same listener, it proves nothing."""
    host, port = links[1].address.split("|")
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def record() -> None:
            rank, target = listener.accept()[0], socket.create_connection((host, int(port)))
            with rank, target:
                rank.sendall(target.recv(1000))
                said.append(rank.recv(1000))  # and never passes it on

        thread = threading.Thread(target=record)
        thread.start()
        links[0].meet([links[0].address, f"127.0.0.1|{listener.getsockname()[1]}"], TOKEN)
        with pytest.raises(TransportError, match="closed the connection without a reply"):
            links[0].outbound(1, "forward")
        thread.join()
    with call(links[1]) as replayed:
        assert b"challenge" in replayed.recv(1000)
        replayed.sendall(said[0])
        assert b"it has a different secret" in replayed.recv(1000)
    assert not links[1].inbound(0, "forward").connected


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
    with call(links[1]) as stranger, contextlib.suppress(ConnectionResetError):
        stranger.settimeout(20.0)
        while stranger.recv(1000):
            pass


def test_links_that_outlive_their_module_end_without_a_word(tmp_path: Path) -> None:
    """At interpreter shutdown, when module globals are gone before the last objects."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom stageline.transport.tcp import links\nlinks.kept = links.Links(0, 1)\nsys.kept = links\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
