"""A rank's connection to the failure monitor: each proves that it knows the job's secret, then both send JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any

from stageline.common.errors import ControlError
from stageline.common.trust import new_nonce, proof, proves
from stageline.faults.monitor.launch import Address

CONNECT_TIMEOUT = 30.0
"""Seconds in which the monitor must answer a hello."""


class Connection:
    """Sends and receives messages; any thread may send, one thread receives."""

    def __init__(self, address: Address, rank: int, where: str) -> None:
        """Connect, or raise OSError, ValueError or ControlError."""
        self.socket = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT)
        self._buffer = b""
        self._sending = threading.Lock()
        self._pid = os.getpid()
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._introduce(address.token, rank, where)
        except BaseException:
            self.socket.close()
            raise

    @property
    def host(self) -> str:
        """The address of this machine on the connection."""
        return str(self.socket.getsockname()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; the thread that receives notices if the monitor is gone."""
        if os.getpid() == self._pid:
            with self._sending, contextlib.suppress(OSError):
                self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Any] | None:
        """Return the messages that have arrived, or None once the monitor is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        return self._messages(data) if data else None

    def received(self) -> list[Any]:
        """Return the messages that arrived with the monitor's welcome."""
        return self._messages(b"")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _messages(self, data: bytes) -> list[Any]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _introduce(self, secret: str, rank: int, where: str) -> None:
        theirs, ours = str(self._first_message().get("challenge")), new_nonce()
        facts = (rank, theirs, ours)
        self.send({"hello": rank, "nonce": ours, "proof": proof(secret, "rank", *facts, where), "where": where})
        if not proves(self._first_message().get("proof"), secret, "monitor", *facts):
            raise ControlError("it does not know the secret of this job")

    def _first_message(self) -> Any:
        while b"\n" not in self._buffer:
            data = self.socket.recv(4096)
            if not data:
                raise ControlError("it refused this rank: another job's token, or its number is taken")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)
