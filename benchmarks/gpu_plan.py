"""The planned and the measured step of a GPT on one GPU: time, and peak memory by purpose.

python benchmarks/gpu_plan.py [--repeats 5] [--samples 2] [--blocks 12] [--width 1024] [--json]

bfloat16, 8 microbatches with the given number of samples of 1024 tokens, one rank, AdamW. Plans are made from a profile
with the loss; the measured step is the median of `repeats`, in turns, after two warm-ups, and the measured peak is that
of torch's allocator over a step and its update. "1f1b" is one stage, "interleaved" four, "gpipe" holds all
microbatches, "recompute" recomputes stages, and "zb-h1" splits the backward.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import stageline as sl
from one_gpu import LENGTH, VOCABULARY, Block, loss_fn
from stageline.common.units import format_size

DEVICE = "cuda"
MICROBATCHES = 8
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe"},
    "recompute": {"schedule": "gpipe", "recompute": "stage"},
    "interleaved": {"schedule": "interleaved", "chunks": 4},
    "zb-h1": {"schedule": "zb-h1"},
}
BYTES = 2.0
"""Of a parameter, of its gradient, and of each of AdamW's two moments, which have its type."""


def build(blocks: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(blocks))]
    return nn.Sequential(*layers, nn.Linear(width, VOCABULARY, bias=False)).to(DEVICE, torch.bfloat16)


def measure(pipe: sl.Pipeline, tokens: Tensor, repeats: int) -> tuple[float, float]:
    """Return the median seconds of a step, and the peak bytes of a step and its update."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4, fused=True)
    seconds = []
    for turn in range(repeats + 2):
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if turn == 2:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        pipe.step(tokens, tokens)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        optimizer.step()
    torch.cuda.synchronize()
    return statistics.median(seconds[2:]), float(torch.cuda.max_memory_allocated())


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    gc.collect()  # the model of the case before
    before = torch.cuda.memory_allocated()
    model = build(options.blocks, options.width)
    tokens = torch.randint(0, VOCABULARY, (options.samples * MICROBATCHES, LENGTH), device=DEVICE)
    example = tokens[: options.samples]
    own = {"recompute": "none", **CASES[name]}
    plan = sl.plan(
        model, example, loss_fn=loss_fn, targets=example, ranks=1, microbatches=MICROBATCHES, repeats=options.repeats,
        parameter_bytes=BYTES, optimizer_bytes_per_parameter=2 * BYTES, time_limit=2.0, memory="130GiB", **own,
    )  # fmt: skip
    torch.cuda.empty_cache()
    pipe = sl.Pipeline(
        plan.split(model), loss_fn=loss_fn, schedule=plan.schedule, recompute=plan.recompute, planned=plan
    )
    seconds, peak = measure(pipe, tokens, options.repeats)
    peak -= before
    memory = plan.memory[0]
    return {
        "case": name, "schedule": plan.schedule.name, "planned ms": 1e3 * plan.step_seconds, "ms": 1e3 * seconds,
        "time": seconds / plan.step_seconds, "planned bytes": memory.total, "bytes": peak,
        "memory": peak / memory.total, "parts": memory._asdict(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2, help="samples of 1024 tokens in a microbatch (default 2)")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    compare("1f1b", argparse.Namespace(**{**vars(options), "blocks": 1, "repeats": 1}))  # loads the kernels
    rows = []
    for name in options.only:
        row = compare(name, options)
        rows.append(row)
        if not options.json:
            parts = ", ".join(f"{part} {format_size(size)}" for part, size in row["parts"].items() if size)
            print(
                f"{name:12} step {row['ms']:7.1f} ms, {row['time']:.3f} of the planned {row['planned ms']:.1f} ms; "
                f"memory {format_size(row['bytes'])}, {row['memory']:.3f} of the planned "
                f"{format_size(row['planned bytes'])} ({parts})",
                flush=True,
            )
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
