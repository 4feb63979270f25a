"""How true plans are: the planned and the measured step of jobs, of a GPT, of sleeping stages and of one GPU.

python benchmarks/plan_truth.py [--rounds 3] [--only "job, 2 threads" …] [--json]

Every round makes a new plan for every setting, and measures the steps that follow it. A row shows the medians over the
rounds of the planned step, of the measured one and of their ratio, the range of the ratio, and the goal. A step is a
call as its user sees it; in a job, it is the makespan that its report compares with the plan.

- **job**: `stageline train` as it is by default, with 2 or 4 ranks as threads or as processes.
- **gpt**: `sl.plan` on two processes, for a schedule each, then `Pipeline.step`.
- **auto**: `Pipeline(schedule="auto")` with two ranks as threads.
- **one rank**: `sl.plan(ranks=1)`, on the CPU and on a GPU.
- **sleep**: `sl.plan` for stages that only sleep, as threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stageline as sl
from runtime_speed import BLOCKS, SIZES, VOCABULARY, Block, loss_fn
from stageline.common.machine import cores
from stageline.common.units import format_seconds, format_table
from stageline.testing import SleepStage, run_ranks

WIDTH, LENGTH, BATCH = SIZES["middle"]
MICROBATCHES = 8
NOMINAL = 0.01
"""Seconds in which a sleeping rank runs F, I and W of a microbatch, each."""
WARM_UP = 4
"""First steps that do not count."""


class Steps(NamedTuple):
    """The planned seconds of a step, and the measured ones."""

    planned: float
    measured: list[float]
    schedule: str


def job(launcher: str, ranks: int, steps: int) -> Steps:
    """Train as `stageline train` does by default, without validation, checkpoints and samples."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "job.dump_folder": folder, "training.steps": steps, "checkpoint.enable": "false",
            "validation.enable": "false", "sample.tokens": 0, "parallelism.launcher": launcher,
            "parallelism.pipeline_parallel_degree": ranks,
        }  # fmt: skip
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "stageline", "train", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONWARNINGS": "ignore"})
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        seconds = [row["makespan"] for row in rows if row["event"] == "step"]
        planned = sl.read_timeline(Path(folder) / "timeline" / "planned.json")
        return Steps(planned.makespan, seconds[WARM_UP:], planned.schedule.name)


def gpt(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, WIDTH), *(Block(WIDTH) for _ in range(BLOCKS)), nn.Linear(WIDTH, VOCABULARY)]
    return nn.Sequential(*layers).to(device)


def time_steps(pipe: sl.Pipeline, tokens: Tensor, steps: int) -> list[float]:
    """Return the seconds of this many steps, after a few that do not count."""
    taken = []
    for _ in range(WARM_UP + steps):
        pipe.zero_grad()
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        pipe.step(tokens, tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return taken[WARM_UP:]


def planned_gpt(rank: int, schedule: str, ranks: int, steps: int, device: str = "cpu") -> Steps:
    """Plan on rank 0, as every rank does for itself otherwise, and run the plan."""
    model, tokens = gpt(device), torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
    example = tokens[: BATCH // MICROBATCHES]
    texts = [""]
    if rank == 0:
        plan = sl.plan(
            model, example, ranks=ranks, microbatches=MICROBATCHES, loss_fn=loss_fn, targets=example, schedule=schedule,
            cores=cores() if device == "cpu" else None, time_limit=1.0, recompute="none",
        )  # fmt: skip
        texts = [plan.to_text()]
    if ranks > 1:
        dist.broadcast_object_list(texts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(texts[0])
        plan = sl.read_plan(path)
    pipe = sl.Pipeline(plan.split(model), loss_fn=loss_fn, schedule=plan.schedule)
    return Steps(plan.step_seconds, time_steps(pipe, tokens, steps), plan.schedule.name)


def gpt_processes(schedule: str, steps: int) -> Steps:
    steps_of_ranks: list[Steps] = run_ranks(planned_gpt, 2, schedule, 2, steps, timeout=600)
    return steps_of_ranks[0]


def one_rank(device: str, steps: int) -> Steps:
    return planned_gpt(0, "1f1b", 1, steps, device)


def automatic(steps: int) -> Steps:
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    pipe = sl.Pipeline(gpt(), loss_fn=loss_fn, schedule="auto", ranks=2, microbatches=MICROBATCHES, example=tokens)
    assert pipe.plan is not None
    return Steps(pipe.plan.step_seconds, time_steps(pipe, tokens, steps), pipe.schedule.name)


def sleep(family: str, ranks: int, steps: int) -> Steps:
    named = sl.schedule(family, ranks, 4 * ranks)
    part = NOMINAL * ranks / named.stages
    model = nn.Sequential(*(SleepStage(part, part, part, width=64) for _ in range(named.stages)))
    x, loss_fn = torch.ones(named.microbatches, 64), nn.functional.mse_loss
    plan = sl.plan(
        model, x[:1], ranks=ranks, microbatches=named.microbatches, loss_fn=loss_fn, targets=x[:1], schedule=family,
        time_limit=1.0, recompute="none",
    )  # fmt: skip
    pipe = sl.Pipeline(plan.split(model), loss_fn=loss_fn, schedule=plan.schedule)
    taken = []
    for _ in range(1 + max(2, steps // 5)):
        begin = time.perf_counter()
        pipe.step(x, x)
        taken.append(time.perf_counter() - begin)
    return Steps(plan.step_seconds, taken[1:], plan.schedule.name)


SETTINGS: dict[str, tuple[Callable[[int], Steps], float]] = {
    "job, 2 threads": (partial(job, "threads", 2), 0.10),
    "job, 2 processes": (partial(job, "processes", 2), 0.10),
    "job, 4 threads": (partial(job, "threads", 4), 0.10),
    "job, 4 processes": (partial(job, "processes", 4), 0.10),
    "gpt, 2 processes, 1f1b": (partial(gpt_processes, "1f1b"), 0.10),
    "gpt, 2 processes, zb-h1": (partial(gpt_processes, "zb-h1"), 0.10),
    "gpt, 2 processes, interleaved": (partial(gpt_processes, "interleaved"), 0.10),
    "auto, 2 threads": (automatic, 0.10),
    "one rank": (partial(one_rank, "cpu"), 0.10),
    "one rank, GPU": (partial(one_rank, "cuda"), 0.10),
    "sleep, 2 ranks, zb-h1": (partial(sleep, "zb-h1", 2), 0.05),
    "sleep, 3 ranks, interleaved": (partial(sleep, "interleaved", 3), 0.05),
    "sleep, 4 ranks, 1f1b": (partial(sleep, "1f1b", 4), 0.05),
    "sleep, 4 ranks, zb-v": (partial(sleep, "zb-v", 4), 0.05),
}
"""What is run, and how far the measured step may be from the planned one."""


def row_of(name: str, rounds: list[Steps], load: float) -> dict[str, Any]:
    """Return the figures of a setting."""
    ratios = [statistics.median(steps.measured) / steps.planned for steps in rounds]
    goal = SETTINGS[name][1]
    ratio = statistics.median(ratios)
    return {
        "setting": name,
        "schedule": rounds[-1].schedule,
        "planned_seconds": statistics.median(steps.planned for steps in rounds),
        "measured_seconds": statistics.median(statistics.median(steps.measured) for steps in rounds),
        "ratio": ratio,
        "ratios": ratios,
        "goal": goal,
        "reached": abs(ratio - 1) <= goal,
        "load": load,
    }


def shown(row: dict[str, Any]) -> list[str]:
    ratios = f"{min(row['ratios']):.2f}–{max(row['ratios']):.2f}"
    times = [format_seconds(row[name]) for name in ("planned_seconds", "measured_seconds")]
    return [row["setting"], row["schedule"], *times, f"{row['ratio']:.3f}", ratios, f"±{row['goal']:.0%}",
            "yes" if row["reached"] else "no", f"{row['load']:.1f}"]  # fmt: skip


HEADER = ["setting", "schedule", "planned", "measured", "ratio", "range", "goal", "reached", "load"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a round (default 20)")
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds: dict[str, list[Steps]] = {name: [] for name in options.only}
    loads: dict[str, list[float]] = {name: [] for name in options.only}
    if not torch.cuda.is_available() and rounds.pop("one rank, GPU", None) is not None and not options.json:
        print("one rank, GPU: skipped, no GPU is visible")
    for _ in range(options.rounds):
        for name, turns in rounds.items():
            turns.append(SETTINGS[name][0](options.steps))
            loads[name].append(os.getloadavg()[0])
            if not options.json:
                print(*shown(row_of(name, turns[-1:], loads[name][-1])), sep="  ", flush=True)
    rows = [row_of(name, turns, statistics.median(loads[name])) for name, turns in rounds.items()]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"\ntorch {torch.__version__}, {cores()} cores, medians of {options.rounds} rounds")
    print("\n".join(format_table([HEADER, *map(shown, rows)], left={0, 1})))


if __name__ == "__main__":
    main()
