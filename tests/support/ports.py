"""Ports for jobs whose ranks find each other by an address."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port that nobody listens at, and that the system gives to nobody who asks for any: those begin at 32768."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(12000, 32000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
