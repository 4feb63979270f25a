"""Stages that only sleep on a GPU, over NCCL: how much longer a step takes than its schedule predicts.

python benchmarks/gpu_sleep.py [--ranks 2 4] [--families 1f1b zb-h1] [--torch 1f1b] [--repeats 5] [--json]

All ranks share one GPU, each as a machine of its own (`run_ranks(backend="nccl", share_gpu=True)`). Start MPS first, or
the GPU runs one rank at a time:

    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps && mkdir -p /tmp/mps
    nvidia-cuda-mps-control -d            # and at the end: echo quit | nvidia-cuda-mps-control

Every rank sleeps 10 ms in F and 20 ms in B of every microbatch (10 in I, 10 in W), divided by the number of its chunks;
a kernel that sleeps uses one thread of the GPU, so ranks do not compete. A ratio is the median of the measured steps
over the makespan that `sl.simulate` predicts with free transfers and the sleeps as measured alone. torch runs the same
stages in the same processes, in turns. "first" is the time from constructing the pipeline (in torch: the stages) to the
end of its first step, in fresh processes whose GPU is in use. The parts of our step: before the first action of rank 0,
the measured makespan, and after its last action.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stageline as sl
from stageline.testing import SleepStage, run_ranks

TORCH = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}
NOMINAL, WIDTH, MICROBATCHES = 0.01, 1024, 16
_cycles = [0.0]


def gpu_sleep(cycles: float) -> None:
    sleep: Any = torch.cuda._sleep
    sleep(int(cycles))


class GpuSleepStage(SleepStage):
    """Sleeps on the GPU; the host goes on."""

    def sleep(self, kind: str) -> None:
        gpu_sleep(self.seconds[kind] * _cycles[0])


def calibrate() -> float:
    """Measure how many cycles a second of sleep has; returns the seconds of a nominal sleep after that."""
    new_event: Any = torch.cuda.Event
    before, after = (new_event(enable_timing=True) for _ in range(2))

    def slept(cycles: float) -> float:
        times: list[float] = []
        for _ in range(5):
            before.record()
            gpu_sleep(cycles)
            after.record()
            after.synchronize()
            times.append(float(before.elapsed_time(after)) / 1e3)
        return statistics.median(times)

    slept(2e8)  # until the clock is up
    _cycles[0] = 2e7 / slept(2e7)
    return slept(NOMINAL * _cycles[0])


def stages_of(schedule: sl.Schedule) -> list[GpuSleepStage]:
    part = NOMINAL * schedule.ranks / schedule.stages
    return [GpuSleepStage(part, part, part, width=WIDTH).cuda() for _ in range(schedule.stages)]


def torchs(name: str, parts: list[GpuSleepStage], schedule: sl.Schedule) -> Callable[[Any, Any], Any]:
    """A step of torch's schedule over the same stages."""
    from torch.distributed import pipelining

    mine = schedule.placement.stages_of(dist.get_rank())
    device = torch.device("cuda", 0)
    stages = [pipelining.PipelineStage(parts[index], index, len(parts), device) for index in mine]
    kind = getattr(pipelining.schedules, TORCH[name])
    peer = kind(stages[0] if name == "1f1b" else stages, schedule.microbatches, loss_fn=nn.functional.mse_loss)
    first, last = 0 in mine, len(parts) - 1 in mine

    def step(x: Any, y: Any) -> None:
        arguments: dict[str, Any] = {"target": y, "losses": []} if last else {}
        peer.step(*([x] if first else []), **arguments)

    return step


def ours(parts: list[GpuSleepStage], schedule: sl.Schedule) -> sl.Pipeline:
    return sl.Pipeline(parts, loss_fn=nn.functional.mse_loss, schedule=schedule)


def timed(step: Callable[[Any, Any], Any], x: Any, y: Any) -> float:
    """How long a step took, with everything on the GPU."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    step(x, y)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turns(rank: int, ranks: int, families: list[str], repeats: int, peers: list[str]) -> list[dict[str, Any]]:
    """All families on this rank: ours and torch's in turns."""
    warnings.simplefilter("ignore")
    slept = calibrate()
    rows = []
    for name in families:
        schedule = sl.schedule(name, ranks, MICROBATCHES)
        row: dict[str, Any] = {"slept": slept, "stageline": [], "torch": [], "parts": []}
        pipe = ours(stages_of(schedule), schedule)
        runs: dict[str, Callable[[Any, Any], Any]] = {"stageline": pipe.step}
        if name in peers:
            runs["torch"] = torchs(name, stages_of(schedule), schedule)
        x, y = torch.ones(MICROBATCHES, WIDTH).cuda(), torch.zeros(MICROBATCHES, WIDTH).cuda()
        for turn in range(repeats + 2):
            for who, step in runs.items():
                seconds = timed(step, x, y)
                timeline = pipe.timeline
                if turn >= 2:
                    row[who].append(seconds)
                if turn >= 2 and who == "stageline":
                    row["parts"].append([seconds, timeline.makespan])
        row["slept after"] = calibrate()
        rows.append(row)
    return rows


def first_step(rank: int, ranks: int, name: str, who: str) -> float:
    """Seconds from construction to the end of the first step, in a process that has used its GPU."""
    warnings.simplefilter("ignore")
    calibrate()
    schedule = sl.schedule(name, ranks, MICROBATCHES)
    parts = stages_of(schedule)
    x, y = torch.ones(MICROBATCHES, WIDTH).cuda(), torch.zeros(MICROBATCHES, WIDTH).cuda()
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    step = ours(parts, schedule).step if who == "stageline" else torchs(name, parts, schedule)
    step(x, y)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def row_of(name: str, ranks: int, seen: list[dict[str, Any]]) -> dict[str, Any]:
    schedule = sl.schedule(name, ranks, MICROBATCHES)
    slept = statistics.median([process["slept"] for process in seen]) * ranks / schedule.stages
    makespan = sl.simulate(schedule, sl.Costs(forward=slept, backward_input=slept, backward_weight=slept)).makespan
    row: dict[str, Any] = {"ranks": ranks, "family": name, "makespan ms": 1e3 * makespan}
    row["slept ms"] = [1e3 * process["slept"] for process in seen] + [1e3 * seen[0]["slept after"]]
    for who in ("stageline", "torch"):
        steps = [max(times) for times in zip(*(process[who] for process in seen), strict=False)]
        row[who] = statistics.median(steps) / makespan if steps else None
        row[f"{who} all"] = [seconds / makespan for seconds in steps]
    row["outside ms"] = statistics.median(1e3 * (seconds - span) for seconds, span in seen[0]["parts"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--families", nargs="+", default=list(TORCH), choices=list(TORCH))
    parser.add_argument("--torch", nargs="*", default=["1f1b"], choices=list(TORCH), help="torch's, beside ours")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each (default 5)")
    parser.add_argument("--first", type=int, default=3, help="measured first steps of 1f1b (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        sizes = (ranks, options.families, options.repeats, options.torch)
        seen = run_ranks(in_turns, ranks, *sizes, timeout=300, backend="nccl", share_gpu=True)
        for index, name in enumerate(options.families):
            row = row_of(name, ranks, [process[index] for process in seen])
            rows.append(row)
            if not options.json:
                shown = "-" if row["torch"] is None else f"{row['torch']:.4f}"
                print(
                    f"P={ranks} {name:12} stageline {row['stageline']:.4f}  torch {shown}  makespan "
                    f"{row['makespan ms']:.1f} ms, outside of it {row['outside ms']:.2f} ms",
                    flush=True,
                )
        firsts: dict[str, list[float]] = {"stageline": [], "torch": []}
        for _ in range(options.first):
            for who, taken in firsts.items():
                sized = (ranks, "1f1b", who)
                taken.append(max(run_ranks(first_step, ranks, *sized, timeout=120, backend="nccl", share_gpu=True)))
        rows.append({"ranks": ranks, "first": firsts})
        if not options.json and options.first:
            shown_firsts = ", ".join(f"{who} {statistics.median(taken):.2f} s" for who, taken in firsts.items())
            print(f"P={ranks} first step of 1f1b: {shown_firsts}", flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
