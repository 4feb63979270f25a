"""The cost of the measured timeline and the flight record: steps with and without both, in turns.

python benchmarks/tracing.py [--repeats 200] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import stageline as sl
from stageline.runtime import executor


class NoRing:
    """A ring buffer that drops everything."""

    def append(self, item: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="steps of each (default 200)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule="interleaved-zb", ranks=1, microbatches=8, chunks=4)
    x = torch.randn(64, 256)
    module: Any = executor
    clock, flight = module.perf_counter, pipe.runner.host.flight(0)
    rings = (flight.actions, flight.sent, flight.received)
    taken: dict[str, list[float]] = {"traced": [], "not traced": []}
    for turn in range(options.repeats + 5):
        for how, times in taken.items():
            traced = how == "traced"
            module.perf_counter = clock if traced else float
            flight.actions, flight.sent, flight.received = rings if traced else (NoRing(),) * 3  # type: ignore[assignment]
            began = time.perf_counter()
            pipe.step(x, x)
            if turn >= 5:
                times.append(time.perf_counter() - began)
    medians = {how: 1e3 * statistics.median(times) for how, times in taken.items()}
    cost = medians["traced"] / medians["not traced"] - 1
    if options.json:
        print(json.dumps({**medians, "cost": cost}))
        return
    actions = pipe.schedule.num_actions
    print(f"torch {torch.__version__}, {actions} actions a step: {medians['traced']:.2f} ms traced, ", end="")
    print(f"{medians['not traced']:.2f} ms not: {cost:+.2%}")


if __name__ == "__main__":
    main()
