"""How long partitioning takes, and its gain over equal counts and over a greedy cut, on random layers.

python benchmarks/partition_speed.py [--seeds 3] [--caps] [--json]

The greedy cut fills a stage until it has its share of the work, in the order of the layers. Ratios are the slowest rank
of the other cut over ours, the median over seeds: 1.10 means 10% slower. "to ideal" is our slowest rank over the work
of all layers spread evenly, which a cut may not be able to reach; "bound" is the proven gap.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from typing import Any

import numpy as np

from stageline.common.errors import StagelineError
from stageline.model.partition.cuts import Floats
from stageline.model.partition.partition import evaluate, partition, uniform

SIZES = [(16, 4), (80, 8), (200, 16), (1000, 64)]
SHAPES = [(1, "loop"), (2, "v"), (2, "loop"), (4, "loop")]
ROOM = 1.1
"""The memory cap of a rank, as a multiple of its even share of random sizes; most cuts exceed it."""


def greedy(costs: Floats, stages: int) -> list[tuple[int, int]]:
    """Fill each stage until it has its share; leave at least one layer for every later stage."""
    places, share, work = [0], float(costs.sum()) / stages, 0.0
    for layer, cost in enumerate(costs.tolist()):
        missing = stages - len(places)
        full = work >= share or len(costs) - layer == missing
        if missing and full and layer > places[-1]:
            places.append(layer)
            work = 0.0
        work += cost
    return list(pairwise([*places, len(costs)]))


def layers_of(kind: str, count: int, seed: int) -> Floats:
    dice = np.random.default_rng(seed)
    if kind == "uniform":
        return dice.uniform(0.5, 1.5, count)
    # A model: equal blocks, a light first layer, and a last one as heavy as some blocks.
    costs = dice.normal(1.0, 0.05, count)
    costs[0], costs[-1] = 0.2, 4.0
    return costs


def measure(
    kind: str, layers: int, ranks: int, chunks: int, placement: str, seeds: int, capped: bool
) -> dict[str, Any]:
    rows = []
    for seed in range(seeds):
        costs = layers_of(kind, layers, seed)
        room: dict[str, Any] = {}
        if capped:
            memory = layers_of("uniform", layers, seed + 1000)
            room = {"memory": memory, "caps": memory.sum() / ranks * ROOM}
        began = time.perf_counter()
        try:
            best = partition(costs, ranks, chunks, placement, **room)
        except StagelineError:  # nothing keeps these caps
            continue
        seconds = time.perf_counter() - began
        others = (uniform(layers, ranks * chunks), greedy(costs, ranks * chunks))
        ratios = [evaluate(cut, costs, ranks, chunks, placement).slowest / best.slowest for cut in others]
        rows.append((seconds, *ratios, best.slowest * ranks / costs.sum(), best.gap))
    if not rows:
        rows = [(float("nan"),) * 5]
    seconds, counts, filled, ideal, gap = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "layers": kind, "count": layers, "ranks": ranks, "chunks": chunks, "placement": placement,
        "caps": capped,
        "seconds": seconds, "equal counts": counts, "greedy": filled, "to ideal": ideal, "gap": gap,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="random layers of each size (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--caps", action="store_true", help="limit the bytes that each rank may hold")
    options = parser.parse_args()
    cases = [
        (kind, layers, ranks, chunks, placement)
        for kind in ("uniform", "model")
        for layers, ranks in SIZES
        for chunks, placement in SHAPES
        if layers >= ranks * chunks
    ]
    if not options.json:
        print("layers          ranks  shape     seconds   equal counts  greedy  to ideal  gap to the bound")
    rows = []
    for case in cases:
        row = measure(*case, seeds=options.seeds, capped=options.caps)
        rows.append(row)
        if not options.json:
            print(
                f"{row['count']:5} {row['layers']:8} {row['ranks']:6}  {row['chunks']} {row['placement']:6}"
                f" {row['seconds']:9.3f}  {row['equal counts']:12.3f} {row['greedy']:8.3f} {row['to ideal']:9.4f}"
                f"  {100 * row['gap']:5.2f}%",
                flush=True,
            )
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
