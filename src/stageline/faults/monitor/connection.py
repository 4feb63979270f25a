"""Starting the failure monitor, its address, and a rank's connection to it."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageline.common.errors import ControlError, TrustError, shorten
from stageline.common.handshake import MessageSeal, open_connection
from stageline.common.trust import Sharing, Store, one_machine

# Empty packages in place of the real ones, which would load numpy first.
_BOOT = """
import sys, types
for name in ("stageline", "stageline.common", "stageline.faults", "stageline.faults.monitor"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = ["/".join([sys.argv[2], *name.split(".")])]
from stageline.faults.monitor.server import main
main()
"""
NAME = "stageline-monitor"
"""The argument that identifies the monitor in a list of processes, next to the name of its job."""
CONNECT_TIMEOUT = 30.0
"""Seconds in which the monitor must answer a hello."""
SLOWEST_START = 30.0
"""Seconds that a Python process may take to start on a busy machine."""


@dataclass(frozen=True)
class Address:
    """Where the monitor listens, and the secret of the job.

    >>> address = Address.parse("127.0.0.1:5000:secret")
    >>> address.host, address.port, str(address)
    ('127.0.0.1', 5000, '127.0.0.1:5000:secret')
    """

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port:token`; the host may itself have colons."""
        parts = text.rsplit(":", 2)
        if len(parts) != 3 or not all(parts) or not parts[1].isdecimal() or not 0 < int(parts[1]) < 65536:
            raise ControlError(f"an address of the control channel is host:port:token, got {shorten(text, 24)}")
        return cls(parts[0], int(parts[1]), parts[2])

    def __str__(self) -> str:
        """The text that ranks share. It holds the secret, so never log it."""
        return f"{self.host}:{self.port}:{self.token}"

    def __repr__(self) -> str:
        return f"Address({self.host}:{self.port})"

    @property
    def job(self) -> str:
        """A short name of the job that does not reveal the secret."""
        return job_of(self.token)


def job_of(token: str) -> str:
    """Return a digest of the secret."""
    return hashlib.sha256(b"stageline job " + token.encode()).hexdigest()[:8]


def share_by_store(store: Store, rank: int, name: str = "0", ranks: int = 1) -> Sharing:
    """Share the address through a store; only rank 0 has to be running.

    If all ranks are on one machine, the store holds only the name of a file, because the address holds the secret.
    `name` distinguishes several channels of a job. A job that torchrun restarted uses another key, because its store
    may still hold the address of the previous attempt.
    """
    key = f"stageline/control/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
    return Sharing(store, key, rank, here=one_machine(ranks))


def control_host() -> str:
    """Return the address on which the monitor listens by default: STAGELINE_CONTROL_HOST, or loopback."""
    host = os.environ.get("STAGELINE_CONTROL_HOST", "")
    if not host:
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        raise ControlError(
            f"STAGELINE_CONTROL_HOST is {host}, which no rank can connect to; set it to the address of rank 0's machine"
        )
    return host


def start_monitor(
    ranks: int, deadline: float, start_deadline: float, host: str = "", *, standby_of: Address | None = None
) -> Address:
    """Start the monitor process; it ends by itself when the ranks are gone. `host` is where it listens."""
    host = host or control_host()
    token = secrets.token_hex(32) if standby_of is None else standby_of.token
    # Through stdin: everyone on the machine can read the arguments of a process.
    options = {"ranks": ranks, "deadline": deadline, "start_deadline": start_deadline, "host": host, "token": token}
    options["standby"] = standby_of is not None
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _BOOT, NAME, str(Path(__file__).parents[3]), job_of(token)],
            input=json.dumps(options) + "\n",
            capture_output=True,
            text=True,
            timeout=SLOWEST_START,
            start_new_session=True,
            check=False,
        )
        answer = json.loads(process.stdout or "{}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ControlError(f"the failure monitor did not start: {error}") from error
    if "port" not in answer:
        why = answer.get("error") or (process.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise ControlError(
            f"the failure monitor cannot listen on {host}: {why}; set STAGELINE_CONTROL_HOST to an address of rank 0's "
            "machine"
        )
    return Address(host, int(answer["port"]), token)


def no_address(rank: int, error: Exception) -> ControlError:
    """Return the error of a rank that waited for the address in vain."""
    return ControlError(
        f"rank {rank} received no address of the control channel, so rank 0 did not start or has ended: "
        f"{type(error).__name__}: {error}"
    )


class Connection:
    """Sends and receives authenticated lines of JSON, once both ends have proved that they know the job's secret.

    Any thread may send, and never waits; one thread receives.
    """

    def __init__(self, address: Address, rank: int, where: str, timeout: float = CONNECT_TIMEOUT) -> None:
        """Connect, or raise OSError, ValueError or ControlError."""
        facts = {"rank": rank, "where": where}
        try:
            session = open_connection(address.host, address.port, address.token, facts, timeout=timeout)
        except TrustError as error:
            raise ControlError(str(error)) from error
        self.socket = session.link
        self.received = int(session.facts["received"])
        """The last number that the monitor has received from this rank, on an earlier connection."""
        self._seal = MessageSeal(session.key, opener=True)
        self._buffer = self._unsent = b""
        self._sending = threading.Lock()
        self._pid = os.getpid()

    @property
    def host(self) -> str:
        """The address of this machine on the connection."""
        return str(self.socket.getsockname()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or keep what the network does not accept yet; the thread that receives notices an end."""
        if os.getpid() != self._pid:
            return
        with self._sending, contextlib.suppress(OSError):
            if not ("beat" in message and self._unsent):  # one that waits says enough
                self._unsent += self._seal.seal(json.dumps(message).encode()) + b"\n"
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[Any] | None:
        """Return the messages that have arrived, or None once the monitor is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            return [json.loads(self._seal.unseal(line)) for line in lines] if data else None
        except TrustError:
            return None  # someone else wrote to the connection

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
