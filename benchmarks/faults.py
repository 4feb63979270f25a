"""Real faults: how long until the last rank raised, and its message; also for torch.distributed.pipelining.

python benchmarks/faults.py [--stages 0 1 2] [--worlds threads processes torch] [--only killed] [--markdown | --json]

Three ranks train for one step. In the next step a stage injects a fault and records the moment. Seconds are from then
until the last living rank has raised or exited, the maximum over all places of the fault. Ours have a deadline of 5 s.
torch runs Schedule1F1B over gloo with a process group timeout of 20 s. A job that has not ended 40 s after the fault
is killed and counts as a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import stageline as sl
from stageline.testing import Child, FaultyStage, FaultyTransport, ForkServer

RANKS, MICROBATCHES, WIDTH, DEADLINE, TIMEOUT, LIMIT = 3, 4, 8, 5.0, 20.0, 40.0
FAULTS = {
    "exception in a forward": ("F", "error"),
    "exception in a backward": ("B", "error"),
    "killed (SIGKILL)": ("B", "kill"),
    "frozen (SIGSTOP)": ("F", "stop"),
    "interrupted (KeyboardInterrupt)": ("F", "interrupt"),
    "a stage returns NaN": ("F", "nan"),
    "a stage returns infinity": ("F", "infinity"),
    "wrong shape on the wire": ("wire", "shape"),
    "wrong dtype on the wire": ("wire", "dtype"),
    "different schedule on one rank": ("start", "odd"),
    "a rank that never starts": ("start", "missing"),
    "exit between two steps": ("start", "exit"),
}
ON_THREADS = [name for name, (_, fault) in FAULTS.items() if fault not in ("kill", "stop", "odd", "missing", "exit")]


class Planter:
    """Records the moment, and injects the fault."""

    def __init__(self, folder: Path, place: str, fault: str, stage: int) -> None:
        self.folder, self.place, self.fault, self.stage = folder, place, fault, stage
        self.armed = False

    def note(self) -> None:
        with contextlib.suppress(FileExistsError), (self.folder / "planted").open("x") as file:
            file.write(str(time.time()))

    def __call__(self, value: Tensor) -> Tensor:
        self.note()
        if self.fault == "error":
            raise ArithmeticError("planted")
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        if self.fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.fault == "kill" else signal.SIGSTOP)
        return value * {"nan": float("nan"), "infinity": float("inf")}.get(self.fault, 1.0)

    def spoil(self, tensor: Tensor) -> Tensor:
        self.note()
        self.armed = False
        return tensor.double() if self.fault == "dtype" else tensor[:1].contiguous()

    def arm(self, stages: list[FaultyStage]) -> None:
        """Before the second step."""
        self.armed = True
        if self.place in ("F", "B"):
            stages[self.stage].plant(self, self.place, 1)  # type: ignore[arg-type]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)


def ours(rank: int, stages: list[FaultyStage], planter: Planter) -> None:
    """Two steps of `sl.Pipeline`."""
    odd = planter.fault == "odd" and rank == planter.stage
    pipe = sl.Pipeline(
        stages,
        loss_fn=functional.mse_loss,
        schedule="gpipe" if odd else "1f1b",
        microbatches=MICROBATCHES,
        deadline=DEADLINE,
    )
    host: Any = pipe.runner.host
    honest = host.transport

    def replaced(message: Any) -> Any:
        mine = planter.armed and planter.place == "wire" and message.header.stage == planter.stage
        return [planter.spoil(message.leaves[0]), *message.leaves[1:]] if mine else message.leaves

    host.transport = lambda rank: FaultyTransport(honest(rank), replaced=replaced)
    pipe.step(*batch())
    leave(rank, planter)
    planter.arm(stages)
    pipe.step(*batch())


def theirs(rank: int, stages: list[FaultyStage], planter: Planter) -> None:
    """Two steps of torch's Schedule1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", timeout=timeout)
    odd = planter.fault == "odd" and rank == planter.stage
    stage = PipelineStage(stages[rank], rank, RANKS, torch.device("cpu"))
    kind: Any = ScheduleGPipe if odd else Schedule1F1B
    schedule = kind(stage, n_microbatches=MICROBATCHES, loss_fn=functional.mse_loss)
    honest = dist.batch_isend_irecv

    def spoiling(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op is dist.isend and planter.armed and planter.place == "wire" and rank == planter.stage:
                operation.tensor = planter.spoil(operation.tensor)
        return honest(operations)

    dist.batch_isend_irecv = spoiling  # type: ignore[assignment]

    def step() -> None:
        x, y = batch()
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": []} if rank == RANKS - 1 else {}))

    step()
    leave(rank, planter)
    planter.arm(stages)
    step()


def leave(rank: int, planter: Planter) -> None:
    if planter.fault == "exit" and rank == planter.stage:
        planter.note()
        raise SystemExit(0)


def work(rank: int, world: str, folder: str, place: str, fault: str, stage: int) -> None:
    """Run a rank, and write its error to a file."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    stages = [FaultyStage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(RANKS)]
    planter = Planter(Path(folder), place, fault, stage)
    if place == "start" and fault != "exit":
        planter.note()
    message = "no error: the step succeeded"
    try:
        (theirs if world == "torch" else ours)(rank, stages, planter)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
    (Path(folder) / f"left-{rank}").write_text(json.dumps({"at": time.time(), "said": message}))
    if fault != "exit" or rank != stage:
        os._exit(0)  # do not measure the shutdown of Python


@dataclass
class Case:
    """A running job with one fault."""

    world: str
    name: str
    stage: int
    folder: Path
    children: dict[int, Child]
    began: float

    def over(self) -> bool:
        """Whether every rank has exited, except a frozen one."""
        running = [rank for rank, child in self.children.items() if child.poll() is None]
        frozen = FAULTS[self.name][1] == "stop"
        return running in ([], [self.stage] if frozen else []) or time.time() - self.began > LIMIT + 15

    def result(self) -> dict[str, Any]:
        """Kill the remaining ranks, and return the errors of all."""
        planted = float((self.folder / "planted").read_text()) if (self.folder / "planted").exists() else self.began
        messages: dict[int, str] = {}
        seconds = 0.0
        for rank, child in self.children.items():
            hangs = child.poll() is None
            child.signal(signal.SIGKILL)
            child.signal(signal.SIGCONT)
            path = self.folder / f"left-{rank}"
            alone = self.world == "threads"
            victim = not alone and rank == self.stage and FAULTS[self.name][1] in ("kill", "stop", "interrupt", "exit")
            if path.exists():
                left = json.loads(path.read_text())
                messages[rank] = left["said"]
                seconds = max(seconds, left["at"] - planted)
            elif not victim:
                messages[rank] = "no error: it hung and was killed" if hangs else f"exited with code {child.code}"
                seconds = max(seconds, LIMIT if hangs else 0.0)
            if victim:
                messages.pop(rank, None)
        return {"world": self.world, "fault": self.name, "stage": self.stage, "seconds": seconds, "said": messages}


def start(fork_server: ForkServer, world: str, name: str, stage: int, folder: Path) -> Case:
    from turns import free_port  # the ranks, which load this file too, do not have its folder on their path

    port = free_port()
    place, fault = FAULTS[name]
    folder.mkdir()
    children = {}
    for rank in range(1 if world == "threads" else RANKS):
        if fault == "missing" and rank == stage:
            continue
        environment = {"GLOO_SOCKET_IFNAME": "lo", "STAGELINE_FLIGHT_DIR": str(folder / "flights")}
        if world != "threads":
            environment |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
        arguments = [rank, world, str(folder), place, fault, stage]
        children[rank] = fork_server.start(
            __file__, "work", arguments, log=folder / f"log-{rank}", environment=environment
        )
    return Case(world, name, stage, folder, children, time.time())


def run(fork_server: ForkServer, plan: list[tuple[str, str, int]], jobs: int, folder: Path) -> list[dict[str, Any]]:
    """Run the cases, several at a time."""
    waiting, running, results = list(plan), [], []  # type: ignore[var-annotated]
    while waiting or running:
        while waiting and len(running) < jobs:
            world, name, stage = waiting.pop(0)
            running.append(start(fork_server, world, name, stage, folder / f"{world}-{len(results)}-{len(waiting)}"))
        for case in [case for case in running if case.over()]:
            running.remove(case)
            results.append(case.result())
        time.sleep(0.02)
    return results


def shortened(text: str, limit: int = 110) -> str:
    """Return the essence of an error."""
    gist = " ".join(text.removeprefix("PipelineError: ").split()).split("; no parameter")[0]
    gist = gist.replace("|", "/").replace("/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/", "")
    return gist if len(gist) <= limit else gist[: limit - 1] + "…"


def cell(results: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the seconds, and the messages of the survivors for the fault in the middle."""
    if not results:
        return "", ""
    middle = min(results, key=lambda result: abs(result["stage"] - 1))
    ranks_by_message: dict[str, list[int]] = {}
    for rank, text in middle["said"].items():
        ranks_by_message.setdefault(shortened(text), []).append(rank)
    every = len(ranks_by_message) == 1
    listing = "; ".join(
        text if every else f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_by_message.items()
    )
    return f"{max(result['seconds'] for result in results):.1f}", listing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--worlds", nargs="+", default=["threads", "processes", "torch"])
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = [name for name in FAULTS if options.only in name]
    results: list[dict[str, Any]] = []
    with ForkServer() as fork_server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for world in options.worlds:
            plan = [(world, name, stage) for name in names for stage in options.stages]
            plan = [case for case in plan if world != "threads" or case[1] in ON_THREADS]
            plan = [case for case in plan if FAULTS[case[1]][0] != "wire" or case[2] < RANKS - 1]
            # torch mostly waits for its timeout, so several jobs do not disturb each other.
            results += run(fork_server, plan, 6 if world == "torch" else 1, Path(folder))
    if options.json:
        print(json.dumps(results))
        return
    if options.markdown:
        print("| fault | where | seconds | error messages |\n| --- | --- | ---: | --- |")
    for name in names:
        for world in options.worlds:
            rows = [result for result in results if (result["fault"], result["world"]) == (name, world)]
            seconds, message = cell(rows)
            if rows:
                shown = world if world == "torch" else f"stageline, {world}"
                print(f"| {name} | {shown} | {seconds} | {message} |" if options.markdown else
                      f"{name:34} {shown:22} {seconds:>6} s  {message}")  # fmt: skip


if __name__ == "__main__":
    main()
