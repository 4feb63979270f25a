"""The failure monitor's process: hears from every rank, and tells all of them which one failed first.

Rank 0 starts it (see `connection.py`) in a session of its own, so that it outlives every rank and the signals that a
launcher sends to them. It needs only the standard library and starts in a tenth of a second. If the ranks are on
several machines, the first rank of another machine than rank 0's starts a standby: it hears everything too, and takes
over once a rank has lost the first monitor. Then it gets a standby of its own, on another machine.

Each rank has one TCP connection to each monitor (`common/handshake.py`), with authenticated lines of JSON both ways:

    rank → monitor   process · beat (doing, waits, done) · failed (…) · ask · deadline ·
                     terminated · bye (how) · standby (host, port) · lead · relay (verdict)
    monitor → rank   all (every rank has come) · verdict (…) · nobody (all end)
                     · beat · answer · start_standby · standby (host, port)

A connection that closes without a bye means that the process died: the kernel closes the sockets of a killed process at
once, so its death is known in milliseconds, and by its own rank instead of a neighbour's. A process that is seen to
live, or that is on another machine, may have lost only its connection, and opens it again. What must not be lost has a
number, and the welcome holds the last one that was received. The rules are in `blame.py`; the sockets are here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import sys
import time
from typing import Any

from stageline.common.errors import StagelineError, TrustError
from stageline.common.handshake import PATIENCE, Facts, MessageSeal, Reception, check_tls
from stageline.common.machine import listen
from stageline.faults.monitor.blame import BlameRules

LINGER = 1.0
"""Seconds without any rank after which the monitor ends."""
MAX_STRANGERS = 32
"""Maximum number of connections, beside one per rank, that have not proved it."""
SLOWEST_STANDBY = 30.0
"""Seconds in which the first rank must connect to a standby."""
PAUSE = 0.05
"""Seconds between two looks at the rules, unless something happens."""
PF_EXITING = 0x4
"""The flag of Linux for a process that is ending; its sockets close before it is a zombie."""
LONGEST_LINE = 1 << 18


class Peer:
    """One connection: a stranger until the handshake is over, then a rank."""

    def __init__(self, reception: Reception) -> None:
        self.link = reception.link
        self.reception = reception
        self.rank: int | None = None
        self.seal: MessageSeal | None = None
        """Authenticates the messages of a rank."""
        self.buffer = b""
        self.out = b""
        self.want = selectors.EVENT_READ


class Server:
    """Accepts ranks that prove that they know the token, passes their messages to the rules, and sends verdicts."""

    def __init__(self, listener: socket.socket, token: str, rules: BlameRules, host: str = "") -> None:
        """`host` is the machine of a standby; the first monitor is on that of rank 0."""
        self.listener = listener
        self.token = token
        self.rules = rules
        self.peers: dict[socket.socket, Peer] = {}
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        self.complete = False
        self._verdicts_sent = 0
        self._received = [0] * len(rules.ranks)
        """The number of the last message of each rank that must not be lost."""
        self._kernel = kernel()
        self._processes: dict[int, int] = {}
        """The processes on this machine, by rank."""
        self._unconnected: set[int] = set()
        """Ranks on this machine that live without a connection."""
        self._standby: list[Any] | None = None
        """Host and port of the standby."""
        self._needs_standby = True
        self._host = host
        self._followers: set[int] = set()
        """The ranks that listen to this one since it took over from a monitor that was lost."""
        self._news = True
        """Whether something happened that the rules must judge at once."""

    def serve(self) -> None:
        """Serve until no rank is left."""
        alone_since = time.monotonic()
        came = False
        next_beat = next_look = 0.0
        pause = min(PAUSE, self.rules.deadline / 10)
        first = SLOWEST_STANDBY if self.rules.standby else PATIENCE
        while True:
            before = time.monotonic()
            events = self.selector.select(pause)
            for key, mask in events:
                if key.data is None:
                    self._accept()
                else:
                    self._ready(key.data, mask)
            now = time.monotonic()
            if now - before - pause > 1.0:
                self.rules.forgive(now - before - pause, now)
            if now < next_look and not self._news:
                continue  # a thousand ranks send several hundred heartbeats a second
            next_look, self._news = now + pause, False
            self._check_processes(now)
            # Everything sent before this round has been read; what was sent since may not have been.
            self._apply_rules(before)
            if now >= next_beat:
                next_beat = now + min(1.0, self.rules.deadline / 5)
                self._broadcast({"beat": round(now - self.rules.started, 1)})
            self._close_idle(now)
            if self._expects(now):
                alone_since, came = now, True
            elif now - alone_since > (LINGER if came else first) or self.rules.all_gone():
                return

    def _expects(self, now: float) -> bool:
        """Whether a rank is connected, or may connect again."""
        if any(peer.rank is not None for peer in self.peers.values()):
            return True
        return any(state.state == "here" and now - state.heard < self.rules.deadline for state in self.rules.ranks)

    def _apply_rules(self, now: float) -> None:
        self.rules.tick(now)
        if not self.complete and not self.rules.standby and all(state.state != "absent" for state in self.rules.ranks):
            self.complete = True
            self._broadcast({"all": True})
        if self.complete and self._needs_standby and not self.rules.is_settled(None) and self._is_followed():
            self._needs_standby = False
            self._ask_for_standby()
        if self.rules.verdicts > self._verdicts_sent:
            self._verdicts_sent = self.rules.verdicts
            self._broadcast({"verdict": self.rules.verdict})
        elif self.rules.all_terminated(now):
            self._broadcast({"nobody": True})

    def _is_followed(self) -> bool:
        """Whether the machines of all ranks are known and, if this was a standby, all of them listen to it."""
        if self._host and any(
            state.state == "here" and state.rank not in self._followers for state in self.rules.ranks
        ):
            return False
        return all(state.host for state in self.rules.ranks)

    def _ask_for_standby(self) -> None:
        """Let the first rank of another machine than this one start a standby."""
        hosts = {peer.rank: self.rules.ranks[peer.rank].host for peer in self.peers.values() if peer.rank is not None}
        own = self._host or hosts.get(0)
        other = [rank for rank, host in sorted(hosts.items()) if own is not None and host != own]
        for peer in self.peers.values():
            if other and peer.rank == other[0]:
                self._tell(peer, {"start_standby": True})

    def _check_processes(self, now: float) -> None:
        """Report the deaths of ranks on this machine that have no connection."""
        for rank in [rank for rank in self._unconnected if exited(self._processes[rank])]:
            self._unconnected.discard(rank)
            self.rules.closed(rank, now)

    def _close_idle(self, now: float) -> None:
        """Close connections that do not say hello, and those of frozen ranks when no other rank is left."""
        for peer in list(self.peers.values()):
            if peer.rank is None and now - peer.reception.since > PATIENCE:
                self._close(peer)
        known = [peer for peer in self.peers.values() if peer.rank is not None]
        if known and all(now - self.rules.ranks[peer.rank or 0].heard > self.rules.deadline + LINGER for peer in known):
            for peer in known:
                self._close(peer)

    def _accept(self) -> None:
        # Nobody can fill the table: the oldest stranger is closed before another is accepted.
        strangers = [peer for peer in self.peers.values() if peer.rank is None]  # in the order in which they came
        if len(strangers) >= MAX_STRANGERS + len(self.rules.ranks):
            self._close(strangers.pop(0))
        try:
            link, _ = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and strangers:
                self._close(strangers[0])  # the new one is accepted in the next round
            return
        try:
            peer = Peer(Reception(link, self.token, self._admit))
        except OSError:  # it is gone already
            link.close()
            return
        self.peers[peer.link] = peer
        self.selector.register(peer.link, selectors.EVENT_READ, peer)
        self._proceed(peer)

    def _proceed(self, peer: Peer) -> None:
        """Go on with the handshake of a stranger."""
        try:
            session = peer.reception.proceed()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._close(peer)
            return
        if session is None:
            return
        peer.seal, peer.rank, self._news = MessageSeal(session.key, opener=False), int(session.facts["rank"]), True
        if self.complete:
            self._tell(peer, {"all": True})
        if self._standby is not None:
            self._tell(peer, {"standby": self._standby})
        if self.rules.verdict is not None:
            self._tell(peer, {"verdict": self.rules.verdict})

    def _ready(self, peer: Peer, mask: int) -> None:
        if peer.link not in self.peers:
            return  # closed earlier in this round
        if mask & selectors.EVENT_WRITE:
            self._send(peer, b"")
        if not mask & selectors.EVENT_READ:
            return
        if peer.seal is None:
            self._proceed(peer)
            return
        try:
            data = peer.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.buffer += data
        *lines, peer.buffer = peer.buffer.split(b"\n")
        try:
            for line in lines:
                self._handle(peer, json.loads(peer.seal.unseal(line)))
            if len(peer.buffer) > LONGEST_LINE:
                raise ValueError("the line is too long")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            data = b""
        if not data:
            self._close(peer)

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        now = time.monotonic()
        assert peer.rank is not None
        if "beat" in message:
            waits = message.get("waits")
            doing = str(message.get("doing") or "")
            self.rules.beat(peer.rank, doing, None if waits is None else int(waits), int(message.get("done", 0)), now)
            return
        self._news = True
        number = int(message.get("number", 0))
        if number and number <= self._received[peer.rank]:
            return  # it was sent again
        if "process" in message:
            self.rules.ranks[peer.rank].host = str(message["host"])
            if message["kernel"] and message["kernel"] == self._kernel:
                self._processes[peer.rank] = int(message["process"])
        elif "failed" in message:
            self.rules.failed(peer.rank, message["failed"], now)
        elif "ask" in message:
            rank = int(message["ask"])
            known = 0 <= rank < len(self.rules.ranks)
            self._tell(peer, {"answer": rank, "busy": known and self.rules.busy(rank, now)})
        elif "deadline" in message:
            self.rules.deadline = max(0.1, float(message["deadline"]))
        elif "terminated" in message:
            self.rules.terminated(peer.rank, now)
        elif "bye" in message:
            self.rules.bye(peer.rank, str(message["bye"]), bool(message.get("clean", True)), now)
        elif "standby" in message:
            self._standby = [str(message["standby"][0]), int(message["standby"][1])]
            self._broadcast({"standby": self._standby})
        elif "relay" in message:
            self.rules.adopt(message["relay"])
        elif "lead" in message:
            self.rules.lead(now)
            self._followers.add(peer.rank)
            if self._standby is not None:
                self._tell(peer, {"standby": self._standby})
            if self.rules.verdict is not None:
                self._tell(peer, {"verdict": self.rules.verdict})
        self._received[peer.rank] = max(number, self._received[peer.rank])

    def _admit(self, facts: Facts) -> Facts:
        """Make a rank of a stranger that knows the secret; or raise TrustError."""
        rank, where, now = int(facts["rank"]), str(facts["where"]), time.monotonic()
        if self.rules.rejoin(rank, now, where):
            for earlier in [other for other in self.peers.values() if other.rank == rank]:
                self._drop(earlier)
            self._unconnected.discard(rank)
        elif not self.rules.hello(rank, now, where):
            raise TrustError(f"there is no rank {rank}, or it is connected")
        return {"received": self._received[rank]}

    def _broadcast(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        for peer in list(self.peers.values()):
            if peer.seal is not None:
                self._send(peer, peer.seal.seal(text) + b"\n")

    def _tell(self, peer: Peer, message: dict[str, Any]) -> None:
        assert peer.seal is not None
        self._send(peer, peer.seal.seal(json.dumps(message).encode()) + b"\n")

    def _send(self, peer: Peer, data: bytes) -> None:
        """Send what the socket accepts, and the rest when it accepts more."""
        peer.out += data
        try:
            while peer.out:
                peer.out = peer.out[peer.link.send(peer.out) :]
        except BlockingIOError:
            pass
        except OSError:
            return  # the read notices that it is gone
        if len(peer.out) > 4 * LONGEST_LINE:
            peer.out = b""
        want = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if want != peer.want:
            peer.want = want
            self.selector.modify(peer.link, want, peer)

    def _close(self, peer: Peer) -> None:
        self._drop(peer)
        if peer.rank is None:
            return
        self._news = True
        now, process = time.monotonic(), self._processes.get(peer.rank)
        if process is not None and not exited(process):
            if self.rules.ranks[peer.rank].state == "here":
                self._unconnected.add(peer.rank)
        elif process is None and self.rules.ranks[peer.rank].host:
            self.rules.disconnected(peer.rank, now)  # it is on another machine
        else:
            self.rules.closed(peer.rank, now)

    def _drop(self, peer: Peer) -> None:
        self.selector.unregister(peer.link)
        del self.peers[peer.link]
        peer.link.close()


def main() -> None:
    """Read the options from stdin, bind, print the port, and serve as a process that is nobody's child."""
    options = json.loads(sys.stdin.readline())
    try:
        check_tls()  # its files are read here, before this process changes its folder
        listener = listen(options["host"])
    except (OSError, StagelineError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    if os.fork():
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        os._exit(0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.chdir("/")
    _raise_file_limit(options["ranks"])
    standby = bool(options.get("standby"))
    start_deadline = float("inf") if standby else options["start_deadline"]
    rules = BlameRules(options["ranks"], options["deadline"], start_deadline, time.monotonic(), standby=standby)
    Server(listener, options["token"], rules, options["host"] if standby else "").serve()


def kernel() -> str:
    """A name that processes have in common if they can look each other up; empty if unknown.

    >>> kernel() == kernel()
    True
    """
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def exited(process: int) -> bool:
    """Whether a process of this machine has ended or is ending.

    >>> exited(os.getpid())
    False
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return True
    return state in (b"Z", b"X") or bool(int(fields[5]) & PF_EXITING)


def _raise_file_limit(ranks: int) -> None:
    """Allow one connection for each rank: a thousand of them exceed the usual limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ranks + 100:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
