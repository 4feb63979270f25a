"""The addresses of this machine: the one that leads to another host, and the interface that has it."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from array import array
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has, beyond every network: the route to them is the default route."""
_SIOCGIFCONF = 0x8912
_IFREQ = 40
"""Bytes of a `struct ifreq`."""


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
