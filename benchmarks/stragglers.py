"""Stages that become slower: is such a stage reported, and is nothing reported because of noise?

python benchmarks/stragglers.py [--trials 20] [--steps 1000] [--processes] [--seed 0] [--json]

Every trial trains a pipeline until a random step and then makes a random stage twice as slow, with a sleep in its
forward that lasts as long as its forward and backward did. The benchmark counts how often the one logged line names
this stage within 10 steps. Then it runs normal steps with one busy loop per core, in which no line should be logged.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import run_ranks

RANKS, WIDTH, MICROBATCHES = 4, 192, 8


class Layer(nn.Module):
    """A layer with some work, and an optional sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.as_tensor(self.work(x))


class Lines(logging.Handler):
    """A handler that keeps log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("stageline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(rank: int, steps: int, plant: tuple[int, int] | None) -> list[tuple[int, str]]:
    """Train; return the logged lines with their steps. With `plant` = (step, stage), slow that stage down."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines, layers = Lines(), [Layer() for _ in range(RANKS)]
    pipe = sl.Pipeline(layers, loss_fn=functional.mse_loss, microbatches=MICROBATCHES)
    x = torch.randn(16 * MICROBATCHES, WIDTH)
    warnings: list[tuple[int, str]] = []
    for step in range(steps):
        stats = pipe.step(x, x)
        pipe.zero_grad()
        warnings += [(step, text) for text in lines.texts]
        lines.texts.clear()
        if plant is not None and step + 1 == plant[0]:
            timeline = stats.measured()
            mine = timeline.schedule.stage_ids == plant[1]
            layers[plant[1]].seconds = float((timeline.end - timeline.start)[mine].sum()) / MICROBATCHES
    logging.getLogger("stageline").removeHandler(lines)
    return warnings


def run(processes: bool, steps: int, plant: tuple[int, int] | None = None) -> list[tuple[int, str]]:
    if not processes:
        return train(0, steps, plant)
    return [line for lines in run_ranks(train, RANKS, steps, plant, timeout=3600.0) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--processes", action="store_true", help="ranks as processes, not as threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    named, others, waits = 0, 0, []
    for _ in range(options.trials):
        begin, stage = chance.randrange(12, 40), chance.randrange(RANKS)
        warnings = run(options.processes, begin + 10, (begin, stage))
        right = [step for step, text in warnings if f"stage {stage} on" in text and step >= begin]
        named += bool(right)
        others += len(warnings) - bool(right)
        waits += [right[0] - begin + 1] if right else []
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        noise = run(options.processes, options.steps)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    if options.json:
        print(json.dumps({"trials": options.trials, "named": named, "others": others, "waits": waits, "noise": noise}))
    else:
        print(
            f"{named} of {options.trials} planted stragglers named within 10 steps, "
            f"at most {max(waits, default=0)} steps"
        )
        print(f"{others} other lines in these trials")
        print(f"{len(noise)} lines in {options.steps} steps beside a busy loop on each of {len(loops)} cores")
        for step, text in noise:
            print(f"  {step}: {text}")
    sys.exit(0 if named == options.trials and not noise else 1)


if __name__ == "__main__":
    main()
