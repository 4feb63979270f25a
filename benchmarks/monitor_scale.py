"""The failure monitor with many ranks: how long they take to start and to hear a verdict, and what the monitor costs.

python benchmarks/monitor_scale.py [--ranks 1024] [--seconds 10] [--json]

The monitor is the real process. The ranks are simulated by one process, over one real connection for each: they send
heartbeats as often as the ranks of such a job do, and change their action with each. Then one of them dies.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stageline.faults.monitor.client import MonitorClient
from stageline.faults.monitor.connection import NAME, Address, Connection, start_monitor
from stageline.faults.monitor.server import kernel

DEADLINE = 60.0


class Ranks:
    """The simulated ranks: one connection each, and when the next heartbeat is due."""

    def __init__(self, address: Address, ranks: int, victim: int) -> None:
        """Connect all; `victim` is the process that the last rank claims to be."""
        self.selector = selectors.DefaultSelector()
        self.interval = MonitorClient(0, ranks, DEADLINE).interval
        self.heard: dict[int, float] = {}
        """When each rank heard what it was waiting for."""

        def connect(rank: int) -> Connection:
            connection = Connection(address, rank, f"pid {rank} on here")
            pid = victim if rank == ranks - 1 else os.getpid()
            connection.send({"process": pid, "kernel": kernel(), "host": "here"})
            return connection

        with ThreadPoolExecutor(16) as pool:
            self.connections = list(pool.map(connect, range(ranks)))
        now = time.monotonic()
        for rank, connection in enumerate(self.connections):
            self.selector.register(connection.socket, selectors.EVENT_READ, rank)
        self._due = [now + self.interval * rank / ranks for rank in range(ranks)]

    def run(self, seconds: float, until: str = "") -> None:
        """Send heartbeats for so many seconds, or until all ranks have heard something."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and not (until and len(self.heard) == len(self.connections)):
            for rank, due in enumerate(self._due):
                if due <= now:
                    self._due[rank] = due + self.interval
                    doing = f"F of stage {rank}, microbatch {int(now)}"
                    self.connections[rank].send({"beat": 1, "doing": doing, "waits": None, "done": int(now)})
            for key, _ in self.selector.select(0.02):
                self._note(key.data, self.connections[key.data].receive() or [], until)

    def _note(self, rank: int, messages: list[Any], until: str) -> None:
        if until and any(until in message for message in messages):
            self.heard.setdefault(rank, time.monotonic())

    def lose_last(self) -> float:
        """Close the connection of the last rank, as the kernel does for a killed process; return when."""
        connection = self.connections.pop()
        self._due.pop()
        self.selector.unregister(connection.socket)
        connection.close()
        return time.monotonic()


def monitors(job: str) -> list[int]:
    """The processes of the monitors of a job."""
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and {NAME, job} <= set(_words(folder / "cmdline"))
    ]


def _words(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(ranks: int, seconds: float) -> dict[str, float]:
    """Start the ranks, let them run, and let one of them die."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * ranks + 200)), hard))
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1e6)"])
    try:
        began = time.monotonic()
        address = start_monitor(ranks, DEADLINE, DEADLINE)
        job = Ranks(address, ranks, victim.pid)
        job.run(DEADLINE, until="all")
        start = max(job.heard.values()) - began
        (pid,) = monitors(address.job)
        before, own = processor_time(pid), time.process_time()
        job.run(seconds)
        load, simulation = (processor_time(pid) - before) / seconds, (time.process_time() - own) / seconds
        victim.kill()
        victim.wait()
        lost = job.lose_last()
        job.heard.clear()
        job.run(DEADLINE, until="verdict")
        heard = [moment - lost for moment in job.heard.values()]
        for connection in job.connections:
            connection.send({"bye": "", "clean": True})
            connection.close()
    finally:
        victim.kill()
        victim.wait()
    verdict = {"first to hear": min(heard), "last to hear": max(heard), "heard": float(len(heard))}
    return {"ranks": ranks, "start": start, "monitor": load, "simulation": simulation, **verdict}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.ranks, options.seconds)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{options.ranks} ranks connected, and knew of each other, {result['start']:.1f} s after the start")
    print(
        f"heartbeats of all: the monitor took {result['monitor']:.1%} of a core (simulation {result['simulation']:.0%})"
    )
    print(
        f"a rank died: {result['heard']:.0f} of {options.ranks - 1} others heard the verdict, the first after "
        f"{result['first to hear']:.2f} s and the last after {result['last to hear']:.2f} s"
    )


if __name__ == "__main__":
    main()
