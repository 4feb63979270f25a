"""A rank of a training job that kills itself at chosen moments; a launcher starts it again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stageline as sl
from stageline.distributed.attempts import number_of
from stageline.distributed.launchers.launcher import Job, Outcome
from stageline.distributed.launchers.processes import ProcessLauncher
from stageline.distributed.recovery_policy import Recovery
from stageline.runtime.executor import Executor
from stageline.train import recovery, setup, snapshots, step
from stageline.train.checkpoint import folder as disk
from support.jobs import TINY

Kills = list[tuple[int, int, str, int]]

MOMENTS: dict[str, tuple[Any, str]] = {
    "step": (Executor, "run"),
    "save": (disk.ChecksummedFile, "write"),
    "validation": (step.TrainingStep, "evaluate"),
    "copy": (snapshots.Slot, "write"),
    "meeting": (setup, "job_host"),
    "building": (setup.Setup, "_build_pipeline"),
    "restoring": (recovery, "load_tensors"),
    "freeze": (Executor, "run"),
    "freeze meeting": (setup, "job_host"),
}
"""Functions at whose n-th call a rank dies."""


def train(settings: list[str], kills: list[tuple[int, int, str, int]]) -> tuple[int, str]:
    """Train; a kill is an attempt, a rank, a moment, and the number of the call, or of milliseconds from a step."""
    torch.set_num_threads(1)
    for attempt, rank, moment, count in kills:
        if int(os.environ["RANK"]) == rank:
            if moment == "time":
                die_after(attempt, count)
            elif moment in ("reads late", "writes early"):
                mark = next(word for word in settings if word.startswith("job.dump_folder=")).partition("=")[2]
                (read_late if moment == "reads late" else write_early)(attempt, mark)
            else:
                number = signal.SIGSTOP if moment.startswith("freeze") else signal.SIGKILL
                die_in(attempt, *MOMENTS[moment], count, number, half_written=moment == "copy")
    result = sl.Trainer(sl.Config.read(None, *settings)).run()
    return result.step, result.why


def die_in(
    attempt: int, owner: Any, name: str, count: int, number: signal.Signals, *, half_written: bool = False
) -> None:
    """Kill or stop this process at the n-th call of a function of a module or class in an attempt."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += number_of() == attempt
        if calls < count or number_of() != attempt:
            return function(*arguments, **named)
        if half_written:  # the last tensor cannot be read
            tensors = dict(arguments[2])
            tensors[list(tensors)[-1]] = None
            with contextlib.suppress(Exception):
                function(arguments[0], arguments[1], tensors, *arguments[3:])
        os.kill(os.getpid(), number)
        return None

    setattr(owner, name, call)


def die_after(attempt: int, milliseconds: int) -> None:
    """Kill this process some time after its first action program of an attempt."""
    run, began = Executor.run, threading.Event()

    def note(self: Executor, *arguments: Any) -> Any:
        if number_of() == attempt:
            began.set()
        return run(self, *arguments)

    def wait() -> None:
        began.wait()
        time.sleep(milliseconds / 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    Executor.run = note  # type: ignore[method-assign,assignment]
    threading.Thread(target=wait, daemon=True).start()


def read_late(attempt: int, mark: str) -> None:
    """Read states after another rank has begun to write a new one, unless that waits for this one."""
    restore = recovery.JobRecovery.restore

    def wait(self: recovery.JobRecovery, *arguments: Any) -> Any:
        end = time.monotonic() + (1.0 if number_of() == attempt else 0.0)
        while time.monotonic() < end and not Path(f"{mark}-writes").exists():
            time.sleep(0.01)
        try:
            return restore(self, *arguments)
        finally:
            Path(f"{mark}-has-read").touch()

    recovery.JobRecovery.restore = wait  # type: ignore[method-assign,assignment]


def write_early(attempt: int, mark: str) -> None:
    """Hold the first new state half-written until the other rank has read."""
    write = snapshots.Slot.write

    def hold(self: snapshots.Slot, *arguments: Any) -> None:
        end = time.monotonic() + 10
        if number_of() == attempt and not Path(f"{mark}-writes").exists():
            with open(self._path, "r+b") as file:
                file.write(bytes(16))
            Path(f"{mark}-writes").touch()
            while not Path(f"{mark}-has-read").exists() and time.monotonic() < end:
                time.sleep(0.01)
        write(self, *arguments)

    snapshots.Slot.write = hold  # type: ignore[method-assign,assignment]


def random_kills(chance: random.Random, ranks: int) -> list[tuple[int, int, str, int]]:
    """One to three kills in a row, each at a random moment of the attempt after the one before."""
    limits = {"step": 20, "save": 8, "validation": 2, "copy": 12, "meeting": 1, "building": 1, "restoring": 1}
    kills = []
    for attempt in range(chance.randint(1, 3)):
        moment = chance.choice(["time", *limits] if attempt else ["time", "step", "save", "validation", "copy"])
        count = chance.randint(0, 1500) if moment == "time" else chance.randint(1, limits[moment])
        kills.append((attempt, chance.randrange(ranks), moment, count))
    return kills


def write_tokens(folder: Path) -> Path:
    """The data of the jobs."""
    path = folder / "tokens.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 32, 4000).astype(np.uint16).tobytes())
    return path


def settings_of(tokens: Path, name: str, ranks: int) -> list[str]:
    """The config of a small job, in a folder beside the tokens."""
    words = [word.removeprefix("--") for word in TINY] + [f"job.dump_folder={tokens.parent / name}"]
    return [*words, f"training.dataset_path={tokens}", f"parallelism.pipeline_parallel_degree={ranks}"]


def run(
    tokens: Path, name: str, kills: Kills, *more: str, ranks: int = 2, recovery: Recovery | None = None
) -> list[Outcome]:
    """Run a job on processes of this machine, with kills."""
    words = [*settings_of(tokens, name, ranks), *more]
    launcher = ProcessLauncher(logs=tokens.parent / f"{name}-logs")
    recovery = recovery or Recovery(max_restarts=8)
    return launcher.run(Job(train, (words, kills), ranks, timeout=200, recovery=recovery))
