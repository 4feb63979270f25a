"""A GPT on one GPU: the plain loop over microbatches against pipelines of four stages on that GPU.

python benchmarks/one_gpu.py [--repeats 5] [--blocks 16] [--width 2048] [--json]

bfloat16, 16 microbatches of 2 × 1024 tokens. Every number is a median of this run, measured in turns; memory is the
peak of what was allocated, less parameters and gradients. Ranks are threads of this process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import one_process_step

CASES = {"1f1b, 4 threads": ("1f1b", 4), "zb-h1, 4 threads": ("zb-h1", 4), "gpipe, 1 rank": ("gpipe", 1)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inside, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (
            self.inside(self.first(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.as_tensor(x + self.down(functional.gelu(self.up(self.second(x)))))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.manual_seed(0)
    vocabulary, microbatches = 32768, 16
    layers = [nn.Embedding(vocabulary, given.width), *(Block(given.width) for _ in range(given.blocks))]
    model = nn.Sequential(*layers, nn.Linear(given.width, vocabulary, bias=False)).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, vocabulary, (2 * microbatches, 1024), device="cuda")
    pipes = {
        name: sl.Pipeline(model, loss_fn=loss_fn, schedule=family, ranks=ranks, microbatches=microbatches)
        for name, (family, ranks) in CASES.items()
    }
    taken: dict[str, list[float]] = {"plain loop": [], **{name: [] for name in pipes}}
    peaks: dict[str, float] = {}
    for turn in range(given.repeats + 2):
        for name in taken:
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            if name in pipes:
                pipes[name].step(tokens, tokens)
            else:
                one_process_step(model, loss_fn, tokens, tokens, microbatches)
            torch.cuda.synchronize()
            if turn >= 2:
                taken[name].append(time.perf_counter() - began)
                held = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
                peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**30
    medians = {name: statistics.median(values) for name, values in taken.items()}
    rows = [
        {"case": name, "ms": 1e3 * median, "times plain": median / medians["plain loop"], "GiB": peaks[name]}
        for name, median in medians.items()
    ]
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.blocks} blocks of width {given.width}")
    for row in rows:
        print(f"{row['case']:18} {row['ms']:8.1f} ms   {row['times plain']:.2f} times plain   {row['GiB']:6.2f} GiB")


if __name__ == "__main__":
    main()
