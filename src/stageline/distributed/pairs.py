"""Bandwidth and latency between pairs of ranks, over the links that a pipeline uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from stageline.common.errors import PeerFailed
from stageline.distributed.thread_host import join_started
from stageline.transport.protocol import Header, Message
from stageline.transport.threads import ThreadHub

TRIPS, LARGE, SIZE = 20, 4, 8 * 2**20
"""Round trips of a small message; one-way messages of so many bytes."""
SPACED = 12
"""Small messages that a rank does not wait for. It computes before each of them, because in a step the caches hold what
a stage has just computed, and sending takes several times as long as in a loop."""
ALL_PAIRS = 16
"""Up to so many ranks every pair is measured, one after the other; beyond, only neighbours."""


@dataclass(frozen=True)
class Pair:
    """The link between two ranks."""

    first: int
    second: int
    latency_us: float
    """Half of the shortest round trip of a small message."""
    gbytes_per_s: float
    """Of messages of 8 MiB, the fastest of four."""
    message_us: float = 0.0
    """How long a rank is busy with sending a small message, or with receiving one that has arrived."""


def measure_pairs(host: Any, pairs: Iterable[tuple[int, int]], device: torch.device) -> list[Pair]:
    """Measure the links between these ranks, pair by pair, with tensors on a device.

    All ranks of the job call this and get the same list; `host` is that of processes.
    """
    rank = host.process
    transport = host.transport(rank)
    rows = []
    for number, (first, second) in enumerate(pairs):
        row = np.zeros(3)
        other = {first: second, second: first}.get(rank)
        counts = {} if other is None else {(other, "forward"): TRIPS + LARGE + SPACED}
        transport.begin(counts, counts, device if device.type == "cuda" else None)  # the others count the steps, too
        if other is not None:
            row = _measure(transport, rank, other, number, rank == first, device)
        transport.finish(host.deadline)
        total = host.all_reduce(row)  # and no rank starts before the pair has ended
        rows.append(Pair(first, second, *map(float, total)))
    return rows


def measure_threads(compute: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a rank spends on sending a message to another thread, and those until it is received.

    The sender computes before and after; the receiver waits for the message.

    Threads share the interpreter lock: the receiver needs it, while the sender goes on.

    >>> sending, latency = measure_threads(lambda: sum(range(1000)))
    >>> sending > 0, latency > 0
    (True, True)
    """
    hub, received = ThreadHub(ranks=2), [0.0] * SPACED
    hub.patience = lambda rank: True
    headers = [Header(0, 1, "forward", 0, microbatch, 0) for microbatch in range(SPACED)]

    def receive() -> None:
        with suppress(PeerFailed):  # `compute` has raised an error
            for number, header in enumerate(headers):
                hub.end(1).receive(header, 60.0)
                received[number] = time.perf_counter()

    receiver = threading.Thread(target=receive, name="stageline messages", daemon=True)
    receiver.start()
    sent = []
    try:
        for header in headers:
            compute()
            began = time.perf_counter()
            hub.end(0).send(Message(header, [], "", []))
            sent.append((began, time.perf_counter()))
        compute()
    except BaseException as error:
        hub.set_failure(0, error, "measuring messages")
        raise
    finally:
        join_started(receiver)
    latencies = [end - began for (began, _), end in zip(sent, received, strict=True)]
    return median(end - began for began, end in sent), median(latencies)


def pairs_of(ranks: int) -> Iterator[tuple[int, int]]:
    """The pairs to measure.

    >>> list(pairs_of(3)), len(list(pairs_of(64)))
    ([(0, 1), (0, 2), (1, 2)], 63)
    """
    if ranks <= ALL_PAIRS:
        yield from combinations(range(ranks), 2)
    else:
        yield from zip(range(ranks - 1), range(1, ranks), strict=True)


def _measure(transport: Any, rank: int, other: int, number: int, asks: bool, device: torch.device) -> Any:
    small, large = torch.zeros(1, device=device), torch.zeros(SIZE // 4, device=device)

    def send(microbatch: int, tensor: torch.Tensor) -> None:
        header = Header(rank, other, "forward", 0, microbatch, number)
        transport.send(Message(header, [tensor], "", [False]))

    def receive(microbatch: int) -> None:
        transport.receive(Header(other, rank, "forward", 0, microbatch, number), 60.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    trips: list[float] = []
    transfers: list[float] = []
    for microbatch in range(TRIPS + LARGE):
        if not asks:
            receive(microbatch)
            send(microbatch, small)
            continue
        began = time.perf_counter()
        send(microbatch, small if microbatch < TRIPS else large)
        receive(microbatch)
        (trips if microbatch < TRIPS else transfers).append(time.perf_counter() - began)
    busy, layers = 0.0, nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)).to(device)
    for function in (lambda number: send(number, small), receive):  # by now, both ranks send
        seconds = []
        for microbatch in range(TRIPS + LARGE, TRIPS + LARGE + SPACED):
            layers(torch.ones(256, 256, device=device)).sum().backward()
            began = time.perf_counter()
            function(microbatch)
            seconds.append(time.perf_counter() - began)
        busy += median(seconds)
    message = busy / 2 / 2  # of a send and a receive, on two ranks
    if not asks:
        return np.array([0.0, 0.0, message * 1e6])
    latency = min(trips) / 2
    return np.array([latency * 1e6, SIZE / max(1e-9, min(transfers) - latency) / 1e9, message * 1e6])
