"""The referee: a small process beside the ranks that hears who lives, and tells all of them who failed first.

Started by rank 0 (see `launch.py`) in a session of its own, so that it outlives every rank and the signals that a
launcher sends to them. It needs the standard library alone and is there in a tenth of a second.

What it hears and says are lines of JSON on one TCP connection a rank:

    rank → referee   hello (rank, nonce, proof) · beat (doing, waits, done) · failed (…) · terminated · bye (how)
    referee → rank   challenge · welcome (proof) · all (every rank has come) · verdict (…) · nobody (all end) · beat

A connection that ends without a bye is a process that died: the kernel closes the sockets of a killed process at once,
so the death is known in milliseconds, and by the name of the rank that died and not of its neighbour. The rules are in
`judge.py`; here are the sockets.
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

from stageline.common.trust import new_nonce, proof, proves
from stageline.faults.monitor.blame import Judge

LINGER = 1.0
"""Seconds without any rank after which the referee ends."""
PATIENCE = 5.0
"""Seconds in which a stranger must say hello."""
STRANGERS = 32
LONGEST_HELLO = 1024
LONGEST_LINE = 1 << 18


class Peer:
    """One connection."""

    def __init__(self, link: socket.socket, now: float) -> None:
        """A stranger, until it says hello."""
        self.link = link
        self.since = now
        self.rank: int | None = None
        self.challenge = new_nonce()
        self.buffer = b""
        self.out = b""
        self.want = selectors.EVENT_READ


class Server:
    """The sockets: reads lines, asks the judge, and tells everyone."""

    def __init__(self, listener: socket.socket, token: str, judge: Judge) -> None:
        """Serve ranks that prove that they know the token."""
        self.listener = listener
        self.token = token
        self.judge = judge
        self.peers: dict[socket.socket, Peer] = {}
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        self.complete = False
        self.told = 0

    def serve(self) -> None:
        """Until no rank is left."""
        alone_since = time.monotonic()
        came = False
        next_beat = 0.0
        pause = min(0.05, self.judge.deadline / 10)
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
                self.judge.forgive(now - before - pause, now)
            # All that was said before this round is heard, and what is said since may not be: so it is judged by then.
            self._judge(before)
            if now >= next_beat:
                next_beat = now + 1.0
                self._tell({"beat": round(now - self.judge.started, 1)})
            self._dismiss(now)
            if any(peer.rank is not None for peer in self.peers.values()):
                alone_since, came = now, True
            elif now - alone_since > (LINGER if came else PATIENCE) or self.judge.all_gone():
                return

    def _judge(self, now: float) -> None:
        self.judge.tick(now)
        if not self.complete and all(seat.state != "absent" for seat in self.judge.seats):
            self.complete = True
            self._tell({"all": True})
        if self.judge.told > self.told:
            self.told = self.judge.told
            self._tell({"verdict": self.judge.verdict})
        elif self.judge.nobody(now):
            self._tell({"nobody": True})

    def _dismiss(self, now: float) -> None:
        """Close strangers that say nothing, and whoever froze when nobody else is left to be told."""
        for peer in list(self.peers.values()):
            if peer.rank is None and now - peer.since > PATIENCE:
                self._close(peer)
        known = [peer for peer in self.peers.values() if peer.rank is not None]
        if known and all(now - self.judge.seats[peer.rank or 0].heard > self.judge.deadline + LINGER for peer in known):
            for peer in known:
                self._close(peer)

    def _accept(self) -> None:
        # Nobody can fill the table: the oldest stranger has to go before another one comes.
        strangers = sorted((peer for peer in self.peers.values() if peer.rank is None), key=lambda peer: peer.since)
        if len(strangers) >= STRANGERS + len(self.judge.seats):
            self._close(strangers.pop(0))
        try:
            link, _ = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and strangers:
                self._close(strangers[0])  # whoever calls is taken in the next round
            return
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peers[link] = peer = Peer(link, time.monotonic())
        self.selector.register(link, selectors.EVENT_READ, peer)
        self._send(peer, _line({"challenge": peer.challenge}))

    def _ready(self, peer: Peer, mask: int) -> None:
        if peer.link not in self.peers:
            return  # closed a moment ago
        if mask & selectors.EVENT_WRITE:
            self._send(peer, b"")
        if not mask & selectors.EVENT_READ:
            return
        try:
            found = peer.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        peer.buffer += found
        *lines, peer.buffer = peer.buffer.split(b"\n")
        try:
            for line in lines:
                self._hear(peer, line)
            if len(peer.buffer) > (LONGEST_HELLO if peer.rank is None else LONGEST_LINE):
                raise ValueError("the line is too long")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            found = b""
        if not found:
            self._close(peer)

    def _hear(self, peer: Peer, line: bytes) -> None:
        now = time.monotonic()
        if peer.rank is None:
            if len(line) > LONGEST_HELLO:
                raise ValueError("the hello is too long")
            said = json.loads(line)
            rank, where = int(said["hello"]), str(said["where"])
            facts = (rank, peer.challenge, str(said["nonce"]))
            if not proves(said["proof"], self.token, "rank", *facts, where):
                raise ValueError("wrong proof")
            if not self.judge.hello(rank, now, where):
                raise ValueError("not expected")
            peer.rank = rank
            self._send(peer, _line({"welcome": rank, "proof": proof(self.token, "referee", *facts)}))
            if self.complete:
                self._send(peer, _line({"all": True}))
            if self.judge.verdict is not None:
                self._send(peer, _line({"verdict": self.judge.verdict}))
            return
        said = json.loads(line)
        if "beat" in said:
            waits = said.get("waits")
            doing = str(said.get("doing") or "")
            self.judge.beat(peer.rank, doing, None if waits is None else int(waits), int(said.get("done", 0)), now)
        elif "failed" in said:
            self.judge.failed(peer.rank, said["failed"], now)
        elif "ask" in said:
            asked = int(said["ask"])
            known = 0 <= asked < len(self.judge.seats)
            self._send(peer, _line({"answer": asked, "busy": known and self.judge.busy(asked, now)}))
        elif "deadline" in said:
            self.judge.deadline = max(0.1, float(said["deadline"]))
        elif "terminated" in said:
            self.judge.terminated(peer.rank, now)
        elif "bye" in said:
            self.judge.bye(peer.rank, str(said["bye"]), bool(said.get("clean", True)), now)

    def _tell(self, what: dict[str, Any]) -> None:
        line = _line(what)
        for peer in list(self.peers.values()):
            if peer.rank is not None:
                self._send(peer, line)

    def _send(self, peer: Peer, data: bytes) -> None:
        """Send what the socket takes, and the rest when it takes more."""
        peer.out += data
        try:
            while peer.out:
                peer.out = peer.out[peer.link.send(peer.out) :]
        except BlockingIOError:
            pass
        except OSError:
            return  # its end is heard by the read
        if len(peer.out) > 4 * LONGEST_LINE:
            peer.out = b""
        want = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if want != peer.want:
            peer.want = want
            self.selector.modify(peer.link, want, peer)

    def _close(self, peer: Peer) -> None:
        self.selector.unregister(peer.link)
        del self.peers[peer.link]
        peer.link.close()
        if peer.rank is not None:
            self.judge.closed(peer.rank, time.monotonic())


def _line(what: dict[str, Any]) -> bytes:
    return json.dumps(what).encode() + b"\n"


def main() -> None:
    """Read what to do from stdin, bind, say the port, and serve as a process that is nobody's child."""
    said = json.loads(sys.stdin.readline())
    family = socket.AF_INET6 if ":" in said["host"] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((said["host"], 0))
        listener.listen(1024)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    if os.fork():
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        os._exit(0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.chdir("/")
    _take_all_the_files_we_may(said["ranks"])
    judge = Judge(said["ranks"], said["deadline"], said["start_deadline"], time.monotonic())
    Server(listener, said["token"], judge).serve()


def _take_all_the_files_we_may(ranks: int) -> None:
    """A connection a rank: a thousand of them pass the usual limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ranks + 100:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
