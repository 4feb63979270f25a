"""Authenticated connections for links and the control channel: one function opens them, and one class accepts them.

    opener                                                     acceptor
      ── TCP, and TLS if it is configured (`tls`) ────────────▶
      ◀──────────────────────────────── challenge: a nonce ────
      ── hello: version, facts, a nonce, proof ───────────────▶    facts: who opens, and what for
      ◀───────────────────────────── welcome: answer, proof ───    or why it is refused

Both prove that they know the secret of the job: a proof is a keyed digest of what the opener says, what the acceptor
answers, and the nonces of both. So a recorded or reflected proof is useless. Both then have a key that belongs to this
connection alone (`MessageSeal`). The opener reads no more than the welcome, so whatever follows belongs to the owner of
the connection. Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from stageline._version import __version__
from stageline.common.errors import StagelineError, TrustError
from stageline.common.trust import new_nonce, proof, proves

LONGEST = 2048
"""The most bytes of a message of the handshake."""
PATIENCE = 5.0
"""Seconds in which someone who connected must prove to be a rank."""
_DIGITS = 32
TLS_VARIABLES = ("STAGELINE_TLS_CERT", "STAGELINE_TLS_KEY", "STAGELINE_TLS_CA")
"""The files of a rank's certificate, of its key, and of the authority that signed those of all ranks."""
Facts = Mapping[str, Any]
Result = TypeVar("Result")


def uses_tls(environment: Mapping[str, str] | None = None) -> bool:
    """Whether connections are encrypted; refuses a part of the variables.

    >>> uses_tls({}), uses_tls(dict.fromkeys(TLS_VARIABLES, "file.pem"))
    (False, True)
    """
    variables = os.environ if environment is None else environment
    missing = [name for name in TLS_VARIABLES if not variables.get(name)]
    if missing and len(missing) < len(TLS_VARIABLES):
        raise StagelineError(f"TLS needs all of {', '.join(TLS_VARIABLES)}; set {' and '.join(missing)}, too")
    return not missing


def check_tls(environment: Mapping[str, str] | None = None) -> None:
    """Refuse variables of TLS that are incomplete, and files that cannot be read.

    >>> check_tls({})
    >>> check_tls(dict.fromkeys(TLS_VARIABLES, "no-such-file.pem"))
    Traceback (most recent call last):
        ...
    stageline.StagelineError: cannot read the files of STAGELINE_TLS_CERT=no-such-file.pem, ...
    """
    if uses_tls(environment):
        from stageline.common.tls import load  # the failure monitor starts sooner without it

        for server in (False, True):
            load(server=server, environment=environment)


class Session(NamedTuple):
    """A connection that stands."""

    link: socket.socket
    """It does not block."""
    key: bytes
    """Known to both ends of this connection, and to nobody else."""
    facts: Facts
    """What the opener said, at the acceptor; what the acceptor answered, at the opener."""


def open_connection(
    host: str,
    port: int,
    secret: str,
    facts: Facts,
    *,
    timeout: float,
    alarm: socket.socket | None = None,
) -> Session:
    """Connect, and prove to each other that both know the secret; `facts` say who this is, and what for.

    Raises OSError if nobody answers in time, and `TrustError` if the other end is not trusted, or does not admit this
    one. Once `alarm` has something to read, a few seconds are left: another rank failed, and this one may be frozen.
    """
    limit = _Limit(time.monotonic() + timeout, alarm)
    link = _connect(host, port, limit)
    try:
        link, secure = _secured(link, server=False)
        _until_done(secure, link, select.POLLIN, limit)
        challenge = str(_receive(link, limit).get("challenge"))
        nonce, text = new_nonce(), json.dumps(facts, sort_keys=True)
        transcript = (__version__, text, challenge, nonce)
        hello = {"version": __version__, "facts": text, "nonce": nonce, "proof": proof(secret, "opener", *transcript)}
        _until_done(lambda: link.send(_frame(hello)), link, select.POLLOUT, limit)  # short, so it is sent whole
        welcome = _receive(link, limit)
        if "refused" in welcome:
            raise TrustError(f"it refused this rank: {str(welcome['refused'])[:400]}")
        answer = str(welcome.get("answer"))
        if not proves(welcome.get("proof"), secret, "acceptor", *transcript, answer):
            raise TrustError("it does not know the secret of this job")
        return Session(link, _key(secret, *transcript, answer), json.loads(answer))
    except BaseException:
        link.close()
        raise


class Reception:
    """The acceptor's end of one handshake, on an accepted socket. It never blocks.

    Call `proceed` at once, and whenever the socket has something to read.

    >>> import threading
    >>> with socket.create_server(("127.0.0.1", 0)) as listener:
    ...     arguments = (*listener.getsockname(), "a secret", {"rank": 1})
    ...     opener = threading.Thread(target=lambda: open_connection(*arguments, timeout=60).link.close())
    ...     opener.start()
    ...     reception = Reception(listener.accept()[0], "a secret", lambda facts: {"welcome": facts["rank"]})
    ...     while (session := reception.proceed()) is None:
    ...         time.sleep(0.01)
    >>> opener.join()
    >>> session.facts
    {'rank': 1}
    >>> session.link.close()
    """

    def __init__(self, link: socket.socket, secret: str, admit: Callable[[Facts], Facts]) -> None:
        """`admit` is called with the facts of someone who knows the secret; it answers, or raises TrustError."""
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.link, self._secure = _secured(link, server=True)
        self.since = time.monotonic()
        self._secret, self._admit = secret, admit
        self._challenge = new_nonce()
        self._in, self._out = b"", _frame({"challenge": self._challenge})
        self._session: Session | None = None

    def proceed(self) -> Session | None:
        """Go on as far as possible; return the connection once it stands.

        Raises OSError if the other end is gone, and `TrustError` if it is not admitted: close the socket then.
        """
        with contextlib.suppress(BlockingIOError):
            self._secure()
            while True:
                while self._out:  # short, so the socket takes it
                    self._out = self._out[self.link.send(self._out) :]
                if self._session is not None:
                    return self._session
                self._read()
        return None

    def _read(self) -> None:
        """Read the hello, and no more than it."""
        wanted = 2 if len(self._in) < 2 else 2 + int.from_bytes(self._in[:2], "big")
        if wanted > LONGEST:
            raise TrustError("its greeting is too long")
        data = self.link.recv(wanted - len(self._in))
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        self._in += data
        if len(self._in) == wanted > 2:
            self._answer(_parse(self._in[2:]))

    def _answer(self, hello: dict[str, Any]) -> None:
        version, text, nonce = (str(hello.get(name)) for name in ("version", "facts", "nonce"))
        if version != __version__:
            self._refuse(f"stageline {__version__} runs there, and {version[:20]} here")
        transcript = (version, text, self._challenge, nonce)
        if not proves(hello.get("proof"), self._secret, "opener", *transcript):
            self._refuse("it has a different secret")
        facts = json.loads(text)
        try:
            answer = json.dumps(self._admit(facts))
        except TrustError as error:
            self._refuse(str(error))
        welcome = {"answer": answer, "proof": proof(self._secret, "acceptor", *transcript, answer)}
        self._out = _frame(welcome)
        self._session = Session(self.link, _key(self._secret, *transcript, answer), facts)

    def _refuse(self, why: str) -> None:
        """Say why, if the socket takes it, and raise."""
        with contextlib.suppress(OSError):
            self.link.send(_frame({"refused": why}))
        raise TrustError(why)


class MessageSeal:
    """Authenticates the messages of one connection: each has a keyed digest of its direction, its number and its bytes.

    >>> here, there = MessageSeal(b"key", opener=True), MessageSeal(b"key", opener=False)
    >>> there.unseal(here.seal(b"one")), there.unseal(here.seal(b"two"))
    (b'one', b'two')
    >>> there.unseal(MessageSeal(b"key", opener=True).seal(b"one"))
    Traceback (most recent call last):
        ...
    stageline.common.errors.TrustError: message 2 of the connection was modified, or does not come from its peer
    """

    def __init__(self, key: bytes, *, opener: bool) -> None:
        """For the end that opened the connection, or the one that accepted it."""
        self._key = key
        self._directions = (b">", b"<") if opener else (b"<", b">")
        self._sent = self._received = 0

    def seal(self, message: bytes) -> bytes:
        """The message with its digest, as text in front of it."""
        sealed = self._digest(self._directions[0], self._sent, message) + message
        self._sent += 1
        return sealed

    def unseal(self, sealed: bytes) -> bytes:
        """The message without its digest; raise `TrustError` if it is not the next one of the other end."""
        digest, message = sealed[:_DIGITS], sealed[_DIGITS:]
        if not hmac.compare_digest(digest, self._digest(self._directions[1], self._received, message)):
            raise TrustError(f"message {self._received} of the connection was modified, or does not come from its peer")
        self._received += 1
        return message

    def _digest(self, direction: bytes, number: int, message: bytes) -> bytes:
        text = b"%b%d %b" % (direction, number, message)
        return hmac.digest(self._key, text, "sha256").hex()[:_DIGITS].encode()


def _connect(host: str, port: int, limit: _Limit) -> socket.socket:
    """Connect to one of the addresses of a host; the socket does not block."""
    problem: OSError = OSError(f"{host} has no address")
    for family, kind, number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        link = socket.socket(family, kind, number)
        try:
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            status = link.connect_ex(address)
            if status == errno.EINPROGRESS:
                limit.wait(link, select.POLLOUT)
                status = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status == 0:
                return link
            problem = OSError(status, os.strerror(status))
        except OSError as error:
            problem = error
        except BaseException:
            link.close()
            raise
        link.close()
    raise problem


def _secured(link: socket.socket, *, server: bool) -> tuple[socket.socket, Callable[[], object]]:
    """The socket, encrypted if that is configured, and what to call until it no longer raises BlockingIOError."""
    if not uses_tls():
        return link, lambda: None
    from stageline.common.tls import wrap  # the failure monitor starts sooner without it

    wrapped = wrap(link, server=server)
    return wrapped, wrapped.do_handshake


class _Limit:
    """Until when to wait."""

    def __init__(self, end: float, alarm: socket.socket | None) -> None:
        self.end, self.alarm = end, alarm

    def wait(self, link: socket.socket, event: int) -> None:
        """Wait for an event of a socket, or raise TimeoutError."""
        while True:
            poll = select.poll()
            poll.register(link, event)
            if self.alarm is not None and self.alarm.fileno() < 0:
                raise ConnectionAbortedError("this process has closed its connections")
            if self.alarm is not None:
                poll.register(self.alarm, select.POLLIN)
            events = {number for number, _ in poll.poll(max(0.0, 1e3 * (self.end - time.monotonic())))}
            if link.fileno() in events:
                return
            if not events:
                raise TimeoutError("no answer in time")
            self.alarm, self.end = None, min(self.end, time.monotonic() + PATIENCE)


def _until_done(call: Callable[[], Result], link: socket.socket, event: int, limit: _Limit) -> Result:
    while True:
        try:
            return call()
        except BlockingIOError:
            limit.wait(link, event)


def _receive(link: socket.socket, limit: _Limit) -> dict[str, Any]:
    """One message of the handshake, and no byte more."""
    data, wanted = b"", 2
    while len(data) < wanted:
        missing = wanted - len(data)
        piece = _until_done(lambda size=missing: link.recv(size), link, select.POLLIN, limit)  # type: ignore[misc]
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection without a reply")
        data += piece
        if len(data) == 2:
            wanted = 2 + int.from_bytes(data, "big")
    return _parse(data[2:])


def _key(secret: str, *transcript: str) -> bytes:
    return bytes.fromhex(proof(secret, "messages", *transcript))


def _frame(message: Facts) -> bytes:
    text = json.dumps(message).encode()
    return len(text).to_bytes(2, "big") + text


def _parse(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrustError("it does not use the protocol of a job's ranks") from error
    if not isinstance(message, dict):
        raise TrustError("it does not use the protocol of a job's ranks")
    return message
