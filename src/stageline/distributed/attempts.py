"""The attempts of a job that recovers: its launcher announces them in the store, and its processes read them there.

A launcher that replaces lost ranks sets STAGELINE_ATTEMPT in the environment of its processes. The number grows with
every recovery. All ranks of one attempt meet under one prefix of the store, which the launcher keeps, so nothing that a
lost rank held is needed to meet again.

On several hosts, each launcher has a store of its own, from which the processes of its host read the attempts; they
meet at the store of the launcher that leads (`launchers/hosts.py`). An attempt then says where every seat is.

A process has a *seat*: the rank that it has while nobody is lost. An attempt gives some or all seats a rank. A process
whose seat has none, and a spare one, wait for an attempt in which they get one.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from stageline.common.errors import PipelineError
from stageline.distributed._torch_private import TCPStore

NUMBER = "STAGELINE_ATTEMPT"
"""The attempt of this process; unset where the launcher replaces nothing."""
SEAT = "STAGELINE_SEAT"
"""The seat of this process; for a spare one, its own number after those of all ranks."""
SLOT = "STAGELINE_SLOT"
"""The number of this process on its host, which chooses its GPU; unset where that is its seat."""
LAUNCHER = "STAGELINE_LAUNCHER"
"""The port of the store of this host's launcher; unset where the ranks meet there."""
MEMORY = "STAGELINE_MEMORY"
"""The files of host memory in which the ranks keep their last states, of each seat in its turn."""
_NEWEST, _OVER, _COMPLETE, _SHAPE = "newest", "over", "complete", "shape"
POLL = 0.02
"""Seconds between two looks for a new attempt."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job after the first, as the launcher announces it."""

    number: int
    lost: tuple[str, ...]
    """A sentence for every loss since the job last trained."""
    action: str
    """What was done about it."""
    moment: float
    """When the launcher learned of the first of them, in seconds since the epoch."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """The rank of every seat that takes part."""
    replaced: tuple[int, ...] = ()
    """The seats that have new processes."""
    before: tuple[int, ...] = ()
    """The seats that took part when the job last trained: they have its state."""
    spares: Mapping[int, int] = field(default_factory=dict)
    """The seats that spare processes take."""
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """On several hosts: the host of every seat that takes part, and its number there."""
    hosts: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """The addresses and ports of the launchers of all hosts."""
    store: tuple[str, int] = ("", 0)
    """The address and port of the store at which the ranks meet."""

    def to_text(self) -> str:
        """The announcement."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: bytes) -> Attempt:
        """Read an announcement.

        >>> attempt = Attempt(1, ("rank 2 was killed by SIGKILL",), "restart", 0.0, {0: 0, 1: 1}, (1,))
        >>> Attempt.parse(attempt.to_text().encode()) == attempt
        True
        """
        values = json.loads(text)
        for name in ("lost", "replaced", "before"):
            values[name] = tuple(values[name])
        for name in ("ranks", "spares"):
            values[name] = {int(key): value for key, value in values[name].items()}
        for name in ("places", "hosts"):
            values[name] = {int(key): tuple(value) for key, value in values[name].items()}
        values["store"] = tuple(values["store"])
        return cls(**values)

    def place(self, seat: int) -> dict[str, str] | None:
        """The environment of the process in a seat, or of a spare one; None if it waits for another attempt.

        >>> Attempt(1, (), "spare", 0.0, {0: 0, 1: 1}, spares={2: 1}).place(2)["RANK"]
        '1'
        """
        seat = self.spares.get(seat, seat)
        if seat not in self.ranks:
            return None
        rank, count = str(self.ranks[seat]), str(len(self.ranks))
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, SEAT: str(seat)}
        if self.places:
            place |= self._place_on_host(seat)
        return {**place, NUMBER: str(self.number), "TORCHELASTIC_RESTART_COUNT": str(self.number)}

    def _place_on_host(self, seat: int) -> dict[str, str]:
        here = self.neighbours(seat)
        return {
            "LOCAL_RANK": str(here.index(seat)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "GROUP_RANK": str(self.places[seat][0]),
            "MASTER_ADDR": self.store[0],
            "MASTER_PORT": str(self.store[1]),
            SLOT: str(self.places[seat][1]),
        }

    def neighbours(self, seat: int) -> list[int]:
        """The seats on the same host, in their order there.

        >>> Attempt(0, (), "", 0.0, {0: 0, 1: 1, 2: 2}, places={0: (0, 1), 1: (1, 0), 2: (0, 0)}).neighbours(0)
        [2, 0]
        """
        here = [other for other in self.ranks if self.places[other][0] == self.places[seat][0]]
        return sorted(here, key=lambda other: self.places[other][1])


class Announcements:
    """The attempts of a job in the store of its launcher.

    >>> from torch.distributed import HashStore
    >>> announcements = Announcements(HashStore())
    >>> announcements.newest(), announcements.over()
    (0, '')
    >>> announcements.make(Attempt(1, ("rank 2 was killed by SIGKILL",), "restart", 0.0, {0: 0}))
    >>> announcements.newest(), announcements.read(1).ranks
    (1, {0: 0})
    """

    def __init__(self, store: Any) -> None:
        self._store = PrefixStore("stageline/attempts", store)

    def make(self, attempt: Attempt) -> None:
        """Announce an attempt."""
        self._store.set(str(attempt.number), attempt.to_text())
        self._store.set(_NEWEST, str(attempt.number))

    def end(self, why: str) -> None:
        """Announce that there will be no other attempt."""
        self._store.set(_OVER, why)

    def newest(self) -> int:
        """The number of the last attempt."""
        return int(self._get(_NEWEST) or 0)

    def over(self) -> str:
        """Why there will be no other attempt; empty while there may be one."""
        return self._get(_OVER)

    def read(self, number: int) -> Attempt:
        """An attempt that was announced."""
        return Attempt.parse(self._store.get(str(number)))

    # What processes tell the launcher.

    def complete(self, number: int) -> None:
        """Say that the job trains again, in this attempt."""
        self._store.set(_COMPLETE, str(number))

    def completed(self) -> int:
        """The last attempt in which the job trained."""
        return int(self._get(_COMPLETE) or 0)

    def describe(self, *, per_replica: int, replans: bool) -> None:
        """Say how many ranks a replica has (0 if replicas cannot be left out), and whether the job can use fewer."""
        self._store.set(_SHAPE, json.dumps([per_replica, replans]))

    def shape(self) -> tuple[int, bool]:
        """What the job said with `describe`; by default, that it can do neither."""
        per_replica, replans = json.loads(self._get(_SHAPE) or "[0, false]")
        return per_replica, replans

    def arrive(self, seat: int, number: int) -> None:
        """Say that a process takes part in an attempt, or waits for a later one."""
        self._store.set(f"arrived/{number}/{seat}", "1")

    def arrived(self, seat: int, number: int) -> bool:
        """Whether the process of a seat takes part in an attempt, or waits for a later one."""
        return bool(self._get(f"arrived/{number}/{seat}"))

    def blame(self, rank: int, number: int, how: str) -> None:
        """Say that a rank does not run ("frozen", "died", or "absent" from the start), though its process may exist."""
        self._store.set(f"blamed/{number}", f"{rank} {how}")

    def blamed(self, number: int) -> tuple[int, str] | None:
        """The rank that others blame for the end of an attempt, and what for; None if they blame none."""
        rank, _, how = self._get(f"blamed/{number}").partition(" ")
        return (int(rank), how) if rank else None

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def number_of(environment: Mapping[str, str] | None = None) -> int | None:
    """The attempt of this process; None if its launcher replaces nothing.

    >>> number_of({}), number_of({"STAGELINE_ATTEMPT": "2"})
    (None, 2)
    """
    text = (os.environ if environment is None else environment).get(NUMBER, "")
    return int(text) if text.isdecimal() else None


def own_seat() -> int:
    """The seat of this process."""
    return int(os.environ.get(SEAT) or os.environ.get("RANK") or 0)


def announcements() -> Announcements:
    """The announcements of the launcher of this process."""
    port = os.environ.get(LAUNCHER)
    if port:
        return _connect("127.0.0.1", int(port), os.getpid())
    return _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.getpid())


@cache
def _connect(host: str, port: int, process: int) -> Announcements:
    return Announcements(TCPStore(host, port, None, False, datetime.timedelta(seconds=60), wait_for_workers=False))


def superseded() -> bool:
    """Whether the launcher has announced another attempt: the ranks of this one will never be complete."""
    number = number_of()
    return number is not None and announcements().newest() > number


def refuse_superseded() -> None:
    """Raise if another rank was lost."""
    if superseded():
        raise PipelineError("another rank was lost while the job recovered from the loss of one")


def blame_absent(rank: int) -> None:
    """Tell the launcher, if it replaces lost ranks, that a rank does not join the others."""
    number = number_of()
    if number is not None and announcements().blamed(number) is None:
        announcements().blame(rank, number, "absent")


def next_place(number: int) -> Attempt | None:
    """Wait for an attempt after this one that gives this process a rank, and take it; None once there is no other."""
    launcher, seat = announcements(), own_seat()
    while True:
        newest = launcher.newest()
        if newest > number:
            number, attempt = newest, launcher.read(newest)
            place = attempt.place(seat)
            if place is not None:
                os.environ.update(place)
                return attempt
            launcher.arrive(seat, number)
        elif launcher.over():
            return None
        time.sleep(POLL)


def take_place() -> bool:
    """Wait for a rank where this process was started without one; return whether it has one."""
    number, seat = number_of(), own_seat()
    if number is None or (number == 0 and "RANK" in os.environ):
        return True
    launcher = announcements()
    place = launcher.read(number).place(seat) if number else None
    if place is not None:
        os.environ.update(place)
        return True
    launcher.arrive(seat, number)
    return next_place(number) is not None
