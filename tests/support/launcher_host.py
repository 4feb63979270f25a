"""The launcher of one host of several, and a rank that waits until its host is cut off."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from stageline.distributed.attempts import number_of
from stageline.distributed.launchers.host_ranks import HostLauncher
from stageline.distributed.launchers.hosts import HostPlace
from stageline.distributed.launchers.launcher import Job, first_failure
from stageline.distributed.recovery_policy import Recovery
from stageline.runtime.executor import Executor
from support.recovery_rank import train

torch.set_num_threads(1)


def launch(
    place: Sequence[Any],
    ranks: int,
    spares: int,
    on_loss: Sequence[str],
    words: list[str],
    kills: list[tuple[int, int, str, int]],
    cut: str,
) -> None:
    """Run the ranks of this host; end with 0, or with 3 and the sentence about the first failure."""
    recovery = Recovery(4, tuple(on_loss), spares)
    from support import launcher_host  # ranks import it by this name

    number = place[1]
    job = Job(launcher_host.train_until_cut, (words, kills, cut), ranks, timeout=200, recovery=recovery)
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


def train_until_cut(words: list[str], kills: list[tuple[int, int, str, int]], cut: str) -> None:
    """Train; rank 1 stops before its 8th program of the first attempt until its host is cut off, and then continues."""
    if cut and os.environ["RANK"] == "1" and number_of() == 0:
        run, calls = Executor.run, 0

        def wait(self: Executor, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 8:
                Path(f"{cut}-ready").touch()
                while not Path(cut).exists():
                    time.sleep(0.02)
            return run(self, *arguments)

        Executor.run = wait  # type: ignore[method-assign,assignment]
    train(words, kills)
