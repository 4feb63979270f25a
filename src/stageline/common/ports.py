"""The ports on which a job listens: any free one, or those of STAGELINE_PORTS, for firewalls that open only a range."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping

from stageline.common.errors import StagelineError

VARIABLE = "STAGELINE_PORTS"


def port_range(environment: Mapping[str, str] | None = None) -> range | None:
    """The ports of STAGELINE_PORTS, `first-last`; None if it is not set.

    >>> port_range({"STAGELINE_PORTS": "29500-29507"}), port_range({})
    (range(29500, 29508), None)
    """
    text = (os.environ if environment is None else environment).get(VARIABLE, "").strip()
    if not text:
        return None
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= 65535:
        return range(int(first), int(last) + 1)
    raise StagelineError(f"{VARIABLE} is {text!r}, expected first-last with ports from 1 to 65535, as in 29500-29515")


def check_ports(environment: Mapping[str, str]) -> None:
    """Refuse a range of ports that is too small for the ranks on this machine.

    >>> check_ports({"STAGELINE_PORTS": "29500-29501", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"})
    Traceback (most recent call last):
        ...
    stageline.StagelineError: STAGELINE_PORTS=29500-29501 has 2 ports, and a machine with 2 ranks needs 4: one for each
    rank, one for the failure monitor and one for the store at MASTER_PORT
    """
    ports, ranks = port_range(environment), environment.get("LOCAL_WORLD_SIZE", "")
    if ports is None:
        return
    local, master = int(ranks) if ranks.isdecimal() else 1, environment.get("MASTER_PORT", "")
    store = master.isdecimal() and int(master) in ports
    if len(ports) < local + 1 + store:
        raise StagelineError(
            f"{VARIABLE}={ports[0]}-{ports[-1]} has {len(ports)} ports, and a machine with {local} ranks needs "
            f"{local + 1 + store}: one for each rank, {'' if store else 'and '}one for the failure monitor"
            f"{' and one for the store at MASTER_PORT' if store else ''}"
        )


def listen(host: str, backlog: int = 1024) -> socket.socket:
    """A socket that listens at an address of this machine, on the first free port of the range; raises OSError.

    >>> with listen("127.0.0.1") as listener:
    ...     listener.getsockname()[0]
    '127.0.0.1'
    """
    ports = port_range()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        for port in (0,) if ports is None else ports:
            try:
                listener.bind((host, port))
                listener.listen(backlog)
            except OSError as error:
                if port == 0 or error.errno != errno.EADDRINUSE:
                    raise
            else:
                return listener
        assert ports is not None
        raise OSError(
            errno.EADDRINUSE,
            f"all {len(ports)} ports of {VARIABLE}={ports[0]}-{ports[-1]} are in use: another job may use them; give "
            "every job of a machine its own range",
        )
    except BaseException:
        listener.close()
        raise
