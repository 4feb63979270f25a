"""A small GPT on two single-threaded processes: steps of this runtime and of torch.distributed.pipelining.

python benchmarks/runtime_speed.py [--sizes small middle large] [--repeats 15] [--microbatches 8] [--json]

Both run the same stages on the same batch in the same processes, in turns; every number is a median of this run. The
overhead of a runtime does not depend on the size of the tensors, so there are several sizes: the larger, the smaller
its share.
Throughput is in tokens per second. The limit is the throughput of two processes that run plain loops side by side, less
the bubble of the schedule. The last column is our throughput over torch's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import run_ranks

VOCABULARY, BLOCKS = 512, 8


class Size(NamedTuple):
    """How wide the GPT is, how long its samples are and how many of them a batch has."""

    width: int
    length: int
    batch: int


SIZES = {"small": Size(128, 64, 8), "middle": Size(192, 96, 16), "large": Size(256, 128, 16)}
CASES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inside, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inside(self.first(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.as_tensor(x + self.down(functional.gelu(self.up(self.second(x)))))


def model(stages: int, width: int) -> list[nn.Sequential]:
    """As many blocks in every stage, the embedding with the first ones and the head with the last."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(*(Block(width) for _ in range(BLOCKS // stages))) for _ in range(stages)]
    blocks[0].insert(0, nn.Embedding(VOCABULARY, width))
    blocks[-1].append(nn.Linear(width, VOCABULARY))
    return blocks


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def torchs(name: str, parts: list[nn.Sequential], placement: list[int], microbatches: int) -> tuple[Any, bool, bool]:
    """torch's schedule over the same parts, and whether this rank holds the first and the last stage."""
    from torch.distributed import pipelining

    rank = dist.get_rank()
    mine = [index for index, owner in enumerate(placement) if owner == rank]
    cpu = torch.device("cpu")
    stages = [pipelining.PipelineStage(parts[index], index, len(parts), cpu) for index in mine]
    kind = getattr(pipelining.schedules, CASES[name])
    schedule = kind(stages[0] if name == "1f1b" else stages, microbatches, loss_fn=loss_fn)
    return schedule, 0 in mine, len(parts) - 1 in mine


def plain(rank: int, size: Size, microbatches: int, repeats: int) -> float:
    """Seconds of the whole batch without any pipeline, on both processes at once, so that both cores are as busy."""
    torch.set_num_threads(1)
    whole, taken = nn.Sequential(*model(1, size.width)), []
    tokens = torch.randint(0, VOCABULARY, (size.batch, size.length))
    for _ in range(repeats + 2):
        began = time.perf_counter()
        for part in tokens.chunk(microbatches):
            (loss_fn(whole(part), part) / microbatches).backward()  # type: ignore[no-untyped-call]
        taken.append(time.perf_counter() - began)
        whole.zero_grad()
    return statistics.median(taken[2:])


def limit(name: str, microbatches: int, alone: float) -> float:
    """Seconds of a step of two processes without any overhead: equal stages, B = I + W = 2F, the family's bubble."""
    schedule = sl.schedule(name, 2, microbatches)
    costs = sl.Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, transfer=0.0)
    return alone * sl.simulate(schedule, costs).makespan / (3 * schedule.stages * microbatches)


def measure(rank: int, name: str, size: Size, microbatches: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a step, of both, in turns."""
    warnings.simplefilter("ignore")
    schedule = sl.schedule(name, 2, microbatches)
    whole = model(schedule.stages, size.width)
    parts = copy.deepcopy(whole)
    pipe = sl.Pipeline(whole, loss_fn=loss_fn, schedule=schedule)
    theirs, first, last = torchs(name, parts, pipe.schedule.placement.table[0].tolist(), microbatches)
    tokens = torch.randint(0, VOCABULARY, (size.batch, size.length))
    taken: dict[str, list[float]] = {"stageline": [], "torch": []}
    for turn in range(repeats + 2):
        for who in taken:
            for part in (*whole, *parts):
                part.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            if who == "stageline":
                pipe.step(tokens, tokens)
            else:
                arguments: dict[str, Any] = {"target": tokens, "losses": []} if last else {}
                theirs.step(*([tokens] if first else []), **arguments)
            dist.barrier()
            if turn >= 2:
                taken[who].append(time.perf_counter() - began)
    return taken


def row_of(name: str, size: Size, microbatches: int, repeats: int) -> dict[str, Any]:
    """The figures of one family."""
    taken = run_ranks(measure, 2, name, size, microbatches, repeats, timeout=300)[0]
    ours, torchs_own = (statistics.median(taken[who]) for who in ("stageline", "torch"))
    alone = statistics.mean(run_ranks(plain, 2, size, microbatches, repeats, timeout=300))
    tokens, least = size.batch * size.length, limit(name, microbatches, alone)
    return {
        "family": name, "torch": CASES[name], "tokens/s": tokens / ours, "torch tokens/s": tokens / torchs_own,
        "times torch": torchs_own / ours, "of the limit": least / ours, "torch of the limit": least / torchs_own,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--repeats", type=int, default=15, help="measured steps of each (default 15)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in options.sizes:
        size = SIZES[name]
        if not options.json:
            print(
                f"torch {torch.__version__}, {BLOCKS} blocks of width {size.width}, {size.batch} × {size.length} "
                "tokens, two processes"
            )
        rows[name] = []
        for family in CASES:
            row = row_of(family, size, options.microbatches, options.repeats)
            rows[name].append(row)
            if not options.json:
                print(
                    f"{row['family']:15} {row['tokens/s']:6.0f} tokens/s, {row['of the limit']:.2f} of the limit   "
                    f"{row['torch']:31} {row['torch tokens/s']:6.0f}, {row['torch of the limit']:.2f}   "
                    f"{row['times torch']:.2f} times torch",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
