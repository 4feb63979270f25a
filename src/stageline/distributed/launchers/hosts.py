"""The launchers of a job on several hosts: one on each host, all connected, each with the last status of all others.

      host 0 ───── host 1        Five times a second, each sends its whole status to all others: what became of its
          ╲         ╱            processes, and what its ranks announced. Nothing depends on a single message.
           ╲       ╱             The first host that is there leads: its status has the attempt that all follow.
            host 2

A host is lost if its launcher ended, or was not heard for too long. A host that hears too few others is cut off, and
stops before the others continue without it: so a job never runs twice. A launcher that is started again on a lost host
connects to host 0, or is found there by the others; it waits until the one that leads adds it to the table of hosts.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from stageline.common.errors import StagelineError, TrustError
from stageline.common.handshake import PATIENCE as HANDSHAKE
from stageline.common.handshake import Facts, MessageSeal, Reception, Session, open_connection
from stageline.common.machine import port_range
from stageline.distributed.state_memory import StateMemory

BEAT = 0.2
"""Seconds between two messages to another host."""
REOPEN = 1.5
"""Seconds in which a connection that broke must be opened again."""
START = 300.0
"""Seconds in which the launchers of all hosts must start."""
NOTE = 5.0
"""Seconds after which a launcher says whom it waits for."""
LONGEST_LINE = 1 << 22


@dataclass(frozen=True)
class HostPlace:
    """The place of a launcher among those of all hosts, and the address of the first one.

    >>> HostPlace(3, 1, "10.0.0.1").port
    29400
    """

    count: int
    number: int
    address: str
    port: int = 29400
    timeout: float = 30.0
    """Seconds of silence after which a host is lost."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.number < self.count:
            raise StagelineError(
                f"--node-rank must be from 0 to {max(self.count, 1) - 1} for --nnodes {self.count}; got {self.number}"
            )
        if not self.address:
            raise StagelineError("--nnodes above 1 requires --master-addr, an address of the host with --node-rank 0")
        if not 0 < self.port < 65536:
            raise StagelineError(f"--master-port must be a port from 1 to 65535; got {self.port}")


class HostEntry(NamedTuple):
    """What all launchers know of a host."""

    address: str
    port: int
    """Where its launcher listens."""
    ranks: int
    spares: int
    store: int
    """The port of its store."""
    id: str = ""
    """A random number of its launcher."""
    since: int = 0
    """How many hosts had come back when it did; 0 if it was there from the start."""


_NOBODY = HostEntry("", 0, 0, 0, 0)


class _Link:
    """Sends and receives authenticated lines of JSON; a message that the network does not take yet is dropped."""

    def __init__(self, session: Session, *, opener: bool) -> None:
        self.socket, self._seal = session.link, MessageSeal(session.key, opener=opener)
        self._buffer = self._unsent = b""
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):
            if self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            if not self._unsent:
                data = self._seal.seal(json.dumps(message).encode()) + b"\n"
                self._unsent = data[self.socket.send(data) :]

    def receive(self) -> list[Any] | None:
        """The messages that arrive within half a second; None once the other end is gone."""
        if not select.select([self.socket], [], [], 0.5)[0]:
            return []
        try:
            data = self.socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if not data or len(self._buffer) > LONGEST_LINE:
            return None
        return [json.loads(self._seal.unseal(line)) for line in lines]


class HostNetwork:
    """The connections of this launcher to those of the other hosts. Threads keep them; the launcher reads what is new.

    `facts` are the ranks, the spares and the port of the store of this host; `recovery` are options that must be the
    same on all hosts.
    """

    def __init__(self, place: HostPlace, secret: str, facts: Mapping[str, int], recovery: str = "") -> None:
        self.place, self.number, self._secret = place, place.number, secret
        self.status: Mapping[str, Any] = {}
        """What this launcher tells all others."""
        self.statuses: dict[int, Mapping[str, Any]] = {}
        """The last status of every other host."""
        self.table: dict[int, HostEntry] = {}
        """All hosts, once all have come."""
        self.members: set[int] = set(range(place.count))
        """The hosts that the job had when it last continued."""
        self.lost: dict[int, str] = {}
        """The hosts that were lost, and how."""
        self.lost_at: dict[int, float] = {}
        """When, in seconds since the epoch."""
        self.returning: dict[int, HostEntry] = {}
        """Launchers that were started again on hosts that were lost."""
        self.order: Mapping[str, Any] | None = None
        """The last order of a job that this host came back to; None if it was there from the start."""
        self.refused = ""
        """Why other hosts do not talk to this one."""
        self._given_up: dict[int, str] = {}
        """The hosts that declared this one lost, and why: they do not take it back."""
        self.memory: StateMemory | None = None
        self._entries: dict[int, HostEntry] = {}
        self._links: dict[int, _Link] = {}
        self._heard: dict[int, float] = {}
        self._broken: dict[int, float] = {}
        """Since when a host that was connected is not."""
        self._changed, self._lock = threading.Event(), threading.RLock()
        self._closed = False
        self._is_late = False
        """Whether a launcher that connected to this one belongs to a job that has started."""
        self._listener = listen_anywhere(place.port if place.number == 0 else 0, besides=place.port)
        self._facts = {**facts, "launcher": place.number, "hosts": place.count, "port": self._listener.getsockname()[1]}
        self._facts |= {"torch": torch.__version__, "recovery": recovery, "id": secrets.token_hex(8)}
        self._run(self._accept)
        self._run(self._beat)
        if place.number:
            self._run(self._open, 0)

    def _run(self, function: Any, *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, name="stageline hosts", daemon=True).start()

    # Meeting.

    def meet(self, patience: float = START) -> None:
        """Wait until the launchers of all hosts are connected to this one."""
        end, note = time.monotonic() + patience, time.monotonic() + NOTE
        while True:
            self._read_table()
            missing = sorted(set(self.present) - {self.number} - self._links.keys())
            if self.table and not missing:
                self._facts["started"] = True
                return
            if self.refused:
                raise StagelineError(self.refused)
            if self.lost and self.order is None:
                number, how = next(iter(self.lost.items()))
                raise StagelineError(f"host {number} was lost before all hosts had started: {how}")
            where = f"--master-addr {self.place.address}, port {self.place.port}"
            if time.monotonic() > end and missing:
                why = "nothing answers at" if missing[0] == 0 else "its launcher did not connect to"
                raise StagelineError(f"host {missing[0]} never started: {why} {where} within {patience:g} s")
            if time.monotonic() > note and missing:
                note = float("inf")
                names = ", ".join(f"host {number}" for number in missing)
                sys.stderr.write(f"stageline: waiting for the launchers of {names}; {where}\n")
            self._changed.wait(0.05)

    def _read_table(self) -> None:
        """Take a table of all hosts that has this launcher from another one, and connect to those in between."""
        for status in [] if self.table else list(self.statuses.values()):
            table = read_table(status["order"]["table"] if "order" in status else status.get("table", {}))
            if table.get(self.number, _NOBODY).id == self._facts["id"]:
                self._join(table, status)
                return
        if not self.table and not self.number:
            with self._lock:
                if len(self._entries) == self.place.count - 1 and not self._is_late:
                    self._entries[0] = _entry(self._own_address(), self._facts)
                    self.table = dict(sorted(self._entries.items()))

    def _join(self, table: dict[int, HostEntry], status: Mapping[str, Any]) -> None:
        with self._lock:
            if "order" in status:
                self.order = status["order"]
                gone = table.keys() - set(status["order"]["members"]) - {self.number}
                self.lost = dict.fromkeys(gone, "lost before this host came back")
                self.lost_at = dict.fromkeys(gone, time.time())
                self._heard |= dict.fromkeys(set(self.present) - self._heard.keys() - {self.number}, time.monotonic())
            self.table, self._entries = table, dict(table)
        for number in range(1, self.number):
            self._run(self._open, number)

    def readmit(self, table: Mapping[int, HostEntry]) -> None:
        """Take a table in which launchers that were started again have the places of hosts that were lost."""
        others = {number: entry for number, entry in table.items() if number != self.number}
        for number, entry in others.items():
            if entry.id == self.table[number].id:
                continue
            with self._lock:
                self.table = {**self.table, number: entry}
                self._entries[number] = entry
                self._heard[number] = time.monotonic()
                for values in (self.statuses, self._broken, self.returning, self.lost, self.lost_at, self._given_up):
                    values.pop(number, None)
            if 0 < number < self.number:
                self._run(self._open, number)

    def _own_address(self) -> str:
        """The address of the first host, as the others see it."""
        addresses = [_plain(link.socket.getsockname()[0]) for link in self._links.values()]
        return addresses[0] if addresses else "127.0.0.1"

    # Who is there.

    @property
    def present(self) -> list[int]:
        """The hosts that are not lost, this one included."""
        return [number for number in range(self.place.count) if number not in self.lost]

    @property
    def leader(self) -> int:
        """The one of them that was there first."""
        return min(self.present, key=self._seniority)

    def _seniority(self, number: int) -> tuple[int, int]:
        return self.table.get(number, _NOBODY).since, number

    @property
    def cut_off(self) -> str:
        """Why this host has to stop: it hears fewer than half of the others. Empty if it has not.

        Of two halves, the one with the host that was there first continues.
        """
        if self.refused:
            return self.refused
        now = time.monotonic()
        near = {number for number in self.present if now - self._heard.get(number, now) < self.place.timeout}
        near = ((near - self._given_up.keys()) | {self.number}) & self.members
        missing = sorted(self.members - near)
        if 2 * len(near) > len(self.members) or (
            2 * len(near) == len(self.members) and min(self.members, key=self._seniority) in near
        ):
            return ""
        if self._given_up:  # this process did not run for some time
            return f"the other hosts declared host {self.number} lost: {next(iter(self._given_up.values()))}"
        names = ", ".join(f"host {number} ({self._name(number)})" for number in missing)
        return f"{names} cannot be reached from host {self.number}, and a job needs most of its hosts to continue"

    def _name(self, number: int) -> str:
        return self.table[number].address if number in self.table else "unknown"

    def lose(self, number: int, how: str) -> None:
        """Give a host up, for good."""
        with self._lock:
            if number not in self.lost and not self._closed:
                self.lost_at[number] = time.time()
                self.lost[number] = how
        self._changed.set()

    def tell(self, status: Mapping[str, Any]) -> None:
        """Send a status now, if it is new, and from now on."""
        if status != self.status:
            self.status = status
            self._changed.set()

    # Threads.

    def _beat(self) -> None:
        while not self._closed:
            began = time.monotonic()
            message = {**self.status}
            if not self.number and self.table:
                message["table"] = self.table
            for link in list(self._links.values()):
                link.send(message)
            self._check(began)
            self._changed.wait(BEAT)
            self._changed.clear()
            gap = time.monotonic() - began
            if gap > 1.0 + BEAT:  # this process did not run, so the silence of others does not count
                for number in self._heard:
                    self._heard[number] += gap

    def _check(self, now: float) -> None:
        limit = 1.25 * self.place.timeout + 1.0  # a host that is cut off has stopped by then
        for number, heard in list(self._heard.items()):
            if now - heard > limit:
                self.lose(number, f"not heard for {now - heard:.0f} s")
            elif number > self.number and now - self._broken.get(number, now) > REOPEN:
                self.lose(number, "its launcher ended")

    def _accept(self) -> None:
        while not self._closed:
            try:
                if select.select([self._listener], [], [], 0.5)[0]:
                    self._run(self._receive, self._listener.accept()[0])
            except (OSError, ValueError):  # closed, or too many files are open
                time.sleep(0.05)

    def _receive(self, link: socket.socket) -> None:
        """Serve someone who connected: the launcher of another host, or a rank that asks for a state."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TrustError), link:
            reception = Reception(link, self._secret, self._admit)
            end = time.monotonic() + HANDSHAKE
            while (session := reception.proceed()) is None:
                if time.monotonic() > end:
                    return
                select.select([reception.link], [], [], 0.5)
            with session.link:
                if "memory" not in session.facts:
                    number = int(session.facts["launcher"])
                    address = _plain(session.link.getpeername()[0])
                    with self._lock:
                        self._is_late |= bool(session.facts.get("started"))
                        self._entries.setdefault(number, _entry(address, session.facts))
                        if number in self.lost:
                            self.returning[number] = _entry(address, session.facts)
                    self._serve(number, session, opener=False)
                elif self.memory is not None:
                    self.memory.serve(session.link, session.facts)

    def _admit(self, facts: Facts) -> Facts:
        if "memory" in facts:
            if self.memory is None:
                raise TrustError("this host has not started")
            return self.memory.admit(facts)
        number = int(facts["launcher"])
        if facts.get("lost", [""])[0] == self._facts["id"]:
            self._given_up[number] = str(facts["lost"][1])
            raise TrustError(f"host {self.number} was declared lost")
        if facts["recovery"] != self._facts["recovery"]:
            raise TrustError(f"it has {facts['recovery']}, and host {self.number} has {self._facts['recovery']}")
        if int(facts["hosts"]) != self.place.count:
            raise TrustError(f"it has --nnodes {facts['hosts']}, and host {self.number} has {self.place.count}")
        if facts["torch"] != torch.__version__:
            raise TrustError(f"it runs torch {facts['torch']}, and host {self.number} runs {torch.__version__}")
        known = self._entries.get(number, _NOBODY)
        if number in self._broken and known.id != facts["id"]:
            self.lose(number, "its launcher was started again")
        if number in self.lost:
            if known.id == facts["id"]:
                raise TrustError(f"the other hosts declared it lost: {self.lost[number]}")
            if (known.ranks, known.spares) != (facts["ranks"], facts["spares"]):
                raise TrustError(f"it came back with other options; it had -n {known.ranks} --spares {known.spares}")
        elif number == self.number or known.id not in ("", facts["id"]):
            raise TrustError(f"another launcher also has --node-rank {number}")
        return self._facts

    def _open(self, number: int) -> None:
        """Keep a connection to a host before this one; look whether the first one comes back if it is lost."""
        while not self._closed and not self.refused and (number == 0 or number not in self.lost):
            entry = self.table.get(number)
            address = (self.place.address, self.place.port) if entry is None else (entry.address, entry.port)
            facts = self._facts
            if entry is not None and number in self.lost:  # its launcher may not know, if it did not run for some time
                facts = {**facts, "lost": [entry.id, self.lost[number]]}
            try:
                session = open_connection(*address, self._secret, facts, timeout=max(1.0, self.place.timeout / 3))
            except TrustError as error:
                if number in self.lost:  # another job may be there now
                    time.sleep(1.0)
                    continue
                self.refused = f"the launcher of host {number} at {address[0]}, port {address[1]}: {error}"
                self._changed.set()
            except OSError as error:
                if isinstance(error, ConnectionRefusedError) and number in self._heard:
                    self.lose(number, "its launcher ended")
                time.sleep(1.0 if number in self.lost else 0.1)
            else:
                with session.link:
                    if number in self.lost and not self._returns(number, session.facts):
                        time.sleep(1.0)
                        continue
                    self._serve(number, session, opener=True)

    def _returns(self, number: int, facts: Facts) -> bool:
        """Whether it is a new launcher that answers at a host that was lost."""
        entry = self.table.get(number)
        options = (facts["ranks"], facts["spares"])
        if entry is None or entry.id == facts["id"] or options != (entry.ranks, entry.spares):
            return False
        self.returning[number] = _entry(entry.address, facts)
        return True

    def _serve(self, number: int, session: Session, *, opener: bool) -> None:
        """Read what a host sends, until its connection breaks."""
        link = _Link(session, opener=opener)
        with self._lock:
            self._links[number], self._heard[number] = link, time.monotonic()
            self._broken.pop(number, None)
        self._changed.set()
        with contextlib.suppress(OSError, ValueError, TrustError):
            while not self._closed and self._knows(number) and self._links.get(number) is link:
                messages = link.receive()
                if messages is None:
                    break
                for message in messages:
                    self.statuses[number], self._heard[number] = message, time.monotonic()
        with self._lock:
            if self._links.get(number) is link:
                del self._links[number]
                self._broken[number] = time.monotonic()
                self.returning.pop(number, None)

    def _knows(self, number: int) -> bool:
        return number not in self.lost or number in self.returning

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def drain(self, timeout: float) -> None:
        """Send the last status until the others have left."""
        end = time.monotonic() + timeout
        self._changed.set()
        while self._links and time.monotonic() < end:
            time.sleep(0.02)

    def close(self) -> None:
        """Close all connections."""
        for link in list(self._links.values()):
            link.send(self.status)
        self._closed = True
        self._changed.set()
        self._listener.close()
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)


def _entry(address: str, facts: Facts) -> HostEntry:
    port, ranks, spares, store = (int(facts[name]) for name in ("port", "ranks", "spares", "store"))
    return HostEntry(address, port, ranks, spares, store, str(facts["id"]))


def read_table(entries: Mapping[Any, Sequence[Any]]) -> dict[int, HostEntry]:
    """The table of all hosts, as another host sent it.

    >>> read_table({"1": ["10.0.0.2", 29400, 4, 0, 29401, "1a2b", 0]})[1].ranks
    4
    """
    return {int(number): HostEntry(*entry) for number, entry in entries.items()}


def _plain(address: str) -> str:
    """An address without the prefix of an IPv4 address that was reached over an IPv6 socket."""
    return address.removeprefix("::ffff:")


def listen_anywhere(port: int = 0, *, besides: int = 0) -> socket.socket:
    """A socket that listens on all addresses of this machine: on this port, or on a free one, but for `besides`."""
    ports = (
        [port] if port else [candidate for candidate in port_range() or [0] if not candidate or candidate != besides]
    )
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for candidate in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", candidate), family=family, backlog=1024, dualstack_ipv6=dual)
    if port:
        raise StagelineError(f"this launcher cannot listen on --master-port {port}; another job may be using that port")
    raise StagelineError(f"all ports of STAGELINE_PORTS={ports[0]}-{ports[-1]} are in use: give each job its own range")
