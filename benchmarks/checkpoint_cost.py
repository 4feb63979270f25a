"""The cost of checkpoints: the built-in job with one every 50 steps, compared with the same job without.

python benchmarks/checkpoint_cost.py [--rounds 5] [--every 50] [--dim 128] [--where threads processes] [--json]

Both jobs run at the same time and train in turns. A turn has as many steps as lie between two checkpoints, so every
turn of the first job writes and publishes exactly one, in its middle, while it trains. The cost is the median over the
rounds of two neighbouring turns, with the lower and upper quartile; "by CPU" is the same for the CPU time of all
threads, which depends less on the load of the machine. "blocked" is how long training itself waited, from the job's
events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from stageline.train.config.config import Config
from stageline.train.events import read_metrics
from stageline.train.trainer import Trainer
from turns import Job, Turn, Turns, in_turns

RANKS = 2


def work(folder: str, enable: str, every: str, dim: str, rank: str, tell: str) -> None:
    turns = Turns(int(every) // 2, int(every), int(tell))  # so the checkpoint is in the middle of a turn

    class Paced(Trainer):
        def _train(self) -> None:
            turns.before_step(self._loss)
            super()._train()

    torch.set_num_threads(1)
    settings = [f"job.dump_folder={folder}", f"checkpoint.enable={enable}", f"checkpoint.interval={every}"]
    settings += [f"model.dim={dim}"]
    settings += [f"parallelism.pipeline_parallel_degree={RANKS}", "parallelism.pipeline_parallel_schedule=zb-h1"]
    settings += ["parallelism.pipeline_parallel_split=parameters", "validation.enable=false"]
    settings += ["training.steps=1000000", "comm.train_timeout_seconds=3600"]
    Paced(Config.read(None, *settings)).run()


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def measure(where: str, rounds: int, every: int, dim: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-cost-")))
        jobs = []
        for name, enable in (("with", "true"), ("without", "false")):
            command = [sys.executable, str(Path(__file__).resolve()), "--work", str(folder / name)]
            command += [enable, str(every), str(dim)]
            environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            jobs.append(Job(name, command, folder, RANKS if where == "processes" else 1, environment))
            stack.callback(jobs[-1].close)
            jobs[-1].wait()
            jobs[-1].turn()  # the warm-up
        for job in jobs:  # the first checkpoint makes the memory for its copies
            job.turn()
        taken = in_turns(jobs, rounds)
        saved = read_metrics(folder / "with" / "metrics.jsonl").of("checkpoint")
    pairs: list[tuple[Turn, Turn]] = list(zip(taken["with"], taken["without"], strict=True))
    seconds = statistics.median(turn.seconds for turn in taken["without"])
    blocked = statistics.median(row["blocked"] for row in saved[1:])
    return {
        "where": where,
        "seconds of a turn": seconds,
        "CPU seconds of a turn": statistics.median(turn.cpu for turn in taken["without"]),
        "bytes": saved[-1]["bytes"],
        "cost": spread([one.seconds / other.seconds - 1 for one, other in pairs]),
        "cost by CPU": spread([one.cpu / other.cpu - 1 for one, other in pairs]),
        "blocked": {"seconds": blocked, "share": blocked / seconds},
        "checkpoints": len(saved),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of both jobs (default 5)")
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next (default 50)")
    parser.add_argument("--dim", type=int, default=128, help="the model's width (default 128)")
    parser.add_argument("--where", nargs="+", choices=["threads", "processes"], default=["threads", "processes"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    for where in options.where:
        rows.append(measure(where, options.rounds, options.every, options.dim))
        if not options.json:
            show(rows[-1], options.every)
    if options.json:
        print(json.dumps(rows, indent=2))


def show(row: dict[str, Any], every: int) -> None:
    print(
        f"{RANKS} {row['where']}: a checkpoint of {row['bytes'] / 1e6:.0f} MB every {every} steps, "
        f"which take {row['seconds of a turn']:.1f} s; load {row['load']:.1f}"
    )
    for what in ("cost", "cost by CPU"):
        change = row[what]
        print(f"  {what:12} {change['median']:+7.2%}   ({change['low']:+.2%} to {change['high']:+.2%})")
    print(f"  {'blocked':12} {row['blocked']['share']:+7.2%}   {1e3 * row['blocked']['seconds']:.0f} ms", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
