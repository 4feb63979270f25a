"""Faults over NCCL: kills, freezes and exceptions on four ranks that share one GPU, named by every survivor or not.

python benchmarks/nccl_faults.py [--cases 10] [--jobs 2] [--only kill] [--json]

Run it without MPS: a killed client can take the MPS server along. Each case is a new job of four processes, forked from
one that imported torch and never touched CUDA. Every stage sleeps 2 ms on the GPU in each microbatch, so hosts are far
ahead of it, and the rank that a fault hits has receives posted on its neighbours. After two good steps, one rank kills
itself, stops itself or raises in the forward or the backward of a microbatch. A survivor is right if it raises
PipelineError with the culprit's name in time: at once after an exception, within the deadline of 5 s after a freeze,
and before it after a kill; after an exception, the next step must work. All survivors must then exit with code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import Child, FaultyStage, ForkServer, shared_gpu

RANKS, MICROBATCHES, WIDTH, DEADLINE, SLACK, LIMIT = 4, 8, 256, 5.0, 1.5, 60.0
FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "exception": None}


class Layer(nn.Module):
    """Takes 2 ms of the GPU and almost nothing of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sleep: Any = torch.cuda._sleep
        sleep(4_000_000)
        return torch.as_tensor(torch.tanh(self.linear(x)))


def work(rank: int, folder: str, fault: str, culprit: int, action: str, microbatch: int) -> None:
    """Run a rank, and write what it raised and when."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    torch.cuda.set_device(0)
    answer: dict[str, Any] = {"said": "no error: the step succeeded"}
    stages = [FaultyStage(Layer()) for _ in range(RANKS)]
    model = [stage.cuda() for stage in stages]
    pipe = sl.Pipeline(
        model, loss_fn=functional.mse_loss, schedule="1f1b", microbatches=MICROBATCHES, deadline=DEADLINE
    )
    x, y = (torch.ones(2 * MICROBATCHES, WIDTH, device="cuda") * value for value in (1.0, 0.5))
    pipe.step(x, y)
    pipe.zero_grad()
    good = pipe.step(x, y).loss
    pipe.zero_grad()

    def planted(value: Tensor) -> Tensor:
        (Path(folder) / "planted").write_text(str(time.time()))
        number = FAULTS[fault]
        if number is None:
            raise ArithmeticError("planted")
        os.kill(os.getpid(), number)
        return value

    stages[culprit].plant(planted, action, microbatch)  # type: ignore[arg-type]
    try:
        pipe.step(x, y)
    except sl.PipelineError as error:
        answer = {"said": str(error), "at": time.time()}
    if fault == "exception":
        pipe.zero_grad()
        answer["again"] = pipe.step(x, y).loss == good
    answer["left"] = time.time()
    (Path(folder) / f"left-{rank}").write_text(json.dumps(answer))


class Case:
    """A job with one fault."""

    def __init__(self, server: ForkServer, folder: Path, fault: str, number: int) -> None:
        from turns import free_port

        folder.mkdir()
        self.folder, self.fault, self.culprit = folder, fault, number % RANKS
        self.action, self.microbatch = "FB"[number // RANKS % 2], (3 * number) % MICROBATCHES
        self.began = time.time()
        self.ended: dict[int, float] = {}
        arguments = [str(folder), fault, self.culprit, self.action, self.microbatch]
        common = {
            "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
            "STAGELINE_FLIGHT_DIR": str(folder / "flights"),
        }  # fmt: skip
        self.children: dict[int, Child] = {
            rank: server.start(
                __file__, "work", [rank, *arguments], log=folder / f"log-{rank}",
                environment={**common, **shared_gpu(rank), "RANK": str(rank)},
            )
            for rank in range(RANKS)
        }  # fmt: skip

    def over(self) -> bool:
        """Whether every survivor has exited."""
        for rank, child in self.children.items():
            if child.poll() is not None:
                self.ended.setdefault(rank, time.time())
        victims = {self.culprit} if self.fault != "exception" else set()
        return set(self.ended) | victims == set(self.children) or time.time() - self.began > LIMIT

    def result(self) -> dict[str, Any]:
        """Kill what is left, and judge what the survivors said."""
        path = self.folder / "planted"
        planted = float(path.read_text()) if path.exists() else self.began
        allowed = {"kill": DEADLINE, "freeze": DEADLINE + SLACK, "exception": SLACK}[self.fault]
        messages, problems, seconds, leaving = {}, [], 0.0, 0.0
        for rank, child in self.children.items():
            victim = rank == self.culprit and self.fault != "exception"
            hangs = child.poll() is None
            child.signal(signal.SIGKILL)
            left = self.folder / f"left-{rank}"
            answer = json.loads(left.read_text()) if left.exists() else {}
            if victim:
                continue
            messages[rank] = answer.get("said", "nothing: " + (self.folder / f"log-{rank}").read_text()[-600:])
            took = answer.get("at", time.time()) - planted
            seconds = max(seconds, took)
            leaving = max(leaving, self.ended.get(rank, time.time()) - answer.get("left", planted))
            if not messages[rank].startswith(f"rank {self.culprit} "):
                problems.append(f"rank {rank} names another, or nobody")
            if took > allowed:
                problems.append(f"rank {rank} took {took:.1f} s")
            if self.fault == "exception" and not answer.get("again"):
                problems.append(f"the next step of rank {rank} failed or differs")
            if hangs or child.code != 0:
                problems.append(f"rank {rank} " + ("hung at exit" if hangs else f"exited with {child.code}"))
        return {
            "fault": self.fault, "culprit": self.culprit, "action": f"{self.action} {self.microbatch}",
            "seconds": seconds, "exit": leaving, "problems": problems, "said": messages,
            "whole": time.time() - self.began, "noise": self.noise(),
        }  # fmt: skip

    def noise(self) -> list[str]:
        """Lines on the survivors' stderr that are not ours."""
        lines: set[str] = set()
        for rank in self.children:
            for line in (self.folder / f"log-{rank}").read_text(errors="replace").splitlines():
                if line.strip() and not line.startswith("stageline:"):
                    lines.add(line[:300])
        return sorted(lines)[:20]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10, help="of each fault (default 10)")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default 2)")
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    waiting = [(fault, number) for number in range(options.cases) for fault in options.only]
    running: list[Case] = []
    results = []
    with ForkServer() as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                fault, number = waiting.pop(0)
                running.append(Case(server, Path(folder) / f"{fault}-{number}", fault, number))
            for case in [case for case in running if case.over()]:
                running.remove(case)
                results.append(case.result())
                if not options.json:
                    row = results[-1]
                    verdict = "; ".join(row["problems"]) or "right"
                    print(
                        f"{row['fault']:9} rank {row['culprit']} {row['action']}: named in {row['seconds']:.1f} s, "
                        f"exit in {row['exit']:.1f} s, {row['whole']:.0f} s in all: {verdict}",
                        flush=True,
                    )
                    for line in [*(sorted(set(row["said"].values())) if row["problems"] else []), *row["noise"]]:
                        print(f"    {line[:400]}", flush=True)
            time.sleep(0.02)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        right = sum(not row["problems"] for row in results)
        print(f"{right} of {len(results)} named rightly by every survivor in time")


if __name__ == "__main__":
    main()
