"""A TCP relay between two ends: it adds delay, caps the bandwidth, holds bytes back and resets connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Self

from stageline.common import handshake

_ORIGINAL = 80
"""SO_ORIGINAL_DST, for IPv4 and IPv6: where a connection was going before the firewall led it here."""
MARK = 77
"""The mark of the relay's own packets, so that `Host.relay_ports` does not lead them back to it."""
_PIECE = 1 << 14


class Relay:
    """Passes connections on to a target, or to where they were going (`Host.relay_ports`).

    `delay`, `bandwidth` and `held` may change at any time.
    """

    def __init__(self, target: tuple[str, int] | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; `delay` is in seconds for each direction, and `bandwidth` in bytes per second of each direction."""
        self.delay = 0.0
        self.bandwidth = float("inf")
        self.held = False
        """Whether bytes wait in the relay, as if their packets were lost and sent again later."""
        self.passed = 0
        """How many bytes were passed on."""
        self.opened = 0
        """How many connections were made."""
        self._target = target
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def reset(self) -> int:
        """Reset all connections, in both directions; return how many ends that were."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # A thread that waits in recv keeps the connection open until it is woken.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)
            end.close()
        return len(ends)

    def holds(self, end: socket.socket) -> bool:
        """Whether the connection of this end was not reset."""
        with self._lock:
            return end in self._ends

    def close(self) -> None:
        """End the relay and its connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), name="relay", daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        target = self._target or _original(client)
        server = socket.socket(
            client.family if self._target is None else socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        )
        try:
            if self._target is None:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
            server.connect(target)
        except OSError:
            server.close()
            client.close()
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._ends += [client, server]
            self.opened += 1
        for source, sink in ((client, server), (server, client)):
            _Pump(self, source, sink)


class RelayedConnections:
    """While this is open, connections that this process opens for links and the control channel go through relays."""

    def __init__(self) -> None:
        self._relays: dict[tuple[str, int], Relay] = {}
        self._create, self._connect = socket.create_connection, handshake._connect

        def create(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
            return self._create(self._relay(*address), timeout)

        def connect(host: str, port: int, limit: Any) -> socket.socket:
            return self._connect(*self._relay(host, port), limit)

        socket.create_connection, handshake._connect = create, connect  # type: ignore[assignment]

    def reset(self) -> int:
        """Reset all connections; return how many ends that were."""
        return sum(relay.reset() for relay in list(self._relays.values()))

    def _relay(self, host: str, port: int) -> tuple[str, int]:
        if (host, port) not in self._relays:
            self._relays[(host, port)] = Relay((host, port))
        return "127.0.0.1", self._relays[(host, port)].port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        socket.create_connection, handshake._connect = self._create, self._connect
        for relay in self._relays.values():
            relay.close()


class _Pump:
    """Passes the bytes of one direction on, in order: one thread reads, and one writes when they are due."""

    def __init__(self, relay: Relay, source: socket.socket, sink: socket.socket) -> None:
        self._relay, self._source, self._sink = relay, source, sink
        self._due: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()
        for work in (self._read, self._write):
            threading.Thread(target=work, name="relay", daemon=True).start()

    def _read(self) -> None:
        data = b"-"
        while data:
            try:
                data = self._source.recv(_PIECE)
            except OSError:
                data = b""
            with self._changed:
                self._changed.wait_for(lambda: len(self._due) < 64)  # a queue as long as a router's
                self._due.append((time.monotonic() + self._relay.delay, data))
                self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._due))
                due, data = self._due.popleft()
                self._changed.notify_all()
            time.sleep(max(0.0, due - time.monotonic()))
            while self._relay.held:
                time.sleep(0.005)
            try:
                if not data:
                    if self._relay.holds(self._sink):  # a reset is not an end of the stream
                        self._sink.shutdown(socket.SHUT_WR)
                    return
                self._sink.sendall(data)
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(OSError):
                    self._source.shutdown(socket.SHUT_RD)
                return
            self._relay.passed += len(data)
            if self._relay.bandwidth != float("inf"):
                time.sleep(len(data) / self._relay.bandwidth)


def _original(client: socket.socket) -> tuple[str, int]:
    if client.family == socket.AF_INET6:
        raw = client.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL, 28)
        return socket.inet_ntop(socket.AF_INET6, raw[8:24]), int.from_bytes(raw[2:4], "big")
    raw = client.getsockopt(socket.IPPROTO_IP, _ORIGINAL, 16)
    return socket.inet_ntoa(raw[4:8]), int.from_bytes(raw[2:4], "big")
