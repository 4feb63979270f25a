"""The last states of ranks in the memory of hosts: files that outlive the ranks, and copies of them on other hosts.

Every host has files for all seats. A rank writes its states to those of its own seat; copies of states of other hosts
arrive in theirs. What a file holds is up to its writer, apart from its head: the step plus 1, or 0 while incomplete.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from stageline.common.errors import StagelineError, TrustError
from stageline.common.handshake import Facts, open_connection

SLOTS = 2
"""Files of a seat: a rank writes its next state to one while the other holds its last one."""
HEAD = struct.Struct("<qq")
"""The step plus 1, or 0 while the state is incomplete; and a number for its writer."""
PATIENCE = 10.0
"""Seconds without progress after which a host is given up."""
Address = tuple[str, int]


@contextmanager
def host_memory(seats: int) -> Iterator[list[str]]:
    """Files of host memory that live as long as the launcher, whatever happens to the ranks that write them."""
    with ExitStack() as stack:
        paths = []
        for _ in range(seats * SLOTS):
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("stageline")
                stack.callback(os.close, descriptor)
                paths.append(f"/proc/{os.getpid()}/fd/{descriptor}")
            else:
                paths.append(stack.enter_context(tempfile.NamedTemporaryFile(prefix="stageline-")).name)
        yield paths


def step_of(path: str) -> int | None:
    """The step of the state in a file; None if there is none, or it is incomplete."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        head = os.pread(file, HEAD.size, 0)
    finally:
        os.close(file)
    step = HEAD.unpack(head)[0] if len(head) == HEAD.size else 0
    return step - 1 if step else None


class StateMemory:
    """The states in the memory of this host.

    >>> with host_memory(2) as paths:
    ...     memory = StateMemory(paths)
    ...     for step, path in enumerate(memory.files(1)):
    ...         _ = os.write(file := os.open(path, os.O_WRONLY), HEAD.pack(step + 1, 0))
    ...         os.close(file)
    ...     memory.steps()
    ...     memory.forget_after(0)
    ...     memory.steps()
    {1: [0, 1]}
    {1: [0]}
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    @property
    def seats(self) -> int:
        """How many seats the job has."""
        return len(self._paths) // SLOTS

    def files(self, seat: int) -> list[str]:
        """The files of a seat."""
        return list(self._paths[seat * SLOTS : (seat + 1) * SLOTS])

    def steps(self) -> dict[int, list[int]]:
        """The steps of all complete states, by seat."""
        known = {seat: [step_of(path) for path in self.files(seat)] for seat in range(self.seats)}
        steps = {seat: sorted(step for step in own if step is not None) for seat, own in known.items()}
        return {seat: own for seat, own in steps.items() if own}

    def find(self, seat: int, step: int) -> str | None:
        """The file with the state of a seat after a step."""
        return next((path for path in self.files(seat) if step_of(path) == step), None)

    def next_file(self, seat: int, step: int) -> str:
        """The file for a new state: the one with a state of this step, or the oldest."""
        ages = {path: step_of(path) for path in self.files(seat)}
        return min(ages, key=lambda path: (ages[path] != step, -1 if ages[path] is None else ages[path] or 0))

    def forget_after(self, step: int) -> None:
        """Remove the states of all later steps: the job returns to this one, and may continue differently."""
        for path in self._paths:
            if (step_of(path) or 0) > step:
                with open(path, "r+b") as file:
                    file.write(bytes(HEAD.size))

    # Requests of other hosts.

    def admit(self, request: Facts) -> Facts:
        """Answer a request in the handshake; raise `TrustError` for what is not here."""
        if request["memory"] != "fetch":
            return {}
        path = self.find(int(request["seat"]), int(request["step"]))
        if path is None:
            raise TrustError(f"there is no state of rank {request['seat']} after step {request['step']}")
        return {"size": os.stat(path).st_size}

    def serve(self, link: socket.socket, request: Facts) -> None:
        """Do what a request asks for, on its connection."""
        link.settimeout(PATIENCE)
        kind = request["memory"]
        if kind == "keep":
            seat, step = int(request["seat"]), int(request["step"])
            _receive(link, self.next_file(seat, step), int(request["size"]))
        elif kind == "fetch":
            path = self.find(int(request["seat"]), int(request["step"]))
            with open(path or os.devnull, "rb") as file:
                link.sendfile(file)
            link.recv(1)
            return
        elif kind == "forget":
            self.forget_after(int(request["step"]))
        link.sendall(json.dumps(self.steps()).encode() if kind == "list" else b"1")


def _receive(link: socket.socket, path: str, size: int) -> None:
    """Receive a state into a file, which is not valid before it is complete."""
    file = os.open(path, os.O_RDWR)
    try:
        os.pwrite(file, bytes(HEAD.size), 0)
        os.ftruncate(file, size)
        with mmap.mmap(file, size) as data, memoryview(data) as room:
            head = bytearray()
            while len(head) < HEAD.size:
                head += _some(link.recv(HEAD.size - len(head)))
            at = HEAD.size
            while at < size:
                count = link.recv_into(room[at:])
                if not count:
                    raise ConnectionResetError("the other host closed the connection")
                at += count
            room[: HEAD.size] = head
    finally:
        os.close(file)


def _some(data: bytes) -> bytes:
    if not data:
        raise ConnectionResetError("the other host closed the connection")
    return data


@contextmanager
def _request(address: Address, secret: str, **request: object) -> Iterator[tuple[socket.socket, Facts]]:
    session = open_connection(*address, secret, request, timeout=PATIENCE)
    with session.link as link:
        link.settimeout(PATIENCE)
        yield link, session.facts


def fetch_state(address: Address, secret: str, seat: int, step: int, memory: StateMemory) -> None:
    """Copy a state from the memory of another host into that of this one."""
    with _request(address, secret, memory="fetch", seat=seat, step=step) as (link, answer):
        _receive(link, memory.next_file(seat, step), int(answer["size"]))
        link.sendall(b"1")


def list_states(address: Address, secret: str) -> dict[int, list[int]]:
    """The steps of all complete states in the memory of another host, by seat."""
    with _request(address, secret, memory="list") as (link, _):
        text = b""
        while data := link.recv(1 << 16):
            text += data
    return {int(seat): steps for seat, steps in json.loads(text).items()}


def forget_states(address: Address, secret: str, step: int) -> None:
    """Remove the states of later steps from the memory of another host."""
    with _request(address, secret, memory="forget", step=step) as (link, _):
        _some(link.recv(1))


class StateCopies:
    """Sends the states of a rank to the memory of another host, in the background: one at a time."""

    def __init__(self, hosts: Sequence[Address], secret: str, seat: int) -> None:
        """`hosts` are tried in turn: the first that is reached keeps the states."""
        self._hosts, self._secret, self._seat = list(hosts), secret, seat
        self._link: socket.socket | None = None
        self._closed = False
        self.pending = False
        """Whether the last state is not on another host yet."""

    def send(self, path: str, step: int) -> None:
        """Send the state in a file, which must not change while `pending`."""
        if self._hosts and not self._closed:
            self.pending = True
            threading.Thread(target=self._send, args=(path, step), name="stageline states", daemon=True).start()

    def _send(self, path: str, step: int) -> None:
        for _ in range(len(self._hosts)):
            try:
                self._send_to(self._hosts[0], path, step)
            except (OSError, StagelineError):
                self._hosts.append(self._hosts.pop(0))
            else:
                self.pending = False
                return
            if self._closed:
                return

    def _send_to(self, address: Address, path: str, step: int) -> None:
        size = os.stat(path).st_size
        request = _request(address, self._secret, memory="keep", seat=self._seat, step=step, size=size)
        with request as (self._link, _), open(path, "rb") as file:
            if not self._closed:
                self._link.sendfile(file)
                _some(self._link.recv(1))

    def close(self) -> None:
        """Abandon what is being sent."""
        self._closed, link = True, self._link
        if link is not None:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
