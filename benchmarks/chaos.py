"""Goodput of a job that loses a rank every 30 seconds: undisturbed, with our recovery, and with torchrun's restarts.

python benchmarks/chaos.py [--minutes 10] [--every 30] [--ranks 2] [--arms undisturbed ours torchrun] [--seed 0]

Each arm trains the built-in job for the same time, counted from its first step. Once in every interval, at a random
moment, a random rank is killed (SIGKILL). The goodput is the number of steps that the arm has completed, as a share of
those of the undisturbed arm. The losses of all steps are compared with those of the undisturbed arm, bit for bit. A
recovery is timed from the kill to the first step with a number that was not reported before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ARMS = ("undisturbed", "ours", "torchrun")
LONGEST = 300.0
"""Seconds without a new step after which a job counts as failed."""


class Job:
    """The built-in job of one arm, in a folder."""

    def __init__(self, arm: str, ranks: int, folder: Path, more: list[str]) -> None:
        self.folder, self.depth = folder, 1 if arm == "torchrun" else 2
        python, restarts = sys.executable, "0" if arm == "undisturbed" else "1000000"
        start = [python, "-m", "stageline", "launch", "-n", str(ranks), "--max-restarts", restarts, "-m", "stageline"]
        if arm == "torchrun":
            start = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", restarts]
            start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "stageline"]
        words = [f"--job.dump_folder={folder / 'run'}", "--training.steps=1000000", "--validation.freq=1000000"]
        words += [f"--parallelism.pipeline_parallel_degree={ranks}", "--metrics.timeline_freq=0", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*start, "train", *words], env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def ranks(self) -> list[int]:
        """The processes of the ranks: children of torchrun, or of the fork server."""
        processes = [self.process.pid]
        for _ in range(self.depth):
            processes = [child for process in processes for child in _children(process)]
        return processes

    def last_step(self) -> int:
        """The number of the last step that was reported."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "run" / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            rows = (_row(line) for line in file.read().split(b"\n")[:-1])
            return max((row["step"] for row in rows if row.get("event") == "step"), default=0)
        return 0

    def wait(self, step: int, until: float) -> float | None:
        """Wait for a step; return when it was reported, or None if that is later than `until`."""
        end = time.monotonic() + LONGEST
        while self.last_step() < step:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no step {step}:\n{(self.folder / 'log').read_text()[-4000:]}")
            if time.time() > until:
                return None
            time.sleep(0.02)
        return time.time()

    def losses(self) -> dict[int, float]:
        """The losses of all steps."""
        lines = (self.folder / "run" / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return {row["step"]: row["loss"] for row in map(_row, lines) if row.get("event") == "step"}

    def end(self) -> None:
        """Kill the job."""
        for process in (*self.ranks(), *_children(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def _children(process: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _row(line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:  # the beginning of the part that was read
        return {}
    return row


def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one arm; return its steps, losses, kills and the seconds of its recoveries."""
    chance, recoveries, kills = random.Random(options.seed), list[float](), 0
    with tempfile.TemporaryDirectory(prefix="stageline-chaos-", ignore_cleanup_errors=True) as folder:
        job = Job(arm, options.ranks, Path(folder), options.options)
        try:
            began = job.wait(1, time.time() + LONGEST) or 0.0
            until = began + 60.0 * options.minutes
            for interval in range(int(60.0 * options.minutes / options.every) if arm != "undisturbed" else 0):
                moment = began + options.every * (interval + chance.random())
                time.sleep(max(0.0, moment - time.time()))
                ranks, last = job.ranks(), job.last_step()
                if not ranks:  # torchrun starts them again
                    continue
                killed, kills = time.time(), kills + 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(ranks), signal.SIGKILL)
                recovered = job.wait(last + 1, until)
                recoveries += [] if recovered is None else [recovered - killed]
            time.sleep(max(0.0, until - time.time()))
            steps, losses = job.last_step(), job.losses()
        finally:
            job.end()
    return {"arm": arm, "steps": steps, "losses": losses, "kills": kills, "recoveries": sorted(recoveries)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each arm (default 10)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills (default 30)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seed", type=int, default=0, help="what the kills are drawn from")
    parser.add_argument("--options", nargs="*", default=[], help="options of the job")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the jobs are ended
    rows = [measure(arm, options) for arm in options.arms]
    whole, steps = rows[0]["losses"], max(1, rows[0]["steps"])
    for row in rows:
        losses = row.pop("losses")
        common = losses.keys() & whole.keys()
        row["goodput"] = row["steps"] / steps
        row["same_bits"] = all(losses[step] == whole[step] for step in common)
        row["compared"] = max(common, default=0)
    if options.json:
        print(json.dumps({"load": os.getloadavg()[0], "arms": rows}, indent=2))
        return
    for row in rows:
        line = f"{row['arm']:12} {row['steps']:6} steps, goodput {row['goodput']:.0%}, {row['kills']} kills"
        seconds = row["recoveries"]
        if seconds:
            high = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
            line += f", seconds to the next new step: median {statistics.median(seconds):.2f}, p95 {high:.2f}"
        bits = "the same bits" if row["same_bits"] else "DIFFERENT losses"
        print(f"{line}; {bits} up to step {row['compared']}")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
