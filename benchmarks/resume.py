"""From `kill -9` to the first step after it: the built-in job is killed at random moments and started again.

python benchmarks/resume.py [--kills 5] [--where threads processes] [--seed 0] [--json]

All processes of the job are killed at a random moment, and the same command is started again at once. The time is from
the kill to the end of the first step, from the job's own events; its parts are measured in the process of the first
rank. For comparison: the first start, which profiles the model and chooses a schedule, and a bare script (python,
import torch, one AdamW step on one number, for which torch imports its compiler; here that is part of "pipeline").
Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BORN = time.time()  # before torch and stageline are imported
RANKS, EVERY, DEADLINE = 2, 5, 300.0
BARE = "import torch; x = torch.ones(1, requires_grad=True); x.sum().backward(); torch.optim.AdamW([x]).step()"
PARTS = ("python", "imports", "processes", "data", "choice", "pipeline", "find", "load", "start", "first step")


# The job, with a note of when each part of its start was done.


def work(notes: str, *arguments: str) -> None:
    from stageline.cli import main
    from stageline.train import trainer
    from stageline.train.output import Output
    from stageline.train.setup import Setup

    times = {"python": BORN, "imports": time.time()}

    def noted(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            result = function(*args, **named)
            times.setdefault(part, time.time())
            if part == "first step":
                aside = Path(notes).with_suffix(".aside")
                aside.write_text(json.dumps(times))
                aside.replace(notes)
            return result

        return call

    steps: tuple[tuple[str, Any, str], ...] = (
        ("processes", Setup, "_join_processes"),
        ("data", Setup, "open_data"),
        ("choice", Setup, "_choose_schedule"),
        ("pipeline", Setup, "_build_pipeline"),
        ("find", trainer, "find_checkpoint"),
        ("load", trainer.Trainer, "_prepare"),
        ("start", Output, "begin"),
        ("first step", Output, "step"),
    )
    for part, owner, name in steps:
        setattr(owner, name, noted(part, getattr(owner, name)))
    sys.argv = ["stageline", "train", *arguments]
    main()


# Who kills it.


class Run:
    """A job in a folder that can be restarted."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder, self.processes = folder, processes
        self.running: list[subprocess.Popen[bytes]] = []
        self.starts = 0

    def start(self) -> float:
        """Start it; return the time."""
        from turns import free_port

        arguments = [f"--job.dump_folder={self.folder / 'run'}", f"--checkpoint.interval={EVERY}"]
        arguments += [f"--parallelism.pipeline_parallel_degree={RANKS}", "--training.steps=1000000"]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        common |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if self.processes > 1:
            common |= {"WORLD_SIZE": str(self.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            common |= {"GLOO_SOCKET_IFNAME": "lo"}
        self.starts += 1
        began = time.time()
        for rank in range(self.processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.processes > 1 else {}
            notes = str(self._notes if rank == 0 else self.folder / "other.json")
            with (self.folder / f"log-{rank}").open("ab") as log:
                self.running.append(
                    subprocess.Popen(
                        [sys.executable, str(Path(__file__).resolve()), "--work", notes, *arguments],
                        stdout=log,
                        stderr=log,
                        env=common | own,
                    )
                )
        return began

    @property
    def _notes(self) -> Path:
        return self.folder / f"notes-{self.starts}.json"

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > end or any(process.poll() is not None for process in self.running):
                logs = "".join((self.folder / f"log-{rank}").read_text()[-2000:] for rank in range(self.processes))
                raise RuntimeError(f"{what} did not come:\n{logs}")
            time.sleep(0.01)

    def first_step(self, since: float) -> dict[str, float]:
        """Return the seconds of the parts from a time to the first step."""
        self.wait(self._notes.exists, "the first step")
        times: dict[str, float] = json.loads(self._notes.read_text())
        parts, before = {}, since
        for part in PARTS:
            if part in times:  # a first start finds no checkpoint
                parts[part], before = times[part] - before, times[part]
        return {**parts, "all": before - since}

    def checkpoints(self) -> set[str]:
        return {path.name for path in (self.folder / "run" / "checkpoint").glob("step-*")}

    def kill(self) -> float:
        """Kill all processes; return the time."""
        at = time.time()
        for process in self.running:
            process.send_signal(signal.SIGKILL)
        for process in self.running:
            process.wait()
        self.running.clear()
        return at


def measure(where: str, kills: int, chance: random.Random) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stageline-resume-", ignore_cleanup_errors=True) as folder:
        run = Run(Path(folder), RANKS if where == "processes" else 1)
        try:
            first = run.first_step(run.start())
            again = []
            for _ in range(kills):
                before = run.checkpoints()
                run.wait(lambda before=before: bool(run.checkpoints() - before), "a checkpoint")  # type: ignore[misc]
                time.sleep(chance.uniform(0.0, 1.0))
                at = run.kill()
                run.start()
                again.append(run.first_step(at))
        finally:
            run.kill()
    medians = {part: statistics.median(restart[part] for restart in again) for part in again[0]}
    seconds = [restart["all"] for restart in again]
    return {"where": where, "first": first, "resume": medians, "least": min(seconds), "most": max(seconds)}


def bare_script() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", BARE], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each job (default 5)")
    parser.add_argument("--where", nargs="+", choices=["threads", "processes"], default=["threads", "processes"])
    parser.add_argument("--seed", type=int, default=0, help="what the moments are drawn from")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    rows, alone = [], []
    for where in options.where:
        rows.append(measure(where, options.kills, chance))
        alone += [bare_script() for _ in range(3)]
    base, load = statistics.median(alone), os.getloadavg()[0]
    if options.json:
        print(json.dumps({"bare script": base, "load": load, "jobs": rows}, indent=2))
        return
    print(f"a bare script of torch: {base:.2f} s; load {load:.1f}")
    for row in rows:
        resume, first = row["resume"], row["first"]
        print(
            f"{RANKS} {row['where']}: {resume['all']:.2f} s from the kill to the first step ({row['least']:.2f} to "
            f"{row['most']:.2f}), {resume['all'] / base:.1f} times the bare script; first start {first['all']:.2f} s"
        )
        for part in PARTS:
            print(f"  {part:12} {resume[part]:6.2f} s   first start {first.get(part, 0.0):6.2f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
