"""A GPT over NCCL, all ranks on one GPU: our schedules against torch's Schedule1F1B in the same processes, in turns.

python benchmarks/nccl_speed.py [--ranks 2 4] [--families 1f1b zb-h1] [--repeats 5] [--blocks 16] [--json]

0.9 billion parameters, bfloat16, 16 microbatches of 2 × 1024 tokens. Every rank is a machine of its own to NCCL (see
`stageline.testing.shared_gpu`). Under MPS, the kernels of the ranks overlap; without it, the GPU runs one rank at a
time (see gpu_sleep.py for how to start MPS). Times are medians of this run. "first" is the time from constructing the
pipeline (in torch: the stage) to the end of its first step, in processes that have used their GPU; ours is constructed
first, so it also starts cuBLAS.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageline as sl
from one_gpu import LENGTH, MICROBATCHES, VOCABULARY, Block, loss_fn
from stageline.testing import run_ranks


def torchs(parts: list[nn.Sequential], rank: int) -> Callable[[Tensor], Any]:
    """A step of torch's 1F1B on the same parts."""
    from torch.distributed import pipelining

    part = copy.deepcopy(parts[rank])
    stage = pipelining.PipelineStage(part, rank, len(parts), torch.device("cuda", 0))
    peer = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    first, last = rank == 0, rank == len(parts) - 1

    def step(tokens: Tensor) -> None:
        part.zero_grad()
        arguments: dict[str, Any] = {"target": tokens, "losses": []} if last else {}
        peer.step(*([tokens] if first else []), **arguments)

    return step


def ours(model: nn.Module, family: str, ranks: int) -> tuple[sl.Pipeline, Callable[[Tensor], Any]]:
    pipe = sl.Pipeline(model, loss_fn=loss_fn, schedule=family, ranks=ranks, microbatches=MICROBATCHES)

    def step(tokens: Tensor) -> None:
        pipe.zero_grad()
        pipe.step(tokens, tokens)

    return pipe, step


def timed(step: Callable[[Tensor], Any], tokens: Tensor) -> float:
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    step(tokens)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turns(rank: int, ranks: int, families: list[str], repeats: int, blocks: int, width: int) -> dict[str, Any]:
    """Seconds of every step on this rank, and of the first ones."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with torch.device("cuda", 0):
        layers = [nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(blocks))]
        model = nn.Sequential(*layers, nn.Linear(width, VOCABULARY, bias=False)).to(torch.bfloat16)
        tokens = torch.randint(0, VOCABULARY, (2 * MICROBATCHES, LENGTH))
    taken: dict[str, list[float]] = {}
    firsts: dict[str, float] = {}
    runs: dict[str, Callable[[Tensor], Any]] = {}
    parts: list[nn.Sequential] = []
    for family in families:
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))
        began = time.perf_counter()
        pipe, runs[family] = ours(model, family, ranks)
        runs[family](tokens)
        torch.cuda.synchronize()
        firsts[family] = time.perf_counter() - began
        parts = parts or list(pipe.runner.stages.parts)
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    runs["torch 1f1b"] = torchs(parts, rank)
    runs["torch 1f1b"](tokens)
    torch.cuda.synchronize()
    firsts["torch 1f1b"] = time.perf_counter() - began
    for turn in range(repeats + 1):
        for name, step in runs.items():
            seconds = timed(step, tokens)
            if turn:
                taken.setdefault(name, []).append(seconds)
    return {"steps": taken, "first": firsts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--families", nargs="+", default=["1f1b", "zb-h1"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        sizes = (ranks, options.families, options.repeats, options.blocks, options.width)
        seen = run_ranks(in_turns, ranks, *sizes, timeout=240, backend="nccl", share_gpu=True)
        steps = {
            name: [max(times) for times in zip(*(process["steps"][name] for process in seen), strict=True)]
            for name in seen[0]["steps"]
        }
        medians = {name: statistics.median(times) for name, times in steps.items()}
        for name, median in medians.items():
            first = max(process["first"][name] for process in seen)
            row = {"ranks": ranks, "case": name, "ms": 1e3 * median, "first s": first, "all": steps[name]}
            row["over torch"] = median / medians["torch 1f1b"]
            rows.append(row)
            if not options.json:
                print(
                    f"P={ranks} {name:12} {1e3 * median:7.1f} ms, {row['over torch']:.3f} of torch's 1F1B; first "
                    f"step {first:.2f} s",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
