"""Starting the referee, and the address by which ranks find it."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stageline.common.errors import ControlError, shorten
from stageline.common.trust import Sharing, Store, one_machine

# The referee's modules by their own names, in empty packages: the real ones would load numpy first.
_BOOT = """
import sys, types
for name in ("stageline", "stageline.runtime", "stageline.faults.monitor"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = ["/".join([sys.argv[2], *name.split(".")])]
from stageline.faults.monitor.server import main
main()
"""
NAME = "stageline-referee"
"""By this argument, and the name of its job, it is known in a list of processes."""
SLOWEST_START = 30.0
"""Seconds that a small Python may take to start on a busy machine."""


@dataclass(frozen=True)
class Address:
    """Where the referee is, and the secret that it asks for.

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
        """As it is shared between the ranks; it holds the secret, so it belongs into no log."""
        return f"{self.host}:{self.port}:{self.token}"

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Address({self.host}:{self.port})"

    @property
    def job(self) -> str:
        """A short name that all ranks of a job share and no other job has; it does not give the secret away."""
        return job_of(self.token)


def job_of(token: str) -> str:
    """A digest of the secret."""
    return hashlib.sha256(b"stageline job " + token.encode()).hexdigest()[:8]


def share_by_store(store: Store, rank: int, name: str = "0", ranks: int = 1) -> Sharing:
    """Share the address through a store, for which no rank but 0 has to be there.

    Where the ranks are on one machine, the store holds only the name of a file, for the address holds the secret.

    `name` tells several channels of a job apart. A job that torchrun started again gets a key of its own, for its
    store may still hold the one of the attempt before.
    """
    key = f"stageline/control/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
    return Sharing(store, key, rank, here=one_machine(ranks))


def control_host(ranks: int = 1) -> str:
    """Where the referee listens: loopback, or what STAGELINE_CONTROL_HOST says.

    Loopback serves one machine. Where a launcher says that there are several, ranks that cannot come must not be taken
    for absent, so the address has to be given.
    """
    host = os.environ.get("STAGELINE_CONTROL_HOST", "")
    if not host:
        here, machines = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("SLURM_NNODES", "")
        if (here.isdecimal() and int(here) < ranks) or (machines.isdecimal() and int(machines) > 1):
            raise ControlError(
                "the ranks are on several machines: set STAGELINE_CONTROL_HOST to the address of rank 0's machine"
            )
        return "127.0.0.1"
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if found.is_unspecified:
        raise ControlError(
            f"STAGELINE_CONTROL_HOST is {host}, which no rank can connect to; set it to the address of rank 0's machine"
        )
    return host


def start_referee(ranks: int, deadline: float, start_deadline: float, host: str | None = None) -> Address:
    """Start the process that watches over the ranks; it ends by itself when they are gone."""
    host = control_host(ranks) if host is None else host
    token = secrets.token_hex(32)
    # By stdin and not as an argument: everyone on the machine can read the arguments of a process.
    orders = {"ranks": ranks, "deadline": deadline, "start_deadline": start_deadline, "host": host, "token": token}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _BOOT, NAME, str(Path(__file__).parents[3]), job_of(token)],
            input=json.dumps(orders) + "\n",
            capture_output=True,
            text=True,
            timeout=SLOWEST_START,
            start_new_session=True,
            check=False,
        )
        said = json.loads(done.stdout or "{}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ControlError(f"the referee did not start: {error}") from error
    if "port" not in said:
        why = said.get("error") or (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ControlError(f"the referee cannot listen on {host}: {why}; set STAGELINE_CONTROL_HOST to an address here")
    return Address(host, int(said["port"]), token)
