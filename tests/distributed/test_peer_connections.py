"""Connections to other processes of a pipeline, found by their ends, and when they are shut down."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from stageline.distributed.peer_connections import Gather, PeerConnections, tcp_connections
from stageline.distributed.process_host import ProcessHost

OTHER_PROCESS = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1))"


def gather_with_the_other_end(link: socket.socket) -> Gather:
    """A gather of two processes; the other one has only the other end of this link."""
    (own,) = [ends for file, _, ends in tcp_connections() if file == link.fileno()]

    def gather(row: NDArray[np.float64]) -> NDArray[np.float64]:
        if len(row) == 1:
            return np.array([row, [1.0]])
        other = np.zeros_like(row)
        other[:2] = own[::-1]
        return np.stack([row, other])

    return gather


def test_a_connection_to_another_process_is_shut_down_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", OTHER_PROCESS, str(server.getsockname()[1])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        link, _ = server.accept()
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with process, closing(link), closing(near), closing(far):
        peers = PeerConnections.find(gather_with_the_other_end(link), ())
        assert len(peers) == 1, "a connection of this process to itself does not count"
        peers.shut_down_soon()
        assert process.communicate(timeout=60)[0] == "b''\n", "the other process reads the end of the stream"
        near.sendall(b"x")
        assert far.recv(1) == b"x"


def test_a_descriptor_that_was_reused_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            PeerConnections({near.fileno(): 0}).shut_down()  # the inode of a connection that is closed by now
            near.sendall(b"x")
            assert far.recv(1) == b"x"


def test_only_a_thread_that_computes_nothing_loses_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        peers = PeerConnections({near.fileno(): os.fstat(near.fileno()).st_ino})
        released = threading.Event()
        sleeper = threading.Thread(target=released.wait, daemon=True)
        sleeper.start()
        assert sleeper.native_id is not None
        peers.shut_down_if_blocked(sleeper.native_id, lambda: True)
        assert near.recv(1) == b""
        assert len(peers) == 0
        released.set()
        sleeper.join()


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("[/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4474: Connection reset by peer", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_collective_that_lost_a_process_is_not_blamed_before_it(text: str, follows: bool) -> None:
    """gloo may notice a dead process before the monitor does: its error waits for its cause."""
    host: Any = ProcessHost.__new__(ProcessHost)
    host._control, host._transport, host.layout = Mock(doing=("F", 0, 0)), Mock(), Mock()
    host._failures = Mock(blamed=Mock(return_value=None))
    wrapped = ValueError("layer 1 fails")
    wrapped.__cause__ = RuntimeError(text)
    for error in (RuntimeError(text), wrapped):
        host._report(SimpleNamespace(process=0, doing="F", record=Mock(), forget=Mock()), error)
        assert host._control.report.call_args.args[0].secondary == follows
