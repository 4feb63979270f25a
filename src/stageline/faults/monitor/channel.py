"""A rank's connection to one monitor, which is opened again when it breaks or falls silent."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from stageline.common.errors import ControlError
from stageline.faults.monitor.connection import CONNECT_TIMEOUT, Address, Connection
from stageline.faults.monitor.server import kernel

ATTEMPT = 3.0
"""Seconds in which a monitor must answer when a connection is opened again."""
REFUSALS = 6
"""How often the monitor must refuse this rank until it counts as gone; a connection refused by its machine counts 3."""
KEPT = 64
"""How many messages are kept that may have to be sent again."""

PROBLEMS = (OSError, ControlError, ValueError, AttributeError)
"""What opening a connection may raise."""


class Channel:
    """Any thread may send. One thread, the client's, receives and calls everything else.

    Messages with a number are kept, and sent again on the next connection unless the monitor has received them.
    """

    def __init__(
        self, address: Address, rank: int, where: str, machine: str = "", timeout: float = CONNECT_TIMEOUT
    ) -> None:
        """Connect, or raise one of `PROBLEMS`; `machine` is the address of this machine, if the caller knows it."""
        self.address = address
        self.heard = time.monotonic()
        """When the monitor was last heard."""
        self.gone = ""
        """Why the monitor is gone, if it certainly is."""
        self._rank, self._where = rank, where
        self._connection: Connection | None = Connection(address, rank, where, timeout)
        self.machine = machine or self._connection.host
        self._lock = threading.Lock()
        self._number = 0
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._next: Connection | None = None
        self._opening = False
        self._closed = False
        self._send_process(self._connection)

    @property
    def connection(self) -> Connection | None:
        """The connection; None while it is broken."""
        return self._connection

    def send(self, message: dict[str, Any], *, keep: bool = False) -> None:
        """Send a message; `keep` sends it again if it may have been lost."""
        with self._lock:
            if keep:
                self._number += 1
                message = {**message, "number": self._number}
                self._kept.append(message)
            if self._connection is not None:
                self._connection.send(message)

    def kept(self, kind: str) -> list[Any]:
        """What was sent with `keep` under this key, the latest last."""
        with self._lock:
            return [message[kind] for message in self._kept if kind in message]

    def receive(self) -> list[Any]:
        """The messages that have arrived; a broken connection is dropped."""
        messages = None if self._connection is None else self._connection.receive()
        if messages is None:
            self._drop()
            return []
        if messages:
            self.heard = time.monotonic()
        return messages

    def open_again(self, wake: Callable[[], None]) -> None:
        """Open another connection on a thread, until that succeeds or the monitor is gone, and then call `wake`."""
        if not self._opening and not self.gone:
            self._opening = True
            threading.Thread(target=self._open, args=(wake,), name="stageline control again", daemon=True).start()

    def take_over(self) -> bool:
        """Use the connection that was opened again, if there is one, and send on it what may have been lost."""
        with self._lock:
            fresh, self._next = self._next, None
            if fresh is None:
                return False
            if self._connection is not None:
                self._connection.close()
            self._connection, self._opening, self.heard = fresh, False, time.monotonic()
            self._send_process(fresh)
            for message in self._kept:
                if message["number"] > fresh.received:
                    fresh.send(message)
        return True

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        for connection in (self._connection, self._next):
            if connection is not None:
                connection.close()

    def _drop(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _send_process(self, connection: Connection) -> None:
        """Let the monitor look this process up if it is on the same machine."""
        connection.send({"process": os.getpid(), "kernel": kernel(), "host": self.machine})

    def _open(self, wake: Callable[[], None]) -> None:
        refusals, pause = 0, 0.02
        while not self._closed and self._next is None:
            try:
                self._next = Connection(self.address, self._rank, self._where, timeout=ATTEMPT)
            except (ConnectionRefusedError, ControlError) as error:
                refusals += (
                    1 if isinstance(error, ControlError) else 3
                )  # a reset may look like a refusal by the monitor
                if refusals >= REFUSALS:
                    self.gone = "the failure monitor has exited"
                    break
            except PROBLEMS:
                refusals = 0
            if self._next is None:
                time.sleep(pause)
                pause = min(1.0, 2 * pause)
        if self._closed and self._next is not None:
            self._next.close()
        with contextlib.suppress(OSError, ValueError):
            wake()
