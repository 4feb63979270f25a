"""A small GPT on two processes of one thread each: steps of this runtime against torch.distributed.pipelining's.

python benchmarks/runtime_speed.py [--repeats 7] [--microbatches 8] [--json]

Both run the same stages on the same batch in the same processes, in turns; every number is a median of this run.
Throughput is tokens a second, and the last column is how many times torch's throughput ours is.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import run_ranks

WIDTH, LENGTH, VOCABULARY, BLOCKS, BATCH = 192, 96, 512, 6, 16
CASES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inside, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.inside(self.first(x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return torch.as_tensor(x + self.down(functional.gelu(self.up(self.second(x)))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, VOCABULARY)
    )


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
    made = kind(stages[0] if name == "1f1b" else stages, microbatches, loss_fn=loss_fn)
    return made, 0 in mine, len(parts) - 1 in mine


def measure(rank: int, name: str, microbatches: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a step, of both, in turns."""
    warnings.simplefilter("ignore")
    whole = model()
    twin = copy.deepcopy(whole)
    pipe = sl.Pipeline(whole, loss_fn=loss_fn, schedule=name, ranks=2, microbatches=microbatches)
    parts = sl.Pipeline(twin, loss_fn=loss_fn, schedule=name, ranks=2, microbatches=microbatches)._parts
    theirs, first, last = torchs(name, parts, pipe.schedule.placement.table[0].tolist(), microbatches)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    taken: dict[str, list[float]] = {"stageline": [], "torch": []}
    for turn in range(repeats + 2):
        for who in taken:
            whole.zero_grad()
            twin.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            if who == "stageline":
                pipe.step(tokens, tokens)
            else:
                given: dict[str, Any] = {"target": tokens, "losses": []} if last else {}
                theirs.step(*([tokens] if first else []), **given)
            dist.barrier()
            if turn >= 2:
                taken[who].append(time.perf_counter() - began)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="measured steps of each (default 7)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    rows = []
    for name, theirs in CASES.items():
        taken = run_ranks(measure, 2, name, given.microbatches, given.repeats, timeout=300)[0]
        ours, torchs_own = (statistics.median(taken[who]) for who in ("stageline", "torch"))
        tokens = BATCH * LENGTH
        rows.append(
            {"family": name, "torch": theirs, "tokens/s": tokens / ours, "torch tokens/s": tokens / torchs_own,
             "times torch": torchs_own / ours}
        )  # fmt: skip
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"torch {torch.__version__}, {BLOCKS} blocks of width {WIDTH}, {BATCH} × {LENGTH} tokens, two processes")
    for row in rows:
        ours, torchs_own, ratio = row["tokens/s"], row["torch tokens/s"], row["times torch"]
        print(
            f"{row['family']:15} {ours:9.0f} tokens/s   {row['torch']:31} {torchs_own:9.0f}   {ratio:.2f} times torch"
        )


if __name__ == "__main__":
    main()
