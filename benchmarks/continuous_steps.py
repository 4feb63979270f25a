"""Continuous steps compared with single steps: `pipe.run` and `pipe.step` with `optimizer.step()`.

python benchmarks/continuous_steps.py [--ranks 4] [--microbatches 8 16] [--families 1f1b zb-h2 zb-v] [--steps 8]
                                  [--repeats 3] [--max-norm 1e9] [--quick] [--markdown]

Every rank sleeps 10 ms in F, I and W of every microbatch; with V chunks per rank, each chunk sleeps a V-th of that. A
turn is a number of steps with the loop and then the same number with `pipe.run`, with AdamW, on the same pipeline.
Figures are medians over the turns: steps per second, and their ratio, the gain. The limits come from `sl.simulate` with
the nominal sleeps. "steady state" is makespan over span: a step costs the makespan when all ranks wait for its end, and
at best the span when they do not. "limit" is the same for one turn, whose last step is waited for either way. The work
between steps is part of the gain, not of the limits.
With --max-norm below the norms, every step is clipped after the fact and computed twice: this measures that cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl
from stageline.testing import SleepStage, run_ranks

NOMINAL, WIDTH = 0.01, 64


def measure(
    name: str, ranks: int, microbatches: int, steps: int, repeats: int, max_norm: float | None
) -> dict[str, list[float]]:
    """Steps a second, turn by turn; the first turn is not counted."""
    schedule = sl.schedule(name, ranks, microbatches)
    part = NOMINAL * schedule.ranks / schedule.stages
    stages = [SleepStage(part, part, part, width=WIDTH) for _ in range(schedule.stages)]
    pipe = sl.Pipeline(stages, loss_fn=nn.functional.mse_loss, schedule=schedule, check_finite=False)
    optimizer = torch.optim.AdamW(pipe.parameters())
    batch = torch.ones(microbatches, WIDTH), torch.zeros(microbatches, WIDTH)

    def loop(count: int) -> None:
        for _ in range(count):
            pipe.step(*batch)
            if max_norm is not None:
                pipe.clip_grad_norm_(max_norm)
            optimizer.step()
            pipe.zero_grad()

    def run(count: int) -> None:
        for _ in pipe.run(itertools.repeat(batch, count), optimizer=optimizer, max_norm=max_norm):
            pass

    rates: dict[str, list[float]] = {"loop": [], "run": []}
    ways: dict[str, Callable[[int], None]] = {"loop": loop, "run": run}
    for turn in range(repeats + 1):
        for way, train in ways.items():
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            train(steps if turn else 2)
            if turn:
                rates[way].append(steps / (time.perf_counter() - began))
    return rates


def in_process(rank: int, *sizes: Any) -> dict[str, list[float]]:
    return measure(*sizes)


def row_of(
    where: str, name: str, ranks: int, microbatches: int, steps: int, seen: list[dict[str, list[float]]]
) -> dict[str, Any]:
    """The figures of all ranks; the slowest one is the pipeline's."""
    schedule = sl.schedule(name, ranks, microbatches)
    part = NOMINAL * schedule.ranks / schedule.stages
    planned = sl.simulate(schedule, sl.Costs(forward=part, backward_input=part, backward_weight=part))
    turns = {way: [min(rates) for rates in zip(*(one[way] for one in seen), strict=True)] for way in ("loop", "run")}
    together = (steps - 1) * planned.span + planned.makespan
    return {
        "where": where,
        "family": name,
        "ranks": ranks,
        "microbatches": microbatches,
        "loop": statistics.median(turns["loop"]),
        "run": statistics.median(turns["run"]),
        "gain": statistics.median(run / loop for loop, run in zip(*turns.values(), strict=True)),
        "limit": steps * planned.makespan / together,
        "steady state": planned.makespan / planned.span,
    }


def show(row: dict[str, Any], markdown: bool) -> str:
    cells = [
        row["where"],
        row["family"],
        f"{row['microbatches']}",
        f"{row['loop']:.3f}",
        f"{row['run']:.3f}",
        f"{row['gain']:.3f}",
        f"{row['limit']:.3f}",
        f"{row['steady state']:.3f}",
    ]
    return f"| {' | '.join(cells)} |" if markdown else "  ".join(f"{cell:>9}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--families", nargs="+", default=["1f1b", "zb-h2", "zb-v"])
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="turns (default 3)")
    parser.add_argument(
        "--max-norm", type=float, default=1e9, help="what gradients are clipped to (default 1e9: never)"
    )
    parser.add_argument("--where", nargs="+", default=["threads", "processes"], choices=["threads", "processes"])
    parser.add_argument("--quick", action="store_true", help="8 microbatches, 4 steps, 2 turns")
    parser.add_argument("--markdown", action="store_true", help="print a table for the documentation")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.quick:
        options.microbatches, options.steps, options.repeats = [8], 4, 2
    torch.set_num_threads(1)
    if not options.json:
        names = ["where", "family", "M", "loop /s", "run /s", "gain", "limit", "steady state"]
        print(f"| {' | '.join(names)} |" if options.markdown else "  ".join(f"{name:>9}" for name in names))
        if options.markdown:
            print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for where, microbatches, name in itertools.product(options.where, options.microbatches, options.families):
        sizes = (name, options.ranks, microbatches, options.steps, options.repeats, options.max_norm)
        seen = [measure(*sizes)] if where == "threads" else run_ranks(in_process, options.ranks, *sizes, timeout=300)
        rows.append(row_of(where, name, options.ranks, microbatches, options.steps, seen))
        if not options.json:
            print(show(rows[-1], options.markdown), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
