"""Jobs on several hosts, which are network namespaces (see `support/hosts.py`)."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import Network
from support.relay import Relay

ECHO = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])), reuse_port=True)
print("ready", flush=True)
link, _ = server.accept()
while data := link.recv(100):
    link.sendall(data)
"""
CLIENT = """
import socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)
for line in sys.stdin:
    link.sendall(line.encode())
    sys.stdout.write(link.makefile().readline())
    sys.stdout.flush()
"""


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path / "network") as network:
        yield network


def started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ask(client: subprocess.Popen[str], text: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{text}\n")
    client.stdin.flush()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_hosts_of_the_tests_have_firewalls_and_cables(two_hosts: Network) -> None:
    first, second = two_hosts.hosts
    assert second.run("hostname").strip() == "host1"
    (second.folder / "own").touch()
    assert "own" in second.run("ls", str(two_hosts.shared_path))
    assert "own" not in first.run("ls", str(two_hosts.shared_path))
    first.open_ports(5000, 5001)
    processes = []
    try:
        for port in (5000, 6000):
            processes.append(started(first.command(sys.executable, "-S", "-c", ECHO, str(port))))
            assert line_of(processes[-1]) == "ready"
        client = started(second.command(sys.executable, "-S", "-c", CLIENT, "host0", "5000"))
        blocked = started(second.command(sys.executable, "-S", "-c", CLIENT, "host0", "6000"))
        processes += [client, blocked]
        ask(client, "through the firewall")
        assert line_of(client) == "through the firewall"
        first.cut()
        ask(client, "after the cut")
        time.sleep(0.2)
        first.restore()
        assert line_of(client) == "after the cut"
        assert "timed out" in blocked.communicate(timeout=30)[1]
        assert first.blocked_packets() > 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_the_relay_of_the_tests_delays_caps_holds_and_resets() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Relay(listener.getsockname()) as relay,
        socket.create_connection(("127.0.0.1", relay.port)) as client,
    ):
        link, _ = listener.accept()
        relay.delay = 0.1
        began = time.monotonic()
        client.sendall(b"late")
        assert link.recv(100) == b"late"
        assert time.monotonic() - began >= 0.1
        relay.delay, relay.bandwidth = 0.0, 1e6
        began, received = time.monotonic(), 0
        client.sendall(bytes(300_000))
        while received < 300_000:
            received += len(link.recv(1 << 16))
        assert time.monotonic() - began >= 0.25
        relay.held = True
        client.sendall(b"held")
        link.settimeout(0.1)
        with pytest.raises(TimeoutError):
            link.recv(100)
        relay.held = False
        link.settimeout(10)
        assert link.recv(100) == b"held"
        assert relay.reset() == 2
        with pytest.raises(ConnectionResetError):
            link.recv(100)
        link.close()
