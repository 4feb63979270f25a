"""From the kill of a rank to the next step, in a job that `torchrun --max-restarts` starts again.

python benchmarks/restarts.py [--kills 20] [--ranks 4] [--job train|script|group] [--busy 0] [--seed 0] [--json]

At a random moment after a step, a random rank of a training job is killed (SIGKILL). torchrun ends the others and
starts all of them again; the job has recovered when every rank has finished a step. The time is from the kill until
then, with its parts on the first rank. `train` is `stageline train`, which resumes from its checkpoint; `script`
creates a `Pipeline` that sets up everything else; `group` first creates the default group, in a part of the store for
this attempt (otherwise torch itself contacts ranks that are gone). `--busy` runs that many busy loops.
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

BORN = time.time()  # before torch is imported
LONGEST = 300.0
"""Seconds without a step after which a job counts as failed."""
BUSY = "while True: pass"


# A rank.


def notes_of(folder: Path, attempt: int, rank: int) -> Path:
    """The file in which a rank records the times of its start-up, after its first step."""
    return folder / f"notes-{attempt}-{rank}.json"


def work(job: str, folder: str) -> None:
    """Train until killed."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    (Path(folder) / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    notes = notes_of(Path(folder), attempt, rank)
    if job == "train":
        import resume

        resume.BORN = BORN
        ranks = os.environ["WORLD_SIZE"]
        words = [
            "--training.steps=1000000",
            "--checkpoint.interval=5",
            f"--parallelism.pipeline_parallel_degree={ranks}",
        ]
        resume.work(str(notes), f"--job.dump_folder={Path(folder) / 'run'}", *words)
    else:
        train(notes, make_group=job == "group")


def train(notes: Path, *, make_group: bool) -> None:
    """Run a user's script."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    import stageline as sl

    times = {"python": BORN, "imports": time.time()}
    torch.manual_seed(0)
    if make_group:
        store, rank, ranks = next(iter(rendezvous("env://")))
        ours = PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group("gloo", store=ours, rank=rank, world_size=ranks)
        times["processes"] = time.time()
    stages = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(int(os.environ["WORLD_SIZE"]))]
    pipe = sl.Pipeline(stages, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=8)
    times["pipeline"] = time.time()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    while True:
        pipe.step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        if "first step" not in times:
            times["first step"] = time.time()
            aside = notes.with_suffix(".aside")
            aside.write_text(json.dumps(times))
            aside.replace(notes)


# Who kills it.


class Job:
    """A job under torchrun, in a folder."""

    def __init__(self, kind: str, ranks: int, restarts: int, folder: Path) -> None:
        self.ranks, self.folder, self.attempt = ranks, folder, 0
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        torchrun += ["--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment |= {"STAGELINE_FLIGHT_DIR": str(folder / "flights")}
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*torchrun, str(Path(__file__).resolve()), "--work", kind, str(folder)],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def step(self) -> dict[str, float]:
        """Wait until every rank has finished a step in this attempt; return the start-up times of the first rank."""
        end = time.monotonic() + LONGEST
        notes = [notes_of(self.folder, self.attempt, rank) for rank in range(self.ranks)]
        while not all(path.exists() for path in notes):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"no step in attempt {self.attempt}:\n{(self.folder / 'log').read_text()[-6000:]}")
            time.sleep(0.01)
        times = [json.loads(path.read_text()) for path in notes]
        return {**times[0], "all ranks": max(moments["first step"] for moments in times)}

    def kill(self, rank: int) -> float:
        """Kill a rank; return the time."""
        pid = int((self.folder / f"pid-{self.attempt}-{rank}").read_text())
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        self.attempt += 1
        return at

    def end(self) -> None:
        """Terminate torchrun and its ranks."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure(kind: str, kills: int, ranks: int, chance: random.Random) -> list[dict[str, float]]:
    """Return the seconds of the parts of each recovery."""
    recoveries: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="stageline-restarts-", ignore_cleanup_errors=True) as folder:
        job = Job(kind, ranks, kills, Path(folder))
        try:
            job.step()
            for _ in range(kills):
                time.sleep(chance.uniform(0.0, 2.0))
                killed = job.kill(chance.randrange(ranks))
                times, parts, before = job.step(), {}, killed
                for part, at in times.items():
                    parts[part], before = max(0.0, at - before), max(at, before)
                recoveries.append({**parts, "recovery": before - killed})
        except RuntimeError as error:
            print(error, file=sys.stderr)
        finally:
            job.end()
    return recoveries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--job", choices=["train", "script", "group"], default="train")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the job")
    parser.add_argument("--seed", type=int, default=0, help="what ranks and moments are drawn from")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and leave nothing running
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.busy)]
    try:
        recoveries = measure(options.job, options.kills, options.ranks, random.Random(options.seed))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    seconds = sorted(parts["recovery"] for parts in recoveries)
    summary: dict[str, Any] = {"job": options.job, "kills": options.kills, "ranks": options.ranks}
    summary |= {"recoveries": len(recoveries), "load": os.getloadavg()[0]}
    if seconds:
        summary |= {"median": statistics.median(seconds), "p95": seconds[-(-95 * len(seconds) // 100) - 1]}
        summary |= {"most": seconds[-1]}
        summary["parts"] = {
            part: statistics.median(recovery[part] for recovery in recoveries) for part in recoveries[0]
        }
    if options.json:
        print(json.dumps(summary))
    else:
        print(f"{len(recoveries)} of {options.kills} kills of a rank among {options.ranks} recovered ({options.job})")
        if seconds:
            print(
                "seconds from the kill to the next step: "
                + ", ".join(f"{name} {summary[name]:.1f}" for name in ("median", "p95", "most"))
                + f"; load {summary['load']:.1f}"
            )
            for part, median in summary["parts"].items():
                print(f"  {part:12} {median:6.2f}")
    sys.exit(0 if len(recoveries) == options.kills else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
