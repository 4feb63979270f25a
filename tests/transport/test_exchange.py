"""What ranks tell each other at the end of a step: every row reaches every rank, whatever the tree looks like."""

from __future__ import annotations

import datetime
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from stageline.common.errors import TransportError
from stageline.transport.tcp import exchange
from stageline.transport.tcp.exchange import Exchange, SocketGroup
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.outbox import Outbox

Rows = NDArray[np.float64]


def on_all(ranks: int, fan: int, call: Callable[[int, Exchange], Rows], monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """Call something with every rank's end, each on a thread of its own."""
    monkeypatch.setattr(exchange, "FAN", fan)
    ends = [Links(rank, ranks) for rank in range(ranks)]
    try:
        for end in ends:
            end.meet([peer.address for peer in ends], "0" * 32)
        exchanges = [Exchange(end, Outbox(), range(ranks)) for end in ends]
        with ThreadPoolExecutor(ranks) as pool:
            futures: list[Future[Rows]] = [pool.submit(call, rank, end) for rank, end in enumerate(exchanges)]
            return [future.result(100.0) for future in futures]
    finally:
        for end in ends:
            end.close()


def patient(seconds: float = 60.0) -> Callable[[], None]:
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise TransportError("nothing came")

    return check


@pytest.mark.parametrize("fan", [1, 2])
def test_collectives_end_in_order_on_all_ranks_while_they_compute(fan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums with the same bits on all ranks, and bytes of any number from any rank, started before the first wait."""
    monkeypatch.setattr(exchange, "FAN", fan)
    ranks, sizes = 5, (0, 1, 3_000_000)
    ends = [Links(rank, ranks) for rank in range(ranks)]
    for end in ends:
        end.meet([peer.address for peer in ends], "0" * 32)
    groups = [SocketGroup(end, range(ranks), "collective") for end in ends]
    sums = [[group.all_reduce(np.array([[0.1 * rank, 1.0]])) for rank, group in enumerate(groups)]]
    sums += [[group.all_gather(np.array([float(rank)])) for rank, group in enumerate(groups)]]
    texts = {
        (source, size): [group.broadcast(bytes([source]) * size if rank == source else None, source)
                         for rank, group in enumerate(groups)]
        for source in (0, 3, 4) for size in sizes
    }  # fmt: skip
    for works in (*sums, *texts.values()):
        for work in works:
            work.wait(datetime.timedelta(seconds=60))
    assert {work.value.tobytes() for work in sums[0]} == {sums[0][0].value.tobytes()}
    np.testing.assert_allclose(sums[0][0].value, [[1.0, 5.0]])
    assert [work.value.tolist() for work in sums[1]] == [[[0.0], [1.0], [2.0], [3.0], [4.0]]] * ranks
    for (source, size), works in texts.items():
        assert [work.value.tobytes() for work in works] == [bytes([source]) * size] * ranks
    pending = groups[0].all_gather(np.zeros(1))
    with pytest.raises(RuntimeError, match="takes longer"):
        pending.wait(datetime.timedelta(seconds=0.01))
    groups[0].close()
    with pytest.raises(TransportError, match="were closed"):
        pending.wait(datetime.timedelta(seconds=60))
    for end in ends:
        end.close()


@pytest.mark.parametrize("fan", [1, 2, 3, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_every_row_reaches_every_rank_in_order(ranks: int, fan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(rank: int, end: Exchange) -> Rows:
        draw = random.Random(rank)
        gathered = []
        for number in range(3):
            time.sleep(draw.choice([0.0, 0.005]))
            gathered.append(end.gather(np.array([rank, number, 0.5]), patient()))
        return np.stack(gathered)

    expected = np.array([[[rank, number, 0.5] for rank in range(ranks)] for number in range(3)])
    for gathered in on_all(ranks, fan, gather, monkeypatch):
        assert np.array_equal(gathered, expected)


def test_a_rank_that_tells_another_number_of_figures_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = threading.Event()

    def in_vain() -> None:
        if refused.is_set():
            raise TransportError("nothing came")

    def gather(rank: int, end: Exchange) -> Rows:
        try:
            return end.gather(np.zeros(3 if rank == 2 else 2), in_vain if rank else patient())
        except TransportError as error:
            refused.set()
            return np.array([ord(letter) for letter in str(error)])

    errors = ["".join(map(chr, row.astype(int))) for row in on_all(3, 16, gather, monkeypatch)]
    assert errors[0].startswith("rank 2 sent 3 numbers at the end of a step, but rank 0 expects 2")
    assert errors[1] == errors[2] == "nothing came"
