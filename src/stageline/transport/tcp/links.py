"""The connections between the processes of a job: one for each sender, receiver and traffic, made when first used.

Every process listens on one port, and a sender connects to it and says hello. What comes in is read by whoever waits
for it, straight from the socket, so a message wakes one thread of the receiver and no other. A wait ends early when the
process is woken (`wake`), from any thread.

Both ends prove that they know the secret of the job (`_trust.py`), and a sender need not wait for an answer: a listener
publishes its address with a nonce and a proof of both, and a hello proves the sender, its lane, that address and nonce,
and a nonce of its own. So nobody else can stand in for a rank, and a hello serves at one listener, once.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch.distributed as dist

from stageline.common.errors import TransportError
from stageline.common.trust import Sharing, new_nonce, one_machine, proof, proves
from stageline.transport import wire
from stageline.transport.protocol import Traffic

Lane: TypeAlias = Traffic | Literal["exchange"]
"""What a connection carries: the messages of a traffic, or what all ranks tell each other."""

T = TypeVar("T")
LANES: tuple[Lane, ...] = ("forward", "backward", "exchange")
CONNECT = 30.0
"""Seconds in which another process that lives answers a call."""
STRANGERS = 64
"""How many that have not said hello are listened to, beside the ranks."""
PATIENCE = 5.0
"""Seconds in which a stranger must say hello."""
_HELLO = struct.Struct("<8s32s64sii")
_MAGIC = b"stagelin"
_PIECES = 512
"""How many pieces of memory one call of the system takes; it may take a few more."""

_open: weakref.WeakSet[Links] = weakref.WeakSet()
"""What a forked child must let go of."""
_joined: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How often the processes of a default group joined each other: a process may be new, and the others not."""


class Inbound:
    """Where the messages of one channel come in, piece by piece."""

    def __init__(self, source: int, lane: Lane) -> None:
        """Not connected yet."""
        self.source = source
        self.lane = lane
        self.link: socket.socket | None = None
        self.left = 0
        """How many messages are still to come in this step."""
        self._ahead = b""
        """Bytes that were read already, of what comes next."""
        self._begin()

    def _begin(self) -> None:
        self._head = bytearray(wire.HEAD)
        self._prefix: wire.Prefix | None = None
        self._text = b""
        self._more = bytearray()
        self._opened: Any = None
        self._missing = [memoryview(self._head)]
        self._got = 0
        self._guess: tuple[bytes, Any, list[memoryview]] | None = None

    def expect(self, head: bytes, opened: Any, room: list[memoryview]) -> None:
        """Say what the next message will most likely be: how it starts, what it then is, and where its bytes go.

        If it is just that, it costs one call of the system and a comparison when it comes: all else was done while the
        rank had nothing to do. If it is not, nothing is lost.
        """
        if not self._got and not self._ahead and self._guess is None:
            self._guess = (head, opened, room)
            self._missing = [memoryview(self._head), *room]

    def pull(self, open_it: Callable[[wire.Prefix, bytes], tuple[T, list[memoryview]]]) -> T | None:
        """Read what is there: a whole message, or None as long as a part of it has to come.

        `open_it` is called when its header is there, and says where the bytes of its tensors are to go; what else it
        says is given back when they are there too.
        """
        if self.link is None:
            return None
        while True:
            while self._missing:
                got = self._receive(self.link)
                if got is None:
                    return None
                self._got += got
                self._missing = after(self._missing, got)
                if self._guess is not None and self._got >= wire.HEAD:
                    self._check_guess(self._guess)
            if self._opened is not None:
                opened: T = self._opened
                self._begin()
                return opened
            if self._prefix is None:
                self._prefix, self._text = wire.read_head(bytes(self._head))
                self._more = bytearray(self._prefix.text - len(self._text))
                self._missing = [memoryview(self._more)] if self._more else []
            if not self._missing:
                self._opened, self._missing = open_it(self._prefix, self._text + bytes(self._more))

    def _receive(self, link: socket.socket) -> int | None:
        """Fill what is missing as far as there are bytes; None where there are none."""
        if self._ahead:
            room, size = self._missing[0], min(len(self._missing[0]), len(self._ahead))
            room[:size] = self._ahead[:size]
            self._ahead = self._ahead[size:]
            return size
        try:
            got = link.recvmsg_into(self._missing[:_PIECES])[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransportError(f"the connection broke: {error}") from error
        if not got:
            raise TransportError("it closed the connection")
        return got

    def _check_guess(self, guess: tuple[bytes, Any, list[memoryview]]) -> None:
        """The head is there: go on if it is as expected, else put back what was read beyond it."""
        head, opened, room = guess
        self._guess = None
        if self._head == head:
            self._opened = opened
        else:
            self._ahead = b"".join(room)[: self._got - wire.HEAD]
            self._missing = []


class Outbound:
    """Where the messages of one channel go out."""

    def __init__(self, target: int, link: socket.socket) -> None:
        """Connected, and known to the other end."""
        self.target = target
        self.link = link

    def write(self, pieces: list[memoryview]) -> list[memoryview]:
        """Write what the socket takes without waiting; give back the rest."""
        while pieces:
            try:
                sent = self.link.sendmsg(pieces[:_PIECES])
            except BlockingIOError:
                return pieces
            pieces = after(pieces, sent)
        return []


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
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(1024)
        except OSError as error:
            self._listener.close()
            raise TransportError(f"rank {rank} cannot listen at {host}: {error}") from error
        self._listener.setblocking(False)
        self.address = f"{host}|{self._listener.getsockname()[1]}|{new_nonce()}"
        """Host, port, and what this listener wants to see in every hello."""
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._addresses: list[str] = []
        self._token = ""
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
        self._in: dict[tuple[int, Lane], Inbound] = {}
        self._out: dict[tuple[int, Lane], Outbound] = {}
        self._accepting = threading.Lock()
        # With the last pipeline that uses them; not at the end of Python, which leaves nothing to close them with.
        own = (self._listener, self._bell, self._ear)
        self._closing = weakref.finalize(self, _close, own, self._in, self._out, self._strangers)
        self._closing.atexit = False
        _open.add(self)

    @classmethod
    def join(cls, host: str = "127.0.0.1") -> Links:
        """Listen, and learn by the store of the default group where the others do; all its processes call this."""
        store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        links = cls(rank, ranks, host)
        default = dist.group.WORLD
        _joined[default] = _joined.get(default, 0) + 1
        key = f"stageline/links/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_joined[default]}"
        share = Sharing(store, f"{key}/token", rank, here=one_machine(ranks))
        try:
            token = share(secrets.token_hex(32))
            # A rank says where it listens once it has the secret; so when all have said it, the file can go.
            store.set(f"{key}/{rank}", f"{links.address}|{proof(token, 'listener', rank, links.address)}")
            said = [store.get(f"{key}/{other}").decode(errors="replace") for other in range(ranks)]
        finally:
            share.done()
        links.meet([_proven(text, other, rank, token) for other, text in enumerate(said)], token)
        return links

    def meet(self, addresses: Sequence[str], token: str) -> None:
        """Learn where the others listen, and the secret by which they know each other."""
        self._addresses = list(addresses)
        self._token = token

    def inbound(self, source: int, lane: Lane) -> Inbound:
        """The receiving end of a channel, connected or not."""
        key = (source, lane)
        if key not in self._in:
            self._in[key] = Inbound(source, lane)
        return self._in[key]

    def outbound(self, target: int, lane: Lane) -> Outbound:
        """The sending end of a channel; connects if it is not."""
        key = (target, lane)
        if key not in self._out:
            host, port, _ = self._addresses[target].rsplit("|", 2)
            try:
                link = socket.create_connection((host, int(port)), timeout=CONNECT)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                link.sendall(self._hello(target, lane))
                link.setblocking(False)
            except OSError as error:
                raise TransportError(f"rank {self.rank} cannot connect to rank {target} at {host}: {error}") from error
            self._out[key] = Outbound(target, link)
        return self._out[key]

    def _hello(self, target: int, lane: Lane) -> bytes:
        nonce, number = new_nonce(), LANES.index(lane)
        claim = proof(self._token, "sender", self.rank, target, number, self._addresses[target], nonce)
        return _HELLO.pack(_MAGIC, nonce.encode(), claim.encode(), self.rank, number)

    def wait(self, inbound: Inbound, timeout: float, *, wakeful: bool = True) -> None:
        """Wait until something comes in on a channel, or the process is woken, or so many seconds are over."""
        poll = select.poll()
        if inbound.link is not None:
            poll.register(inbound.link, select.POLLIN)
        else:
            with self._accepting:
                if self._accept(inbound):
                    return
                for link in (self._listener, *self._strangers):
                    poll.register(link, select.POLLIN)
        if wakeful:
            poll.register(self._ear, select.POLLIN)
        poll.poll(max(0.0, 1e3 * timeout))
        if inbound.link is None:
            with self._accepting:
                self._accept(inbound)

    def wake(self) -> None:
        """End the waits of this process, and those to come until `reset`. May be called from any thread."""
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def reset(self) -> None:
        """Let waits be waits again."""
        with contextlib.suppress(OSError):
            while self._ear.recv(1024):
                pass

    def _accept(self, wanted: Inbound) -> bool:
        """Take the calls that came, and hear who says hello; whether the one that is wanted is there."""
        now = time.monotonic()
        for link, (_, since) in list(self._strangers.items()):
            self._listen(link)
            if link in self._strangers and now - since > PATIENCE:
                self._dismiss(link)
        while (call := self._take_call()) is not None:
            call.setblocking(False)
            self._strangers[call] = (b"", now)
            self._listen(call)  # a rank says hello at once, and is no stranger any more when the next one comes
        return wanted.link is not None

    def _take_call(self) -> socket.socket | None:
        """The next that calls; None if nobody does. Nobody can fill the table: the oldest strangers go before it."""
        while len(self._strangers) >= STRANGERS + len(LANES) * self.ranks:
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
        """Hear what a stranger says; a rank that proves itself gets its lane, and who is none has to go."""
        said, since = self._strangers[link]
        try:
            more = link.recv(_HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if more and len(said) < _HELLO.size:
            self._strangers[link] = (said, since)
        elif more and self._welcome(link, said):
            del self._strangers[link]
        else:
            self._dismiss(link)

    def _welcome(self, link: socket.socket, said: bytes) -> bool:
        magic, nonce, claim, source, number = _HELLO.unpack(said)
        if magic != _MAGIC or not 0 <= source < self.ranks or not 0 <= number < len(LANES):
            return False
        facts = ("sender", source, self.rank, number, self.address, nonce.decode(errors="replace"))
        if not self._token or not proves(claim.decode(errors="replace"), self._token, *facts):
            return False
        inbound = self.inbound(source, LANES[number])
        if inbound.link is not None:
            return False
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        inbound.link = link
        return True

    def hang_up(self) -> None:
        """End all connections: whoever waits on one, here or there, learns it at once."""
        for link in self._ends():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave nothing behind."""
        self._closing()

    def _ends(self) -> list[socket.socket]:
        return _ends(self._in, self._out)

    def _sockets(self) -> list[socket.socket]:
        return [*self._ends(), *self._strangers, self._listener, self._bell, self._ear]


def _ends(incoming: Mapping[Any, Inbound], outgoing: Mapping[Any, Outbound]) -> list[socket.socket]:
    links = [end.link for end in list(incoming.values()) if end.link is not None]
    return [*links, *(end.link for end in list(outgoing.values()))]


def _close(
    own: tuple[socket.socket, socket.socket, socket.socket],
    incoming: Mapping[Any, Inbound],
    outgoing: Mapping[Any, Outbound],
    strangers: Mapping[socket.socket, Any],
) -> None:
    """Wake who waits, and close everything."""
    with contextlib.suppress(OSError):
        own[1].send(b"!")
    for link in (*_ends(incoming, outgoing), *strangers, *own):
        link.close()


def after(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of pieces of memory when so many bytes of them are done.

    >>> [bytes(piece) for piece in after([memoryview(b"ab"), memoryview(b"cde")], 3)]
    [b'de']
    """
    for index, piece in enumerate(pieces):
        if done < len(piece):
            return [piece[done:], *pieces[index + 1 :]]
        done -= len(piece)
    return []


def _proven(text: str, source: int, rank: int, token: str) -> str:
    """The address that a rank left in the store, if that rank did it."""
    address, _, claim = text.rpartition("|")
    if not proves(claim, token, "listener", source, address):
        raise TransportError(
            f"rank {rank} does not believe the address of rank {source} in the store: who wrote it does not know the "
            "secret of this job"
        )
    return address


def _forget() -> None:
    """In a forked child: the connections are the parent's. Held open by a child, they would hide its death."""
    for links in list(_open):
        for link in links._sockets():
            link.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
