"""Free ports for jobs whose ranks meet at an address."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port on which nobody listens, below the ephemeral ports, which begin at 32768."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(12000, 32000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
