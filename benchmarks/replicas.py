"""Reducing gradients over replicas while the pipeline drains, compared with reducing them afterwards.

python benchmarks/replicas.py [--families 1f1b zb-v] [--megabytes 24] [--microbatches 8] [--repeats 15] [--quick]

Two replicas of two ranks, each rank a process. A stage sleeps in F, I and W, so that the cores are free for the
reduction, and has a weight of the given size with a gradient that costs nothing to compute. The same pipeline runs both
ways in turns, and a third time without reduction (sync=False). A time is that of the slowest rank in the fastest
repeat, because the machine is shared. "hidden" is the share of the reduction time that the overlap saves. If a rank has
several stages (4 in interleaved and looped-bfs, 2 in zb-v), the stages that finish early have the most time to overlap.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import SleepStage, run_ranks

WAYS = ("without", "after", "overlapped")
NOMINAL = 0.01


class Heavy(nn.Module):
    """A stage that sleeps, with a large weight whose gradient costs nothing to compute."""

    def __init__(self, seconds: float, elements: int) -> None:
        super().__init__()
        self.sleep = SleepStage(seconds, seconds, seconds)
        self.ballast = nn.Parameter(torch.zeros(elements))
        self.ballast.grad = torch.zeros(elements)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.sleep(x))


def measure(rank: int, name: str, microbatches: int, megabytes: float, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every step, by way."""
    options = {"chunks": 4} if name in ("interleaved", "looped-bfs") else {}
    schedule = sl.schedule(name, ranks=2, microbatches=microbatches, **options)
    chunks = schedule.stages // 2
    elements = int(megabytes * 2**20 / 4 / chunks)
    stages = [Heavy(NOMINAL / chunks, elements) for _ in range(schedule.stages)]
    pipe = sl.Pipeline(stages, loss_fn=functional.mse_loss, schedule=schedule, replicas=2)
    replicas: Any = pipe.runner.replicas
    x = torch.ones(microbatches, 8)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(repeats + 1):
        for way in WAYS:
            pipe.zero_grad(set_to_none=False)
            replicas.pending = True  # so that nothing else differs between the ways
            replicas.overlap = way == "overlapped"
            replicas.group.broadcast("", 0)  # start together
            began = time.perf_counter()
            pipe.step(x, x, sync=way != "without")
            if turn:
                times[way].append(time.perf_counter() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["1f1b", "zb-v", "interleaved", "looped-bfs"])
    parser.add_argument("--megabytes", type=float, default=24.0, help="gradients of a rank")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one family, few repeats")
    options = parser.parse_args()
    families, repeats = (["looped-bfs"], 3) if options.quick else (options.families, options.repeats)
    print(f"2 replicas × 2 ranks, {options.microbatches} microbatches, {options.megabytes:g} MB a rank; ms a step")
    print(f"{'family':12} {'without':>9} {'after':>9} {'overlapped':>11} {'after/overlapped':>17} {'hidden':>7}")
    for name in families:
        every = run_ranks(measure, 4, name, options.microbatches, options.megabytes, repeats, timeout=300)
        took = {way: min(map(max, zip(*(process[way] for process in every), strict=True))) for way in WAYS}
        extra = took["after"] - took["without"]
        hidden = (took["after"] - took["overlapped"]) / extra if extra > 0 else 0.0
        milliseconds = f"{1e3 * took['without']:9.1f} {1e3 * took['after']:9.1f} {1e3 * took['overlapped']:11.1f}"
        print(f"{name:12} {milliseconds} {took['after'] / took['overlapped']:17.2f} {hidden:7.0%}", flush=True)


if __name__ == "__main__":
    main()
