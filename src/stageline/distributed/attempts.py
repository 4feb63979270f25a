"""The attempts of a job that recovers: its launcher announces them in the store, and its ranks read them there.

A launcher that can start a lost rank again sets STAGELINE_ATTEMPT in the environment of its ranks. The number grows
with every recovery: all ranks of one attempt meet under one prefix of the store, which the launcher keeps, so nothing
that a lost rank held is needed to meet again.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from stageline.common.errors import PipelineError
from stageline.distributed._torch_private import TCPStore

NUMBER = "STAGELINE_ATTEMPT"
"""The attempt of this process; unset where the launcher recovers nothing."""
MEMORY = "STAGELINE_MEMORY"
"""The files of host memory in which the ranks keep their last states, of each rank in its turn."""
_NEWEST, _OVER, _COMPLETE = "newest", "over", "complete"


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
    replaced: tuple[int, ...] = ()
    """The ranks that are new processes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all ranks of the attempt; survivors set them before they meet the others."""

    @classmethod
    def parse(cls, text: bytes) -> Attempt:
        """Read an announcement."""
        values = json.loads(text)
        return cls(**{**values, "lost": tuple(values["lost"]), "replaced": tuple(values["replaced"])})


class Announcements:
    """The attempts of a job in the store of its launcher.

    >>> from torch.distributed import HashStore
    >>> announcements = Announcements(HashStore())
    >>> announcements.newest(), announcements.over()
    (0, '')
    >>> announcements.make(Attempt(1, ("rank 2 was killed by SIGKILL",), "restart", 0.0, (2,)))
    >>> announcements.newest(), announcements.read(1).replaced
    (1, (2,))
    """

    def __init__(self, store: Any) -> None:
        self._store = PrefixStore("stageline/attempts", store)

    def make(self, attempt: Attempt) -> None:
        """Announce an attempt."""
        self._store.set(str(attempt.number), json.dumps(asdict(attempt)))
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

    def complete(self, number: int) -> None:
        """Say that the job trains again, in this attempt."""
        self._store.set(_COMPLETE, str(number))

    def completed(self) -> int:
        """The last attempt in which the job trained."""
        return int(self._get(_COMPLETE) or 0)

    def arrive(self, rank: int, number: int) -> None:
        """Say that a process takes part in an attempt."""
        self._store.set(f"arrived/{number}/{rank}", "1")

    def arrived(self, rank: int, number: int) -> bool:
        """Whether the process of a rank takes part in an attempt."""
        return bool(self._get(f"arrived/{number}/{rank}"))

    def blame(self, rank: int, number: int, culprit: int) -> None:
        """Say that a rank does not run any more, although its process may exist."""
        self._store.set(f"blamed/{number}/{rank}", str(culprit))

    def blamed(self, ranks: int, number: int) -> set[int]:
        """The ranks that others blame for the end of an attempt."""
        texts = (self._get(f"blamed/{number}/{rank}") for rank in range(ranks))
        return {int(text) for text in texts if text}

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def number_of(environment: Mapping[str, str] | None = None) -> int | None:
    """The attempt of this process; None if its launcher recovers nothing.

    >>> number_of({}), number_of({"STAGELINE_ATTEMPT": "2"})
    (None, 2)
    """
    text = (os.environ if environment is None else environment).get(NUMBER, "")
    return int(text) if text.isdecimal() else None


def announcements() -> Announcements:
    """The announcements of the launcher of this process."""
    return _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.getpid())


@cache
def _connect(host: str, port: int, process: int) -> Announcements:
    return Announcements(TCPStore(host, port, None, False, datetime.timedelta(seconds=60), wait_for_workers=False))


def superseded() -> bool:
    """Whether another rank was lost, so that the ranks of this attempt will never be complete."""
    number = number_of()
    return number is not None and announcements().newest() > number


def refuse_superseded() -> None:
    """Raise if another rank was lost."""
    if superseded():
        raise PipelineError("another rank was lost while the job recovered from the loss of one")
