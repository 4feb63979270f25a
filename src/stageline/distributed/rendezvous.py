"""A unique name for one rendezvous, on which its ranks agree through a store that may hold keys of an earlier one.

torchrun's store outlives a restart, and the store of a script may outlive a process group. Their keys then hold the
addresses of processes that are gone. So every rank writes a fresh random number, and rank 0 answers it with the name of
this rendezvous, which is the prefix of all other keys.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol


class Store(Protocol):
    """The methods of a torch.distributed store that are used here."""

    def set(self, key: str, value: str, /) -> object:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""


class Meeting:
    """One rank's part: rank 0 chooses the name and answers the others, who ask for it.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> store.set("stageline/hello/1", "of a rank that is gone")
    >>> with ThreadPoolExecutor() as pool:
    ...     other = pool.submit(Meeting, store, 1, 2)
    ...     first = Meeting(store, 0, 2)
    ...     first.answer(lambda: False)
    ...     other.result().name == first.name
    []
    True
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        """Choose the name, or wait until rank 0 answers with it."""
        self._store, self._ranks = store, ranks
        if rank == 0:
            self.name = secrets.token_hex(8)
            return
        drawn = secrets.token_hex(8)
        store.set(_hello(rank), drawn)
        self.name = store.get(_answer(drawn)).decode()
        store.set(_heard(self.name, rank), "1")

    def answer(self, over: Callable[[], bool]) -> Sequence[int]:
        """On rank 0: answer the others until all know the name or `over()` is true; return the ranks that do not."""
        answered: set[str] = set()
        missing = list(range(1, self._ranks))
        while missing and not over():
            for rank in missing:
                if self._store.check([_hello(rank)]):
                    drawn = self._store.get(_hello(rank)).decode()
                    if drawn not in answered:  # perhaps of an earlier rendezvous, where the answer does no harm
                        self._store.set(_answer(drawn), self.name)
                        answered.add(drawn)
            missing = [rank for rank in missing if not self._store.check([_heard(self.name, rank)])]
            if missing:
                time.sleep(0.01)
        return missing


def _hello(rank: int) -> str:
    return f"stageline/hello/{rank}"


def _answer(drawn: str) -> str:
    return f"stageline/answer/{drawn}"


def _heard(name: str, rank: int) -> str:
    return f"stageline/heard/{name}/{rank}"
