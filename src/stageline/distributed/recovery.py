"""A rank that survives the loss of another one: it leaves the job, and joins the next attempt in the same process."""

from __future__ import annotations

import gc
import time

import torch.distributed as dist

from stageline.common.errors import StagelineError
from stageline.distributed.attempts import POLL, Attempt, announcements, next_place, number_of
from stageline.distributed.bootstrap import final_verdict, leave_channels
from stageline.distributed.process_exit import keep_groups

DECISION = 120.0
"""Seconds in which the launcher decides what to do about a rank that was lost."""
DOUBT = 1.0
"""Seconds in which it may announce a loss that this rank knows only as an error."""


def rejoin(error: Exception) -> Attempt:
    """Leave a job that lost a rank, and wait until its launcher has replaced it; or raise the error.

    A rank calls this when a step fails. Where the launcher replaces lost ranks (`max_restarts`), it returns as soon as
    the replacement starts: create a new `Pipeline`, load your last checkpoint and train on. Where no rank was lost, or
    nothing replaces it, the error is raised.

    >>> rejoin(ValueError("no rank was lost"))
    Traceback (most recent call last):
    ValueError: no rank was lost
    """
    number = number_of()
    if number is None or not isinstance(error, StagelineError | RuntimeError | OSError):
        raise error
    launcher, verdict = announcements(), final_verdict()
    if verdict is not None and verdict.kind in ("frozen", "died", "absent"):
        launcher.blame(verdict.culprit, number, verdict.kind)  # one that froze is still a process
    known = verdict is not None or launcher.blamed(number) is not None
    end = time.monotonic() + (DECISION if known else DOUBT)
    while launcher.newest() <= number:
        if why := launcher.over():
            error.add_note(f"no rank is started again: {why}")
            raise error
        if time.monotonic() > end:
            raise error
        time.sleep(POLL)
    leave()
    attempt = next_place(number)
    if attempt is None:
        raise error
    return attempt


def leave() -> None:
    """Leave the process groups of a job that lost a rank; nothing waits for their collectives."""
    leave_channels()
    if dist.is_initialized():
        keep_groups()
        dist.destroy_process_group()
    gc.collect()  # the failed step holds activations
