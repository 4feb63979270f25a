"""Repeated kills: a rank of a running job is killed at a random moment, and every survivor must name that rank.

python benchmarks/kills.py [--kills 100] [--ranks 4] [--jobs 2] [--seed 0] [--json]

Every kill has its own job: `ranks` processes train without end until a random one receives SIGKILL at a random moment,
in a step or between two. The benchmark measures the time from the kill until the last survivor has raised, and checks
the message of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stageline as sl
from stageline.testing import Child, ForkServer

WIDTH, DEADLINE = 64, 60.0


def train(rank: int, ranks: int, folder: str, family: str) -> None:
    """Train a rank until an error is raised, and write it to a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(ranks)]
    pipe = sl.Pipeline(stages, loss_fn=nn.functional.mse_loss, schedule=family, microbatches=8, deadline=DEADLINE)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    x, y = torch.randn(32, WIDTH), torch.randn(32, WIDTH)
    ready = Path(folder) / f"ready-{rank}"
    try:
        while True:
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
            if not ready.exists():
                ready.touch()
    except sl.PipelineError as error:
        aside = Path(folder) / f"aside-{rank}"
        aside.write_text(json.dumps({"at": time.time(), "said": str(error)}))
        aside.rename(Path(folder) / f"raised-{rank}")


class Job:
    """A training job, one rank of which will be killed."""

    def __init__(self, fork_server: ForkServer, ranks: int, chance: random.Random) -> None:
        from turns import free_port  # the ranks, which load this file too, do not have its folder on their path

        self.holder = tempfile.TemporaryDirectory(prefix="stageline-kill-", ignore_cleanup_errors=True)
        self.folder, self.victim = Path(self.holder.name), chance.randrange(ranks)
        self.family = chance.choice(["1f1b", "gpipe", "zb-h1"])
        self.moment = chance.uniform(0.0, 1.0)
        self.ready = self.killed = 0.0
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        common |= {"GLOO_SOCKET_IFNAME": "lo", "STAGELINE_FLIGHT_DIR": str(self.folder / "flights")}
        self.children: list[Child] = [
            fork_server.start(
                __file__,
                "train",
                [rank, ranks, str(self.folder), self.family],
                log=self.folder / f"log-{rank}",
                environment={**common, "RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        self.began = time.time()

    def tend(self) -> dict[str, Any] | None:
        """Kill the rank when it is time; return the result once all ranks have exited."""
        now = time.time()
        if not self.ready and all((self.folder / f"ready-{rank}").exists() for rank in range(len(self.children))):
            self.ready = now
        if self.ready and not self.killed and now - self.ready > self.moment:
            self.killed = time.time()
            os.kill(self.children[self.victim].pid, signal.SIGKILL)
        codes = [child.poll() for child in self.children]
        if all(code is not None for code in codes) or now - self.began > 2 * DEADLINE:
            return self._result(codes)
        return None

    def _result(self, codes: list[int | None]) -> dict[str, Any]:
        for child in self.children:
            child.signal(signal.SIGKILL)
        messages, seconds = {}, []
        for rank in range(len(self.children)):
            with contextlib.suppress(FileNotFoundError):
                raised = json.loads((self.folder / f"raised-{rank}").read_text())
                messages[rank] = raised["said"]
                seconds.append(raised["at"] - self.killed)
        right = [rank for rank, text in messages.items() if text.startswith(f"rank {self.victim} died")]
        complete = len(messages) == len(self.children) - 1
        result = {"victim": self.victim, "family": self.family, "right": len(right), "complete": complete}
        result |= {"seconds": max(seconds, default=float("inf")), "codes": codes}
        if len(right) < len(self.children) - 1:
            result["said"] = {rank: text[:200] for rank, text in messages.items() if rank not in right}
            result["logs"] = {
                rank: (self.folder / f"log-{rank}").read_text()[-400:]
                for rank in range(len(self.children))
                if rank not in right and rank != self.victim
            }
        self.holder.cleanup()
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2, help="jobs at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance, started = random.Random(options.seed), 0
    results: list[dict[str, Any]] = []
    running: list[Job] = []
    with ForkServer() as fork_server:
        while len(results) < options.kills:
            while len(running) < options.jobs and started < options.kills:
                running.append(Job(fork_server, options.ranks, chance))
                started += 1
            for job in list(running):
                result = job.tend()
                if result is not None:
                    running.remove(job)
                    results.append(result)
                    if "said" in result:
                        print(json.dumps(result), flush=True)
            time.sleep(0.005)
    survivors = options.kills * (options.ranks - 1)
    right = sum(result["right"] for result in results)
    seconds = sorted(result["seconds"] for result in results)
    ended = sum(code == 0 for result in results for code in result["codes"])
    summary = {"kills": len(results), "ranks": options.ranks, "survivors": survivors, "right": right}
    summary |= {"median": statistics.median(seconds), "most": seconds[-1], "ended_well": ended}
    if options.json:
        print(json.dumps(summary))
        return
    print(f"{len(results)} kills among {options.ranks} ranks: {right} of {survivors} survivors named the killed rank")
    print(f"until the last survivor had raised: median {summary['median']:.2f} s, max {summary['most']:.2f} s")
    print(f"survivors that then ended by themselves, with code 0: {ended} of {survivors}")


if __name__ == "__main__":
    main()
