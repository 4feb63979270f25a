"""What several ranks tell each other at the end of a step: a row of numbers from each, known to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stageline.transport import wire
from stageline.transport.links import Links
from stageline.transport.outbox import Outbox
from stageline.transport.protocol import TransportError

TURNS = 1 << 20
"""A turn of a transport is its number and so many times its steps."""


class Exchange:
    """One rank's end. In the k-th round a rank tells the one that is 2^k further all that it knows:

        ranks      0   1   2   3   4        after round k, every rank knows the rows of the 2^k before it, and its own
        round 0    ╰─▶─╯ …                  so few rounds are enough
        round 1    ╰───▶───╯ …

    >>> from stageline.transport.links import Links
    >>> links = Links(0, 1)
    >>> Exchange(links, Outbox(), [0]).gather(np.array([2.0, 3.0]), check=lambda: None)
    array([[2., 3.]])
    >>> links.close()
    """

    def __init__(self, links: Links, outbox: Outbox, ranks: Sequence[int], number: int = 0) -> None:
        """Between these ranks, of which this is one; `number` tells the pipelines apart that share connections."""
        self._links, self._outbox = links, outbox
        self._ranks = list(ranks)
        self._place = self._ranks.index(links.rank)
        self._rounds = number

    def gather(self, row: NDArray[np.float64], check: Callable[[], None]) -> NDArray[np.float64]:
        """The rows of all ranks, in order; `check` is called now and then while one is waited for, and may raise."""
        self._rounds += TURNS
        size, place = len(self._ranks), self._place
        known, distance = np.ascontiguousarray(row, dtype=np.float64)[None], 1
        while distance < size:
            told = known[: min(distance, size - distance)]
            head = wire.write_head(self._rounds, b"-", told.nbytes)
            link = self._links.outbound(self._ranks[(place + distance) % size], "exchange")
            self._outbox.send(link, [memoryview(head), memoryview(told.tobytes())])
            source = self._ranks[(place - distance) % size]
            heard = self._hear(source, check)
            if len(heard) != told.size:
                raise TransportError(
                    f"rank {source} tells {len(heard)} numbers at the end of a step and rank {self._links.rank} "
                    f"{told.size}: one of them evaluates while the other trains, or they run different schedules"
                )
            known = np.concatenate([known, heard.reshape(told.shape)])
            distance *= 2
        return known[(place - np.arange(size)) % size]

    def _hear(self, source: int, check: Callable[[], None]) -> NDArray[np.float64]:
        inbound = self._links.inbound(source, "exchange")

        def open_it(prefix: wire.Prefix, text: bytes) -> tuple[NDArray[np.float64], list[memoryview]]:
            if prefix.turn != self._rounds or prefix.payload % 8:
                raise TransportError(f"rank {source}: {other_turn(prefix.turn, self._rounds)}")
            room = np.empty(prefix.payload // 8)
            return room, [memoryview(room).cast("B")]  # type: ignore[arg-type]

        while (found := inbound.pull(open_it)) is None:
            self._links.wait(inbound, 0.05, wakeful=False)
            check()
        return found


def other_turn(came: int, expected: int) -> str:
    """Say what is wrong with a message of another step or pipeline.

    >>> other_turn(3 * TURNS + 1, 2 * TURNS + 1)
    'a message of step 3 came in step 2'
    """
    if came % TURNS != expected % TURNS:
        return (
            f"a message of pipeline {came % TURNS} came to pipeline {expected % TURNS}: the ranks run their pipelines "
            "in different orders"
        )
    return f"a message of step {came // TURNS} came in step {expected // TURNS}"
