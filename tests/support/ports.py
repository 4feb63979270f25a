"""Free ports for jobs whose ranks meet at an address."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port on which nobody listens, below the ephemeral ports, which begin at 32768."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of several such ports in a row."""
    draw = random.SystemRandom()
    while True:
        first = draw.randrange(12000, 32000)
        if all(_is_free(first + number) for number in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
