"""What a launcher does about ranks that ended: it starts them again in a new attempt, or ends the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from stageline.common.errors import PipelineError, TransportError
from stageline.distributed.attempts import Announcements, Attempt
from stageline.distributed.launchers.launcher import Outcome
from stageline.distributed.recovery_policy import Recovery

BLAMES = {"frozen": "froze", "absent": "did not join the other ranks in time"}
"""What other ranks say about one whose process exists."""
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which somebody ends a process on purpose."""


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

    def __init__(self, policy: Recovery, seats: int, announcements: Announcements) -> None:
        self._policy, self._seats, self._announcements = policy, seats, announcements
        self._started = dict.fromkeys(range(seats), 0)
        """The attempt for which the process of each seat was started."""
        self._attempt = Attempt(0, (), "", 0.0, {seat: seat for seat in range(seats)})
        self._losses = 0
        self._killed: dict[tuple[int, int], str] = {}
        """For attempts, and seats whose process was killed because of what other ranks said: what they said."""
        self.spares: list[int] = []
        """The spare processes that wait."""
        self.stranded: Collection[int] = ()
        """Seats on hosts that were lost: only a spare process can take one."""
        self.locate: Callable[[Attempt], Attempt] = lambda attempt: attempt
        """Says where the seats of an attempt are, if they are on several hosts."""
        self.given_up = ""
        """Why there will be no other attempt."""
        self.limit = ""
        """Why a rank that was lost is not replaced."""

    def resume(self, attempt: Attempt, losses: int) -> None:
        """Continue where the launcher of another host, which was lost, left off."""
        self._attempt, self._losses = attempt, losses
        self._started.update(dict.fromkeys(attempt.replaced, attempt.number))

    @property
    def losses(self) -> int:
        """How many losses there were."""
        return self._losses

    @property
    def number(self) -> int:
        """The current attempt."""
        return self._attempt.number

    @property
    def active(self) -> Collection[int]:
        """The seats that take part in the current attempt."""
        return self._attempt.ranks.keys()

    def blamed(self) -> int | None:
        """The seat of a rank that others have given up, for example because it froze; None if there is none."""
        blamed = None if self.given_up else self._announcements.blamed(self.number)
        seat = next((seat for seat, rank in self._attempt.ranks.items() if blamed and rank == blamed[0]), None)
        if seat is not None and blamed and blamed[1] in BLAMES:
            self._killed[self.number, seat] = BLAMES[blamed[1]]
        return seat

    def next(self, outcomes: Sequence[Outcome], running: Collection[int]) -> Attempt | None:
        """The attempt in which seats get new processes or ranks; None if nothing changes."""
        if self.given_up:
            return None
        lost = [outcome for outcome in outcomes if is_loss(outcome)]
        own = [outcome for outcome in outcomes if outcome.failure and not (is_loss(outcome) or follows(outcome))]
        if own:
            self._give_up(f"rank {own[0].rank} failed by itself")
        elif lost:
            return self._replace(lost, running)
        else:
            return self._return_to_all(running) or self._late([outcome.rank for outcome in outcomes])
        return None

    def regroup(self, why: str) -> Attempt | None:
        """An attempt with the same processes, which cannot meet in the current one; None once they have."""
        if self.given_up or self._announcements.completed() >= self.number:
            return None
        return self._announce("restart", (why,), dict(self._attempt.ranks), (), {})

    def _replace(self, lost: Sequence[Outcome], running: Collection[int]) -> Attempt | None:
        first = f"rank {lost[0].rank} {self._how(lost[0])}"
        self._losses += 1
        if self._losses > self._policy.max_restarts:
            self._give_up(first, f"max_restarts is {self._policy.max_restarts}")
            return None
        ended = tuple(seat for seat in range(self._seats) if seat not in running)
        action = self._choose([outcome.rank for outcome in lost], ended)
        if action is None:
            self._give_up(first, f"no action in on_loss ({', '.join(self._policy.on_loss)}) is possible")
            return None
        ranks, spares = {seat: seat for seat in range(self._seats)}, dict[int, int]()
        if action == "spare":
            spares = dict(zip(self.spares, ended, strict=False))
            del self.spares[: len(ended)]
        elif action == "shrink_replicas":
            ranks = _numbered(self._whole_replicas(ended))
        elif action == "replan":
            ranks = _numbered([seat for seat in self.active if seat not in ended])
        sentences = tuple(f"rank {outcome.rank} {self._how(outcome)}" for outcome in lost)
        replaced = ended if action == "spare" else tuple(seat for seat in ended if seat not in self.stranded)
        return self._announce(action, sentences, ranks, () if action == "replan" else replaced, spares)

    def _choose(self, lost: Sequence[int], ended: Sequence[int]) -> str | None:
        """The first action of `on_loss` that is possible; a restart that failed is repeated only if nothing else is."""
        per_replica, replans = self._announcements.shape()
        trained = self._announcements.completed() >= self.number
        fails_again = not trained and any(self._started[seat] == self.number > 0 for seat in lost)
        whole = self._whole_replicas(ended) if per_replica else []
        stranded = any(seat in self.stranded for seat in ended)
        possible = {
            "restart": not (fails_again or stranded),
            "spare": len(self.spares) >= len(ended),
            "shrink_replicas": bool(whole),
            "replan": replans and any(seat not in ended for seat in self.active),
        }
        chosen = [action for action in self._policy.on_loss if possible[action]]
        again = "restart" in self._policy.on_loss and not stranded
        return chosen[0] if chosen else "restart" if again else None

    def _whole_replicas(self, ended: Sequence[int]) -> list[int]:
        """The seats of the replicas that take part and have lost no process."""
        size = self._announcements.shape()[0]
        replicas = [list(range(first, first + size)) for first in range(0, self._seats, size)]
        return [seat for seats in replicas for seat in seats if self._is_whole(seats, ended)]

    def _is_whole(self, seats: Sequence[int], ended: Sequence[int]) -> bool:
        return all(seat in self.active and seat not in ended for seat in seats)

    def _return_to_all(self, running: Collection[int]) -> Attempt | None:
        """After replicas were left out: an attempt with all of them, once their processes are ready."""
        waiting = [seat for seat in range(self._seats) if seat not in self.active]
        if self._attempt.action != "shrink_replicas" or not waiting or len(running) < self._seats:
            return None
        ready = self._announcements.completed() >= self.number
        if not (ready and all(self._announcements.arrived(seat, self.number) for seat in waiting)):
            return None
        return self._announce("return", self._attempt.lost, {seat: seat for seat in range(self._seats)}, (), {})

    def _announce(
        self,
        action: str,
        sentences: tuple[str, ...],
        ranks: dict[int, int],
        replaced: tuple[int, ...],
        spares: dict[int, int],
    ) -> Attempt:
        earlier, trained = self._attempt, self._announcements.completed() >= self.number
        attempt = Attempt(
            earlier.number + 1,
            sentences if trained else earlier.lost + sentences,
            action,
            time.time() if trained else earlier.moment,
            ranks,
            replaced,
            tuple(earlier.ranks) if trained else earlier.before,
            spares,
        )
        self._attempt = self.locate(attempt)
        self._started.update(dict.fromkeys(replaced, self.number))
        self._announcements.make(self._attempt)
        return self._attempt

    def _late(self, ended: Sequence[int]) -> Attempt | None:
        """The current attempt, for processes that ended instead of joining it, as a script does that knows no other."""
        number = self.number
        late = [seat for seat in ended if self._started[seat] < number and seat in self.active]
        late = [seat for seat in late if not self._announcements.arrived(seat, number)]
        if not late:
            return None
        self._started.update(dict.fromkeys(late, number))
        return replace(self._attempt, replaced=tuple(late), spares={})

    def _how(self, outcome: Outcome) -> str:
        failure = outcome.failure if outcome.error is None else f"failed: {outcome.error}"
        return self._killed.get((self.number, outcome.rank), failure)

    def _give_up(self, why: str, limit: str = "") -> None:
        self.limit, self.given_up = limit, f"{why}, and {limit}" if limit else why
        self._announcements.end(self.given_up)

    def explain(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes of a job; those of ranks that were lost say why they were not replaced."""
        return [
            replace(outcome, failure=f"{self._how(outcome)}, and {self.limit}")
            if self.limit and is_loss(outcome) and outcome.error is None
            else outcome
            for outcome in outcomes
        ]


def _numbered(seats: Sequence[int]) -> dict[int, int]:
    return {seat: rank for rank, seat in enumerate(seats)}


def is_loss(outcome: Outcome) -> bool:
    """Whether a process was lost: a signal killed it, or its GPU failed. Another process may succeed in its place."""
    if isinstance(outcome.error, torch.AcceleratorError):
        return True
    return outcome.code < 0 and -outcome.code not in REQUESTS


def follows(outcome: Outcome) -> bool:
    """Whether a rank ended because of another one, or by an exit code of its own choice."""
    if outcome.error is None:
        return not outcome.is_traceback
    return isinstance(outcome.error, PipelineError | TransportError)
