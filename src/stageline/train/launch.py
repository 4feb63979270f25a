"""A job whose ranks are processes that `stageline train` starts: their signals, their errors, their exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from stageline.common.errors import LaunchError, PipelineError, StagelineError
from stageline.common.interrupts import EXIT_CODE, install, say_interrupted
from stageline.distributed.launchers.launcher import Job, Outcome, describe, first_failure
from stageline.distributed.launchers.processes import ProcessLauncher
from stageline.distributed.recovery_policy import Recovery
from stageline.train.config.config import Config

MODULES = ("stageline.train.trainer", "stageline.train.report")
"""What every rank imports."""


def train_on(processes: int, config: Config) -> None:
    """Train on processes of this machine; raise or exit as the job would in this process.

    Ctrl-C and SIGTERM are passed on to the ranks, which save and stop. An error of several ranks is raised once.
    """
    options = config.recovery
    recovery = Recovery(options.max_restarts, options.on_loss, options.spares)
    run_on(processes, train_as_rank, (config.to_dict(),), recovery=recovery, modules=MODULES)


def run_on(
    processes: int,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    *,
    recovery: Recovery | None = None,
    modules: tuple[str, ...] = (),
) -> None:
    """Call a function on every rank of a job; raise or exit as it would in this process."""
    launcher = ProcessLauncher(forwards=(signal.SIGINT, signal.SIGTERM))
    outcomes = launcher.run(Job(function, arguments, processes, recovery=recovery or Recovery(), modules=modules))
    interrupts = launcher.forwarded.count(signal.SIGINT)
    if interrupts and any(outcome.code in (EXIT_CODE, -signal.SIGINT) for outcome in outcomes):
        if interrupts == 1:  # otherwise the first rank has said that it ended at once
            say_interrupted()
        sys.exit(EXIT_CODE)
    if launcher.forwarded and any(outcome.code == -signal.SIGTERM for outcome in outcomes):
        sys.exit(128 + signal.SIGTERM)
    culprit = first_failure(outcomes)
    if culprit is not None:
        _fail(culprit, outcomes, processes)


def _fail(culprit: Outcome, outcomes: Sequence[Outcome], processes: int) -> None:
    """Raise the error of the rank that failed first; those that lost a rank know best what it was doing."""
    if culprit.error is None and culprit.code < 0:
        for outcome in outcomes:
            if isinstance(outcome.error, PipelineError):
                outcome.error.add_note(describe(culprit, processes))
                raise outcome.error
    if isinstance(culprit.error, StagelineError | OSError | MemoryError):
        raise culprit.error
    if culprit.is_traceback:
        sys.stderr.write(culprit.failure)
        sys.exit(1)
    raise LaunchError(describe(culprit, processes), culprit.rank)


def train_as_rank(config: dict[str, Any]) -> None:
    """Train as one of the ranks that `train_on` started."""
    install(launched=int(os.environ["RANK"]))
    os.setsid()  # Ctrl-C reaches the command alone, which passes it on
    from stageline.train.trainer import Trainer

    Trainer(Config.from_dict(config)).run()
