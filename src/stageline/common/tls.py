"""Optional TLS for the connections of a job, for networks that others can read. Both ends present a certificate.

STAGELINE_TLS_CERT, STAGELINE_TLS_KEY and STAGELINE_TLS_CA name the files of a rank's certificate, of its key, and of
the authority that signed the certificates of all ranks. Names in certificates are not compared with addresses: whoever
has a certificate of that authority, and knows the secret of the job, is a rank.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from stageline.common.errors import StagelineError
from stageline.common.handshake import TLS_VARIABLES as VARIABLES

Result = TypeVar("Result")


def load(*, server: bool, environment: Mapping[str, str] | None = None) -> ssl.SSLContext:
    """Read the files of the variables, once."""
    variables = os.environ if environment is None else environment
    return _context(server, *(variables[name] for name in VARIABLES))


def wrap(link: socket.socket, *, server: bool) -> TlsSocket:
    """Encrypt a socket that does not block; `do_handshake` comes next."""
    wrapped = load(server=server).wrap_socket(link, server_side=server, do_handshake_on_connect=False)
    assert isinstance(wrapped, TlsSocket)
    return wrapped


@cache
def _context(server: bool, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TlsSocket
    if server:
        context.num_tickets = 0
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        names = ", ".join(f"{name}={path}" for name, path in zip(VARIABLES, (certificate, key, authority), strict=True))
        raise StagelineError(f"cannot read the files of {names}: {error}") from error
    return context


class TlsSocket(ssl.SSLSocket):
    """A socket as links and the control channel use it: it does not block, and two threads may use it.

    OpenSSL lets one thread at a time use a connection, even if one only reads and the other only writes.
    """

    _turn: threading.Lock

    def __new__(cls, *arguments: Any, **options: Any) -> TlsSocket:
        """Add a lock; `wrap_socket` calls no `__init__`."""
        link = super().__new__(cls, *arguments, **options)
        link._turn = threading.Lock()
        return link

    def _try(self, call: Callable[[], Result]) -> Result:
        with self._turn:
            try:
                return call()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError(str(error)) from None

    def do_handshake(self, block: bool = False) -> None:
        """Go on with the handshake; raises BlockingIOError while it waits."""
        self._try(lambda: super(TlsSocket, self).do_handshake(block))

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive bytes; raises BlockingIOError if there are none."""
        return self._try(lambda: super(TlsSocket, self).recv(buflen, flags))

    def send(self, data: Any, flags: int = 0) -> int:
        """Send bytes; raises BlockingIOError if the network takes none."""
        return self._try(lambda: super(TlsSocket, self).send(data, flags))

    def recvmsg_into(self, buffers: Iterable[memoryview], *_: Any) -> tuple[int, list[Any], int, Any]:  # type: ignore[override]
        """Fill buffers with the available bytes."""
        total = 0
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                try:
                    got = self._try(lambda view=buffer[at:]: super(TlsSocket, self).recv_into(view))  # type: ignore[misc]
                except BlockingIOError:
                    if not total:
                        raise
                    return total, [], 0, None
                if not got:
                    return total, [], 0, None
                at, total = at + got, total + got
        return total, [], 0, None

    def sendmsg(self, buffers: Iterable[memoryview], *_: Any) -> int:  # type: ignore[override]
        """Send as much of the buffers as the network takes; what it did not take must come first in the next call."""
        total = 0
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                try:
                    sent = self.send(buffer[at:])
                except BlockingIOError:
                    if not total:
                        raise
                    return total
                at, total = at + sent, total + sent
        return total

    def shutdown(self, how: int) -> None:
        """End the connection in one direction or both; what is read later is not taken for plain bytes."""
        socket.socket.shutdown(self, how)
