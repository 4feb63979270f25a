"""This machine: its cores, its addresses, and the ports on which a job listens."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stageline.common.errors import StagelineError
from stageline.common.units import pluralize

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where Linux keeps the processor time of a container: microseconds, or "max", in every so many microseconds."""
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has, beyond every network: the route to them is the default route."""
_SIOCGIFCONF = 0x8912
_IFREQ = 40
"""Bytes of a `struct ifreq`."""
VARIABLE = "STAGELINE_PORTS"
"""The ports on which a job may listen, for firewalls that open only a range; any free one if it is not set."""


def cores() -> int:
    """Return the number of cores for this process: those that it may run on, within the quota of its container.

    >>> cores() >= 1
    True
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # not Linux, or no quota
        return available
    return max(1, min(available, -(-time // period)))


class Route(NamedTuple):
    """How this machine reaches a host."""

    own: str
    """The address of this machine on the way there."""
    target: str
    """The address of the host."""


def route_to(*hosts: str) -> Route | None:
    """The route to the first of these hosts that has an address and a route; sends nothing.

    >>> route_to("no such host", "127.0.0.1")
    Route(own='127.0.0.1', target='127.0.0.1')
    """
    for host in filter(None, hosts):
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return Route(probe.getsockname()[0], probe.getpeername()[0])
    return None


def is_loopback(address: str) -> bool:
    """Whether an address leads back to this machine on every machine.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("localhost")
    (True, True, False, True)
    """
    if address in ("", "localhost"):
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def interface_of(address: str) -> str:
    """The name of the interface with this address; empty if there is none, or if this system does not say.

    >>> interface_of("192.0.2.1")
    ''
    """
    if not sys.platform.startswith("linux"):
        return ""
    with suppress(OSError, ValueError):
        wanted = ipaddress.ip_address(address.partition("%")[0])
        addresses = _ipv4_interfaces() if wanted.version == 4 else _ipv6_interfaces()
        return next((name for own, name in addresses if own == wanted.packed), "")
    return ""


def _ipv4_interfaces() -> list[tuple[bytes, str]]:
    import fcntl

    room = array("B", bytes(256 * _IFREQ))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(room), room.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    entries = [room[at : at + _IFREQ].tobytes() for at in range(0, size, _IFREQ)]
    return [(entry[20:24], entry[:16].partition(b"\0")[0].decode().partition(":")[0]) for entry in entries]


def _ipv6_interfaces() -> list[tuple[bytes, str]]:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return [(bytes.fromhex(words[0]), words[5]) for words in lines]


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
            f"{VARIABLE}={ports[0]}-{ports[-1]} has {pluralize(len(ports), 'port')}, and a machine with "
            f"{pluralize(local, 'rank')} needs {local + 1 + store}: one for each rank, {'' if store else 'and '}one "
            f"for the failure monitor{' and one for the store at MASTER_PORT' if store else ''}"
        )


def listen(host: str, backlog: int = 1024) -> socket.socket:
    """A socket that listens at an address of this machine, on the first free port of the range; raises OSError.

    >>> with listen("127.0.0.1") as listener:
    ...     listener.getsockname()[0]
    '127.0.0.1'
    """
    ports = port_range()
    for port in (0,) if ports is None else ports:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if port:  # connections of a process that ended keep its port for a minute, but nobody listens there
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            if port == 0 or error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    assert ports is not None
    raise OSError(
        errno.EADDRINUSE,
        f"all {len(ports)} ports of {VARIABLE}={ports[0]}-{ports[-1]} are in use, possibly by another job; give "
        "every job on a machine its own range",
    )
