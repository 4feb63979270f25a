"""Jobs that run at the same time and work in turns, so that a change of the machine's load affects all of them.

Used by other benchmarks. A job is one or more processes of a script, each with a `Turns` that it asks before every
step. The benchmark has a `Job` for each and gives them their turns. A job that waits for its turn computes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """The cost of a turn."""

    seconds: float
    cpu: float
    """CPU seconds of all processes and their threads."""
    loss: float | None


class Turns:
    """Waits for a job's turn before every few steps, and reports when they are done; the first turn is the warm-up."""

    def __init__(self, warmup: int, steps: int, tell: int) -> None:
        """`tell` is the file descriptor for reports."""
        self.warmup, self.steps, self.done, self.tell, self.used = warmup, steps, -warmup, tell, 0.0

    def before_step(self, loss: float | None = None) -> None:
        """Call before every step, with the last loss; the process exits when there are no more turns."""
        if self.done == -self.warmup or (self.done >= 0 and self.done % self.steps == 0):
            report = {"cpu": time.process_time() - self.used, "loss": loss}
            os.write(self.tell, json.dumps(report).encode() + b"\n")
            if sys.stdin.readline().strip() != "go":
                os._exit(0)
            self.used = time.process_time()
        self.done += 1


class Job:
    """Processes that work in turns; each is started with its rank and its report descriptor as the last arguments."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, processes: int, environment: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.readers = []
        common = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
        if processes > 1:
            common |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            common |= {"GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("wb") as log:
            for rank in range(processes):
                reader, tell = os.pipe()
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
                self.processes.append(
                    subprocess.Popen(
                        [*command, str(rank), str(tell)],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        pass_fds=[tell],
                        cwd=folder,
                        env=common | own,
                    )
                )
                os.close(tell)
                self.readers.append(os.fdopen(reader))

    def wait(self) -> list[dict[str, Any]]:
        """Wait until all processes wait for their turn; return their reports."""
        lines = [reader.readline() for reader in self.readers]
        if not all(lines):
            raise RuntimeError(f"{self.name} ended too early:\n{self.log.read_text()[-3000:]}")
        return [json.loads(line) for line in lines]

    def turn(self) -> Turn:
        """Let the job run its steps; return their cost."""
        began = time.perf_counter()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        reports = self.wait()
        losses = [report["loss"] for report in reports if report["loss"] is not None]
        return Turn(
            time.perf_counter() - began, sum(report["cpu"] for report in reports), losses[-1] if losses else None
        )

    def close(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()
            process.communicate()
        for reader in self.readers:
            reader.close()


def in_turns(jobs: Sequence[Job], rounds: int) -> dict[str, list[Turn]]:
    """Give every job a turn in every round, in another order each time."""
    taken: dict[str, list[Turn]] = {job.name: [] for job in jobs}
    for number in range(rounds):
        first = number % len(jobs)
        for job in [*jobs[first:], *jobs[:first]]:
            taken[job.name].append(job.turn())
    return taken


def free_port() -> str:
    """Return an unused port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])
