"""What a launcher does about ranks that ended: it starts them again in a new attempt, or gives the job up."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from stageline.common.errors import PipelineError, TransportError
from stageline.distributed.attempts import NUMBER, Announcements, Attempt
from stageline.distributed.launchers.launcher import Outcome
from stageline.distributed.recovery_policy import Recovery

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which somebody ends a process on purpose."""
SLOTS = 2
"""Files of host memory of a rank: it writes its next state to one while the other holds its last one."""


class Replacements:
    """The attempts of one job.

    >>> from torch.distributed import HashStore
    >>> replacements = Replacements(Recovery(max_restarts=1), 2, Announcements(HashStore()))
    >>> killed = Outcome(1, failure="was killed by SIGKILL", code=-9)
    >>> attempt = replacements.next([killed], running={0})
    >>> attempt.number, attempt.action, attempt.replaced
    (1, 'restart', (1,))
    >>> replacements.next([killed], running={0}), replacements.given_up
    (None, 'rank 1 was killed by SIGKILL, and max_restarts is 1')
    """

    def __init__(self, policy: Recovery, ranks: int, announcements: Announcements) -> None:
        self._policy, self._ranks, self._announcements = policy, ranks, announcements
        self._started = dict.fromkeys(range(ranks), 0)
        """The attempt for which the process of each rank was started."""
        self._attempt: Attempt | None = None
        self.given_up = ""
        """Why there will be no other attempt."""

    @property
    def number(self) -> int:
        """The current attempt."""
        return 0 if self._attempt is None else self._attempt.number

    def blamed(self) -> set[int]:
        """The ranks that others have given up, for example because they froze."""
        return set() if self.given_up else self._announcements.blamed(self._ranks, self.number)

    def next(self, outcomes: Sequence[Outcome], running: Collection[int]) -> Attempt | None:
        """The attempt in which ranks that ended are to be started; None if none is."""
        if self.given_up:
            return None
        lost = [outcome for outcome in outcomes if is_loss(outcome)]
        own = [outcome for outcome in outcomes if outcome.failure and not (is_loss(outcome) or _follows(outcome))]
        if own:
            self._give_up(f"rank {own[0].rank} failed by itself")
        elif lost and self.number >= self._policy.max_restarts:
            self._give_up(f"rank {lost[0].rank} {lost[0].failure}, and max_restarts is {self._policy.max_restarts}")
        elif lost:
            return self._announce(lost, running)
        else:
            return self._late([outcome.rank for outcome in outcomes])
        return None

    def _announce(self, lost: Sequence[Outcome], running: Collection[int]) -> Attempt:
        number, earlier = self.number + 1, self._attempt
        if earlier is not None and self._announcements.completed() >= earlier.number:
            earlier = None
        sentences = tuple(f"rank {outcome.rank} {_how(outcome)}" for outcome in lost)
        replaced = tuple(rank for rank in range(self._ranks) if rank not in running)
        self._attempt = Attempt(
            number,
            sentences if earlier is None else earlier.lost + sentences,
            "restart",
            time.time() if earlier is None else earlier.moment,
            replaced,
            {NUMBER: str(number), "TORCHELASTIC_RESTART_COUNT": str(number)},
        )
        self._started.update(dict.fromkeys(replaced, number))
        self._announcements.make(self._attempt)
        return self._attempt

    def _late(self, ended: Sequence[int]) -> Attempt | None:
        """The current attempt, for processes that ended instead of joining it, as a script does that knows no other."""
        number = self.number
        late = [rank for rank in ended if self._started[rank] < number]
        late = [rank for rank in late if not self._announcements.arrived(rank, number)]
        if self._attempt is None or not late:
            return None
        self._started.update(dict.fromkeys(late, number))
        self._attempt = Attempt(**{**vars(self._attempt), "replaced": tuple(late)})
        return self._attempt

    def _give_up(self, why: str) -> None:
        self.given_up = why
        self._announcements.end(why)


def is_loss(outcome: Outcome) -> bool:
    """Whether a process was lost: a signal killed it, or its GPU failed. Another process may succeed in its place."""
    if isinstance(outcome.error, torch.AcceleratorError):
        return True
    return outcome.code < 0 and -outcome.code not in REQUESTS


def _follows(outcome: Outcome) -> bool:
    """Whether a rank ended because of another one, or by an exit code of its own choice."""
    if outcome.error is None:
        return not outcome.failure.startswith("Traceback")
    return isinstance(outcome.error, PipelineError | TransportError)


def _how(outcome: Outcome) -> str:
    return outcome.failure if outcome.error is None else f"failed: {outcome.error}"


@contextmanager
def host_memory(ranks: int) -> Iterator[list[str]]:
    """Files of host memory that live as long as the launcher, whatever happens to the ranks that write them."""
    with ExitStack() as stack:
        paths = []
        for _ in range(ranks * SLOTS):
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("stageline")
                stack.callback(os.close, descriptor)
                paths.append(f"/proc/{os.getpid()}/fd/{descriptor}")
            else:
                paths.append(stack.enter_context(tempfile.NamedTemporaryFile(prefix="stageline-")).name)
        yield paths
