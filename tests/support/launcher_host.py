"""The launcher of one host of several, and ranks that wait until something has happened to a host."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from stageline.distributed.attempts import number_of, superseded
from stageline.distributed.launchers.host_ranks import HostLauncher
from stageline.distributed.launchers.hosts import HostPlace
from stageline.distributed.launchers.launcher import Job, first_failure
from stageline.distributed.recovery_policy import Recovery
from stageline.runtime.executor import Executor
from stageline.train.recovery import JobRecovery
from stageline.train.setup import Setup
from support.recovery_rank import train

torch.set_num_threads(1)

Pause = tuple[int, int, int, str]
"""An attempt, a rank, the number of a program, and the file that it waits for."""


def launch(
    place: Sequence[Any],
    ranks: int,
    spares: int,
    on_loss: Sequence[str],
    words: list[str],
    kills: list[tuple[int, int, str, int]],
    pauses: list[Pause],
) -> None:
    """Run the ranks of this host; end with 0, or with 3 and the sentence about the first failure."""
    recovery = Recovery(4, tuple(on_loss), spares)
    from support import launcher_host  # ranks import it by this name

    number = place[1]
    job = Job(launcher_host.train_with_pauses, (words, kills, pauses), ranks, timeout=200, recovery=recovery)
    try:
        launcher = HostLauncher(HostPlace(*place), logs=Path.cwd() / f"host{number}-logs")
        culprit = first_failure(launcher.run(job))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)
    if culprit is not None:
        print(f"rank {culprit.rank} {culprit.failure}", flush=True)
        os._exit(4)
    os._exit(0)


def train_with_pauses(words: list[str], kills: list[tuple[int, int, str, int]], pauses: list[Pause]) -> None:
    """Train; a rank pauses before a program of an attempt until a file exists, or another attempt is announced.

    With checkpoints in an object store, it returns to those, and not to host memory; and what survives has the plan.
    """
    if any("objects://" in word for word in words):
        importlib.import_module("support.object_store")
        JobRecovery.common_step = lambda self, host: None  # type: ignore[method-assign]
        if number_of():
            Setup._choose = None  # type: ignore[method-assign, assignment]
    for attempt, rank, call, mark in pauses:
        if os.environ["RANK"] == str(rank):
            pause(attempt, call, Path(mark))
    train(words, kills)


def pause(attempt: int, call: int, mark: Path) -> None:
    """Let this process wait before its n-th program of an attempt."""
    run, calls = Executor.run, 0

    def wait(self: Executor, *arguments: Any) -> Any:
        nonlocal calls
        calls += number_of() == attempt
        if calls == call and number_of() == attempt:
            Path(f"{mark}-ready").touch()
            while not (mark.exists() or superseded()):
                time.sleep(0.02)
        return run(self, *arguments)

    Executor.run = wait  # type: ignore[method-assign,assignment]
