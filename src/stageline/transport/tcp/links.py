"""The connections between the processes of a job: one for each sender, receiver and kind of channel, made when needed.

Every process listens on one port; a sender connects to it and says hello. The thread that waits for a message reads it
straight from the socket, so a message wakes one thread of the receiver and no other. `wake` ends all waits early, from
any thread.

Both ends prove that they know the secret of the job (`common/trust.py`), and a sender need not wait for an answer: a
listener publishes its address with a nonce and a proof of both, and a hello proves the sender, the kind of its channel,
that address and nonce, and a nonce of its own. So nobody else can stand in for a rank, and a hello serves at one
listener, once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from stageline.common.errors import TransportError
from stageline.common.ports import listen
from stageline.common.trust import Sharing, new_nonce, one_machine, proof, proves
from stageline.transport._torch_private import default_store
from stageline.transport.tcp.channels import ChannelKind, Inbound, Outbound

KINDS: tuple[ChannelKind, ...] = ("forward", "backward", "exchange")
CONNECT = 30.0
"""Seconds in which another living process accepts a connection."""
STRANGERS = 64
"""How many connections that have not said hello are kept, beside those of the ranks."""
PATIENCE = 5.0
"""Seconds in which a stranger must say hello."""
_HELLO = struct.Struct("<8s32s64sii")
_MAGIC = b"stagelin"

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
        self.address = f"{host}|{self._listener.getsockname()[1]}|{new_nonce()}"
        """Host, port, and what this listener wants to see in every hello."""
        self._bell, self.alarm = socket.socketpair()
        self._bell.setblocking(False)
        self.alarm.setblocking(False)
        self.alarmed = False
        """Whether `alarm`, which ends waits, has something to read."""
        self._addresses: list[str] = []
        self._token = ""
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
        self._in: dict[tuple[int, ChannelKind], Inbound] = {}
        self._out: dict[tuple[int, ChannelKind], Outbound] = {}
        self._accepting = threading.Lock()
        # With the last pipeline that uses them; not at exit, when the modules that this needs may be gone.
        own = (self._listener, self._bell, self.alarm)
        self._closing = weakref.finalize(self, _close, own, self._in, self._out, self._strangers)
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

    def inbound(self, source: int, kind: ChannelKind) -> Inbound:
        """The receiving end of a channel, connected or not."""
        key = (source, kind)
        if key not in self._in:
            self._in[key] = Inbound(source, kind)
        return self._in[key]

    def outbound(self, target: int, kind: ChannelKind) -> Outbound:
        """The sending end of a channel; connects it if needed."""
        key = (target, kind)
        if key not in self._out:
            host, port, _ = self._addresses[target].rsplit("|", 2)
            try:
                link = socket.create_connection((host, int(port)), timeout=CONNECT)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                link.sendall(self._hello(target, kind))
                link.setblocking(False)
            except OSError as error:
                raise TransportError(f"rank {self.rank} cannot connect to rank {target} at {host}: {error}") from error
            self._out[key] = Outbound(target, link)
        return self._out[key]

    def _hello(self, target: int, kind: ChannelKind) -> bytes:
        nonce, number = new_nonce(), KINDS.index(kind)
        claim = proof(self._token, "sender", self.rank, target, number, self._addresses[target], nonce)
        return _HELLO.pack(_MAGIC, nonce.encode(), claim.encode(), self.rank, number)

    def connect(self, inbound: Inbound, timeout: float, *, wakeful: bool = True) -> None:
        """Wait for the sender of a channel to connect; returns early after any connection or an alarm."""
        poll = select.poll()
        with self._accepting:
            if self._accept(inbound):
                return
            for link in (self._listener, *self._strangers):
                poll.register(link, select.POLLIN)
        if wakeful:
            poll.register(self.alarm, select.POLLIN)
        poll.poll(max(0.0, 1e3 * timeout))
        with self._accepting:
            self._accept(inbound)

    def wake(self) -> None:
        """Raise the alarm: end the waits of this process until `reset`. May be called from any thread."""
        self.alarmed = True
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def reset(self) -> None:
        """End the alarm."""
        self.alarmed = False
        with contextlib.suppress(OSError):
            while self.alarm.recv(1024):
                pass

    def _accept(self, wanted: Inbound) -> bool:
        """Accept connections and read their hellos; return whether the wanted sender is connected."""
        now = time.monotonic()
        for link, (_, since) in list(self._strangers.items()):
            self._listen(link)
            if link in self._strangers and now - since > PATIENCE:
                self._dismiss(link)
        while (call := self._take_call()) is not None:
            call.setblocking(False)
            self._strangers[call] = (b"", now)
            self._listen(call)  # a rank says hello at once, so it is no stranger when the next one connects
        return wanted.link is not None

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
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._strangers:
                    raise TransportError(f"rank {self.rank} cannot take a connection: {error}") from error
                self._dismiss(next(iter(self._strangers)))

    def _dismiss(self, link: socket.socket) -> None:
        del self._strangers[link]
        link.close()

    def _listen(self, link: socket.socket) -> None:
        """Read the hello of a stranger; one that proves to be a rank gets its channel, any other is closed."""
        hello, since = self._strangers[link]
        try:
            more = link.recv(_HELLO.size - len(hello))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        hello += more
        if more and len(hello) < _HELLO.size:
            self._strangers[link] = (hello, since)
        elif more and self._welcome(link, hello):
            del self._strangers[link]
        else:
            self._dismiss(link)

    def _welcome(self, link: socket.socket, hello: bytes) -> bool:
        magic, nonce, claim, source, number = _HELLO.unpack(hello)
        if magic != _MAGIC or not 0 <= source < self.ranks or not 0 <= number < len(KINDS):
            return False
        facts = ("sender", source, self.rank, number, self.address, nonce.decode(errors="replace"))
        if not self._token or not proves(claim.decode(errors="replace"), self._token, *facts):
            return False
        inbound = self.inbound(source, KINDS[number])
        if inbound.link is not None:
            return False
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        inbound.link = link
        return True

    def hang_up(self) -> None:
        """Shut down all connections, which ends all waits on them at both ends."""
        for link in self._ends():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all sockets."""
        self._closing()

    def _ends(self) -> list[socket.socket]:
        return _ends(self._in, self._out)

    def _sockets(self) -> list[socket.socket]:
        return [*self._ends(), *self._strangers, self._listener, self._bell, self.alarm]


def _ends(incoming: Mapping[Any, Inbound], outgoing: Mapping[Any, Outbound]) -> list[socket.socket]:
    links = [end.link for end in list(incoming.values()) if end.link is not None]
    return [*links, *(end.link for end in list(outgoing.values()))]


def _close(
    own: tuple[socket.socket, socket.socket, socket.socket],
    incoming: Mapping[Any, Inbound],
    outgoing: Mapping[Any, Outbound],
    strangers: Mapping[socket.socket, Any],
) -> None:
    """End all waits, and close everything."""
    with contextlib.suppress(OSError):
        own[1].send(b"!")
    for link in (*_ends(incoming, outgoing), *strangers, *own):
        link.close()


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
