"""Crashes of a training job at random moments: nothing that was reported as saved may be lost.

python benchmarks/crashes.py [--crashes 50] [--ranks 2] [--steps 200] [--seed 0] [--json]

A job saves a checkpoint every other step. One rank, or all of them, are killed (SIGKILL) while the job starts, during a
step, or while a checkpoint is being written. Then the same job is started again, and so on. After every crash, each
checkpoint that was ever reported as saved must be valid, byte by byte, and must hold the same weights, optimizer and
state as that of an uninterrupted job. The losses of all steps must be the same too, across all resumes. If one rank is
killed, the others must exit on their own and name it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stageline.train.trainer  # noqa: F401  # imported once, before processes fork
from stageline.cli.app import run
from stageline.testing import Child, ForkServer
from stageline.train.checkpoint import open_checkpoint, published
from stageline.train.checkpoint.reader import inspect

LONGEST = 240.0
"""Seconds without progress after which a job counts as failed."""
PROMPT = 20.0
"""Seconds within which survivors must exit."""
MOMENTS = ("starting", "training", "saving")
WORDS = [
    "--training.seq_len=16",
    "--training.local_batch_size=8",
    "--training.dataset=memmap",
    "--training.dataset_dtype=uint16",
    "--model.dim=32",
    "--model.n_layers=4",
    "--model.n_heads=2",
    "--model.dropout=0.1",
    "--model.vocab_size=32",
    "--sample.tokens=0",
    "--validation.freq=10",
    "--validation.steps=1",
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest_k=0",
    "--parallelism.pipeline_parallel_schedule=1f1b",
    "--metrics.timeline_freq=0",
]


def train(words: list[str]) -> None:
    """Run a rank."""
    torch.set_num_threads(1)
    sys.exit(run(["train", *words]))


class Job:
    """A job in a folder that can be restarted."""

    def __init__(self, fork_server: ForkServer, folder: Path, tokens: Path, ranks: int, steps: int) -> None:
        self.fork_server, self.folder, self.ranks = fork_server, folder, ranks
        self.words = [*WORDS, f"--training.dataset_path={tokens}", f"--training.steps={steps}"]
        self.words += [f"--job.dump_folder={folder / 'run'}", f"--parallelism.pipeline_parallel_degree={ranks}"]
        self.children: list[Child] = []
        self.starts = 0
        self.reported: set[int] = set()
        """The steps whose checkpoints the job reported as saved."""
        folder.mkdir()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoint"

    def start(self) -> None:
        from turns import free_port  # the ranks, which load this file too, do not have its folder on their path

        common = {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.starts += 1
        self.children = [
            self.fork_server.start(
                __file__,
                "train",
                [self.words],
                log=self.folder / f"log-{self.starts}-{rank}",
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(self.ranks)
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return the events of the job so far."""
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def losses(self) -> dict[int, tuple[float, float]]:
        return {row["step"]: (row["loss"], row["grad_norm"]) for row in self.rows() if row["event"] == "step"}

    def ended(self) -> bool:
        return all(child.poll() is not None for child in self.children)

    def wait(self, moment: str, chance: random.Random) -> None:
        """Wait for the moment of the crash; return early if the job ends before."""
        end, before = time.monotonic() + LONGEST, len(self.rows())
        while moment != "starting" and len(self.rows()) <= before and not self.ended():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 1.5 if moment == "starting" else 0.7))
        while moment == "saving" and not list(self.checkpoints.glob("*.partial")) and not self.ended():
            assert time.monotonic() < end, self.logs()
        if moment == "saving":
            time.sleep(chance.uniform(0.0, 0.02))

    def kill(self, ranks: list[int]) -> float:
        """Kill ranks; return the seconds until the last of the others exited."""
        at = time.monotonic()
        for rank in ranks:
            self.children[rank].signal(signal.SIGKILL)
        for child in self.children:
            child.wait(LONGEST)
        return time.monotonic() - at

    def logs(self) -> str:
        return "\n".join((self.folder / f"log-{self.starts}-{rank}").read_text()[-1500:] for rank in range(self.ranks))

    def hear(self) -> None:
        """Record the checkpoints that it reported as saved."""
        self.reported |= {row["step"] for row in self.rows() if row["event"] == "checkpoint"}


def same(job: Job, reference: Job, step: int) -> str:
    """Return what is wrong with a checkpoint that was reported as saved; empty if it is valid."""
    paths = {path.name: path for path in published(job.checkpoints)}
    name = f"step-{step:08}"
    if name not in paths:
        return f"the checkpoint of step {step} is gone"
    _, damages = inspect(paths[name])
    if damages:
        return f"the checkpoint of step {step} is damaged: {damages[0]}"
    with open_checkpoint(paths[name]) as mine, open_checkpoint(reference.checkpoints / name) as theirs:
        pairs = [(mine.read_model(), theirs.read_model())]
        both = mine.read_optimizer(), theirs.read_optimizer()
        if both[0].keys() != both[1].keys():
            return f"the checkpoint of step {step} has the optimizer state of other parameters"
        pairs += [(both[0][name], both[1][name]) for name in both[0]]
        for one, other in pairs:
            if one.keys() != other.keys() or any(not torch.equal(one[key], other[key]) for key in one):
                return f"the checkpoint of step {step} differs from that of a job that was never killed"
        state, wanted = dict(mine.state), dict(theirs.state)
        # Not the folder of the job, nor generators that nobody seeded.
        wrong = [key for key in wanted if key not in ("config", "random") and state.get(key) != wanted[key]]
        return f"the checkpoint of step {step} differs in {wrong}" if wrong else ""


class Trials:
    """A series of crashes."""

    def __init__(self, fork_server: ForkServer, folder: Path, options: argparse.Namespace) -> None:
        self.fork_server, self.folder, self.options = fork_server, folder, options
        self.chance = random.Random(options.seed)
        self.tokens = folder / "tokens.bin"
        draws = np.random.default_rng(0).choice([1, 1, 1, 5], size=20_000)
        (np.cumsum(draws) % 32).astype(np.uint16).tofile(self.tokens)
        self.jobs = 0
        self.crashes = dict.fromkeys(MOMENTS, 0)
        self.faults: list[str] = []
        self.seconds: list[float] = []
        self.compared = 0
        self.reference = self.new_job()
        self.reference.start()
        self.finish(self.reference)

    def new_job(self) -> Job:
        self.jobs += 1
        return Job(
            self.fork_server, self.folder / f"job-{self.jobs}", self.tokens, self.options.ranks, self.options.steps
        )

    def finish(self, job: Job) -> None:
        codes = [child.wait(LONGEST) for child in job.children]
        if any(codes):
            raise SystemExit(f"a job that nobody killed ended with {codes}:\n{job.logs()}")

    def run(self) -> None:
        job, checked = self.new_job(), set[int]()
        while sum(self.crashes.values()) < self.options.crashes:
            if len(job.losses()) >= self.options.steps:
                self.compare(job)
                job, checked = self.new_job(), set()
            self.crash(job)
            job.hear()
            for step in sorted(job.reported - checked):
                self.note(same(job, self.reference, step), job)
                self.compared += 1
            checked |= job.reported
        job.start()
        self.finish(job)
        self.compare(job)

    def crash(self, job: Job) -> None:
        """Start a job, and kill one rank or all ranks."""
        moment = self.chance.choice(MOMENTS)
        ranks = list(range(job.ranks))
        # Before the ranks have met, nobody can tell the others; whoever started them kills them all.
        victims = ranks if moment == "starting" or self.chance.random() < 0.3 else [self.chance.choice(ranks)]
        job.start()
        job.wait(moment, self.chance)
        if job.ended():
            return  # it was done before its moment came
        seconds = job.kill(victims)
        self.crashes[moment] += 1
        codes = {rank: child.code for rank, child in enumerate(job.children)}
        if len(victims) == 1 and codes[victims[0]] == -signal.SIGKILL:
            self.seconds.append(seconds)
            named = all(f"rank {victims[0]} " in self.log(job, rank) for rank in ranks if rank != victims[0])
            if seconds > PROMPT or not named:
                self.note(f"killed rank {victims[0]} while {moment}: {seconds:.1f} s, exit codes {codes}", job)

    def log(self, job: Job, rank: int) -> str:
        return (job.folder / f"log-{job.starts}-{rank}").read_text()

    def compare(self, job: Job) -> None:
        """Compare the losses of the interrupted job with those of an uninterrupted one."""
        mine, theirs = job.losses(), self.reference.losses()
        wrong = [step for step in theirs if mine.get(step) != theirs[step]]
        if wrong:
            self.note(f"step {wrong[0]} has loss {mine.get(wrong[0])}, expected {theirs[wrong[0]]}", job)
        job.hear()
        for step in sorted(job.reported):
            self.note(same(job, self.reference, step), job)

    def note(self, fault: str, job: Job) -> None:
        if fault:
            self.faults.append(fault)
            print(f"{fault}\n{job.logs()}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crashes", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="of each job; a finished one is followed by a new one")
    parser.add_argument("--seed", type=int, default=0, help="what ranks and moments are drawn from")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and leave nothing running
    with tempfile.TemporaryDirectory(prefix="stageline-crashes-") as folder, ForkServer() as fork_server:
        trials = Trials(fork_server, Path(folder), options)
        trials.run()
    summary: dict[str, Any] = {"crashes": trials.crashes, "ranks": options.ranks, "jobs": trials.jobs - 1}
    summary |= {"checkpoints": trials.compared, "faults": trials.faults, "load": os.getloadavg()[0]}
    if trials.seconds:
        summary |= {"median": statistics.median(trials.seconds), "most": max(trials.seconds)}
    if options.json:
        print(json.dumps(summary))
    else:
        kinds = ", ".join(f"{count} while {moment}" for moment, count in trials.crashes.items())
        print(f"{sum(trials.crashes.values())} crashes among {options.ranks} ranks: {kinds}")
        print(f"{trials.compared} checkpoints were reported as saved; {len(trials.faults)} faults")
        if trials.seconds:
            print(f"survivors ended after {summary['median']:.2f} s (median), {summary['most']:.2f} s at most")
    sys.exit(1 if trials.faults else 0)


if __name__ == "__main__":
    main()
