"""How ranks meet at a store: they compare versions, and learn the address at which others reach their machine."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stageline._version import __version__
from stageline.common.errors import PipelineError, StagelineError
from stageline.common.handshake import uses_tls
from stageline.common.machine import ELSEWHERE, interface_of, is_loopback, route_to
from stageline.common.trust import one_machine
from stageline.distributed import attempts

LOOPBACK = "127.0.0.1"
_HELLO, _ANSWER, _HEARD = "stageline/hello/{}", "stageline/answer/{}", "stageline/heard/{}/{}"
"""Keys of the store: a rank's random number, the answer to it, and that the rank has read the answer."""

FAREWELL = 3.0
"""Seconds in which a rank that is refused reads why."""


@dataclass(frozen=True)
class Introduction:
    """What one rank tells another, as text in the store.

    >>> mine = Introduction.mine("1a2b", "10.0.0.1")
    >>> Introduction.parse(str(mine)) == mine, Introduction.parse("of a rank that is gone")
    (True, None)
    """

    name: str
    """A random number; in rank 0's answer, the name of the rendezvous."""
    address: str
    """The address at which this rank reaches rank 0's machine; empty if it is on that machine."""
    versions: str
    tls: bool

    @classmethod
    def mine(cls, name: str, address: str) -> Introduction:
        """That of this process."""
        return cls(name, address, f"stageline {__version__} and torch {torch.__version__}", uses_tls())

    @classmethod
    def parse(cls, text: str) -> Introduction | None:
        """Read one; None if the text is something else."""
        try:
            values = json.loads(text)
            return cls(str(values["name"]), str(values["address"]), str(values["versions"]), bool(values["tls"]))
        except (ValueError, TypeError, KeyError):
            return None

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def check(self, rank: int, first: Introduction) -> None:
        """Refuse a rank that cannot work with rank 0."""
        if self.versions != first.versions:
            raise StagelineError(
                f"rank {rank} runs {self.versions[:80]}, but rank 0 runs {first.versions[:80]}; install the same "
                "versions on all hosts"
            )
        if self.tls != first.tls:
            one, other = (rank, 0) if self.tls else (0, rank)
            raise StagelineError(
                f"rank {one} uses TLS but rank {other} does not; set STAGELINE_TLS_CERT, STAGELINE_TLS_KEY and "
                "STAGELINE_TLS_CA on all hosts"
            )


def find_address(environment: Mapping[str, str], ranks: int) -> tuple[str, str]:
    """The address at which other ranks reach this machine, and that at which it reaches rank 0's machine.

    STAGELINE_HOST is the first, if it is set. If all ranks are on this machine, it is loopback. Else it is the address
    of this machine on the route to MASTER_ADDR. On rank 0's own machine that may be loopback, since many systems
    resolve their own name to 127.0.1.1: then both are empty, and ranks on other machines know better.

    >>> find_address({"STAGELINE_HOST": "10.0.0.7", "MASTER_ADDR": "127.0.0.1"}, 2)
    ('10.0.0.7', '')
    >>> find_address({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, 2)
    ('127.0.0.1', '')
    >>> find_address({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.1.1"}, 2)
    ('', '')
    """
    fixed = environment.get("STAGELINE_HOST", "")
    if one_machine(ranks, environment):
        return fixed or LOOPBACK, ""
    master = environment.get("MASTER_ADDR", "")
    route = route_to(master) if master else route_to(*ELSEWHERE)
    if route is None or is_loopback(route.own):
        return fixed, ""
    return fixed or route.own, route.target if master else ""


def use_interface_of(address: str) -> None:
    """Let gloo use the interface with this address, unless the user chose one.

    By default it uses the address of the hostname, which may be unknown, loopback, or that of another network.
    """
    name = interface_of(address)
    if name and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = name


class Meeting:
    """A unique name for one rendezvous: rank 0 chooses it and answers the others, who ask for it.

    torchrun's store outlives a restart, and the store of a script may outlive a process group. Their keys then hold the
    addresses of processes that are gone. So every rank writes a fresh random number, and rank 0 answers it with the
    name of this rendezvous, which is the prefix of all other keys.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> store.set("stageline/hello/1", "of a rank that is gone")
    >>> with ThreadPoolExecutor() as pool:
    ...     other = pool.submit(Meeting, store, 1, 2)
    ...     first = Meeting(store, 0, 2)
    ...     first.answer(lambda: False)
    ...     other.result().name == first.name
    True
    """

    def __init__(self, store: Any, rank: int, ranks: int, patience: float = 300.0, job: int = 0) -> None:
        """Choose the name, or wait until rank 0 answers with it, for so many seconds.

        `job` is the number of all processes, if these are a part of them.
        """
        self._store, self._ranks, self._is_part = store, ranks, bool(job)
        self.name = drawn = secrets.token_hex(8)
        self.address, reached = find_address(os.environ, job or ranks)
        """The address at which other ranks reach this machine."""
        if rank:
            mine = Introduction.mine(drawn, reached)
            store.set(_HELLO.format(rank), str(mine))
            self._await_answer(_ANSWER.format(drawn), patience)
            first = Introduction.parse(store.get(_ANSWER.format(drawn)).decode())
            if first is None:
                raise StagelineError(
                    f"rank {rank} read an answer of rank 0 from the store that does not match this version of Stageline"
                )
            self.name, self.address = first.name, self.address or first.address
            store.set(_HEARD.format(self.name, rank), "1")
            mine.check(rank, first)
        elif not self.address:
            self.address = self._address_by_others(patience / 2)

    def _address_by_others(self, patience: float) -> str:
        """The address at which a rank on another machine reaches this one; loopback if there is no such rank."""
        missing, end = set(range(1, self._ranks)), time.monotonic() + patience
        while True:
            for rank in sorted(missing):
                if self._store.check([_HELLO.format(rank)]):
                    hello = Introduction.parse(self._store.get(_HELLO.format(rank)).decode())
                    if hello is not None and hello.address:
                        return hello.address
                    missing.discard(rank)
            if not missing:
                return LOOPBACK
            attempts.refuse_superseded()
            if time.monotonic() > end:
                if not self._is_part:
                    attempts.blame_absent(min(missing))
                raise PipelineError(
                    f"rank {min(missing)} never started: it did not reach MASTER_ADDR={os.environ.get('MASTER_ADDR')} "
                    f"within {patience:g} s; restart the job with all ranks"
                )
            time.sleep(0.01)

    def _await_answer(self, key: str, patience: float) -> None:
        """Wait for rank 0; where a launcher replaces lost ranks, look whether it was lost meanwhile."""
        recovers, end = attempts.number_of() is not None, time.monotonic() + patience
        while recovers and not self._store.check([key]):
            attempts.refuse_superseded()
            if time.monotonic() > end:
                if not self._is_part:
                    attempts.blame_absent(0)
                break
            time.sleep(0.02)
        self._store.wait([key], datetime.timedelta(seconds=0.1 if recovers else patience))

    def answer(self, over: Callable[[], bool]) -> None:
        """On rank 0: answer the others until all know the name or `over()` is true.

        A rank that cannot work with this one is refused when it knows why: the store may end with this process.
        """
        answered: set[str] = set()
        refused: StagelineError | None = None
        end = float("inf")
        missing = list(range(1, self._ranks))
        mine = Introduction.mine(self.name, self.address)
        while missing and not over() and time.monotonic() < end:
            for rank in missing:
                if self._store.check([_HELLO.format(rank)]):
                    hello = Introduction.parse(self._store.get(_HELLO.format(rank)).decode())
                    # Perhaps of an earlier rendezvous, where the answer does no harm.
                    if hello is not None and hello.name not in answered:
                        self._store.set(_ANSWER.format(hello.name), str(mine))
                        answered.add(hello.name)
                        try:
                            hello.check(rank, mine)
                        except StagelineError as error:
                            refused, end = refused or error, time.monotonic() + FAREWELL
            missing = [rank for rank in missing if not self._store.check([_HEARD.format(self.name, rank)])]
            if missing:
                time.sleep(0.01)
        if refused is not None:
            raise refused
