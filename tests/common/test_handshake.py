"""Opening and accepting connections: with TLS, and with files of it that are wrong."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from stageline.common.errors import StagelineError, TrustError
from stageline.common.handshake import TLS_VARIABLES, MessageSeal, Reception, Session, check_tls, open_connection
from stageline.transport.tcp.channels import after
from support.hosts import needs

SECRET = "a secret"


def certificate(folder: Path, name: str) -> Path:
    """A certificate that signed itself, and its key beside it."""
    needs("openssl", root=False)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=rank", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
    subprocess.run(command, cwd=folder, check=True, timeout=60, capture_output=True)
    return folder / f"{name}.pem"


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = certificate(tmp_path, "own")
    for name, value in zip(TLS_VARIABLES, (path, path.with_suffix(".key"), path), strict=True):
        monkeypatch.setenv(name, str(value))
    return path


def accepted(listener: socket.socket, results: list[Session | Exception]) -> threading.Thread:
    """Accept one connection on a thread."""

    def accept() -> None:
        reception = Reception(listener.accept()[0], SECRET, lambda facts: {"welcome": facts["rank"]})
        try:
            while (session := reception.proceed()) is None:
                time.sleep(0.002)
            results.append(session)
        except (OSError, TrustError) as error:
            results.append(error)
            reception.link.close()

    thread = threading.Thread(target=accept)
    thread.start()
    return thread


def test_a_connection_over_tls_carries_large_messages_both_ways_at_once(tls: Path) -> None:
    data, results = bytes(range(256)) * 20_000, list[Session | Exception]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = accepted(listener, results)
        opened = open_connection("127.0.0.1", listener.getsockname()[1], SECRET, {"rank": 3}, timeout=60)
        thread.join()
    (other,) = results
    assert isinstance(other, Session)
    assert (opened.facts, other.facts, opened.key) == ({"welcome": 3}, {"rank": 3}, other.key)
    assert "TLSv1.3" in str(getattr(opened.link, "version")())  # noqa: B009
    ends, received = (opened.link, other.link), (bytearray(), bytearray())

    def send(end: socket.socket) -> None:
        pieces = [memoryview(data)[:1000], memoryview(data)[1000:100_000], memoryview(data)[100_000:]]
        while pieces:
            try:
                pieces = after(pieces, end.sendmsg(pieces))
            except BlockingIOError:
                time.sleep(0.0005)

    def receive(end: socket.socket, into: bytearray) -> None:
        while len(into) < len(data):
            room = bytearray(70_000)
            try:
                into += room[: end.recvmsg_into([memoryview(room)[:10], memoryview(room)[10:]])[0]]
            except BlockingIOError:
                time.sleep(0.0005)

    threads = [threading.Thread(target=send, args=(end,)) for end in ends]
    threads += [threading.Thread(target=receive, args=pair) for pair in zip(ends, received, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [bytes(one) for one in received] == [data, data]
    seal = MessageSeal(opened.key, opener=True).seal(b"message")
    assert MessageSeal(other.key, opener=False).unseal(seal) == b"message"
    opened.link.close()
    assert other.link.recv(1) == b""
    other.link.close()


def test_only_certificates_of_the_authority_are_trusted(
    tls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Session | Exception] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = accepted(listener, results)
        other = certificate(tmp_path, "other")
        monkeypatch.setenv("STAGELINE_TLS_CERT", str(other))
        monkeypatch.setenv("STAGELINE_TLS_KEY", str(other.with_suffix(".key")))
        with pytest.raises(OSError, match=r"unknown ca|certificate verify failed"):
            open_connection("127.0.0.1", listener.getsockname()[1], SECRET, {"rank": 3}, timeout=60).link.close()
        thread.join()
    assert isinstance(results[0], OSError)


def test_files_of_tls_that_are_wrong_are_named(tls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tls()
    monkeypatch.setenv("STAGELINE_TLS_CA", "absent.pem")
    with pytest.raises(StagelineError, match=r"cannot read the files of STAGELINE_TLS_CERT=.*CA=absent.pem: .*No such"):
        check_tls()
    monkeypatch.delenv("STAGELINE_TLS_CA")
    with pytest.raises(StagelineError, match=r"TLS needs all of STAGELINE_TLS_CERT.*; set STAGELINE_TLS_CA, too"):
        check_tls()
