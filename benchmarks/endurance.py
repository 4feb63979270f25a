"""Many steps: does anything grow? Memory, open files, threads and step time, with threads and with processes.

python benchmarks/endurance.py [--steps 500] [--schedule zb-h1] [--json]

Each figure is taken after a fifth of the steps and at the end; the step time is the median of that fifth.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import stageline as sl
from stageline.testing import run_ranks


def figures(taken: list[float]) -> dict[str, float]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGESIZE") / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "ms a step": 1e3 * statistics.median(taken),
    }


def endure(rank: int, ranks: int, steps: int, schedule: str) -> tuple[dict[str, float], dict[str, float]]:
    """Train, with batches of changing length and an optimizer; the figures early and at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
    pipe = sl.Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, ranks=ranks, microbatches=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    taken: list[float] = []
    early: dict[str, float] = {}
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(8, 4 + step % 3, 32)
        began = time.perf_counter()
        pipe.step(x, x)
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - began)
        if step + 1 == steps // 5:
            early = figures(taken)
    return early, figures(taken[-(steps // 5) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--schedule", default="zb-h1")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    usage: dict[str, Any] = {"threads": endure(0, 2, options.steps, options.schedule)}
    usage["processes"] = run_ranks(endure, 2, 2, options.steps, options.schedule, timeout=1200)[0]
    if options.json:
        print(json.dumps(usage, indent=2))
        return
    print(
        f"torch {torch.__version__}, {options.steps} steps of {options.schedule} on 2 ranks: after a fifth of them, "
        "and at the end"
    )
    for world, (early, late) in usage.items():
        print(f"{world:10}", "   ".join(f"{name} {early[name]:.6g} → {late[name]:.6g}" for name in early))


if __name__ == "__main__":
    main()
