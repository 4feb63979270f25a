"""The connections over which layers run collectives themselves, so that nobody waits there for a process that failed.

gloo cannot abort a collective: a process that waits for one that has failed, but lives, waits until the timeout. It
stops at once when its connection is shut down. gloo does not say which connections it uses; they are those between two
processes of the pipeline that belong neither to Stageline nor to torch's store.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCKED = 2.0
"""Seconds without computing after which a process counts as blocked, once another one has failed."""
SETTLE = 0.5
"""Seconds in which collectives between processes that live may end, once the job has lost one."""
CHECK_EVERY = 0.25
BUSY = 0.02
"""The part of the time for which a blocked thread may compute."""

Ends = tuple[float, float]
"""The digests of the two ends of a connection: first the own one."""
Gather = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class PeerConnections:
    """Connections of this process to others of its pipeline, by file descriptor and inode.

    Descriptors are reused after a connection is closed, inodes are not.
    """

    def __init__(self, inodes: Mapping[int, int] | None = None) -> None:
        self._inodes = dict(inodes or {})

    @classmethod
    def find(cls, gather: Gather, ports: Collection[int]) -> PeerConnections:
        """Compare the connections of all processes, which call this together.

        `gather` returns the rows of all processes; connections from or to one of the `ports` are left out.
        """
        own = list(tcp_connections(ports))
        size = int(gather(np.array([float(len(own))])).max())
        if not size:
            return cls()
        row = np.zeros((size, 2))
        row[: len(own)] = np.array([ends for _, _, ends in own]).reshape(-1, 2)
        known = set(map(tuple, gather(row.reshape(-1)).reshape(-1, 2).tolist()))
        known -= {ends for _, _, ends in own}  # connections of this process to itself
        return cls({file: inode for file, inode, (one, other) in own if (other, one) in known})

    def __len__(self) -> int:
        return len(self._inodes)

    def shut_down(self) -> None:
        """Let collectives over these connections fail, here and on the other processes; may be called by any thread."""
        while self._inodes:
            file, inode = self._inodes.popitem()
            with suppress(OSError):
                if os.fstat(file).st_ino == inode:
                    with socket.socket(fileno=os.dup(file)) as link:
                        link.shutdown(socket.SHUT_RDWR)

    def shut_down_soon(self, seconds: float = SETTLE) -> threading.Timer:
        """Shut down once collectives between processes that live have ended, unless the timer is cancelled before.

        gloo may not notice that a connection was shut down while data arrived on it, and then waits until the timeout.
        """
        timer = threading.Timer(seconds, self.shut_down)
        timer.name, timer.daemon = "stageline collectives", True
        if self._inodes:
            timer.start()
        return timer

    def shut_down_if_blocked(self, thread: int, acting: Callable[[], bool]) -> None:
        """Watch a thread, by its native number, while it is acting; shut down if it computes nothing any more."""
        if self._inodes:
            watch = threading.Thread(
                target=self._watch, args=(thread, acting), name="stageline collectives", daemon=True
            )
            watch.start()

    def _watch(self, thread: int, acting: Callable[[], bool]) -> None:
        blocked = 0.0
        while acting() and blocked < BLOCKED:
            used, began = seconds_computed(thread), time.monotonic()
            time.sleep(CHECK_EVERY)
            elapsed = time.monotonic() - began
            blocked = blocked + elapsed if seconds_computed(thread) - used < BUSY * elapsed else 0.0
        if acting():
            self.shut_down()


def tcp_connections(ports: Collection[int] = ()) -> Iterator[tuple[int, int, Ends]]:
    """The descriptor, inode and ends of every TCP connection of this process that uses none of the ports.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     with socket.create_connection(server.getsockname()) as link:
    ...         files = [file for file, _, _ in tcp_connections()]
    ...         rest = [file for file, _, _ in tcp_connections(ports=[link.getsockname()[1]])]
    ...         link.fileno() in files, server.fileno() in files, link.fileno() in rest
    (True, False, False)
    """
    for entry in Path("/proc/self/fd").iterdir():
        file = int(entry.name)
        with suppress(OSError):
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(file)) as link:
                if link.type != socket.SOCK_STREAM or link.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ends = link.getsockname()[:2], link.getpeername()[:2]
            if not {port for _, port in ends} & set(ports):
                yield file, os.fstat(file).st_ino, (_digest(*ends[0]), _digest(*ends[1]))


def ended_by_peer(error: BaseException | None) -> bool:
    """Whether a collective over gloo failed because of another process, which may have died or closed its connections.

    >>> text = "[/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:44744: Connection reset by peer"
    >>> ended_by_peer(RuntimeError(text)), ended_by_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, RuntimeError) and "gloo/transport/" in str(error):
            return True
        error = error.__cause__
    return False


def seconds_computed(thread: int) -> float:
    """The processor time of a thread of this process, by its native number; 0 if it has ended.

    >>> before = seconds_computed(threading.get_native_id())
    >>> while seconds_computed(threading.get_native_id()) == before:  # it counts in steps of some milliseconds
    ...     pass
    """
    try:
        words = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _digest(host: str, port: int) -> float:
    """A whole number that a float holds exactly; the same for an IPv4 address and its form in IPv6."""
    address: Any = ipaddress.ip_address(host.partition("%")[0])
    text = f"{getattr(address, 'ipv4_mapped', None) or address}|{port}"
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()))
