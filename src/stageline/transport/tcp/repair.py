"""Reopening a broken connection: the sender reconnects, learns what has arrived, and sends the rest again."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from stageline.common.errors import TransportError
from stageline.transport.tcp.channels import COUNT, PIECES, ChannelKind, after
from stageline.transport.tcp.outbox import Outbound

REFUSALS = 4
"""How often a process must refuse a connection until it counts as gone."""


class Endpoint(Protocol):
    """The connections of this process, as a repair needs them."""

    ended: bool
    """Whether they have ended, so that none is opened again."""
    deadline: float
    """Seconds in which a connection must be opened again."""

    @property
    def closed(self) -> bool:
        """Whether the sockets have been closed, so that whoever opened one meanwhile must close it."""

    def dial(self, target: int, kind: ChannelKind) -> socket.socket:
        """Connect to a rank and say hello; raises OSError."""

    def wake_keeper(self) -> None:
        """Watch the new connection."""


FindEndpoint: TypeAlias = Callable[[], Endpoint | None]
"""Returns the connections as long as they are used: a thread must not keep them alive."""


def start_repair(outbound: Outbound, find: FindEndpoint) -> None:
    """Repair on a thread, which ends with the repair."""

    def work() -> None:
        try:
            repair(outbound, find)
        except TransportError as error:
            outbound.fail(str(error))
        endpoint = find()
        if endpoint is not None:
            endpoint.wake_keeper()

    threading.Thread(target=work, name=f"stageline repair to {outbound.target}", daemon=True).start()


def repair(outbound: Outbound, find: FindEndpoint) -> None:
    """Dial until the receiver answers, and send it what did not arrive."""
    began, refusals, pause = time.monotonic(), 0, 0.01
    while True:
        endpoint = find()
        if endpoint is None or endpoint.ended:
            outbound.fail("the connections of this process have ended")
            return
        deadline = endpoint.deadline
        try:
            link = endpoint.dial(outbound.target, outbound.kind)
            del endpoint
            if _send_again(outbound, link, find):
                endpoint = find()
                if endpoint is None or endpoint.closed:
                    link.close()
                return
            began, refusals, pause = time.monotonic(), 0, 0.01
        except ConnectionRefusedError as error:
            refusals += 1
            if refusals == REFUSALS:
                raise TransportError(f"its process has exited: {error}") from error
        except OSError as error:
            if time.monotonic() - began > deadline:
                raise TransportError(f"the connection broke and could not be reopened: {error}") from error
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def _send_again(outbound: Outbound, link: socket.socket, find: FindEndpoint) -> bool:
    """Send what has not arrived; return False if this connection breaks, too."""
    counts = b""
    try:
        while len(counts) < COUNT.size:  # the receiver answers when it reads from this channel again
            if _ready(link, select.POLLIN, find):
                more = link.recv(COUNT.size - len(counts))
                if not more:
                    link.close()
                    return False
                counts += more
        outbound.resume(link, COUNT.unpack(counts)[0])
        number = outbound.first
        while (lost := outbound.lost_message(number)) is not None:
            pieces = lost.pieces
            while pieces:
                if _ready(link, select.POLLOUT, find):
                    with contextlib.suppress(BlockingIOError):
                        pieces = after(pieces, link.sendmsg(pieces[:PIECES]))
            number += 1
    except (OSError, ValueError):  # a socket that was closed meanwhile has no number
        link.close()
        return False
    return True


def _ready(link: socket.socket, event: int, find: FindEndpoint) -> bool:
    poll = select.poll()
    poll.register(link, event)
    if poll.poll(1000):
        return True
    endpoint = find()
    if endpoint is None or endpoint.ended:
        raise ConnectionAbortedError
    return False
