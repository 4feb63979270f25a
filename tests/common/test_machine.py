"""Ports of a job: STAGELINE_PORTS."""

from __future__ import annotations

import socket

import pytest

from stageline.common.errors import StagelineError
from stageline.common.machine import listen, port_range
from support.ports import free_port


def test_listeners_take_the_free_ports_of_the_range_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("STAGELINE_PORTS", f"{port}-{port}")
    with listen("127.0.0.1") as first:
        assert first.getsockname()[1] == port
        with pytest.raises(
            OSError, match=f"all 1 ports of STAGELINE_PORTS={port}-{port} are in use, possibly by another job"
        ):
            listen("127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = taken.getsockname()[1]
        monkeypatch.setenv("STAGELINE_PORTS", f"{other}-{min(other + 20, 65535)}")
        with listen("127.0.0.1") as second:
            assert other < second.getsockname()[1] <= other + 20


def test_a_port_whose_connections_were_closed_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps such a connection (TIME_WAIT) for a minute after a rank was killed or its job has ended."""
    port = free_port()
    monkeypatch.setenv("STAGELINE_PORTS", f"{port}-{port}")
    for _ in range(2):
        with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as client:
            with pytest.raises(OSError, match="are in use"):
                listen("127.0.0.1")
            listener.accept()[0].close()
            assert client.recv(1) == b""


@pytest.mark.parametrize("text", ["29500", "a-b", "5-4", "0-9", "1-65536", "-", "1 - 2 - 3"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(StagelineError, match="expected first-last with ports from 1 to 65535"):
        port_range({"STAGELINE_PORTS": text})
