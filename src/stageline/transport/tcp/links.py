"""The connections between the processes of a job: one for each sender, receiver and kind of channel, made when needed.

Every process listens on one port; a sender connects to it, and both prove that they know the secret of the job
(`common/handshake.py`). The thread that waits for a message reads it straight from the socket, so a message wakes one
thread of the receiver and no other. `wake` ends all waits early, from any thread.

A thread, the keeper, accepts connections and watches those of this sender; it sleeps while nothing happens to them. A
connection that breaks is opened again by its sender (`repair.py`). A receiver that notices it first calls the sender:
it opens a connection that says which channel is to be opened again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from stageline.common.errors import TransportError, TrustError
from stageline.common.handshake import PATIENCE, Facts, Reception, open_connection
from stageline.common.machine import listen
from stageline.common.trust import Sharing, one_machine, proof, proves
from stageline.transport._torch_private import default_store
from stageline.transport.tcp.channels import ChannelKind, Inbound
from stageline.transport.tcp.outbox import Outbound
from stageline.transport.tcp.repair import start_repair

KINDS: tuple[ChannelKind, ...] = ("forward", "backward", "exchange", "collective", "replica")
CONNECT = 30.0
"""Seconds in which another living process accepts a connection; fewer if the deadline is shorter."""
STRANGERS = 64
"""How many connections that have not proved to be of a rank are kept, beside those of the ranks."""
CALL_EVERY = 1.0
"""Seconds between two calls to the sender of a connection that broke."""
HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)

_open: weakref.WeakSet[Links] = weakref.WeakSet()
"""What a forked child must close."""
_joined: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How often the processes of a default group joined each other."""


class Links:
    """One process's connections to the others.

    >>> links = Links(0, 1)
    >>> links.meet([links.address], token="a secret")
    >>> links.close()
    """

    def __init__(self, rank: int, ranks: int, host: str = "127.0.0.1") -> None:
        """Listen at an address of this machine that the others can reach."""
        self.rank = rank
        self.ranks = ranks
        try:
            self._listener = listen(host)
        except OSError as error:
            raise TransportError(f"rank {rank} cannot listen at {host}: {error}") from error
        self._listener.setblocking(False)
        self.address = f"{host}|{self._listener.getsockname()[1]}"
        """Host and port."""
        self._bell, self.alarm = socket.socketpair()
        self._bell.setblocking(False)
        self.alarm.setblocking(False)
        self.alarmed = False
        """Whether `alarm`, which ends waits, has something to read."""
        self._addresses: list[str] = []
        self._token = ""
        self.deadline = 60.0
        """Seconds in which a connection that broke must be opened again."""
        self.ended = False
        """Whether the connections have ended on purpose."""
        self._strangers: dict[socket.socket, Reception] = {}
        """Connections that have not proved to be of a rank, the oldest first."""
        self._in: dict[tuple[int, ChannelKind], Inbound] = {}
        self._out: dict[tuple[int, ChannelKind], Outbound] = {}
        self._changed = threading.Condition()
        self._caller, self._ear = socket.socketpair()
        """To wake the keeper."""
        self._caller.setblocking(False)
        self._ear.setblocking(False)
        # With the last pipeline that uses them; not at exit, when the modules that this needs may be gone.
        own = (self._listener, self._bell, self.alarm, self._caller)
        self._unheard = [self._ear]
        """The keeper's end, until there is a keeper."""
        self._closing = weakref.finalize(self, _close, own, self._unheard, self._in, self._out, self._strangers)
        self._closing.atexit = False
        _open.add(self)

    @classmethod
    def join(cls, host: str = "127.0.0.1", members: Sequence[int] = ()) -> Links:
        """Listen, and exchange addresses through the store of the default group; all its processes call this.

        Or only some of them, its `members`, which are then ranks from 0 on, and have a part of the store to themselves.
        """
        store, rank, ranks = default_store(), dist.get_rank(), dist.get_world_size()
        one = one_machine(ranks)
        if members:
            rank, ranks = members.index(rank), len(members)
        links = cls(rank, ranks, host)
        default = dist.group.WORLD
        if not members:
            _joined[default] = _joined.get(default, 0) + 1
        number = "part" if members else _joined[default]
        key = f"stageline/links/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}"
        share = Sharing(store, f"{key}/token", rank, here=one)
        try:
            token = share(secrets.token_hex(32))
            # A rank publishes its address once it has the secret, so when all have, the file can go.
            store.set(f"{key}/{rank}", f"{links.address}|{proof(token, 'listener', rank, links.address)}")
            published = [store.get(f"{key}/{other}").decode(errors="replace") for other in range(ranks)]
        finally:
            share.done()
        links.meet([_proven(text, other, rank, token) for other, text in enumerate(published)], token)
        return links

    def meet(self, addresses: Sequence[str], token: str) -> None:
        """Take the addresses of all processes, and the secret by which they know each other."""
        self._addresses = list(addresses)
        self._token = token
        if not self.ended:
            self._unheard.clear()
            threading.Thread(
                target=_keep, args=(weakref.ref(self), self._ear), name="stageline keeper", daemon=True
            ).start()

    def inbound(self, source: int, kind: ChannelKind) -> Inbound:
        """The receiving end of a channel, connected or not."""
        with self._changed:
            key = (source, kind)
            if key not in self._in:
                self._in[key] = Inbound(source, kind)
            return self._in[key]

    def outbound(self, target: int, kind: ChannelKind) -> Outbound:
        """The sending end of a channel; connects it if needed."""
        key = (target, kind)
        if key not in self._out:
            host, port = self._addresses[target].rsplit("|", 1)
            try:
                link = self.dial(target, kind)
            except OSError as error:
                raise TransportError(
                    f"rank {self.rank} cannot connect to rank {target} at {host}, port {port}: {error}"
                ) from error
            find = weakref.ref(self)
            self._out[key] = Outbound(target, kind, link, lambda outbound: start_repair(outbound, find))
            if self.closed:
                link.close()
            self.wake_keeper()
        return self._out[key]

    def dial(self, target: int, kind: ChannelKind, *, call: bool = False) -> socket.socket:
        """Open a connection to a rank; `call` asks it to open its own channel to this rank again. Raises OSError."""
        host, port = self._addresses[target].rsplit("|", 1)
        facts = {"source": self.rank, "target": target, "kind": kind, "call": call}
        timeout = CALL_EVERY if call else max(1.0, min(CONNECT, self.deadline))
        try:
            return open_connection(host, int(port), self._token, facts, timeout=timeout, alarm=self.alarm).link
        except TrustError as error:
            raise ConnectionAbortedError(str(error)) from error

    def host_of(self, rank: int) -> str:
        """The address of the machine of a rank."""
        return self._addresses[rank].rpartition("|")[0] if self._addresses else ""

    def connect(self, inbound: Inbound, timeout: float, *, wakeful: bool = True) -> None:
        """Wait for the sender of a channel to connect; returns early after an alarm.

        If a connection broke, ask the sender for another one; raise TransportError if that process is gone.
        """
        end = time.monotonic() + timeout
        while True:
            until = min(end, inbound.call_after) if inbound.broken else end
            with self._changed:
                self._changed.wait_for(
                    lambda: inbound.connected or self.ended or (wakeful and self.alarmed),
                    max(0.0, until - time.monotonic()),
                )
            if inbound.connected or (wakeful and self.alarmed) or time.monotonic() >= end:
                return
            if inbound.broken and time.monotonic() >= inbound.call_after:
                self._call_sender(inbound)

    def _call_sender(self, inbound: Inbound) -> None:
        inbound.call_after = time.monotonic() + CALL_EVERY
        try:
            if self.ended:
                raise ConnectionRefusedError
            self.dial(inbound.source, inbound.kind, call=True).close()
        except ConnectionRefusedError as error:
            raise TransportError(inbound.broken) from error
        except OSError:
            return  # the deadline of the step decides

    def wake(self) -> None:
        """Raise the alarm: end the waits of this process until `reset`. May be called from any thread."""
        with self._changed:
            self.alarmed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def wake_keeper(self) -> None:
        """Let the keeper see what has changed."""
        with contextlib.suppress(OSError):
            self._caller.send(b"!")

    def reset(self) -> None:
        """End the alarm."""
        self.alarmed = False
        with contextlib.suppress(OSError):
            while self.alarm.recv(1024):
                pass

    def watched(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """What the keeper waits for: files, their events, and what to do."""
        watched: dict[int, tuple[int, Callable[[], None]]] = {}
        for outbound in list(self._out.values()):
            if not outbound.repairing and not outbound.failed and outbound.link.fileno() >= 0:
                lose = partial(outbound.lose, "its receiver closed the connection")
                watched[outbound.link.fileno()] = (HUNG_UP, lose)
        for link in (self._listener, *self._strangers):
            watched[link.fileno()] = (select.POLLIN, self.accept)
        return watched

    def accept(self) -> None:
        """Accept connections, and let those that are not yet of a rank prove it."""
        now = time.monotonic()
        for link, reception in list(self._strangers.items()):
            self._proceed(link)
            if link in self._strangers and now - reception.since > PATIENCE:
                self._dismiss(link)
        while not self.ended and (call := self._take_call()) is not None:
            try:
                reception = Reception(call, self._token, self._admit)
            except OSError:  # it is gone already
                call.close()
                continue
            self._strangers[reception.link] = reception
            self._proceed(reception.link)
        if self.closed:  # meanwhile, by another thread, which does not know of the last ones
            for link in list(self._strangers):
                self._dismiss(link)

    def _take_call(self) -> socket.socket | None:
        """The next connection; None if there is none. The oldest strangers go before the table is full."""
        while len(self._strangers) >= STRANGERS + len(KINDS) * self.ranks:
            self._dismiss(next(iter(self._strangers)))
        while True:
            try:
                return self._listener.accept()[0]
            except BlockingIOError:
                return None
            except OSError as error:
                if self.ended:
                    return None
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._strangers:
                    raise TransportError(f"rank {self.rank} cannot accept a connection: {error}") from error
                self._dismiss(next(iter(self._strangers)))

    def _dismiss(self, link: socket.socket) -> None:
        del self._strangers[link]
        link.close()

    def _proceed(self, link: socket.socket) -> None:
        """Go on with the handshake of a stranger; one that proves to be a rank gets its channel, others are closed."""
        try:
            session = self._strangers[link].proceed()
        except (OSError, TrustError, ValueError, TypeError, AttributeError):
            self._dismiss(link)
            return
        if session is None:
            return
        if session.facts["call"]:
            self._dismiss(link)
        else:
            del self._strangers[link]
            self._use(link, self.inbound(session.facts["source"], session.facts["kind"]))

    def _admit(self, facts: Facts) -> Facts:
        """Whether this rank expects what someone who knows the secret asks for; raise `TrustError` if not."""
        source, kind = int(facts["source"]), facts["kind"]
        if facts["target"] != self.rank or not 0 <= source < self.ranks or kind not in KINDS:
            raise TrustError(f"rank {self.rank} expects no such connection")
        if facts["call"]:
            called = self._out.get((source, kind))
            if called is not None and called.age > CALL_EVERY / 2:  # it may not have seen a new one yet
                called.lose("its receiver lost the connection")
        return {}

    def _use(self, link: socket.socket, inbound: Inbound) -> None:
        """Offer a connection to the thread that reads; one that broke, or is broken now, is replaced."""
        inbound.offer(link)
        if self.closed:
            link.close()
        with self._changed:
            self._changed.notify_all()

    def hang_up(self) -> None:
        """Shut down all connections, which ends all waits on them at both ends, and accept no others."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()
        for link in (self._listener, *self._ends()):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all sockets."""
        self.ended = True
        self._closing()

    @property
    def closed(self) -> bool:
        """Whether the sockets are being closed: whoever opens another one later must close it."""
        return not self._closing.alive

    def _ends(self) -> list[socket.socket]:
        return _ends(self._in, self._out)

    def _sockets(self) -> list[socket.socket]:
        own = [self._listener, self._bell, self.alarm, self._caller, self._ear]
        return [*self._ends(), *self._strangers, *own]


def _ends(incoming: Mapping[Any, Inbound], outgoing: Mapping[Any, Outbound]) -> list[socket.socket]:
    links = [link for end in list(incoming.values()) for link in (end.link, end.offered) if link is not None]
    return [*links, *(end.link for end in list(outgoing.values()))]


def _close(
    own: tuple[socket.socket, ...],
    unheard: Sequence[socket.socket],
    incoming: Mapping[Any, Inbound],
    outgoing: Mapping[Any, Outbound],
    strangers: Mapping[socket.socket, Any],
) -> None:
    """End all waits and the keeper, and close everything."""
    for bell in (own[1], own[3]):
        with contextlib.suppress(OSError):
            bell.send(b"!")
    for link in (*_ends(incoming, outgoing), *strangers, *own, *unheard):
        link.close()


def _keep(find: Callable[[], Links | None], ear: socket.socket) -> None:
    """The keeper: accept connections, and notice those that break, as long as the links are used."""
    with ear:
        while (links := find()) is not None and not links.ended:
            watched = links.watched()
            timeout = PATIENCE if links._strangers else None
            del links
            poll = select.poll()
            poll.register(ear, select.POLLIN)
            for number, (event, _) in watched.items():
                poll.register(number, event)
            numbers = [number for number, _ in poll.poll(None if timeout is None else max(1.0, 1e3 * timeout))]
            with contextlib.suppress(OSError):
                while len(ear.recv(1024)) == 1024:
                    pass
            links = find()
            if links is None or links.ended:
                return
            for react in {watched[number][1] for number in numbers if number in watched}:
                with contextlib.suppress(OSError, TransportError):
                    react()
            if timeout is not None:
                with contextlib.suppress(TransportError):
                    links.accept()  # a stranger may have been silent for too long


def _proven(text: str, source: int, rank: int, token: str) -> str:
    """The address that a rank left in the store, if it proves to be from that rank."""
    address, _, claim = text.rpartition("|")
    if not proves(claim, token, "listener", source, address):
        raise TransportError(
            f"rank {rank} does not trust the address of rank {source} in the store: its writer does not know the "
            "secret of this job"
        )
    return address


def _forget() -> None:
    """In a forked child, close the parent's connections: held open here, they would hide the parent's death."""
    for links in list(_open):
        for link in links._sockets():
            link.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
